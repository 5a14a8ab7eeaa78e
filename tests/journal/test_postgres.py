"""The journal in PostgreSQL: who owns it, and what a confirm means when servers and connections
fail. Real servers, among them a primary with a synchronous standby.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqks import __version__, blocking
from mqks.broker.spine.log.pending import Entry
from mqks.commands import main
from mqks.errors import (
    ClaimLost,
    DatabaseLocked,
    DatabaseUnreachable,
    JournalFailed,
    JournalReverted,
)
from mqks.journal.segment import NewSegment
from mqks.server import silence
from mqks.settings import DatabaseUrl, Settings
from mqks.testing import Broker
from tests.kit.fixtures import client_here
from tests.kit.line_client import LineClient
from tests.kit.postgres import Postgres, taken_over
from tests.kit.proxy import CHUNK_BYTES, Peer
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import WAIT_S, until
from tests.lives.test_standby import line_of
from tests.lives.test_standby import standby as waiting_broker
from tests.server.test_metrics import Web

pytest.importorskip("psycopg", reason="psycopg is not installed")

from mqks.journal.postgres import claim, migrations, store
from mqks.journal.postgres.store import PostgresStore

ALONE = "--db-replication", "none"
BACKEND = "application_name = 'mqks' and pid <> pg_backend_pid()"
END = f"select pg_{{}}_backend(pid) from pg_stat_activity where {BACKEND}"


def server_of(url: DatabaseUrl, *flags: str, module: str = "mqks") -> ServerProcess:
    return ServerProcess(url.text, *ALONE, *flags, module=module)


@contextmanager
def served(url: DatabaseUrl) -> Iterator[tuple[ServerProcess, LineClient]]:
    """A server, and a client for whom a queue `q` gets the event `e`."""
    with server_of(url) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        yield server, client


def owner(postgres: Postgres, url: DatabaseUrl) -> tuple[Any, ...]:
    """Epoch, holder, last segment, beat."""
    schema = url.text.rpartition("schema=")[2]
    with postgres.connection() as connection:
        row = connection.execute(f"select epoch, holder, last, beat from {schema}.owner".encode())
        found = row.fetchone()
    assert found is not None
    return found


def consumed(client: LineClient, queue: bytes, last: bytes) -> list[tuple[bytes, bytes]]:
    """Id and data of all messages, up to the one with the id `last`."""
    client.send(b"c consume %b\n" % queue)
    found: list[tuple[bytes, bytes]] = []
    while not found or found[-1][0] != last:
        _, _, message, _, data = client.line().split(b" ", 4)
        found.append((message, data))
    return found


# ------------------------------------------------------------------------------- the claim


def test_a_second_broker_is_refused_while_the_first_one_lives(
    postgres: Postgres, journal_url: DatabaseUrl
) -> None:
    with server_of(journal_url) as first:
        code, log = refusal(journal_url.text, *ALONE, "--no-standby")
        assert "event=standby" not in log
        assert code == DatabaseLocked.exit_code
        assert f"is served by another mqks ({os.uname().nodename} pid {first.pid})" in log
        assert first.stop() == 0
    assert owner(postgres, journal_url)[1] is None
    # It was given up: so nobody waits for its beat.
    with server_of(journal_url) as second:
        assert owner(postgres, journal_url)[0] == 2
        assert second.stop() == 0


async def loaded(url: DatabaseUrl) -> PostgresStore:
    store = await PostgresStore.open(Settings(db=url, db_replication="none"), print)
    await store.claim(wait=False)
    async for _ in store.segments(await store.load()):
        pass
    return store


@pytest.mark.anyio
async def test_an_owner_beats_while_it_loads(
    postgres: Postgres, journal_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BEAT_S", 0.01)
    loading = await loaded(journal_url)
    beat = owner(postgres, journal_url)[3]
    while owner(postgres, journal_url)[3] < beat + 3:
        await asyncio.sleep(0.01)
    await loading.begin()
    beat = owner(postgres, journal_url)[3]
    await asyncio.sleep(0.05)
    assert owner(postgres, journal_url)[3] == beat, "there are no two who commit"
    await loading.close()


WRITES: dict[str, Callable[[PostgresStore], Awaitable[object]]] = {
    "a segment": lambda store: store.commit([NewSegment(1, b"head", [b"text"], 8)]),
    "anything else": lambda store: store.commit([], Entry(once=[b"m"])),
    "a beat": lambda store: store._claim.beat(),
    "an epoch": lambda store: store.become("another"),
    "a gap": lambda store: store.skip_to(9),
}


@pytest.mark.anyio
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_an_owner_that_was_taken_over_writes_nothing(
    postgres: Postgres,
    journal_url: DatabaseUrl,
    write: Callable[[PostgresStore], Awaitable[object]],
) -> None:
    old = await loaded(journal_url)
    await old.begin()
    taken_over(journal_url)
    before = owner(postgres, journal_url)
    with pytest.raises(ClaimLost):
        await write(old)
    await old.close()
    assert owner(postgres, journal_url) == before


# ------------------------------------------------------------------------------- connections


@pytest.mark.slow
def test_connections_that_are_ended_lose_and_double_nothing(
    postgres: Postgres, journal_url: DatabaseUrl
) -> None:
    with served(journal_url) as (server, client):
        with postgres.connection() as operator:
            for number in range(100):
                client.send(b"m%d publish --confirm e x\n" % number)
                if number % 5 == 0:
                    operator.execute(END.format("terminate").encode())
                if number % 7 == 0:
                    operator.execute(END.format("cancel").encode())
                assert client.line() == b"m%d ok " % number
        assert client.ask(b"last publish --confirm e x") == b"last ok "
        assert server.stop() == 0
    # All of them are read from the database now, on a connection that has been ended, too.
    with served(journal_url) as (server, client):
        with postgres.connection() as operator:
            operator.execute(END.format("terminate").encode())
        found = consumed(client, b"q", b"last")
        assert [message for message, _ in found[:-1]] == [b"m%d" % n for n in range(100)]
        assert server.stop() == 0


class Swallowing(Peer):
    """Between a broker and PostgreSQL: what the server says is lost on a connection from where its
    client has said `MARK`."""

    MARK = b"swallow"

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.swallowed = 0
        self._directory = directory

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(
            f"{self._directory}/.s.PGSQL.5432"
        )
        back = asyncio.create_task(self._pass(from_server, writer))
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                if self.MARK in chunk:
                    self.swallowed += 1
                    back.cancel()
                to_server.write(chunk)
        finally:
            back.cancel()
            to_server.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
        writer.transport.abort()


def test_a_commit_whose_reply_was_swallowed_is_confirmed_and_there_once(
    postgres: Postgres, journal_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "ASK_S", 0.2)
    schema = journal_url.text.rpartition("schema=")[2]
    with Swallowing(postgres.environment["PGHOST"]) as proxy:
        url = postgres.url(schema, host="127.0.0.1", port=str(proxy.port), sslmode="disable")
        with client_here(DatabaseUrl(url)) as client:
            assert client.ask(b"s subscribe --confirm q e") == b"s ok "
            assert client.ask(b"m publish --confirm e swallow") == b"m ok "
            assert proxy.swallowed == 1
            assert client.ask(b"last publish --confirm e x") == b"last ok "
            assert [each for each, _ in consumed(client, b"q", b"last")] == [b"m", b"last"]


@pytest.mark.slow
def test_an_open_transaction_does_not_slow_commits_down(
    postgres: Postgres, journal_url: DatabaseUrl
) -> None:
    """No version of the owner's row can be removed meanwhile: a commit reads one page of them."""
    table = f"{journal_url.text.rpartition('schema=')[2]}.owner"
    query = f"""
        select n_tup_upd, heap_blks_read + heap_blks_hit, pg_relation_size(relid) / 8192
        from pg_stat_user_tables join pg_statio_user_tables using (relid)
        where relid = '{table}'::regclass"""
    with (
        served(journal_url) as (_, client),
        postgres.connection() as operator,
        postgres.connection() as reader,
    ):

        def after(commits: int) -> tuple[int, int, int]:
            """What the server tells, once a second, of at least so many more."""
            written, *_ = figures()
            for _ in range(commits):
                assert client.ask(b"m publish --confirm e x") == b"m ok "
            until(lambda: figures()[0] >= written + commits)
            return figures()

        def figures() -> tuple[int, int, int]:
            [row] = operator.execute(query.encode()).fetchall()
            return row[0], row[1], row[2]

        reader.execute(f"analyze {table}".encode())
        reader.execute("begin isolation level repeatable read")
        reader.execute(f"select from {table}".encode())
        written, read, _ = after(1500)
        now_written, now_read, pages = after(150)
        assert pages > 15, "no version of the row was kept"
        assert (now_read - read) / (now_written - written) < pages / 2


