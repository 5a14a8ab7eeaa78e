"""What the server's log says of messages that die without a dead-letter queue."""

import logging
import re
from pathlib import Path

import pytest

from mqks.limits import DROPPED_LINES_MAX
from mqks.server import notices
from mqks.testing import Broker
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until


def rejected(client: LineClient, queue: bytes, count: int, flags: bytes = b"--retries=1") -> None:
    """Publish and reject so many messages of a queue that has no dead letters."""
    assert client.ask(b"s set_queue --confirm %b %b" % (queue, flags)) == b"s ok "
    client.ask(b"c consume --confirm %b %b --manual-ack --existing" % (queue, queue))
    for number in range(count):
        client.send(b"m%d publish %b x\n" % (number, queue))
        client.line()
        assert client.ask(b"r reject --confirm c m%d --retries=1" % number) == b"r ok "
    assert client.ask(b"d delete_consumer --confirm c") == b"d ok "


def test_what_is_dropped_is_told_once_a_minute_for_each_queue(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        rejected(client, b"jobs", 3)
        rejected(client, b"mails", 1)
        rejected(client, b"kept", 2, b"--retries=1 --dead-letters=kept.dead")
        for full in range(2):
            client.ask(b"s set_queue --confirm short --messages-max=1 --overflow=drop")
            client.ask(b"s subscribe --confirm short e")
            client.ask(b"m%d publish --confirm e x" % full)
        for number in range(DROPPED_LINES_MAX):
            rejected(client, b"many.%d" % number, 1)
        assert server.stop() == 0
    parts = re.compile(r"level=(\w+) event=messages_dropped queue=(\S+) (.*)")
    found = [each.groups() for each in map(parts.search, server.log.splitlines()) if each]
    assert found[:3] == [
        ("warning", "jobs", "count=1 reason=rejects"),
        ("warning", "mails", "count=1 reason=rejects"),
        ("info", "short", "count=1 reason=overflow"),
    ]
    assert len(found) == DROPPED_LINES_MAX


@patches_modules
def test_after_a_minute_the_others_are_told_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mqks_broker: Broker
) -> None:
    monkeypatch.setattr(notices, "MINUTE_S", 0.2)
    monkeypatch.setattr(notices, "DROPPED_LINES_MAX", 2)
    caplog.set_level(logging.INFO, "mqks")

    def counts() -> list[int]:
        return [
            vars(each)["fields"]["count"]
            for each in caplog.records
            if each.msg in ("messages_dropped", "drops_suppressed")
        ]

    with LineClient(("127.0.0.1", mqks_broker.port)) as client:
        for queue in (b"a", b"b", b"c"):
            rejected(client, queue, 20)
        client.ask(b"s set_queue --confirm a --messages-max=1 --overflow=drop")
        for each in range(3):
            client.ask(b"m%d publish --confirm a x" % each)
    until(lambda: sum(counts()) == 62)
    assert len(counts()) < 62
