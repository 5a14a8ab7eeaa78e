"""What tests of the clients get."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mqks import Options, blocking
from mqks.testing import Broker
from tests.kit.one_broker import mqks_broker, one_broker
from tests.kit.waiting import WAIT_S

__all__ = ["mqks_broker", "one_broker"]

QUICK = Options(
    timeout_s=WAIT_S,
    connect_timeout_s=WAIT_S,
    keep_alive_s=0.2,
    reconnect_min_s=0.01,
    reconnect_max_s=0.05,
)


@pytest.fixture
async def client(
    connect: Any, mqks_broker: Broker, request: pytest.FixtureRequest
) -> AsyncIterator[Any]:
    """Either client, of the broker in this process; through the proxy, where a test has one."""
    if "proxy" in request.fixturenames:
        arguments: tuple[Any, ...] = request.getfixturevalue("proxy").url, QUICK
    else:
        arguments = (mqks_broker.url,)
    async with connect(*arguments) as client:
        yield client


@pytest.fixture
async def consumer(client: Any) -> AsyncIterator[Any]:
    """Of the queue q, bound to e."""
    async with client.consume("q", ["e"]) as consumer:
        yield consumer


@pytest.fixture
def url(mqks_broker: Broker) -> str:
    """Of a server with the queue q, bound to e."""
    with blocking.connect(mqks_broker.url) as client:
        client.subscribe("q", ["e"])
    return mqks_broker.url
