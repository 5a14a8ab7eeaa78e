"""Connections that wait for each answer: what they make of a peer that answers late, oddly or not.

The one rule: the peer is a socket of the test, which says what a server should not.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import pytest

from mqks import ConnectionLost, Options, ProtocolViolation, ReplyTimeout, RequestFailed
from mqks.client.wire import Wire
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.wire import HEADER_BYTES_MAX, ServerAddress
from tests.kit.waiting import WAIT_S


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
