"""`mqks push`: each answer does with a message what the page says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from mqks import blocking
from mqks.client.blocking import BlockingClient
from mqks.testing import Broker
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


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.hold.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def client(mqks_broker: Broker) -> Iterator[BlockingClient]:
    with blocking.connect(mqks_broker.url) as client:
        client.set_queue("hooks", dead_letter_queue="dead", backoff=0.01)
        client.subscribe("hooks", ["order.new"])
        yield client


@contextmanager
def pushing(broker: Broker, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "mqks", "push", "hooks", *words, "--url", broker.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
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
    with pushing(mqks_broker, receiver.url) as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 69
    assert "answers 410" in told.splitlines()[-1]
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


@pytest.mark.parametrize(
    "address", ["ftp://x/", "example.org/hook", "http://user:secret@example.org"]
)
def test_an_address_that_is_none(mqks_broker: Broker, address: str) -> None:
    with pushing(mqks_broker, address) as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, "address as in" in told) == (64, True)
    assert "secret" not in told
