"""Stops while messages are due at every moment: they are clean ones, and nothing is lost."""

from pathlib import Path

import pytest

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.journal.journal import Journal
from mqks.journal.recovery import Recovery
from mqks.journal.sqlite.store import SqliteStore
from mqks.server.writer import Writer
from mqks.settings import Settings
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess

MESSAGES, STOPS = 3000, 6


@pytest.mark.slow
def test_stops_while_messages_are_due(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "mqks.db")
    with server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        lines = [
            b"m%d publish %s--delay=%f e x\n"
            % (number, b"--confirm " * (number == MESSAGES - 1), 0.1 + number / 1000)
            for number in range(MESSAGES)
        ]
        client.send(b"".join(lines))
        assert client.line() == b"m%d ok " % (MESSAGES - 1)
        for _ in range(STOPS):
            assert server.terminate() == 0, server.log
            server.start()
        with LineClient(server.address) as again:
            again.send(b"c consume q --manual-ack\n")
            told = {again.line().split(b" ")[2] for _ in range(MESSAGES)}
            assert len(told) == MESSAGES


@pytest.mark.anyio
async def test_what_comes_after_the_end_is_not_committed(tmp_path: Path) -> None:
    """The journal is closed then."""
    settings = Settings(db=tmp_path / "mqks.db")
    store = await SqliteStore.open(settings, print)
    journal = Journal(store)
    broker = Broker(
        settings,
        clock=lambda: 0.0,
        now_us=lambda: 0,
        new_error_id=lambda: ("", 0),
        on_error=lambda _: False,
    )
    await Recovery(journal, broker, print).run(salvage=False)
    writer = Writer(broker, journal, release=lambda: None, flush=lambda: None)
    client, intake = broker.connect("test", local=True), Intake(broker)
    intake.receive(client, b"s subscribe q e\n")
    writer.stop()
    await writer.run()
    assert not broker.pending
    await journal.store.close()
    intake.receive(client, b"m publish e x\n")
    writer.wake(alone=True)
    assert broker.pending.records == 1
