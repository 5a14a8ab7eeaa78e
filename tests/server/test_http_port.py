"""What an HTTP port reads of a request, and when: what is parsed in a turn of the event loop is
counted, and what comes behind an answer is executed or not.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import anyio
import h11
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from mqks.limits import (
    HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_LINES_MAX,
    HTTP_PIECE_BYTES_MAX,
    HTTP_PIECE_LINES_MAX,
    HTTP_QUERY_FIELDS_MAX,
)
from mqks.web import connection, serving
from tests.kit.waiting import WAIT_S

CHUNKED = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
CHUNK, LAST = b"1\r\nx\r\n", b"0\r\n\r\n"
GET = b"GET /took HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Seen:
    """What an application has seen of its requests, and what h11 has parsed for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = 0
        self.events: Counter[tuple[int, type]] = Counter()
        """Of a turn."""
        self.bodies: list[bytes] = []
        self.loop = "asyncio"
        self.trickle: bytes | None = None
        """Sent behind the rest, and then a byte now and then."""
        next_event = h11.Connection.next_event

        def counted(connection: h11.Connection) -> Any:
            event = next_event(connection)
            if not isinstance(event, type):
                self.events[self.turn, type(event)] += 1
            return event

        monkeypatch.setattr(h11.Connection, "next_event", counted)

    def parsed(self, kind: type) -> int:
        return sum(count for (_, each), count in self.events.items() if each is kind)

    def most(self, kind: type) -> int:
        """In one turn."""
        return max(count for (_, each), count in self.events.items() if each is kind)

    def ask(self, *sent: bytes) -> list[bytes]:
        """What is answered to each of these, which are sent at once on connections of their own."""
        routes: list[BaseRoute] = [Route("/took", self._took, methods=["GET", "POST"])]
        routes += (Mount(f"/{each.__name__}", each) for each in (silent, raises, breaks, short))
        app = Starlette(routes=[*routes, Route("/read", self._read, methods=["POST"])])

        async def run() -> list[bytes]:
            sock = socket.create_server(("127.0.0.1", 0))
            loop = asyncio.get_running_loop()

            def tick() -> None:
                self.turn += 1
                self.ticks = loop.call_soon(tick)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serving.answer, sock, app, HTTP_CONNECTIONS_MAX)
                tick()
                with anyio.fail_after(WAIT_S):
                    answers = await asyncio.gather(
                        *(_exchange(sock.getsockname(), each, self.trickle) for each in sent)
                    )
                self.ticks.cancel()
                tasks.cancel_scope.cancel()
            return answers

        return anyio.run(run, backend_options={"use_uvloop": self.loop == "uvloop"})

    async def _took(self, request: Request) -> Response:
        self.bodies.append(b"")
        return PlainTextResponse("took")

    async def _read(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        return PlainTextResponse("read")


async def _exchange(address: Any, sent: bytes, trickle: bytes | None) -> bytes:
    reader, writer = await asyncio.open_connection(*address)

    async def send_on(data: bytes) -> None:
        while True:
            writer.write(data)
            await asyncio.sleep(0.05)
            data = data and b"a"

    answer, sending = b"", None
    try:
        writer.write(sent)
        if trickle is not None:
            if sent:
                answer = await reader.readuntil(b"took")
            sending = asyncio.ensure_future(send_on(trickle))
        with suppress(ConnectionResetError):
            answer += await reader.read()
        return answer
    finally:
        if sending is not None:
            sending.cancel()
        writer.close()


async def silent(scope: Any, receive: Any, send: Any) -> None:
    pass


async def raises(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError


async def breaks(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})
    raise ValueError


async def short(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"a"})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def closing(head: bytes) -> bytes:
    return head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def test_of_chunks_a_piece_is_parsed_in_a_turn(seen: Seen) -> None:
    count = 4000
    sent = closing(CHUNKED % b"/read") + CHUNK * count + LAST
    answers = seen.ask(*[sent] * 16)
    assert all(each.endswith(b"read") for each in answers)
    assert seen.bodies == [b"x" * count] * 16
    assert seen.parsed(h11.Data) == 16 * count
    assert seen.most(h11.Data) <= HTTP_PIECE_LINES_MAX
    assert seen.most(h11.Request) == 1