# ------------------------------------------------------------------------------- a standby


@pytest.fixture
def primary() -> Iterator[Postgres]:
    with Postgres(fsync="on") as server:
        yield server


@pytest.fixture
def standby(primary: Postgres) -> Iterator[Postgres]:
    """It confirms each commit of the primary."""
    with Postgres(primary=primary, name="s1", fsync="on") as server:
        primary.change(synchronous_standby_names="s1")
        yield server


def waits(server: Postgres, statement: str = "", long_s: float = 0.0) -> list[int]:
    """Processes of backends that wait for a standby, with this in their statement, for so long."""
    found = f"{BACKEND} and wait_event = 'SyncRep' and position(%s in query) > 0"
    age = "clock_timestamp() - query_start >= %s * interval '1 second'"
    with server.connection() as operator:
        rows = operator.execute(
            f"select pid from pg_stat_activity where {found} and {age}".encode(),
            [statement, long_s],
        )
        return [pid for (pid,) in rows]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No beats between the commits."""
    monkeypatch.setattr(claim, "BEAT_S", 1e9)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_commit_that_no_standby_has_is_not_confirmed(
    primary: Postgres, standby: Postgres, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for the standby is ended: the message is visible then, and not replicated."""
    url = DatabaseUrl(primary.url())
    with Broker(url) as broker, LineClient(("127.0.0.1", broker.port), 0.3) as client:
        client.send(b"s subscribe --confirm q e\n")
        assert until(lambda: line_of(client)) == b"s ok "
        standby.kill()
        client.send(b"m publish --confirm e x\n")
        for _ in range(3):
            [pid] = until(lambda: waits(primary))
            with primary.connection() as operator:
                operator.execute(f"select {end}({pid})".encode())
            until(lambda: owner(primary, url)[2] == 1)
            assert line_of(client) is None
        until(lambda: "journal_waits" in caplog.messages)
        standby.start()
        assert until(lambda: line_of(client)) == b"m ok "
        client.send(b"last publish --confirm e x\n")
        assert until(lambda: line_of(client)) == b"last ok "
    with Broker(url) as broker, LineClient(("127.0.0.1", broker.port)) as client:
        assert [each for each, _ in consumed(client, b"q", b"last")] == [b"m", b"last"]


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_a_commit_that_waits_until_no_standby_is_named_is_not_confirmed(
    primary: Postgres, standby: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL reports success then."""
    with (
        Broker(DatabaseUrl(primary.url())) as broker,
        LineClient(("127.0.0.1", broker.port), 0.3) as client,
    ):
        client.send(b"s subscribe --confirm q e\n")
        assert until(lambda: line_of(client)) == b"s ok "
        standby.kill()
        client.send(b"m publish --confirm e x\n")
        until(lambda: waits(primary, long_s=1.0))
        primary.change(synchronous_standby_names="")
        told = until(lambda: line_of(client) or "journal_waits" in caplog.messages)
        assert (told, line_of(client)) == (True, None)
        primary.change(synchronous_standby_names="s1")
        standby.start()
        assert until(lambda: line_of(client)) == b"m ok "


@pytest.mark.slow
def test_a_server_that_must_end_does_not_wait_for_a_standby(
    primary: Postgres, standby: Postgres
) -> None:
    with ServerProcess(primary.url(), "--drain-timeout-s", "0.5", "--http-port", "0") as server:
        web = Web(server)
        with LineClient(server.address) as client:
            standby.kill()
            client.send(b"m subscribe --confirm q e\n")
            until(lambda: waits(primary))
            # After some seconds there are two reasons.
            until(lambda: f"; {silence.WHY}\n" in web.ask("/readyz").text)
            assert server.stop() == JournalFailed.exit_code
            with pytest.raises(EOFError):
                client.line()
        assert "the server ended before a commit was durable" in server.log


def both(primary: Postgres, standby: Postgres) -> DatabaseUrl:
    hosts = f"{primary.environment['PGHOST']},{standby.environment['PGHOST']}"
    return DatabaseUrl(primary.url(host=hosts))


@pytest.mark.slow
def test_a_fail_over_of_the_database_keeps_connections_and_messages(
    primary: Postgres, standby: Postgres
) -> None:
    url = both(primary, standby)
    with served(url) as (server, client):
        for number in range(50):
            assert client.ask(b"m%d publish --confirm e x" % number) == b"m%d ok " % number
        client.send(b"n publish --confirm e x\n")
        primary.kill()
        standby.promote()
        assert client.line() == b"n ok "
        assert client.ask(b"last publish --confirm e x") == b"last ok "
        found = [each for each, _ in consumed(client, b"q", b"last")]
        assert found == [*(b"m%d" % n for n in range(50)), b"n", b"last"]
        assert server.stop() == 0


@pytest.mark.slow
def test_a_standby_that_lacks_confirmed_messages_is_noticed(
    primary: Postgres, standby: Postgres
) -> None:
    """By the broker that confirmed them, and by one that was waiting. One that starts afterwards
    continues without them."""
    url = both(primary, standby)
    with served(url) as (server, client), waiting_broker(url) as waiting:
        standby.kill()
        primary.change(synchronous_standby_names="")
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        until_a_standby_looks(primary, owner(primary, url)[3])
        primary.kill()
        standby.start()
        standby.promote()
        before = owner(standby, DatabaseUrl(standby.url()))
        client.send(b"n publish --confirm e x\n")
        with pytest.raises(EOFError):
            client.line()
        assert server.wait() == JournalReverted.exit_code, server.log
        assert waiting.wait() == JournalReverted.exit_code, waiting.log
        for each in server, waiting:
            assert "has gone back to an earlier state" in each.log
        assert owner(standby, DatabaseUrl(standby.url())) == before
    with served(url) as (server, client):
        assert client.ask(b"n publish --confirm e x") == b"n ok "
        assert [message for message, _ in consumed(client, b"q", b"n")] == [b"n"]


@pytest.mark.slow
def test_a_claim_that_was_visible_and_never_durable_may_be_lost(
    primary: Postgres, standby: Postgres
) -> None:
    """A broker that has seen it takes over what is left: all that was confirmed."""
    url = both(primary, standby)
    with served(url) as (server, client):
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        with waiting_broker(url) as one, waiting_broker(url) as two:
            server.kill()
            standby.kill()
            until(lambda: waits(primary, "update owner set epoch"))
            primary.kill()
            primary.start()
            claimed = until(lambda: owner(primary, url)[0] == 2 and owner(primary, url))
            claimant, other = (one, two) if f"pid {one.pid} " in claimed[1] else (two, one)
            claimant.kill()
            seen = f"pid {claimant.pid} "
            until(lambda: seen in other.log)
            primary.kill()
            standby.start()
            standby.promote()
            with LineClient(other.address) as taken_over:
                assert [each for each, _ in consumed(taken_over, b"q", b"m")] == [b"m"]
            assert other.stop() == 0


def until_a_standby_looks(server: Postgres, beat: int) -> None:
    """When this beat is known to be durable."""
    with server.connection() as operator:
        durable = "select now() from mqks.owner where durable >= %s"
        since = until(lambda: operator.execute(durable, [beat]).fetchone())
        assert since is not None
        looked = (
            f"select 1 from pg_stat_activity where {BACKEND} and query = %s and query_start > %s"
        )
        until(lambda: operator.execute(looked.encode(), [claim.OWNER, *since]).fetchone())


@pytest.mark.slow
def test_a_start_reads_no_primary_that_lacks_its_claim(
    primary: Postgres, standby: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old primary comes back for a moment, as one, and is the first of the hosts. The messages
    are read where the journal was claimed."""
    url = both(primary, standby)
    with served(url) as (server, client):
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        primary.kill()
        standby.promote()
        assert client.ask(b"n publish --confirm e x") == b"n ok "
        assert server.stop() == 0
    take = claim.Claim.take

    async def taken(self: claim.Claim, *, wait: bool) -> None:
        await take(self, wait=wait)
        await asyncio.to_thread(primary.start)

    monkeypatch.setattr(claim.Claim, "take", taken)
    with Broker(url, db_replication="none") as broker, blocking.connect(broker.url) as reader:
        assert [each.id for each in reader.peek("q")] == ["m", "n"]
    primary.kill()


@pytest.mark.slow
def test_a_standby_server_is_refused(primary: Postgres, standby: Postgres) -> None:
    code, log = refusal(standby.url(), *ALONE)
    assert (code, "this server is a standby" in log) == (78, True)


# ------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("synchronous_commit=off", "set synchronous_commit = on"),
        ("synchronous_commit=local", "set synchronous_commit = on"),
        ("statement_timeout=5000", "set statement_timeout = 0"),
        ("transaction_timeout=5000", "set transaction_timeout = 0"),
    ],
)
def test_settings_of_a_session_that_endanger_a_confirm_are_refused(
    postgres: Postgres, option: str, told: str
) -> None:
    code, log = refusal(postgres.url("refused", options=f"-c {option}"), *ALONE)
    assert (code, told in log) == (78, True)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("fsync", "off", "set fsync = on"),
        ("full_page_writes", "off", "set full_page_writes = on"),
        ("synchronous_standby_names", "", "set db_replication to provider"),
        ("synchronous_standby_names", "*", "any standby confirms"),
        ("synchronous_standby_names", "ANY 1 (*)", "any standby confirms"),
    ],
)
def test_settings_of_a_server_that_endanger_a_confirm_are_refused(
    postgres: Postgres, name: str, value: str, told: str
) -> None:
    flags = () if name.startswith("sync") else ALONE
    postgres.change(**{name: value})
    try:
        code, log = refusal(postgres.url("refused"), *flags)
    finally:
        postgres.change(fsync="on", full_page_writes="on", synchronous_standby_names="")
    assert (code, told in log) == (78, True)


