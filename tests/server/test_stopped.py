"""What comes to a server that has stopped is not committed."""

from pathlib import Path

import pytest

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.journal.journal import Journal
from mqks.journal.recovery import Recovery
from mqks.journal.sqlite.store import SqliteStore
from mqks.server.writer import Writer
from mqks.settings import Settings


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
