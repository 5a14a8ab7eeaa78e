"""The blocking client, as `from mqks.blocking import connect`.

The one rule: it is `mqks.client.blocking` under the name that programs know.
"""

from mqks.client.blocking import BlockingClient, BlockingConsumer, BlockingTail, connect

__all__ = ["BlockingClient", "BlockingConsumer", "BlockingTail", "connect"]
