"""A queue changes while a page of it, or an answer to a reader, is under way from the disk.

The disk is held at the one place where the server waits for it, before the reading or behind it,
until the changes have been carried out and written.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from mqks.broker.spine.queue import lane as lane_module
from mqks.journal.journal import Journal
from mqks.journal.queue_log import QueueLog
from mqks.testing import Broker
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.marks import slow
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

pytestmark = patches_modules
COUNT = 10


class Disk:
    """The readings of one kind; the first one under `held` waits until that ends."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type, method: str) -> None:
        self._hold_at = ""
        self.readings = 0
        self._asked, self._gate = threading.Event(), threading.Event()
        read = getattr(kind, method)

        async def reading(*arguments: Any) -> Any:
            self.readings += 1
            await self._wait("before")
            found = await read(*arguments)
            await self._wait("behind")
            return found

        patch.setattr(kind, method, reading)

    async def _wait(self, place: str) -> None:
        if self._hold_at != place:
            return
        self._hold_at = ""
        self._asked.set()
        while not self._gate.is_set():
            await anyio.sleep(0.001)

    @contextmanager
    def held(self, place: str, client: LineClient, request: bytes) -> Iterator[None]:
        """From the reading on that the request leads to."""
        self._hold_at = place
        client.send(request + b"\n")
        assert self._asked.wait(WAIT_S)
        yield
        self._gate.set()


def filled(db: Path, returned: int = 0) -> None:
    """A queue with messages that are only on disk after a restart, some of them below its cursor:
    a consumer held them."""
    with Broker(db, prefetch_max=returned or COUNT) as broker, client_of(broker) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"s subscribe --confirm another f") == b"s ok "
        assert client.ask(b"m publish --confirm f x") == b"m ok "
        for number in range(1, COUNT + 1):
            assert client.ask(b"m%d publish --confirm e x" % number) == b"m%d ok " % number
        if returned:
            client.send(b"c consume q --manual-ack\n")
            for _ in range(returned):
                client.line()


def client_of(broker: Broker) -> LineClient:
    return LineClient(("127.0.0.1", broker.port))


def done(client: LineClient, *requests: bytes) -> None:
    """Carried out and written."""
    for number, request in enumerate(requests):
        action, _, rest = request.partition(b" ")
        client.send(b"x%d %b --confirm %b\n" % (number, action, rest))
        assert client.line().startswith(b"x%d ok " % number)


def numbers_until_end(client: LineClient) -> list[int]:
    """Of the messages m1, m2, ... that are delivered, up to the one that is called end."""
    found = []
    while (message_id := client.line().split(b" ")[2]) != b"end":
        if message_id != b"--update":
            found.append(int(message_id[1:]))
    return found


PURGE, DELETE = b"purge q", b"delete_queue q"
CHANGES = [
    ([PURGE], []),
    ([b"trim q 2"], range(2, COUNT + 1)),
    ([b"trim q 7"], range(7, COUNT + 1)),
    ([b"trim q 2", b"trim q 3", b"trim q 9"], range(9, COUNT + 1)),
    ([DELETE, b"subscribe q e"], []),
    ([PURGE, b"delete_queue q", b"subscribe q e", b"publish e a", PURGE], [3]),
    ([b"publish e a", b"trim q 11", PURGE], [0]),  # It was delivered when those before it went.
]


@pytest.mark.parametrize("returned", [4, *slow(0)])
@pytest.mark.parametrize("place", ["queued", "before", "behind"])
@pytest.mark.parametrize(
    ("changes", "left"),
    CHANGES,
    ids=["purge", "trim", "far", "again and again", "delete", "made again", "published"],
)
def test_a_page_comes_when_its_queue_has_changed(
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: list[bytes],
    left: list[int],
    place: str,
    returned: int,
) -> None:
    filled(db, returned)
    disk = Disk(monkeypatch, QueueLog, "read")
    with Broker(db) as broker, client_of(broker) as consumer, client_of(broker) as other:
        if place == "queued":
            # The page of another queue comes first.
            with disk.held("before", other, b"a consume another --manual-ack"):
                assert consumer.ask(b"c consume --confirm q --manual-ack") == b"c ok "
                done(other, *changes)
            assert other.line() == b"a ok m event=f x"
            for _ in range(50):  # Its own page comes before there is more in the queue.
                assert other.ask(b"p ping x") == b"p ok x"
        else:
            with disk.held(place, consumer, b"c consume q --manual-ack"):
                done(other, *changes)
        assert other.ask(b"end publish --confirm e x") == b"end ok "
        assert numbers_until_end(consumer) == list(left)


