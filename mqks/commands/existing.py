"""Queues and consumers that a command names must exist.

The one rule: a name that does not exist is an error before anything is asked or done. The server
itself does nothing at an action on such a queue, and confirms that.
"""

from itertools import islice
from typing import TYPE_CHECKING

from mqks.errors import InspectionFailed, did_you_mean

if TYPE_CHECKING:
    from mqks.client.blocking import BlockingClient

NAMES_COMPARED_MAX = 10_000


def check_queue(client: "BlockingClient", name: str, otherwise: str = "") -> None:
    """Raise QueueMissing unless the server has this queue; the error ends with the nearest name, or
    with `otherwise` if no name is near."""
    from mqks.client.errors import QueueMissing  # here, so that --help need not load it

    try:
        client.check_queue(name)
    except QueueMissing as missing:
        if not missing.is_near:
            missing.reason = f"{missing.reason}{otherwise}"
        raise


def check_consumer(client: "BlockingClient", consumer_id: str) -> None:
    """The same for the id of a consumer."""
    ids = _names(client, "consumers", "id")
    if ids is not None and len(ids) < NAMES_COMPARED_MAX and consumer_id not in ids:
        near = did_you_mean(consumer_id, ids)
        raise InspectionFailed(f"there is no consumer {consumer_id}{near}")


def _names(client: "BlockingClient", what: str, key: str) -> list[str] | None:
    """Of the first queues or consumers; None for a user who may not inspect."""
    from mqks.client.errors import RequestFailed  # here, as above
    from mqks.client.wire import rows

    try:
        return [row[key] for row in islice(rows(client.stats, what, key), NAMES_COMPARED_MAX)]
    except RequestFailed:
        return None