def test_confirms_are_held_while_a_setting_endangers_them(
    postgres: Postgres, journal_url: DatabaseUrl
) -> None:
    with (
        server_of(journal_url, module="tests.kit.watchful") as server,
        LineClient(server.address, 0.3) as client,
    ):
        try:
            postgres.change(synchronous_commit="off")
            until(lambda: "event=journal_waits" in server.log)
            assert "set synchronous_commit = on" in server.log
            client.send(b"m publish --confirm e x\n")
            with pytest.raises(TimeoutError):
                client.line()
        finally:
            postgres.change(synchronous_commit="on")
        assert until(lambda: line_of(client)) == b"m ok "
        until(lambda: "event=journal_goes_on" in server.log)


# ------------------------------------------------------------------------------- the journal


def test_a_database_that_fails_while_a_server_starts_is_no_mistake_of_its_settings(
    postgres: Postgres, journal_url: DatabaseUrl
) -> None:
    """Its service manager starts it again."""
    with postgres.connection() as operator:
        operator.execute("select pg_advisory_lock(%s)", [migrations.LOCK])
        server = server_of(journal_url)
        waits = f"select pid from pg_stat_activity where {BACKEND} and wait_event = 'advisory'"
        [(pid,)] = until(lambda: operator.execute(waits.encode()).fetchall())
        operator.execute("select pg_terminate_backend(%s)", [pid])
        assert server.wait() == DatabaseUnreachable.exit_code, server.log


