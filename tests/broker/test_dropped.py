"""What the server's log says of messages that die without a dead-letter queue."""

import logging

import pytest

from mqks.server import notices
from mqks.testing import Broker
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
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


@patches_modules
def test_what_is_dropped_is_told_once_a_minute_for_each_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mqks_broker: Broker
) -> None:
    monkeypatch.setattr(notices, "DROPPED_LINES_MAX", 4)
    caplog.set_level(logging.INFO, "mqks")
    with LineClient(("127.0.0.1", mqks_broker.port)) as client:
        rejected(client, b"jobs", 3)
        rejected(client, b"mails", 1)
        rejected(client, b"kept", 2, b"--retries=1 --dead-letters=kept.dead")
        client.ask(b"s set_queue --confirm short --messages-max=1 --overflow=drop")
        for full in range(2):
            client.ask(b"m%d publish --confirm --to=short e x" % full)
        for number in range(4):
            rejected(client, b"many.%d" % number, 1)
    told = [each for each in caplog.records if each.msg == "messages_dropped"]
    found = [(each.levelname, *vars(each)["fields"].values()) for each in told]
    assert found[:3] == [
        *(("WARNING", "jobs", 1, "rejects"), ("WARNING", "mails", 1, "rejects")),
        ("INFO", "short", 1, "overflow"),
    ]
    assert len(found) == 4


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
