"""Many clients that send more than is handled: memory stays bounded, and others go on.

The one rule: nobody who goes on is disconnected, and every complete line is answered.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

import pytest

from mqks.limits import LONG_LINES_READ
from mqks.server import running, unhandled, unsent
from mqks.testing import Broker
from tests.kit.compiled import patches_modules
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.waiting import WAIT_S, until
from tests.server.test_slow_clients import peak_bytes
from tests.server.test_tls import TlsClient, with_tls

MIB = 1024 * 1024
LIMIT = ("--unhandled-bytes-max", "8MiB")
GROWTH_BYTES = 40 * MIB
"""The limit, eight long lines beyond it, sixty clients, and what the allocator keeps."""
ROOM_BYTES = MIB // 4
loops = pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])


class Sender:
    """Sends what it has, as far as it goes, and keeps what it gets."""

    def __init__(self, sock: socket.socket, data: bytes) -> None:
        self.sock = sock
        self.left = memoryview(data)
        self.got = b""


@contextmanager
def senders(address: tuple[str, int], data: list[bytes]) -> Iterator[list[Sender]]:
    with ExitStack() as stack:
        found = []
        for each in data:
            sock = stack.enter_context(socket.socket())
            # So that replies fill the server's memory, not the system's.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(address)
            sock.setblocking(False)
            found.append(Sender(sock, each))
        yield found


def pump(senders: list[Sender], *, reads: bool, seconds: float, done: bytes = b"") -> None:
    """Send, and read if `reads`, until nothing goes on for so long, or all have got `done` last."""
    with DefaultSelector() as selector:
        for each in senders:
            events = EVENT_READ * reads | EVENT_WRITE * bool(each.left)
            if events:
                selector.register(each.sock, events, each)
        while selector.get_map():
            ready = selector.select(seconds)
            if not ready:
                return
            for key, events in ready:
                sender: Sender = key.data
                if events & EVENT_WRITE:
                    sender.left = sender.left[sender.sock.send(sender.left) :]
                if events & EVENT_READ:
                    data = sender.sock.recv(MIB)
                    assert data, "the server has closed it"
                    sender.got += data
                wanted = EVENT_READ * reads | EVENT_WRITE * bool(sender.left)
                if not wanted or (done and sender.got.endswith(done)):
                    selector.unregister(key.fileobj)
                elif wanted != key.events:
                    selector.modify(key.fileobj, wanted, sender)


def unhandled_bytes(client: LineClient) -> int:
    return int(client.stats()["unhandled_bytes"])


@contextmanager
def small(
    directory: Path, lines: list[bytes], *, room_bytes: int = ROOM_BYTES, loop: str = "--uvloop"
) -> Iterator[tuple[tuple[str, int], LineClient, list[Sender]]]:
    """A broker that has little room for what is not handled, and who sends it these lines."""
    settings = {"unhandled_bytes_max": room_bytes, "uvloop": loop == "--uvloop"}
    with (
        Broker(directory / "mqks.db", output_buffer_bytes_max=MIB, **settings) as broker,
        LineClient(address := ("127.0.0.1", broker.port), seconds=60) as other,
        senders(address, lines) as clients,
    ):
        yield address, other, clients


@contextmanager
def nearly_full(
    directory: Path, lines: list[bytes]
) -> Iterator[tuple[tuple[str, int], LineClient, list[Sender]]]:
    """Incomplete lines take three quarters of its room."""
    with small(directory, lines) as (address, other, clients):
        pump(clients, reads=False, seconds=0.1)
        until(lambda: unhandled_bytes(other) > ROOM_BYTES * 3 // 4)
        yield address, other, clients


@loops
def test_incomplete_lines_wait_until_there_is_room(tmp_path: Path, loop: str) -> None:
    lines = [b"p%03d ping %s\n" % (number, b"x" * 1_000_000) for number in range(60)]
    with (
        served(tmp_path / "mqks.db", *LIMIT, loop) as (server, other),
        senders(server.address, [line[:-1] for line in lines]) as clients,
    ):
        before = server.resident_bytes
        pump(clients, reads=False, seconds=0.3)
        until(lambda: "event=unhandled_full" in server.log)
        # Three quarters, and eight more lines of a megabyte.
        assert 5 * MIB < unhandled_bytes(other) < 15 * MIB
        assert other.ask(b"p ping x") == b"p ok x"
        for client, line in zip(clients, lines, strict=True):
            client.left = memoryview(line)[-1 - len(client.left) :]
        pump(clients, reads=True, seconds=WAIT_S, done=b"\n")
        for client, line in zip(clients, lines, strict=True):
            assert client.got == line.replace(b" ping ", b" ok ", 1)
        until(lambda: unhandled_bytes(other) == 0)
        assert peak_bytes(server) < before + GROWTH_BYTES
        assert "event=unhandled_has_room" in server.log
        assert "does not go on" not in server.log


@pytest.mark.slow
@patches_modules
@loops
def test_who_does_not_read_replies_is_closed_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """Its lines wait until it has read, and may be very short."""
    monkeypatch.setattr(unsent, "STUCK_S", 0.3)
    lines = [b"h help\n" * 100_000] * 8
    with small(tmp_path, lines, room_bytes=MIB, loop=loop) as (_, other, clients):
        with suppress(ConnectionError):
            pump(clients, reads=False, seconds=0.1)
        most = 0
        while not (closed := other.stats("errors")):
            most = max(most, unhandled_bytes(other))
        assert MIB // 2 < most < 2 * MIB
        told = "replies were not read for 0.3 s, and the server has reached unhandled_bytes_max"
        assert all(told in each["reason"] for each in closed)
        until(lambda: unhandled_bytes(other) <= MIB * 3 // 4)


@loops
def test_all_lines_are_answered_in_order_when_there_is_no_room(tmp_path: Path, loop: str) -> None:
    lines = range(4_000)
    data = b"".join(b"%d ping %d\r\n" % (number, number % 7) for number in lines)
    replies = b"".join(b"%d ok %d\n" % (number, number % 7) for number in lines)
    with small(tmp_path, [data] * 30, loop=loop) as (_, _, clients):
        pump(clients, reads=True, seconds=WAIT_S, done=replies[-20:])
        assert all(client.got == replies for client in clients)


def test_who_does_not_go_on_with_a_line_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unhandled, "STUCK_S", 0.3)
    line = b"p ping " + b"x" * 225_000 + b"\n"
    with nearly_full(tmp_path, [b"x" * 25_000] * 40) as (address, other, clients):
        # Somebody's long line comes after theirs.
        with senders(address, [line]) as (last,):
            pump([last], reads=True, seconds=WAIT_S, done=b"\n")
            assert last.got == line.replace(b" ping ", b" ok ")
        closed = set[Sender]()

        def count_closed() -> int:
            for client in {*clients} - closed:
                with suppress(BlockingIOError):
                    with suppress(ConnectionError):
                        assert client.sock.recv(100).startswith(b"- error ")
                    closed.add(client)
            return len(closed)

        assert LONG_LINES_READ <= count_closed() < len(clients)
        until(lambda: other.stats()["connections"] == 1 + len(clients) - count_closed())


@loops
def test_turns_end_whoever_has_sent_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """Each turn is over at once, so in each only one connection is handled, and its rest waits."""
    monkeypatch.setattr(running, "CHUNK_S", -1.0)
    lines = [b"%d publish --confirm e x\n%d ping y\n" % (number, number) for number in range(60)]
    large = [b"".join(lines) + b"q%d purge --confirm none\n" % number for number in range(20)]
    with (
        Broker(tmp_path / "mqks.db", uvloop=loop == "--uvloop") as broker,
        LineClient(address := ("127.0.0.1", broker.port)) as other,
        senders(address, large) as clients,
    ):
        assert other.ask(b"s subscribe --confirm q e") == b"s ok "
        pump(clients, reads=False, seconds=0.1)
        with senders(address, large) as gone:
            pump(gone, reads=False, seconds=0.1)
        for number in range(20):
            assert other.ask(b"p ping %d" % number) == b"p ok %d" % number

        def all_is_answered() -> bool:
            pump(clients, reads=True, seconds=0.1)
            return all(client.got.count(b"\n") >= 121 for client in clients)

        until(all_is_answered)
        for client in clients:
            got = client.got.splitlines()
            assert [each for each in got if each.endswith(b"y")] == [
                b"%d ok y" % number for number in range(60)
            ]
            assert sorted(got) == sorted({*got})
            assert len(got) == 121
        until(lambda: other.stats()["messages_ready"] == 40 * 60)
        until(lambda: other.stats()["connections"] == 21)


def test_who_sends_one_long_line_after_the_other_is_not_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though none of them grows by much for a while; and others get their turn between."""
    monkeypatch.setattr(unhandled, "STUCK_S", 0.5)
    lines = b"".join(b"p ping %s%d\n" % (b"x" * 100_000, number) for number in range(40))
    with (
        nearly_full(tmp_path, [b"x" * 50_000] * 20) as (address, _, _),
        senders(address, [lines] * 2) as clients,
    ):
        pump(clients, reads=True, seconds=WAIT_S, done=b"x39\n")
        assert [client.got for client in clients] == [lines.replace(b" ping ", b" ok ")] * 2


@loops
@pytest.mark.parametrize("ending", ["says goodbye", "only closes"])
def test_over_tls_all_lines_before_the_end_are_handled(
    tmp_path: Path, tls_port: int, loop: str, ending: str
) -> None:
    """However small the pieces are that they are read in, and though the server pauses clients that
    have gone already, and have read nothing."""
    context, tls = with_tls(tmp_path, tls_port)
    address, clients, count = ("127.0.0.1", tls_port), 5, 15_000
    with (
        served(tmp_path / "mqks.db", "--unhandled-bytes-max", "1MiB", loop, *tls) as (_, other),
        ThreadPoolExecutor(clients) as threads,
    ):
        assert other.ask(b"s subscribe --confirm q e") == b"s ok "

        def publish() -> None:
            with TlsClient(address, context) as client:
                client.send(b"".join(b"%d publish e x\n" % each for each in range(count)))
                if ending == "says goodbye":
                    client.say_goodbye()

        for done in [threads.submit(publish) for _ in range(clients)]:
            done.result()
        until(lambda: other.stats()["messages_ready"] == clients * count)