def test_a_newer_schema_is_refused(postgres: Postgres, journal_url: DatabaseUrl) -> None:
    with server_of(journal_url) as server:
        assert server.stop() == 0
    schema = journal_url.text.rpartition("schema=")[2]
    with postgres.connection() as operator:
        operator.execute(f"update {schema}.owner set version = 99".encode())
    server = server_of(journal_url)
    assert (server.wait(), "use a newer mqks" in server.log) == (65, True)


def test_an_older_schema_is_upgraded_and_its_messages_are_kept(
    postgres: Postgres, journal_url: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = journal_url.text.rpartition("schema=")[2]
    asked = f"""
        select owner.version, segment.reloptions, texts.reloptions
        from {schema}.owner, pg_class as segment join pg_class as texts
            on texts.oid = segment.reltoastrelid
        where segment.oid = '{schema}.segment'::regclass"""
    options = ["autovacuum_vacuum_cost_delay=0"]
    known = migrations.migrations("postgres")
    with postgres.connection() as operator:
        # This version needs all tables, so an early schema has what was created later.
        later = "\n".join(sql for _, sql in known[2:])
        early = [(1, f"{known[0][1]}\n{later}")]
        monkeypatch.setattr(migrations, "migrations", lambda _: early)
        with client_here(journal_url) as client:
            client.send(b"s subscribe --confirm q e\nm publish --confirm e x\n")
            assert [client.line(), client.line()] == [b"s ok ", b"m ok "]
        assert operator.execute(asked.encode()).fetchone() == (1, None, None)
        monkeypatch.undo()
        operator.execute(f"drop table {schema}.schedule, {schema}.audit".encode())
        operator.execute(f"drop table {schema}.result, {schema}.batch".encode())
        with served(journal_url) as (_, client):
            assert consumed(client, b"q", b"m") == [(b"m", b"x")]
        assert operator.execute(asked.encode()).fetchone() == (known[-1][0], options, options)


def test_the_queries_of_the_documents_show_what_they_say(
    postgres: Postgres, journal_url: DatabaseUrl
) -> None:
    text = (Path(__file__).parents[2] / "docs/postgresql.md").read_text()
    queries = re.findall(r"(?m)^    (select [^;]*);$", text)
    assert len(queries) == 3
    schema = journal_url.text.rpartition("schema=")[2]
    with served(journal_url), postgres.connection() as operator, postgres.connection() as other:
        tables = operator.execute(queries[0].replace("mqks", schema).encode()).fetchall()
        names = {name for name, *_ in tables}
        assert {"segment", "owner", "once"} < names
        assert any(name.startswith("pg_toast") for name in names)
        other.execute("begin isolation level repeatable read")
        other.execute("select 1")
        who = operator.execute(queries[1].encode()).fetchall()
        assert str(other.info.backend_pid) in {each for each, *_ in who}
        operator.execute("select pg_create_physical_replication_slot('s', true)")
        try:
            slots = operator.execute(queries[2].encode()).fetchall()
        finally:
            operator.execute("select pg_drop_replication_slot('s')")
        assert [(name, active) for name, active, _ in slots] == [("s", False)]


# ------------------------------------------------------------------------------- the URL


def test_a_password_is_never_shown() -> None:
    for text in (
        "postgresql://user:secret@host:5432/db?schema=x",
        "postgres://user:sec:secret@a,b/db",
        "postgresql:/user:secret@host/db",
        "postgresql:///db?user=u&password=secret&schema=x",
    ):
        assert "secret" not in str(DatabaseUrl(text))
    assert str(DatabaseUrl("postgresql://u:p@h:1/d")) == "postgresql://u:***@h:1/d"
    assert str(DatabaseUrl("postgresql://h:1/d?schema=x")) == "postgresql://h:1/d?schema=x"


@pytest.mark.parametrize(
    ("url", "expected", "told"),
    [
        ("postgresql://h/d?schema=a-b", 78, "is not a schema name"),
        ("postgresql://h/d?no=1", 78, "can't be used"),
        ("postgresql:///d?host=/nowhere", 69, "can't connect"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, expected: int, told: str) -> None:
    code, log = refusal(url, "--log-format", "json")
    assert (code, told in log) == (expected, True)
    assert f'"event": "starting", "version": "{__version__}", "db": "{url}"' in log


@pytest.mark.parametrize("command", [["backup", "to.db"], ["compact"]], ids=" ".join)
def test_commands_for_files_refuse_a_url(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in (["--db", "postgresql://u:secret@h/d"], []):
        if not flags:
            monkeypatch.setenv("MQKS_DB", "postgresql://u:secret@h/d")
        assert main([*command, *flags]) == 78
        told = capsys.readouterr().err
        assert "use PostgreSQL's own tools, such as pg_basebackup" in told
        assert "secret" not in told


def test_without_the_extra_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['psycopg'] = None")
    found = subprocess.run(
        [sys.executable, "-m", "mqks", "serve", "--db", "postgresql://h/d"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert found.returncode == 78
    assert "pip install 'mqks[postgres]'" in found.stderr