def test_a_long_body_comes_whole_and_not_by_the_line(seen: Seen) -> None:
    for body in (b"x" * 3_000_000, b"\n" * 100_000, b"\r\n\r\n" * 1000 + b"x" * 100_000):
        [answer] = seen.ask(closing(LENGTH % (b"/read", len(body))) + body)
        assert answer.endswith(b"read")
        assert seen.bodies.pop() == body
        least = max(len(body) / HTTP_PIECE_BYTES_MAX, body.count(b"\n") / HTTP_PIECE_LINES_MAX)
        assert seen.parsed(h11.Data) <= 2 * least + 10
        seen.events.clear()


@pytest.mark.parametrize("lines", [HTTP_HEAD_LINES_MAX - 3, 5000, 15_000])
@pytest.mark.parametrize("where", ["head", "trailer"])
def test_lines_of_a_head_have_a_limit(seen: Seen, lines: int, where: str) -> None:
    many, head = b"a:\r\n" * lines, closing(CHUNKED % b"/read")
    if where == "head":
        [answer] = seen.ask(head[:-2] + many + b"\r\n" + CHUNK + LAST)
    else:
        [answer] = seen.ask(head + CHUNK + LAST[:-2] + many + b"\r\n")
    is_few = lines < HTTP_HEAD_LINES_MAX
    assert answer.startswith(b"HTTP/1.1 200 " if is_few else b"HTTP/1.1 400 "), answer
    assert seen.bodies == ([b"x"] if is_few else [])


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(CHUNKED % b"/took" + CHUNK * 100_000 + LAST, id="chunks"),
        pytest.param(LENGTH % (b"/took", 3_000_000) + b"x" * 3_000_000, id="length"),
        pytest.param(CHUNKED % b"/nowhere" + CHUNK * 10, id="404"),
        pytest.param(CHUNKED.replace(b"POST", b"GET") % b"/read" + b"z", id="405"),
        pytest.param(LENGTH % (b"/took", 5), id="nothing comes"),
    ],
)
def test_a_body_that_nobody_asks_for_is_not_read(seen: Seen, sent: bytes) -> None:
    """And so nothing behind it is a request. The answer comes while the body is being sent."""
    [answer] = seen.ask(sent + GET)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer
    assert seen.parsed(h11.Data) == 0
    assert seen.parsed(h11.Request) == 1


@pytest.mark.parametrize(
    ("sent", "bodies"),
    [
        pytest.param(LENGTH % (b"/read", 1) + b"a" + GET, [b"a", b""], id="length"),
        pytest.param(CHUNKED % b"/read" + CHUNK + LAST + GET, [b"x", b""], id="chunked"),
        pytest.param(LENGTH % (b"/took", 0) + GET, [b"", b""], id="no body"),
        pytest.param(
            (LENGTH % (b"/read", 3) + b"abc") * 50 + GET, [b"abc"] * 50 + [b""], id="many"
        ),
    ],
)
def test_a_request_behind_another_one_is_answered(
    seen: Seen, sent: bytes, bodies: list[bytes]
) -> None:
    [answer] = seen.ask(sent)
    assert answer.count(b"HTTP/1.1 200 ") == len(bodies)
    assert seen.bodies == bodies


