"""`mqks push`: each answer does with a message what the page says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import signal
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer

from mqks import blocking
from mqks.client.blocking import BlockingClient
from mqks.commands.push import Target
from mqks.testing import Broker
from tests.commands.console import MQKS
from tests.kit import forks
from tests.kit.waiting import WAIT_S, until

SECRET = b"0123456789abcdef01234567"


class Receiver(ThreadingHTTPServer):
    """A web address; `answers` are the status, and headers, of each post in turn, then 204."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.hold = threading.Event()
        self.hold.set()
        super().__init__(("127.0.0.1", 0), _Post)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?x=1"


class _Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {key.lower(): value for key, value in self.headers.items()}
        status, more = self.server.answers.pop(0) if self.server.answers else (204, {})
        self.server.got.append((self.path, headers, body))
        self.server.hold.wait(WAIT_S)
        self.send_response(status)
        for key, value in more.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Nowhere."""


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving(server := Receiver()):
        yield server
        server.hold.set()


@pytest.fixture
def client(mqks_broker: Broker) -> Iterator[BlockingClient]:
    with blocking.connect(mqks_broker.url) as client:
        client.set_queue("hooks", dead_letter_queue="dead", backoff=0.01)
        client.subscribe("hooks", ["order.new"])
        yield client


def push(broker: Broker, *words: str) -> list[str]:
    return [*MQKS, "push", "hooks", *words, "--url", broker.url]


@contextmanager
def pushing(broker: Broker, *words: str) -> Iterator[forks.Forked]:
    with open(os.devnull, "r+") as none:
        process = forks.Forked(push(broker, *words), os.environ, (none.fileno(),) * 3)
    try:
        yield process
    finally:
        process.kill()


def left(client: BlockingClient) -> tuple[int, int]:
    queue = client.stats("queue", "hooks")
    return queue["ready"] + queue["scheduled"], queue["unacked"]


def test_a_message_is_posted_signed_and_acked(
    mqks_broker: Broker, client: BlockingClient, receiver: Receiver, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"whsec_" + base64.b64encode(SECRET) + b"\n")
    data = b"any\n\x00 bytes \xff"
    client.publish("order.new", data, id="m ü".replace(" ", "/"), meta={"a b": "c&d"})
    with pushing(mqks_broker, receiver.url, "--secret-file", str(secret)) as process:
        until(lambda: left(client) == (0, 0))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    [(path, headers, body)] = receiver.got
    assert (path, body) == ("/hook?x=1", data)
    id_, at = headers["webhook-id"], headers["webhook-timestamp"]
    digest = hmac.new(SECRET, f"{id_}.{at}.".encode() + data, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    told = [headers[f"mqks-{each}"] for each in ("queue", "event", "retry", "meta")]
    assert [id_, *told] == ["m%2F%C3%BC", "hooks", "order.new", "0", "a+b=c%26d"]


def test_over_tls(
    mqks_broker: Broker,
    client: BlockingClient,
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    receiver.socket = context.wrap_socket(receiver.socket, server_side=True)
    url = receiver.url.replace("http:", "https:")
    client.set_queue("hooks", retries=0)
    client.publish("order.new", "not for anybody")
    with pushing(mqks_broker, url):
        [letter] = until(lambda: client.peek("dead"))
    assert letter.dead_letter is not None
    assert "certificate verify failed" in (letter.dead_letter.why or "")
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca"))
    client.publish("order.new", "x")
    with pushing(mqks_broker, url):
        until(lambda: left(client) == (0, 0))
    assert [body for _, _, body in receiver.got] == [b"x"]


def test_what_the_answers_do(
    mqks_broker: Broker, client: BlockingClient, receiver: Receiver
) -> None:
    receiver.answers = [
        (500, {}),
        (302, {"location": receiver.url}),
        (503, {"retry-after": "0.01"}),
        (422, {}),
    ]
    client.publish("order.new", "x")
    with pushing(mqks_broker, receiver.url):
        [letter] = until(lambda: client.peek("dead"))
    assert letter.dead_letter is not None
    assert letter.dead_letter.why == "127.0.0.1 answers 422"
    assert [headers["mqks-retry"] for _, headers, _ in receiver.got] == ["0", "1", "2", "3"]


def test_who_is_gone_ends_it_and_loses_nothing(
    mqks_broker: Broker, client: BlockingClient, receiver: Receiver
) -> None:
    receiver.answers = [(410, {})] * 100
    client.publish("order.new", "x")
    code, _, told = forks.run(push(mqks_broker, receiver.url))
    assert code == 69
    assert b"answers 410" in told.splitlines()[-1]
    until(lambda: left(client) == (1, 0))


def test_at_most_so_many_and_not_for_longer(
    mqks_broker: Broker, client: BlockingClient, receiver: Receiver
) -> None:
    receiver.hold.clear()
    client.publish_many(("order.new", n) for n in range(10))
    with pushing(mqks_broker, receiver.url, "--concurrency", "2", "--answer-timeout", "0.2"):
        until(lambda: len(receiver.got) >= 4)
        assert left(client)[1] <= 2
        receiver.hold.set()
        until(lambda: left(client) == (0, 0))


def test_the_pause_that_is_told_is_at_least_the_backoff(
    mqks_broker: Broker, client: BlockingClient, receiver: Receiver
) -> None:
    """Whatever is told, and an hour at most."""
    client.set_queue("hooks", backoff=1000)
    pauses = {
        "0": 1000,
        "-5": 1000,
        "nan": 1000,
        "soon": 1000,
        "Thu, 01 Jan 1970 00:00:00 GMT": 1000,
        "0.01": 1000,
        "2000": 2000,
        "1e999": 3600,
    }
    receiver.answers = [(503, {"retry-after": each}) for each in pauses]
    client.publish_many(("order.new", each) for each in pauses)
    with pushing(mqks_broker, receiver.url, "--concurrency", "1"):
        until(lambda: left(client) == (len(pauses), 0) and len(receiver.got) == len(pauses))
        found = client.peek("hooks", scheduled=True, limit=100)
    assert [each.retry for each in found] == [1] * len(pauses)
    due = {each.text: each.due or 0 for each in found}
    for each, pause_s in pauses.items():
        assert 0.9 * pause_s - WAIT_S < due[each] - time.time() < 1.1 * pause_s


def test_a_pause_that_is_told_counts_as_a_try(
    mqks_broker: Broker, client: BlockingClient, receiver: Receiver
) -> None:
    receiver.answers = [(429, {"retry-after": "1000"})] * 100
    client.publish("order.new", "x")

    def is_dead() -> bool:
        client.promote("hooks", None)
        return bool(client.peek("dead"))

    with pushing(mqks_broker, receiver.url):
        until(is_dead)
    assert len(receiver.got) == 20


class RawReceiver(socketserver.ThreadingTCPServer):
    """A web address that answers each post by these bytes, and repeats the last ones until the
    connection ends, or holds it (`holds`), or closes it."""

    daemon_threads = True

    def __init__(self, *answer: bytes, ends: str) -> None:
        self.answer, self.ends, self.posts = answer, ends, 0
        super().__init__(("127.0.0.1", 0), _Raw)


class _Raw(socketserver.StreamRequestHandler):
    server: RawReceiver

    def handle(self) -> None:
        self.server.posts += 1
        while self.rfile.readline().strip():
            pass
        with suppress(OSError):
            self.wfile.write(b"".join(self.server.answer))
            while self.server.ends == "endless":
                self.wfile.write(self.server.answer[-1])
            if self.server.ends == "held":
                self.rfile.read()
            if self.server.ends == "reset":
                linger = struct.pack("ii", 1, 0)
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                for each in self.rfile, self.wfile, self.request:
                    each.close()


@contextmanager
def answering(*answer: bytes, ends: str) -> Iterator[tuple[RawReceiver, str]]:
    with serving(server := RawReceiver(*answer, ends=ends)):
        yield server, f"http://127.0.0.1:{server.server_address[1]}/"


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ((OK + b"Content-Length: 100\r\n\r\n", b"short"), "closed"),
        ((OK + b"Content-Length: 100\r\n\r\n", b"short"), "held"),
        ((OK + b"Content-Length: 100\r\n\r\n", b"short"), "reset"),
        ((OK + b"\r\n", b"x" * 1000), "endless"),
        ((CHUNKED, b"5\r\nab"), "closed"),
        ((CHUNKED, b"no number\r\n"), "held"),
        ((CHUNKED, b"1\r\nx\r\n" * 1000), "endless"),
        ((OK + b"Transfer-Encoding: gzip\r\n\r\n", b"x"), "closed"),
        ((OK + b"Content-Length: -5\r\n\r\n", b"x"), "held"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" * 9, OK + b"Content-Length: 0\r\n\r\n"), "held"),
    ],
)
def test_an_answer_2xx_is_an_ack_whatever_its_body_is(
    mqks_broker: Broker, client: BlockingClient, answer: tuple[bytes, ...], ends: str
) -> None:
    client.publish("order.new", "x")
    with answering(*answer, ends=ends) as (server, url), pushing(mqks_broker, url):
        until(lambda: left(client) == (0, 0))
        assert server.posts == 1
    assert not client.stats("queue", "hooks")["dead"]


@pytest.mark.parametrize(
    ("answer", "ends", "why"),
    [
        ((b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,), "endless", "sends much, and does not answer"),
        ((OK, b"x: " + b"y" * 1000), "endless", "does not answer"),
        ((OK, b"x: y\r\n"), "endless", "does not answer"),
        ((OK, b"Content-"), "closed", "has closed the connection"),
        ((OK,), "held", "does not answer in 0.5 s"),
        ((b"220 mail.example.org\r\n",), "held", "does not answer"),
        ((b"",), "reset", "does not answer"),
        ((b"",), "closed", "has closed the connection"),
    ],
)
def test_what_is_no_answer_is_read_to_a_limit(
    mqks_broker: Broker, client: BlockingClient, answer: tuple[bytes, ...], ends: str, why: str
) -> None:
    client.set_queue("hooks", retries=1)
    client.publish("order.new", "x")
    limit = "--answer-timeout", "0.5" if ends == "held" else str(WAIT_S)
    with answering(*answer, ends=ends) as (server, url), pushing(mqks_broker, url, *limit):
        [letter] = until(lambda: client.peek("dead"))
    assert letter.dead_letter is not None
    assert f"127.0.0.1 {why}" in str(letter.dead_letter.why)
    assert server.posts == 1


@pytest.mark.parametrize(
    "address",
    [
        *("http://", "http:///x", "http://:80/", "http://?x", "//example.org", "http:example.org"),
        *("http://x:0/", "http://x:70000/", "http://x:-1/", "http://x:y/", "http://x:8 0/"),
        *("http://@x/", "http://:p@x/", "http://u:p@x/", "http://x\\@y/", "http://x y/"),
        *("http://x..y/", "http://.x/", f"http://{'x' * 64}/", "http://x%20y/", "http://x\0/"),
        *("http://\u2603\u200b..x/", "http://\ufffd/", "http://xn--\u00fc/", "http://\udcff/"),
        *("http://[::1/", "http://[x]/", "http://1.2.3.999/", "http://x/\udcff", "ftp://x/"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(typer.BadParameter, match="must be an address"):
        Target(address, b"", 1, "text/plain")


@pytest.mark.parametrize(
    ("address", "host", "header"),
    [
        ("http://EXAMPLE.org:8080/x", "example.org", "example.org:8080"),
        ("http://b\u00fccher.example/", "xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("https://[::1]/", "::1", "[::1]"),
        ("http://127.0.0.1:/", "127.0.0.1", "127.0.0.1"),
        ("http://my_host.:80", "my_host.", "my_host.:80"),
    ],
)
def test_addresses(address: str, host: str, header: str) -> None:
    target = Target(address, b"", 1, "text/plain")
    assert (target.host, target._head["host"]) == (host, header)


@pytest.mark.parametrize("content_type", ["a\nb: c", "\u2603"])
def test_what_is_no_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(typer.BadParameter, match="--content-type"):
        Target("http://x", b"", 1, content_type)


def test_an_address_that_is_none(mqks_broker: Broker) -> None:
    code, _, told = forks.run(push(mqks_broker, "http://user:secret@example.org"))
    assert (code, b"address as in" in told) == (64, True)
    assert b"secret" not in told
