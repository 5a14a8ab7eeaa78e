"""Many clients that do not take what they asked for: memory stays bounded, and others go on.

The one rule: what memory may grow by is told by the limit alone, never by how many clients there
are, so each test has clients for a multiple of the limit.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import pytest

from mqks.broker.spine.clients.outbox import Slow
from mqks.broker.spine.queue import blocks
from mqks.server import unsent
from mqks.testing import Broker
from tests.kit.bare import BareWorld
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until
from tests.server.test_tls import TlsClient, with_tls

MIB = 1024 * 1024
LIMIT = ("--unsent-bytes-max", "32MiB")
GROWTH_BYTES = 96 * MIB
"""The limit, what one answer needs while it is made, and what the allocator keeps."""
LINE = b"x" * 1000


def overload(clients: list[socket.socket], kib: int) -> None:
    """Have each of them leave so much of its replies, or all that the server makes."""
    for client in clients:
        client.settimeout(0.5)
        left = memoryview((b"p ping " + LINE + b"\n") * kib)
        with suppress(TimeoutError, ConnectionError):
            while left:  # Not `sendall`, whose limit is for all of it.
                left = left[client.send(left) :]


@contextmanager
def stuck_at(address: tuple[str, int], count: int, request: bytes) -> Iterator[list[socket.socket]]:
    """Clients that ask and never read."""
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            client.sendall(request)
            clients.append(client)
        yield clients


def fill(client: LineClient, count: int) -> None:
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    for start in range(0, count, 500):
        numbers = range(start, start + 500)
        client.send(b"".join(b"m%d publish e %s\n" % (number, LINE) for number in numbers))
    assert client.ask(b"p publish --confirm nowhere x") == b"p ok "


def peak_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def peeked(client: LineClient, after: int) -> int:
    """Number of the last message of the next page."""
    client.send(b"x peek q --after=%d --limit=1000\n" % after)
    while (line := client.line()) != b"x ok --end":
        after = int(line.partition(b",seq=")[2].partition(b",")[0])
    return after


@pytest.mark.slow
def test_readers_over_tls_that_leave_their_answers(tmp_path: Path, tls_port: int) -> None:
    context, tls = with_tls(tmp_path, tls_port)
    with (
        ServerProcess(tmp_path / "mqks.db", *LIMIT, *tls) as server,
        LineClient(server.address, seconds=60) as reader,
        ExitStack() as stack,
    ):
        fill(reader, 8_000)
        before = server.resident_bytes
        for _ in range(60):
            plain = socket.create_connection(("127.0.0.1", tls_port))
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck = context.wrap_socket(plain, server_hostname="127.0.0.1")
            stack.enter_context(stuck).sendall(b"r read q --from=1\n" * 4)
        assert peeked(reader, 0) > 0
        assert peak_bytes(server) < before + GROWTH_BYTES


def test_who_has_said_goodbye_and_does_not_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads would wait for ever, as the first answer is never taken."""
    with (
        Broker(tmp_path / "mqks.db") as broker,
        LineClient(address := ("127.0.0.1", broker.port)) as client,
    ):
        fill(client, 8_000)
        with stuck_at(address, 10, b"r read q --from=1\n" * 16) as stuck:
            for each in stuck:
                each.shutdown(socket.SHUT_WR)
            until(lambda: b'"connections": 11,' in client.ask(b"st stats"))
            monkeypatch.setattr(unsent, "CLOSE_S", 0.1)
            until(lambda: b'"connections": 1,' in client.ask(b"st stats"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-uvloop",)], ids=["uvloop", "asyncio"])
def test_a_large_message_for_many(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """All of them get all of it, one after the other, as there is room."""
    consumers, messages, size = 100, 3, 1_000_000
    with ServerProcess(tmp_path / "mqks.db", *LIMIT, *flags) as server, ExitStack() as stack:
        got: dict[socket.socket, int] = {}
        selector = stack.enter_context(DefaultSelector())
        for number in range(consumers):
            client = stack.enter_context(socket.create_connection(server.address))
            client.sendall(b"c%03d consume --confirm q%d e\n" % (number, number))
            assert client.recv(100) == b"c%03d ok \n" % number
            selector.register(client, EVENT_READ)
            got[client] = 0
        before = server.resident_bytes
        with LineClient(server.address) as publisher:
            for number in range(messages):
                publisher.send(b"m%d publish e %s\n" % (number, b"x" * size))
        each = messages * (len(b"c000 ok m0 event=e \n") + size)
        while min(got.values()) < each:
            ready = selector.select(20)
            assert ready, "nothing comes any more"
            for entry, _ in ready:
                assert isinstance(entry.fileobj, socket.socket)
                piece = entry.fileobj.recv(MIB)
                assert piece, "the server has closed it"
                got[entry.fileobj] += len(piece)
        assert set(got.values()) == {each}
        assert peak_bytes(server) < before + GROWTH_BYTES
        assert "event=request_failed" not in server.log


@pytest.mark.slow
def test_those_who_take_nothing_are_closed_when_there_is_no_room(tmp_path: Path) -> None:
    flags = (*LIMIT, "--output-buffer-bytes-max", "16MiB")
    with (
        ServerProcess(tmp_path / "mqks.db", *flags) as server,
        LineClient(server.address, seconds=60) as other,
    ):
        assert other.ask(b"c consume --confirm q e") == b"c ok "
        before = server.resident_bytes
        with ExitStack() as stack:
            stuck = stack.enter_context(stuck_at(server.address, 6, b"p ping\n"))
            overload(stuck, 16_000)
            until(lambda: "event=outboxes_have_room" in server.log)
            assert "event=outboxes_full" in server.log
            # Who takes its replies goes on, also as a consumer.
            for number in range(20):
                other.send(b"m%d publish e x\n" % number)
                assert other.line() == b"c ok m%d event=e x" % number
            assert peak_bytes(server) < before + GROWTH_BYTES
        assert "were not read for 5 s" in server.log


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_consumers_over_tls_go_on_while_others_leave_much(
    tmp_path: Path, tls_port: int, loop: str
) -> None:
    """More than half of the limit, and less than what anybody is closed at."""
    context, tls = with_tls(tmp_path, tls_port)
    address = "127.0.0.1", tls_port
    flags = (*LIMIT, "--output-buffer-bytes-max", "16MiB", loop)
    with (
        ServerProcess(tmp_path / "mqks.db", *flags, *tls) as server,
        TlsClient(address, context) as earlier,
        LineClient(server.address) as other,
        stuck_at(server.address, 2, b"p ping\n") as stuck,
    ):
        assert earlier.ask(b"c consume --confirm q e") == b"c ok "
        overload(stuck, 14_000)
        until(lambda: other.stats()["unsent_bytes"] > 20 * MIB)
        with TlsClient(address, context) as later:
            assert later.ask(b"d consume --confirm r e") == b"d ok "
            for number in range(5):
                other.send(b"m%d publish e x\n" % number)
                assert earlier.line() == b"c ok m%d event=e x" % number
                assert later.line() == b"d ok m%d event=e x" % number
        assert other.stats()["unsent_bytes"] > 20 * MIB


@patches_modules
def test_no_queue_of_a_slow_connection_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is room in its outbox again, it is the turn of another one of its consumers."""
    monkeypatch.setattr(blocks, "DELIVERY_BYTES", 1)
    world = BareWorld(delivery_pause_bytes=2000)
    names = b"abcd"
    for name in names:
        world.send("k", b"s subscribe %c %c\n" % (name, name))
        world.send("k", b"m publish %c %s\n" % (name, LINE) * 40)
    world.send("c", b"".join(b"%c consume %c\n" % (name, name) for name in names))
    order = [line[0] for line in world.received("c").splitlines()]
    assert len(order) == 160
    assert {*order[:40]} == {*names}


def test_consumers_that_end_or_are_replaced_before_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection is no longer slow, and wakes its consumers in later turns."""
    monkeypatch.setattr(blocks, "DELIVERY_BYTES", 1)
    world = BareWorld()
    world.send("k", b"".join(b"s subscribe %c %c\n" % (name, name) for name in b"abcd"))
    world.send("c", b"".join(b"%c consume %c\n" % (name, name) for name in b"abcd"))
    connection = world.connection("c")
    connection.rest(Slow.PEER)
    world.send("k", b"".join(b"m publish %c x\n" % name for name in b"abcd"))
    world.broker.turns.chunk_s = -1.0
    world.broker.turns.begin()
    connection.resume(Slow.PEER)

    world.send("k", b"x delete_consumer b\n")
    world.send("c", b"c consume c --manual-ack\n")
    lines = world.received("c").splitlines()
    assert sorted(lines) == [b"%c ok m event=%c x" % (name, name) for name in b"acd"]
    world.send("k", b"m2 publish c y\n")
    assert world.received("c") == b"c ok m2 event=c y\n"
    assert connection.consumers[b"c"].manual_ack