@pytest.mark.parametrize("framing", [b"Content-Length: 5", b"Content-Length: 11"])
@pytest.mark.parametrize("other_first", [True, False])
def test_two_lengths_of_a_body_end_the_connection(
    seen: Seen, framing: bytes, other_first: bool
) -> None:
    """Whoever took the other one to count, such as a proxy, would see another request behind it."""
    lines = [framing, b"Transfer-Encoding: chunked"]
    head = b"\r\n".join([b"POST /read HTTP/1.1\r\nHost: localhost", *lines[:: other_first or -1]])
    [answer] = seen.ask(head + b"\r\n\r\n" + CHUNK + LAST + GET)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in answer
    assert seen.bodies == [b"x"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((each, 200) for each in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:80", "")),
        *((each, 421) for each in ("evil.example", "a_b:80", "localhost.evil.example")),
        *((each, 400) for each in ("localhost/x", "user@localhost", "localhost:80x", "local host")),
        *((each, 400) for each in ("[::1", "[::1]x", "localhost?q", "localhost#", "a,localhost")),
        *((each, 400) for each in ("localhost:80:80", "loc\\alhost", "%6cocalhost", "ä")),
    ],
)
def test_a_host_is_a_name_and_perhaps_a_port(seen: Seen, host: str, status: int) -> None:
    [answer] = seen.ask(GET.replace(b"localhost", host.encode()))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /took HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(b"GET\r\n\r\n", id="no target"),
        pytest.param(b"\0" * 100, id="zeros"),
        pytest.param(GET[:-2] + b"A: \xff\0\r\n\r\n", id="bytes"),
        pytest.param(LENGTH[:-2] % (b"/took", 1) + b"Content-Length: 2\r\n\r\n", id="lengths"),
        pytest.param(GET[:-2] + b"a:\r\n" * 5000 + b"\r\n", id="lines"),
        pytest.param(GET[:-2] + b"a: " + b"b" * 1_000_000 + b"\r\n\r\n", id="long"),
    ],
)
def test_a_first_head_that_is_wrong_is_answered(
    seen: Seen, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also to who still sends; and it is no failure of the server."""
    [answer] = seen.ask(head + b"x" * 3_000_000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert seen.bodies == []
    assert "http_failed" not in caplog.text


def test_a_query_has_a_limit(seen: Seen) -> None:
    for fields, status in ((HTTP_QUERY_FIELDS_MAX, 200), (HTTP_QUERY_FIELDS_MAX + 1, 400)):
        [answer] = seen.ask(GET.replace(b"/took", b"/took?" + b"&".join([b"a"] * fields)))
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert len(seen.bodies) == 1


def test_a_body_that_is_wrong_ends_its_request(seen: Seen) -> None:
    for wrong in (b"z\r\n", b"1\r\nxyz", b"g" * 70_000):
        [answer] = seen.ask(CHUNKED % b"/read" + CHUNK + wrong)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert seen.bodies == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("path", "status"), [("silent", 500), ("raises", 500), ("breaks", 200), ("short", 200)]
)
def test_who_gets_no_answer_or_half_of_one_is_not_left_waiting(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, path: str, status: int, loop: str
) -> None:
    monkeypatch.setattr(connection, "REQUEST_S", 0.2)
    seen.loop = loop
    get = GET.replace(b"took", f"{path}/".encode())
    [answer] = seen.ask(get.replace(b"close", b"keep-alive"))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_body_may_wait_until_it_is_wanted(seen: Seen) -> None:
    for path, first in (
        (b"/read", b"HTTP/1.1 100 Continue\r\n\r\nHTTP"),
        (b"/took", b"HTTP/1.1 200"),
    ):
        head = closing(LENGTH % (path, 1)).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        [answer] = seen.ask(head + b"a")
        assert answer.startswith(first)
        assert answer.endswith(path[1:])
    assert seen.bodies == [b"a", b""]


def test_a_head_is_answered_without_a_body(seen: Seen) -> None:
    [answer] = seen.ask(GET.replace(b"GET", b"HEAD"))
    assert b"\r\ncontent-length: 4\r\n" in answer
    assert re.search(rb"\r\ndate: \w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT\r\n", answer)
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("asked", [b"", GET.replace(b"close", b"keep-alive")])
@pytest.mark.parametrize("sent", [b"", b"G", b"GET /took HTTP/1.1\r\na: b\r\n"])
def test_who_sends_no_whole_request_is_closed(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, asked: bytes, sent: bytes
) -> None:
    """Also one that goes on sending a byte now and then."""
    monkeypatch.setattr(connection, "REQUEST_S", 0.2)
    seen.trickle = sent
    [answer] = seen.ask(asked)
    assert answer.count(b"HTTP/1.1 ") == bool(asked)
