"""What clients write when their connection ends: whole requests, and none on one that is torn. What
connections that wait for each answer make of a peer that answers late, oddly or not.

The one rule: an exception of a signal handler comes at a step that the test has chosen."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import anyio
import pytest

from mqks import (
    AsyncClient,
    ConnectionLost,
    Options,
    ProtocolViolation,
    ReplyTimeout,
    RequestFailed,
    blocking,
    connect,
)
from mqks.client.wire import Wire
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.wire import HEADER_BYTES_MAX, ServerAddress
from tests.kit.proxy import Peer
from tests.kit.waiting import WAIT_S, until

pytestmark = pytest.mark.anyio

BIG = 32 * 1024 * 1024
"""More than sockets take at once."""
QUICK = Options(timeout_s=WAIT_S, reconnect_min_s=0.01, line_bytes_max=2 * BIG)
LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": with_uvloop}), id=name)
    for name, with_uvloop in (("asyncio", False), ("uvloop", True))
]


class Interrupted(Exception):
    pass


@contextmanager
def interrupted(event: str, name: str) -> Iterator[None]:
    """This thread, once: after a function of C with this name, or at the call of one of Python."""

    def profile(frame: Any, kind: str, argument: Any) -> None:
        called = argument.__name__ if event == "c_return" and kind == event else None
        if kind == event and (called or frame.f_code.co_name) == name:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(profile)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        sys.setprofile(None)


class Reader:
    """Reads a big request only once it may, and answers what is small. `came` has what came on each
    connection."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.came: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came = bytearray()
        self.came.append(came)
        while data := await reader.read(64 * 1024):
            came += data
            if len(data) > 1000:
                wait = asyncio.get_running_loop().run_in_executor
                await wait(None, self.may_read.wait, WAIT_S)
            elif data.endswith(b"\n"):
                ids = (line.split(b" ")[0] for line in data.splitlines())
                writer.write(b"".join(id_ + b" ok \n" for id_ in ids))

    def is_torn(self) -> bool:
        """Whether a part of the big request came on the first connection. Nothing may have made a
        line of it; the whole of it may have come on the next one."""
        *lines, rest = self.came[0].split(b"\n")
        assert max(map(len, lines)) < 1000
        return len(rest) > 1000


async def test_an_interrupted_request_of_the_async_client_is_not_completed() -> None:
    reader = Reader()
    with Peer(reader.serve) as peer:
        async with connect(peer.url, QUICK) as client:
            with interrupted("call", "_add_writer"):
                await client.publish("e", "x" * BIG, confirm=True)
            reader.may_read.set()
            await client.ping("after")
    until(reader.is_torn)


def test_an_interrupted_request_of_the_blocking_client_is_not_completed() -> None:
    reader = Reader()
    with Peer(reader.serve) as peer, blocking.connect(peer.url, QUICK) as client:
        client.ping("before")
        with interrupted("c_return", "send"):
            client.publish("e", "x" * BIG, confirm=True)
        reader.may_read.set()
        client.ping("after")
    until(reader.is_torn)


def test_a_request_that_a_wire_has_sent_in_part_is_not_completed() -> None:
    reader = Reader()
    options = Options(timeout_s=0.2)
    with Peer(reader.serve) as peer, Wire(peer.url, options, greets=True) as wire:
        with pytest.raises(ReplyTimeout):
            wire.ask(b"ping " + b"x" * BIG)
        reader.may_read.set()
        with pytest.raises(ConnectionLost):
            wire.ask(b"ping after")
    until(reader.is_torn)


class Mortal:
    """Resets the connection when it reads `die`, and confirms all else that it reads."""

    def __init__(self) -> None:
        self.is_dead = threading.Event()
        self.came: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.endswith(b" die\n"):
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                asyncio.get_running_loop().call_soon(self.is_dead.set)
                return
            self.came.append(line.rstrip().rpartition(b" ")[2])
            writer.write(line.split(b" ")[0] + b" ok \n")

    async def dies(self, client: AsyncClient) -> None:
        """The connection of the client is reset, and its event loop has not looked yet."""
        self.is_dead.clear()
        await client.publish("e", "die")
        await anyio.sleep(0)
        self.is_dead.wait(WAIT_S)


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_nothing_is_lost_in_the_turns_in_which_a_connection_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mortal = Mortal()
    with Peer(mortal.serve) as peer:
        for turns in range(1, 6):
            async with connect(peer.url, QUICK) as client, anyio.create_task_group() as tasks:
                await mortal.dies(client)
                tasks.start_soon(client.ping)  # Its write tells that the connection has ended.
                for _ in range(turns):
                    await anyio.sleep(0)
                await client.publish("e", f"unconfirmed-{turns}")
                await client.publish("e", f"confirmed-{turns}", confirm=True)
    for turns in range(1, 6):
        assert f"unconfirmed-{turns}".encode() in mortal.came
        assert f"confirmed-{turns}".encode() in mortal.came
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_a_client_may_end_in_the_turns_in_which_its_connection_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mortal = Mortal()
    with Peer(mortal.serve) as peer:
        for turns in range(1, 6):
            async with anyio.create_task_group() as tasks, connect(peer.url, QUICK) as client:
                await mortal.dies(client)
                tasks.start_soon(client.ping)
                for _ in range(turns):
                    await anyio.sleep(0)
                tasks.cancel_scope.cancel()
    assert "ERROR" not in caplog.text


@contextmanager
def a_peer() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield listener, f"mqks://127.0.0.1:{listener.getsockname()[1]}"


def test_a_late_answer_is_not_taken_for_that_to_the_next_question() -> None:
    with a_peer() as (listener, url), Wire(url, Options(timeout_s=0.05)) as asking:
        peer, _ = listener.accept()
        with peer:
            with pytest.raises(ReplyTimeout):
                asking.ask(b"ping first")
            peer.sendall(b"q ok first\n")

            with pytest.raises(ConnectionLost):
                asking.ask(b"ping second")


@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        (b"q error E1\n", RequestFailed),
        (b"p ok x\n", ProtocolViolation),
        (b"q what x\n", ProtocolViolation),
        (b"q ok " + b"x" * 100 + b"\n", ProtocolViolation),
        (b"q ok " + b"x" * 100, ProtocolViolation),
        (b"- error E1\n", ConnectionLost),
        (b"q ok x", ConnectionLost),
        (b"", ConnectionLost),
    ],
)
def test_what_is_no_answer(sent: bytes, raised: type[Exception]) -> None:
    options = Options(timeout_s=WAIT_S, reply_bytes_max=104)
    with a_peer() as (listener, url), Wire(url, options) as asking:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(raised):
                asking.ask(b"ping x")


def test_a_line_may_be_as_long_as_the_limit() -> None:
    with a_peer() as (listener, url), Wire(url, Options(reply_bytes_max=104)) as asking:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"q ok " + b"x" * 99 + b"\n")
            assert asking.ask(b"ping x") == b"x" * 99


def test_too_long_a_header_of_a_read_is_told_as_such() -> None:
    def answer() -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            for reply in (b"hello ok \n", b"r ok " + b"x" * 2 * HEADER_BYTES_MAX):
                peer.recv(1024)
                peer.sendall(reply)
            peer.recv(1024)  # Until the other end closes.

    with a_peer() as (listener, url):
        answering = Thread(target=answer)
        answering.start()
        reader = QueueReader(None, "q", server=ServerAddress(url=url, retries=0))
        with reader, pytest.raises(ProtocolViolation, match="longer than"):
            reader.range()
        answering.join(WAIT_S)
