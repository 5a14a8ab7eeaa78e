"""A journal is moved from one database to another: as a whole, or not at all. Real servers."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mqks.commands import main
from mqks.errors import CannotWrite, DatabaseLocked, InspectionFailed, JournalDamaged, JournalFailed
from mqks.journal import copying
from mqks.journal.default_store import new_store
from mqks.journal.memory import Memory
from mqks.journal.sqlite.database_file import DatabaseFile
from mqks.journal.sqlite.texts import text_of, texts_path
from mqks.journal.store import Metadata
from mqks.settings import DatabaseUrl, Settings
from tests.kit import forks
from tests.kit.fixtures import client_here, served
from tests.kit.line_client import LineClient
from tests.kit.marks import slow
from tests.kit.postgres import Postgres
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import until

pytest.importorskip("psycopg", reason="psycopg is not installed")

ALONE = "--db-replication", "none"
ODD = b"od\xffd"
"""A name that is no UTF-8."""
LARGE = 3_000_000


def copied(source: Path | DatabaseUrl, target: Path | DatabaseUrl) -> int:
    return main(["copy", text(source), text(target), *ALONE])


def text(place: Path | DatabaseUrl) -> str:
    return place.text if isinstance(place, DatabaseUrl) else str(place)


def something_of_everything(db: Path) -> None:
    """A journal of a server that was killed."""
    with served(db, "--line-bytes-max", "8MiB") as (server, client):
        for request in (
            b"subscribe --confirm mail user.new user.gone",
            b"set_queue --confirm mail --ttl=5000 --dead-letters=dead",
            b"subscribe --confirm dead none",
            b"delete_queue --confirm mail --when-unused=600",
            b"subscribe --confirm %b %b" % (ODD, ODD),
            b"rebind --confirm ghost user.new --add-mask user.*",
            b"subscribe --confirm deleted user.new",
            b"publish --confirm --once user.new known",
            b"publish --confirm --delay=5000 user.gone later",
            b"publish --confirm --ttl=5000 --meta=a=b %b \xff\xfe" % ODD,
            b"publish --confirm %b %b" % (ODD, b"x" * LARGE),
            b"publish --confirm %b %b" % (ODD, b"y" * LARGE),
            b"delete_queue --confirm deleted",
            b"schedule --confirm %b 0 3 * * * --jitter=5 publish user.new \xff" % ODD,
            b"schedule --confirm beat --every=7200 --missed=one --pause publish user.new x",
            b"open_batch --confirm %b publish user.new \xff" % ODD,
            b"publish --confirm --batch=%b %b in a batch" % (ODD, ODD),
            b"publish --confirm --keep-result=900 %b a job" % ODD,
        ):
            reply = client.ask(b"id " + request)
            assert reply == b"id ok ", reply[:200]
        assert client.ask(b"c consume --confirm mail --manual-ack --prefetch=1") == b"c ok "
        client.send(b"m publish user.gone dies\n")
        assert client.line() == b"c ok id event=user.new known"
        client.send(b"r reject --dead c id\n")
        assert client.line() == b"c ok m event=user.gone dies"
        assert b" error " in client.ask(b"bad\xff frob")
        for number in range(50):
            client.send(b"n%d publish --confirm user.new %d\n" % (number, number))
            assert client.line() == b"n%d ok " % number
        server.kill()  # While the consumer has its message.


def contents(db: Path) -> dict[str, Any]:
    """All that a database file has but its epoch."""
    with closing(sqlite3.connect(db)) as raw:
        rows = raw.execute("select id, body, text_bytes from segment order by id").fetchall()
        once = b"\n".join(ids for (ids,) in raw.execute("select ids from once order by number"))
        batches = raw.execute("select name, row from batch order by name").fetchall()
    segments = [
        (segment_id, body if size is None else body + text_of(texts_path(db), segment_id, size))
        for segment_id, body, size in rows
    ]
    with DatabaseFile.open(db, thorough=True) as file:
        assert file.damage == []
        return {
            "queues": file.queues,
            "bindings": file.bindings,
            "schedules": file.schedules,
            "messages": {queue.name: [*file.messages(queue.name)] for queue in file.queues},
            "errors": file.errors(),
            "audit": file.audit(1000),
            "segments": segments,
            "once": once,
            "batches": batches,
        }


def epoch(db: Path) -> str | None:
    with DatabaseFile.open(db) as file:
        return file.facts.epoch


def owner(postgres: Postgres, url: DatabaseUrl) -> tuple[str, int, int] | None:
    """Epoch of the journal, number of its segments, and of its queues."""
    schema = url.text.rpartition("schema=")[2]
    with postgres.connection() as connection:
        found = connection.execute("select to_regclass(%s)", [f"{schema}.owner"]).fetchone()
        if found == (None,):
            return None
        row = connection.execute(
            f"select journal, segments, (select count(*) from {schema}.queue) "
            f"from {schema}.owner".encode()
        ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


@pytest.mark.slow
def test_there_and_back_everything_is_as_it_was(
    postgres: Postgres,
    journal_url: DatabaseUrl,
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    something_of_everything(db)
    second = DatabaseUrl(journal_url.text + "_2")
    back = db.with_name("back.db")
    own = epoch(db)
    assert copied(db, journal_url) == 0
    assert "verified" in capsys.readouterr().out
    before = contents(db)
    assert before["segments"]
    assert before["schedules"].keys() == {b"beat", ODD}
    assert [name for name, _ in before["batches"]] == [ODD]
    assert [len(before["messages"][name]) for name in (b"mail", b"dead", ODD)] == [52, 1, 5]
    assert {queue.name: queue.unacked for queue in before["queues"]}[b"mail"] == 1
    # The epoch has moved on: programs that read the old file again notice.
    assert epoch(db) not in (own, None)
    assert owner(postgres, journal_url) == (own, len(before["segments"]), len(before["queues"]))
    assert copied(journal_url, second) == 0
    assert copied(second, back) == 0
    assert epoch(back) == own
    after = contents(back)
    for name, content in before.items():
        assert after[name] == content, name
    with served(back) as (server, client):
        # Known from before all of this: not stored again.
        assert client.ask(b"id publish --confirm --once user.new twice") == b"id ok "
        client.send(b"c consume dead\n")
        assert client.line().endswith(b" known")
        assert server.stop() == 0
    with DatabaseFile.open(back) as file:
        assert all(message.data != b"twice" for message in file.messages(b"mail"))


def filled(db: Path, count: int = 3) -> None:
    with client_here(db) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for number in range(count):
            assert client.ask(b"m%d publish --confirm e x" % number) == b"m%d ok " % number


def segments(client: LineClient) -> int:
    return int(client.stats("journal")["segments"])


@pytest.mark.parametrize(
    "kept", [pytest.param((7, 50), marks=pytest.mark.slow), ()], ids=["some", "none"]
)
def test_ids_of_segments_that_are_gone_stay_unused(
    journal_url: DatabaseUrl, db: Path, kept: tuple[int, ...]
) -> None:
    with client_here(db) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"k subscribe --confirm kept e2") == b"k ok "
        assert client.ask(b"c consume --confirm q --manual-ack") == b"c ok "
        for number in range(100):
            event = b"e2" if number in kept else b"e"
            client.send(b"m%d publish --confirm %b x\n" % (number, event))
            if event == b"e":
                assert {client.line(), client.line()} >= {b"m%d ok " % number}
                assert client.ask(b"a ack --confirm c m%d" % number) == b"a ok "
            else:
                assert client.line() == b"m%d ok " % number
        until(lambda: segments(client) < (100 if kept else 1))
    before = contents(db)
    with closing(sqlite3.connect(db)) as raw:
        ((end,),) = raw.execute("select next from tally where name = 'segment'")
    assert end > 100
    back = db.with_name("back.db")
    assert copied(db, journal_url) == 0
    assert copied(journal_url, back) == 0
    assert contents(back) == before
    with client_here(back) as client:
        assert client.ask(b"m publish --confirm e2 x") == b"m ok "
    assert contents(back)["segments"][-1][0] >= end


# ------------------------------------------------------------------------------- refused


@pytest.mark.anyio
async def test_a_copy_that_has_lost_a_schedule_is_refused(db: Path) -> None:
    first = Memory()
    first.metadata = Metadata(epoch="0123", schedules={b"s": '{"publish":"e x","every_us":9}'})
    settings = Settings(db=db)
    source, target = await first.open(settings, print), await Memory().open(settings, print)
    commit = target.commit

    async def forgetful(segments: Any, entry: Any = None, **more: Any) -> None:
        await commit(segments, entry and replace(entry, schedules={}), **more)

    target.commit = forgetful  # type: ignore[method-assign, assignment]
    with pytest.raises(JournalFailed, match="has not what was written"):
        await copying.copy(source, target, lambda _: None)
    assert first.metadata.epoch == "0123"


def test_a_journal_that_is_served_is_refused(
    journal_url: DatabaseUrl, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = db.with_name("other.db")
    filled(other)
    with ServerProcess(db):
        assert copied(db, journal_url) == DatabaseLocked.exit_code
        assert copied(other, db) == DatabaseLocked.exit_code
        assert "is in use by another server" in capsys.readouterr().err
    with ServerProcess(journal_url.text, *ALONE) as server:
        assert copied(journal_url, db) == DatabaseLocked.exit_code
        assert copied(other, journal_url) == DatabaseLocked.exit_code
        assert "is served by another mqks" in capsys.readouterr().err
        assert server.stop() == 0


def test_only_a_place_without_a_journal_is_filled(
    postgres: Postgres, journal_url: DatabaseUrl, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, third = db.with_name("other.db"), db.with_name("third.db")
    third_url = DatabaseUrl(f"{journal_url.text}_3")
    assert copied(db, journal_url) == InspectionFailed.exit_code
    filled(db)
    assert copied(journal_url, other) == InspectionFailed.exit_code
    assert not other.exists()
    assert owner(postgres, journal_url) is None
    # A server that nobody has used has left an empty one there.
    with ServerProcess(journal_url.text, *ALONE) as server:
        server.stop()
    assert copied(db, journal_url) == 0
    assert copied(db, journal_url) == CannotWrite.exit_code
    filled(other, 0)
    assert copied(db, other) == CannotWrite.exit_code
    assert contents(other)["segments"] == []
    for place in (third, third_url):  # With nothing but a schedule.
        with client_here(place) as client:
            assert client.ask(b"s schedule --confirm beat --every=9 publish e x") == b"s ok "
        assert copied(db, place) == CannotWrite.exit_code
    assert capsys.readouterr().err.count("exists already") >= 1
    link = db.with_name("link.db")
    link.symlink_to(db)
    for place in (db, link, journal_url):
        assert copied(db if place == link else place, place) == 64
        assert "FROM and TO are the same" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_journal_is_refused(
    postgres: Postgres, journal_url: DatabaseUrl, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(db)
    other, third = db.with_name("other.db"), db.with_name("third.db")
    assert copied(db, journal_url) == 0
    for table, change in (("segment", "head = '\\x00'"), ("segment", "text = '\\x00'")):
        schema = journal_url.text.rpartition("schema=")[2]
        with postgres.connection() as operator:
            operator.execute(f"update {schema}.{table} set {change} where id = 2".encode())
        assert copied(journal_url, other) == JournalDamaged.exit_code
        told = capsys.readouterr().err
        assert "is damaged, so it is not copied: segment 2" in told
        assert "mqks verify" in told
        assert "--salvage" in told
    with closing(sqlite3.connect(db)) as raw:
        raw.execute("update segment set crc = 1 where id = 2")
        raw.commit()
    own = epoch(db)
    assert copied(db, third) == JournalDamaged.exit_code
    assert "segment 2" in capsys.readouterr().err
    assert not other.exists()
    assert not third.exists()
    assert epoch(db) == own


# ------------------------------------------------------------------------------- killed


STEPS = 16
"""Of a copy of these journals."""


def kill_at(call: int, source: str, target: str) -> None:
    """A copy, at its N-th step; it ends before if it has no more."""
    module = sys.executable, "-m", "tests.kit.killed_copy"
    code, _, told = forks.run([*module, str(call), source, target, *ALONE])
    assert code == (-signal.SIGKILL if call <= STEPS else 0), told


EVERY = [*range(1, STEPS + 2)]
"""One more: it ends before that."""
some_or_all_steps = pytest.mark.parametrize(
    "calls", [random.sample(EVERY, 2), *slow((EVERY,))], ids=["some", "all"]
)


@some_or_all_steps
def test_a_copy_that_is_killed_is_there_as_a_whole_or_not_at_all(
    postgres: Postgres, db: Path, journal_url: DatabaseUrl, calls: list[int]
) -> None:
    filled(db, 5)
    whole = contents(db)
    for call in calls:
        url = DatabaseUrl(f"{journal_url.text}_{call}")
        own = epoch(db)
        kill_at(call, text(db), url.text)
        assert contents(db)["segments"] == whole["segments"]
        found = owner(postgres, url)
        if found is not None and found[0] == own:
            assert found[1:] == (len(whole["segments"]), 1)
            assert epoch(db) != own
        elif found is not None and found[1:] != (0, 0):
            assert call <= STEPS
            assert found[0] == ""
            for flag in ("--no-salvage", "--salvage"):
                code, log = refusal(url.text, *ALONE, flag)
                assert code == JournalDamaged.exit_code
                assert "has a copy that was not finished" in log
            assert main(["copy", text(db), url.text, *ALONE]) == JournalDamaged.exit_code


@some_or_all_steps
def test_a_file_that_is_not_complete_has_no_name(
    db: Path, tmp_path: Path, calls: list[int]
) -> None:
    filled(db, 5)
    whole = contents(db)
    for call in calls:
        target = tmp_path / f"copy{call}.db"
        own = epoch(db)
        kill_at(call, text(db), text(target))
        assert contents(db) == whole
        if target.exists():
            assert (epoch(target), contents(target)) == (own, whole)
            assert epoch(db) != own
        else:
            assert call <= STEPS
            assert main(["copy", text(db), text(target)]) == 0
            assert contents(target) == whole
            assert [each.name for each in tmp_path.glob("*.partial*")] == []


@pytest.mark.anyio
async def test_a_file_that_needs_its_wal_gets_no_name(db: Path) -> None:
    async def fill() -> None:
        async with new_store(Settings(db=db), print) as target:
            await target.load()
            # SQLite leaves the WAL to the last one who closes the file.
            other = sqlite3.connect(f"{db}.partial")
            others.append(other)
            other.execute("select * from segment").fetchall()

    others: list[sqlite3.Connection] = []
    with pytest.raises(CannotWrite, match="its WAL could not be copied"):
        await fill()
    others.pop().close()
    assert not db.exists()


# ------------------------------------------------------------------------------- new epochs


@pytest.mark.parametrize("kind", ["file", "postgresql"])
def test_a_reader_proves_that_a_restored_journal_needs_a_new_epoch(
    kind: str, db: Path, request: pytest.FixtureRequest
) -> None:
    place: Path | DatabaseUrl = db
    if kind == "postgresql":
        place = request.getfixturevalue("journal_url")
    new_epoch = ["new-epoch", "--db", text(place), *ALONE]
    with served(text(place), *ALONE) as (server, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"m1 publish --confirm e x") == b"m1 ok "
        assert server.stop() == 0
    restore = saved(place, request)
    with served(text(place), *ALONE) as (server, client):
        assert client.ask(b"m2 publish --confirm e x") == b"m2 ok "
        own = position(client)
        assert own[b"next"] == b"3"
        read = b"r read q --from=3 --epoch=" + own[b"epoch"]
        assert client.ask(read).startswith(b"r ok --read ")
        assert main(new_epoch) == DatabaseLocked.exit_code
        assert server.stop() == 0
    restore()
    with served(text(place), *ALONE) as (server, client):
        assert position(client) == own | {b"next": b"2"}
        assert client.ask(read).startswith(b"r error ")
        until(lambda: "event=epoch_is_stale" in server.log)
        until(lambda: "was read up to 3 under the same epoch" in server.log)
        until(lambda: "mqks new-epoch" in server.log)
        assert b'"reverts_seen": 1' in client.ask(b"s stats")
        # What it reads without its position, or from a place that exists, is no proof.
        for innocent in (b"r read q --from=3", read.replace(b"from=3", b"from=2")):
            assert client.ask(innocent).startswith(b"r ok --read ")
        assert b'"reverts_seen": 1' in client.ask(b"s stats")
        assert server.stop() == 0
    assert main(new_epoch) == 0
    with served(text(place), *ALONE) as (server, client):
        now = position(client)
        assert now.pop(b"epoch") != own.pop(b"epoch")
        assert now == own | {b"next": b"2"}
        assert client.ask(read).startswith(b"r error ")
        until(lambda: "was created again: its epoch is not" in server.log)
        assert b'"reverts_seen": 0' in client.ask(b"s stats")
        assert client.ask(b"c consume q") == b"c ok m1 event=e x"


def position(client: LineClient) -> dict[bytes, bytes]:
    words = [word.partition(b"=") for word in client.ask(b"r range q").split(b" ")[2:]]
    return {name: value for name, _, value in words}


def saved(place: Path | DatabaseUrl, request: pytest.FixtureRequest) -> Callable[[], object]:
    """Puts back, when it is called, what a stopped journal has now."""
    if isinstance(place, Path):
        copy = place.with_name("saved.db")
        shutil.copy(place, copy)
        return lambda: shutil.copy(copy, place)
    postgres: Postgres = request.getfixturevalue("postgres")
    schema, tables = place.text.rpartition("schema=")[2], ("owner", "segment", "queue", "binding")
    with postgres.connection() as operator:
        for table in tables:
            keep = f"create table {schema}.saved_{table} as table {schema}.{table}"
            operator.execute(keep.encode())

    def restore() -> None:
        with postgres.connection() as operator:
            for table in tables:
                operator.execute(f"truncate {schema}.{table}".encode())
                back = f"insert into {schema}.{table} table {schema}.saved_{table}"
                operator.execute(back.encode())

    return restore
