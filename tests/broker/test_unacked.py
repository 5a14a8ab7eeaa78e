"""What consumers hold unacked is bounded in bytes, over all of them, and so is what comes back.

The one rule: whoever acks is served, in order, whatever others hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.bare import BareWorld, ask
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

MIB = 1024 * 1024
DATA = b"x" * 100_000


def bare() -> BareWorld:
    """Whoever holds anything is held back; a queue with `a` who consumes it, and `k` who publishes
    to it."""
    world = BareWorld(unacked_bytes_max=1)
    assert ask(world, b"a consume --confirm q e --manual-ack", "a") == b"a ok \n"
    return world


def publish(world: BareWorld, *numbers: int) -> None:
    """One by one, as what goes out in one step may pass the bound."""
    for number in numbers:
        world.send("k", b"m%d publish e x\n" % number)


def test_consumers_that_are_gone_are_not_remembered() -> None:
    world = bare()
    for number in range(100):
        world.send("c", b"c consume q --manual-ack\n")
        publish(world, 2 * number, 2 * number + 1)
        assert world.received("c")
        world.disconnect("c")
    assert len(world.broker.flow.unacked.waiters) <= 2


def test_it_is_told_once_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it goes up and down meanwhile."""
    world = bare()
    told: list[float] = []
    monkeypatch.setattr(
        world.broker.notices, "unacked_full", lambda unacked_bytes: told.append(world.now_s)
    )
    for _ in range(3):
        begin_s = world.now_s
        for number in range(100):
            publish(world, number, number)
            world.send("a", b"r ack a --all\nr ack a --all\n")
            world.advance(10)
        assert told == [begin_s]
        told.clear()
        world.advance(61)
    assert world.broker.limits_reached["unacked_bytes_max"] == 3


def fill(client: LineClient, numbers: range, data: bytes = DATA) -> None:
    for number in numbers:
        client.send(b"m%d publish e %b\n" % (number, data))
    assert client.ask(b"p publish --confirm nowhere x") == b"p ok "


def test_those_who_never_ack_keep_nobody_from_working(tmp_path: Path) -> None:
    """Four that take all they get and ack nothing, and one that works."""
    count, data = 500, b"x" * 10_000
    with (
        ServerProcess(tmp_path / "mqks.db", "--unacked-bytes-max", "1MiB") as server,
        LineClient(server.address) as publisher,
        LineClient(server.address) as worker,
        ExitStack() as stack,
    ):
        hoarders = [stack.enter_context(LineClient(server.address)) for _ in range(4)]
        for client in hoarders:
            assert client.ask(b"h%d consume --confirm q e --manual-ack" % client.port) == (
                b"h%d ok " % client.port
            )
        fill(publisher, range(count), data)
        held = publisher.stats()
        assert MIB <= held["unacked_bytes"] < 2 * MIB
        assert "event=unacked_full" in server.log
        assert worker.ask(b"w consume --confirm q --manual-ack") == b"w ok "
        numbers: list[int] = []
        returned: list[int] = []
        for number in range(count):
            if number == 100:
                for client in hoarders:
                    client.leave()
            _, _, message_id, event, _ = worker.line().split(b" ", 4)
            (returned if b",retry=" in event else numbers).append(int(message_id[1:]))
            worker.send(b"a ack w %b\n" % message_id)
        assert worker.ask(b"p ping") == b"p ok "
        assert publisher.stats()["unacked_bytes"] == 0
        assert sorted(numbers + returned) == [*range(count)]
        assert numbers == sorted(numbers)
        assert len(returned) >= held["messages_unacked"]


def test_more_unacked_than_the_bound_after_a_crash(tmp_path: Path) -> None:
    """Every second one was acked. What is left comes in its order, before what came later."""
    count, data = 1000, b"x" * 10_000
    with served(tmp_path / "mqks.db") as (server, client), LineClient(server.address) as publisher:
        assert client.ask(b"c consume --confirm q e --manual-ack") == b"c ok "
        fill(publisher, range(count), data)
        for number in range(count):
            assert client.line() == b"c ok m%d event=e %b" % (number, data)
        client.send(b"".join(b"a ack c m%d\n" % number for number in range(0, count - 2, 2)))
        assert client.ask(b"a ack --confirm c m%d" % (count - 2)) == b"a ok "
        server.kill()
    flags = ("--unacked-bytes-max", "1MiB", "--memory-bytes", "1MiB")
    with (
        served(tmp_path / "mqks.db", *flags) as (server, client),
        LineClient(server.address) as publisher,
    ):
        assert publisher.stats()["memory_bytes"] == 0
        fill(publisher, range(count, count + 20), data)
        assert client.ask(b"c consume --confirm q --manual-ack") == b"c ok "
        for number in [*range(1, count, 2), *range(count, count + 20)]:
            retry = b",retry=1" if number < count else b""
            assert client.line() == b"c ok m%d event=e%b %b" % (number, retry, data)
            if number % 20 == 1:
                assert publisher.stats()["unacked_bytes"] < 2 * MIB
            client.send(b"a ack c m%d\n" % number)
        assert client.ask(b"p ping") == b"p ok "
        assert publisher.stats()["unacked_bytes"] == 0