def test_what_a_trim_has_left_of_a_page_is_used(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client that trims again and again would keep a consumer waiting for ever."""
    filled(db)
    disk = Disk(monkeypatch, QueueLog, "read")
    with Broker(db) as broker, client_of(broker) as consumer, client_of(broker) as other:
        with disk.held("behind", consumer, b"c consume q --manual-ack"):
            done(other, b"trim q 4")
        assert consumer.line() == b"c ok m4 event=e x"
        assert disk.readings == 1


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_page_comes_when_its_consumer_has_gone_and_another_one_come(
    db: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    filled(db, 4)
    disk = Disk(monkeypatch, QueueLog, "read")
    with Broker(db) as broker, client_of(broker) as consumer, client_of(broker) as other:
        with disk.held(place, consumer, b"c consume q --manual-ack"):
            done(other, b"delete_consumer c", b"publish e x", b"trim q 3")
            other.send(b"d consume q --manual-ack\n")
        with client_of(broker) as third:
            assert third.ask(b"end publish --confirm e x") == b"end ok "
        found = [other.line().split(b" ")[2] for _ in range(COUNT)]
        assert found == [*(b"m%d" % number for number in range(3, COUNT + 1)), b"x1", b"end"]


@pytest.mark.parametrize("drop", [b"purge q", b"trim q 2"])
def test_a_page_is_asked_for_and_its_queue_emptied_in_one_write(db: Path, drop: bytes) -> None:
    with ServerProcess(db) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        assert server.terminate() == 0
    with ServerProcess(db) as server, LineClient(server.address) as client:
        action, _, rest = drop.partition(b" ")
        client.send(b"c consume q --manual-ack\np %b --confirm %b\n" % (action, rest))
        assert client.line() == b"p ok 1"
        # Two commits, each behind the page in line for the loop.
        assert client.ask(b"s subscribe --confirm other f") == b"s ok "
        assert client.ask(b"n publish --confirm e y") == b"c ok n event=e y"
        assert client.line() == b"n ok "
        assert server.terminate() == 0


def test_what_came_back_is_taken_though_memory_is_short(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed next lies on disk, and later ones fill the room there is."""
    monkeypatch.setattr(lane_module, "SCARCE_BYTES", 200)
    settings: dict[str, Any] = {"memory_bytes": 0, "prefetch_max": 3}
    with Broker(db, **settings) as broker, client_of(broker) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for consumer in (b"a", b"b", b"c"):
            assert (
                client.ask(b"%b consume --confirm q --manual-ack" % consumer) == consumer + b" ok "
            )
        # Each gets every third; those of the first one are large.
        for number in range(1, 10):
            data = b"x" * (100 if number % 3 == 1 else 1)
            client.send(b"m%d publish --confirm e %b\n" % (number, data))
            client.line(), client.line()
        for consumer in (b"a", b"b"):
            assert client.ask(b"d delete_consumer --confirm %b" % consumer) == b"d ok "
        client.send(b"x ack c --all\n")
        assert [client.line().split(b" ")[2] for _ in range(3)] == [b"m1", b"m2", b"m4"]
        assert client.ask(b"p ping x") == b"p ok x"


# -- answers to readers


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([b"trim q 4"], range(4, COUNT + 1)),
        ([PURGE], []),
        ([DELETE], []),
        ([DELETE, b"subscribe q e", b"publish e new"], []),
    ],
    ids=["trim", "purge", "delete", "made again"],
)
def test_an_answer_comes_when_its_queue_has_changed(
    db: Path, monkeypatch: pytest.MonkeyPatch, changes: list[bytes], left: list[int], place: str
) -> None:
    filled(db)
    disk = Disk(monkeypatch, QueueLog, "page")
    everything = list(range(1, COUNT + 1))
    with Broker(db) as broker, client_of(broker) as reader, client_of(broker) as other:
        with disk.held(place, reader, b"p peek q --limit=100"):
            done(other, *changes)
        found = []
        while (line := reader.line()) != b"p ok --end":
            found.append(int(line.split(b" ")[2][1:]))
        # As it was at one moment between the question and the answer.
        assert found in (everything, list(left))


@pytest.mark.parametrize(
    "request_",
    [
        *(b"range q", b"range q --at=1", b"read q --from=1"),
        *(b"range --confirm q", b"read --confirm q --from=1"),
    ],
)
@pytest.mark.parametrize("again", [[], [b"subscribe q e"]], ids=["deleted", "made again"])
def test_nothing_is_told_of_a_queue_that_was_deleted_before_the_answer(
    db: Path, monkeypatch: pytest.MonkeyPatch, request_: bytes, again: list[bytes]
) -> None:
    """Its numbers do not begin again under the epoch that it had."""
    filled(db)
    disk = Disk(monkeypatch, QueueLog, "page")
    with Broker(db) as broker, client_of(broker) as reader:
        with disk.held("before", reader, b"o peek q"):
            reader.send(b"r " + request_ + b"\n")
            done(reader, DELETE, *again)
        while reader.line() != b"o ok --end":
            pass
        assert reader.line().startswith(b"r error ")
        assert reader.ask(b"p ping x") == b"p ok x"


@pytest.mark.parametrize(
    ("later", "left"),
    [
        ([b"delete_queue q", b"set_queue q --retries=2"], {"retries": 2}),
        ([b"set_queue q --reset --losses=1", b"delete_queue q"], None),
        ([b"delete_queue q", b"set_queue q --retries=2", b"delete_queue q", b"set_queue q"], {}),
        ([b"set_queue q --dead-letters=d", b"delete_queue d"], {"ttl_s": 1.0, "dead_letters": "d"}),
    ],
)
def test_a_policy_changes_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: list[bytes], left: dict[str, Any] | None
) -> None:
    disk = Disk(monkeypatch, Journal, "write")
    with Broker(tmp_path / "mqks.db") as broker:
        with client_of(broker) as client, client_of(broker) as other:
            with disk.held("behind", client, b"p set_queue --confirm q --ttl=1"):
                for number, request in enumerate(later):
                    action, _, rest = request.partition(b" ")
                    other.send(b"x%d %b --confirm %b\n" % (number, action, rest))
                assert other.ask(b"alive ping") == b"alive ok "
            assert client.line() == b"p ok "
            assert [other.line() for _ in later] == [b"x%d ok " % n for n in range(len(later))]
        for _ in range(2):
            with client_of(broker) as client:
                answer = client.ask(b"s stats queue q")
                assert answer.startswith(b"s error " if left is None else b"s ok ")
                if left is not None:
                    told = json.loads(answer.removeprefix(b"s ok "))["policy"]
                    assert {name: value["value"] for name, value in told.items()} == left
            broker.stop()
            broker.start()
