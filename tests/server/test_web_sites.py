"""What a web site can make a browser send to the ports of the protocol: nothing of it is executed.

The one rule: the senders are real: Chromium, and Python's client for HTTP.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.server.test_tls import with_tls

CHROMIUM = shutil.which("chromium")
TOLD = "this port does not speak HTTP"
BODY = b"\nx publish e bad\nx purge q\nx delete_queue q\n"
FORM = '<form method="post" enctype="text/plain" action="%s"><input name="%s" value=""></form>'


class Ports:
    """Of a server: TCP, TLS and a Unix socket, and a queue `q` with one message."""

    def __init__(self, directory: Path, tls_port: int) -> None:
        self.unix, self.tls_port = directory / "socket", tls_port
        self.context, flags = with_tls(directory, tls_port)
        self.server = ServerProcess(directory / "mqks.db", "--unix", str(self.unix), *flags)

    def check(self, told: int) -> None:
        """Nothing was executed, and so many connections were closed for it."""
        until(lambda: self.server.log.count("event=request_failed") >= told)
        assert self.server.log.count(TOLD) >= told
        with LineClient(self.server.address) as client:
            reply = client.ask(b"s stats queue q")
        assert json.loads(reply.removeprefix(b"s ok "))["ready"] == 1
        assert "action=purge" not in self.server.log

    def connect(self, port: str) -> socket.socket:
        if port == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(self.unix))
            sock.settimeout(WAIT_S)
            return sock
        if port == "tcp":
            return socket.create_connection(self.server.address, WAIT_S)
        plain = socket.create_connection(("127.0.0.1", self.tls_port), WAIT_S)
        return self.context.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture
def ports(tmp_path: Path, tls_port: int) -> Iterator[Ports]:
    ports = Ports(tmp_path, tls_port)
    with ports.server, LineClient(ports.server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"m publish --confirm e good") == b"m ok "
        yield ports


@pytest.mark.parametrize("port", ["tcp", "tls", "unix"])
def test_a_body_is_not_executed(ports: Ports, port: str) -> None:
    def ask(method: str, path: str) -> None:
        with ports.connect(port) as sock:
            connection = http.client.HTTPConnection("127.0.0.1")
            connection.sock = sock
            # It may be closed while it sends; the reply is none of HTTP.
            with suppress(http.client.BadStatusLine, ConnectionError):
                connection.request(method, path, BODY, {"Content-Type": "text/plain"})
                pytest.fail(f"a reply: {connection.getresponse()}")

    for method, path in (("POST", "/"), ("PUT", "/x?y"), ("GET", "http://x/"), ("brew", "*")):
        ask(method, path)
    ports.check(4)


@pytest.mark.parametrize("port", ["tcp", "tls", "unix"])
def test_every_byte_comes_alone(ports: Ports, port: str) -> None:
    with ports.connect(port) as sock:
        with suppress(ConnectionError):  # It is closed meanwhile.
            for byte in b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + BODY:
                sock.sendall(bytes([byte]))
        with suppress(ConnectionError):
            replies = b"".join(iter(lambda: sock.recv(1000), b""))
            assert replies.startswith(b"POST error "), replies
            assert replies.count(b"\n") == 1, replies
    ports.check(1)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_form_that_sends_itself(ports: Ports) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    host, port = ports.server.address
    urls = f"http://{host}:{port}", f"https://{host}:{ports.tls_port}"
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        context = browser.new_context(ignore_https_errors=True)
        for told, url in enumerate(urls, 1):
            page = context.new_page()
            page.set_content(FORM % (url, BODY.decode().replace("\n", "&#10;")))
            page.evaluate("() => document.forms[0].submit()")
            ports.check(told)
        browser.close()
