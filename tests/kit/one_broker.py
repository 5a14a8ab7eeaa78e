"""One broker for all tests of a file, since a start takes longer than most tests.

The one rule: each test begins without connections, queues, schedules and traces of others; ids that
were published `once` are remembered.
"""

from collections.abc import Iterator

import pytest

from mqks import blocking
from mqks.testing import Broker


@pytest.fixture(scope="module")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker") / "mqks.db") as broker:
        yield broker


@pytest.fixture
def mqks_broker(one_broker: Broker) -> Broker:
    cleared(one_broker.url)
    return one_broker


def cleared(url: str) -> None:
    with blocking.connect(url, client_name="clears") as client:
        for row in client.stats("connections"):
            if row["name"] != "clears":
                client.request("close_connection", "--confirm", str(row["id"]))
        for row in client.stats("queues"):
            client.delete_queue(row["name"], if_exists=True)
        for row in client.schedules():
            client.unschedule(row["name"])
        client.end_trace()
