"""Clients that vanish without a goodbye: the network goes down between them and the server.

The one rule: it is a network of the test's own, so whoever may not make one skips the test.
"""

import ctypes
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqks
from mqks.server import vanished
from mqks.testing import Broker
from tests.kit.line_client import LineClient
from tests.kit.waiting import WAIT_S, until
from tests.server.test_tls import TlsClient, with_tls

CLONE_NEWNET = 0x40000000
SILENT_S = 1


def loopback(state: str) -> bool:
    return not subprocess.run(["ip", "link", "set", "lo", state], timeout=WAIT_S).returncode


@pytest.fixture
def _own_network() -> Iterator[None]:
    """This thread, and those it starts, have a network with nothing but loopback in it."""
    libc = ctypes.CDLL(None)
    with Path("/proc/thread-self/ns/net").open() as before:
        if not shutil.which("ip") or libc.unshare(CLONE_NEWNET):
            pytest.skip("no network of its own: that takes iproute2 and root")
        try:
            if not loopback("up"):
                pytest.skip("nobody here may change a network")
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_own_network")
def test_what_vanished_clients_hold_goes_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vanished, "SILENT_S", SILENT_S)
    monkeypatch.setattr(vanished, "AGAIN_S", SILENT_S)
    monkeypatch.setattr(vanished, "LOOK_S", SILENT_S / 2)
    with (
        Broker(tmp_path / "mqks.db", unix=tmp_path / "sock") as broker,
        mqks.blocking.connect(f"mqks+unix://{tmp_path}/sock") as other,
        LineClient(("127.0.0.1", broker.port)) as silent,
        LineClient(("127.0.0.1", broker.port)) as busy,
        LineClient(("127.0.0.1", broker.port)) as slow,
    ):
        for queue, client in ((b"silent", silent), (b"busy", busy), (b"slow", slow)):
            consume = b"%b consume --confirm %b %b --manual-ack" % (queue, queue, queue)
            assert client.ask(consume) == queue + b" ok "
            other.publish(queue.decode(), "first", id="first")
        assert silent.line() == b"silent ok first event=silent first"
        assert busy.line() == b"busy ok first event=busy first"

        def blocked() -> bool:
            other.publish("slow", "x" * 500_000, confirm=True)
            rows = json.loads(other.request("stats", "consumers"))
            return [row["id"] for row in rows if row["blocked"]] == ["slow"]

        until(blocked, "the system takes any number of bytes")
        time.sleep(4 * SILENT_S)
        rows = json.loads(other.request("stats", "consumers"))
        assert {row["id"] for row in rows} == {"silent", "busy", "slow"}, "they are all there"

        assert loopback("down")
        other.publish("busy", "under way", confirm=True)
        for name in ("silent", "busy", "slow"):
            with other.consume(name) as consumer:
                message = consumer.receive(WAIT_S)
                assert (message.id, message.retry) == ("first", 1)


@pytest.mark.slow
def test_who_ends_while_it_is_looked_at_ends_nothing_else(
    tmp_path: Path, tls_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS has no socket any more a turn of the loop before its client is told."""
    monkeypatch.setattr(vanished, "LOOK_S", 0)
    context, _ = with_tls(tmp_path, tls_port)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with Broker(tmp_path / "mqks.db", tls_port=tls_port, tls_cert=cert, tls_key=key) as broker:
        for _ in range(5):
            with TlsClient(("127.0.0.1", tls_port), context) as client:
                assert client.ask(b"a ping") == b"a ok "
        with LineClient(("127.0.0.1", broker.port)) as client:
            assert client.ask(b"a ping") == b"a ok "