@pytest.mark.slow
def test_memory_is_bounded_over_all_queues(tmp_path: Path) -> None:
    """The messages of all queues share their place on disk, 4 MB; in memory they take 160."""
    queues, count = range(40), 40
    flags = ("--unacked-bytes-max", "8MiB", "--memory-bytes", "8MiB")
    with ServerProcess(tmp_path / "mqks.db", *flags) as server:
        with LineClient(server.address) as client:
            for number in queues:
                assert client.ask(b"s subscribe --confirm q%d e" % number) == b"s ok "
            fill(client, range(count))
        server.kill()
        server.start()
        with LineClient(server.address) as other:
            before = server.resident_bytes
            with ExitStack() as stack:
                for number in queues:
                    client = stack.enter_context(LineClient(server.address))
                    client.send(b"c%d consume q%d --manual-ack\n" % (number, number))
                    assert client.line().startswith(b"c%d ok m0 " % number)
                held = other.stats()["unacked_bytes"]
                assert 8 * MIB <= held < 9 * MIB + len(queues) * len(DATA)
                assert server.resident_bytes < before + 64 * MIB
            # One after the other takes all of a queue, and leaves.
            for number in queues:
                with LineClient(server.address) as client:
                    client.send(b"c consume q%d --manual-ack\n" % number)
                    for message in range(count):
                        assert client.line().startswith(b"c ok m%d event=e" % message)
                    client.leave()
            assert other.ask(b"p publish --confirm nowhere x") == b"p ok "
            until(lambda: other.stats()["memory_bytes"] < 9 * MIB)
            assert server.resident_bytes < before + 64 * MIB
            assert other.stats()["messages_ready"] == len(queues) * count


@pytest.fixture
def spilled(tmp_path: Path) -> Iterator[LineClient]:
    """A client of a server whose queue `q` has the messages 1 to 5, of which 2 was acked and the
    others came back, on disk only."""
    with served(tmp_path / "mqks.db", "--memory-bytes", "0") as (server, client):
        with LineClient(server.address) as earlier:
            assert earlier.ask(b"c consume --confirm q e --manual-ack") == b"c ok "
            fill(client, range(1, 6), b"x")
            for number in range(1, 6):
                assert earlier.line() == b"c ok m%d event=e x" % number
            assert earlier.ask(b"a ack --confirm c m2") == b"a ok "
            earlier.leave()
        assert client.ask(b"p publish --confirm nowhere x") == b"p ok "
        until(lambda: client.stats()["memory_bytes"] == 0)
        assert client.stats("queue q")["ready"] == 4
        yield client


BACK = [b"c ok m%d event=e,retry=1 x" % number for number in (1, 3, 4, 5)]


@pytest.mark.parametrize(
    ("lines", "left", "later"),
    [
        (b"m6 publish e x\nc consume q\nm7 publish e x\n", BACK, [6, 7]),
        (b"c consume q\nm6 publish e x\n", BACK, [6]),
        (b"t trim q 4\nc consume q\n", BACK[2:], []),
        (b"c consume q --manual-ack\nt trim q 4\nm6 publish e x\n", BACK[2:], [6]),
    ],
    ids=["before memory", "published while it is read", "trimmed", "the trim overtakes the page"],
)
def test_what_came_back_is_read_from_disk_first(
    spilled: LineClient, lines: bytes, left: list[bytes], later: list[int]
) -> None:
    spilled.send(lines)
    expected = [*left, *(b"c ok m%d event=e x" % number for number in later)]
    assert [spilled.line() for _ in expected] == expected
    assert spilled.ask(b"t purge --confirm q") == b"t ok 0"


def test_the_oldest_of_what_came_back_goes_first_wherever_it_is(tmp_path: Path) -> None:
    """Five are on disk only, as they were more than is kept in memory; a later one is not."""
    data = b"x" * 1_000_000
    flags = ("--memory-bytes", "0", "--prefetch-max", "1")
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        with LineClient(server.address) as earlier:
            for number in range(1, 6):
                assert earlier.ask(b"c%d consume --confirm q e --manual-ack" % number) == (
                    b"c%d ok " % number
                )
            fill(client, range(1, 6), data)
            for number in range(1, 6):
                assert earlier.line() == b"c%d ok m%d event=e %b" % (number, number, data)
            client.send(b"d consume q --manual-ack\n")
            fill_one = b"m6 publish e " + data
            client.send(fill_one + b"\n")
            assert client.line() == b"d ok m6 event=e " + data
            earlier.leave()
        assert client.ask(b"p publish --confirm nowhere x") == b"p ok "
        until(lambda: client.stats("queue q")["memory_bytes"] == 0)
        client.send(b"x delete_consumer d\nf consume q --manual-ack\n")
        for number in range(1, 7):
            assert client.line() == b"f ok m%d event=e,retry=1 %b" % (number, data)
            client.send(b"a ack f m%d\n" % number)


def test_queues_are_read_from_disk_in_the_order_in_which_they_are_wanted(tmp_path: Path) -> None:
    """The last one to ask goes behind all others, or one that is read fast would starve them."""
    names = [b"q%d" % number for number in range(9)]
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        for name in names:
            assert client.ask(b"s subscribe --confirm %b %b" % (name, name)) == b"s ok "
            assert client.ask(b"m publish --confirm %b x" % name) == b"m ok "
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        client.send(b"".join(b"%b consume %b\n" % (name, name) for name in names))
        assert [client.line().split()[0] for _ in names] == names
