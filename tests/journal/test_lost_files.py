"""A database, its WAL or its lock file that others delete, move or replace while it is served; and
a second server that comes by another name.

The one rule: nothing is confirmed that the next start would not find.
"""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mqks.commands import main
from mqks.journal.sqlite.database_file import DatabaseFile, wal_path
from mqks.journal.sqlite.lock import lock_path, server_of
from tests.kit.fixtures import watchful
from tests.kit.line_client import LineClient
from tests.kit.server_process import refusal
from tests.kit.waiting import until
from tests.server.test_metrics import Web

EXIT_IN_USE = 69
GONE = "level=error event=database_gone"


def is_confirmed(client: LineClient, request: bytes) -> bool:
    reply = client.ask(b"r " + request)
    assert reply == b"r ok " or reply.startswith(b"r error "), reply
    return reply == b"r ok "


def publishes(client: LineClient, message: bytes) -> bool:
    return is_confirmed(client, b"publish --confirm e " + message)


def subscribed(client: LineClient, *messages: bytes) -> None:
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    for message in messages:
        assert publishes(client, message)


def found(db: Path) -> list[bytes]:
    with DatabaseFile.open(db) as file:
        assert not file.damage
        return [message.data for message in file.messages(b"q")]


def files(db: Path) -> list[Path]:
    return sorted(db.parent.glob(db.name + "*"))


def delete(db: Path) -> None:
    for path in files(db):
        path.unlink()


def move(db: Path) -> None:
    (db.parent / "away").mkdir()
    for path in files(db):
        path.rename(path.parent / "away" / path.name)


def move_directory(db: Path) -> None:
    db.parent.rename(db.parent.with_name("away"))


def replace(db: Path) -> None:
    other = db.with_name("other")
    other.write_bytes(b"another file")
    other.replace(db)


def delete_wal(db: Path) -> None:
    wal_path(db).unlink()


@pytest.mark.parametrize("lose", [delete, move, move_directory, replace, delete_wal])
def test_nothing_is_confirmed_without_the_files(
    tmp_path: Path, lose: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    db = tmp_path / "here" / "mqks.db"
    db.parent.mkdir()
    with watchful(db, "--http-port", "0") as (server, client), LineClient(server.address) as worker:
        subscribed(client, b"kept")
        assert worker.ask(b"c consume --confirm work job --manual-ack") == b"c ok "
        assert is_confirmed(client, b"publish --confirm job one")
        assert worker.line() == b"c ok r event=job one"
        assert client.ask(b"d subscribe --confirm drained e3") == b"d ok "
        lose(db)
        until(lambda: GONE in server.log)

        assert not publishes(client, b"lost")
        assert not is_confirmed(client, b"publish e lost"), "nor taken without a confirm"
        assert not is_confirmed(client, b"subscribe --confirm q e2")
        worker.send(b"a ack --confirm c r\n")
        assert worker.line().startswith(b"a error ")
        # What needs no disk goes on.
        assert client.ask(b"p ping") == b"p ok "
        until(lambda: is_confirmed(worker, b"consume --confirm drained"))
        journal = client.stats("journal")
        assert journal["unwritable"]
        assert journal["unwritable"] in client.ask(b"s stats errors").decode()
        web = Web(server)
        assert (web.ask("/readyz").status, web.ask("/healthz").status) == (503, 200)
        assert journal["unwritable"] == web.ask("/readyz").text.strip()
        assert web.scrape()["mqks_ready", ""] == 0

        assert main(["export", "--messages", "--url", server.url]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert "kept" in [row.get("data") for row in rows]
        assert server.log.count(GONE) == 1
        assert server.stop() == 0
    if lose is delete_wal:
        assert found(db) == [b"kept"], "it was folded into the database"


@pytest.mark.parametrize("names", ["all", "database"])
def test_what_is_moved_back_is_written_again(db: Path, names: str) -> None:
    away = db.with_name("away")
    away.mkdir()
    with watchful(db) as (server, client):
        subscribed(client, b"before")
        moved = files(db) if names == "all" else [db]
        for path in moved:
            path.rename(away / path.name)
        until(lambda: GONE in server.log)
        assert not publishes(client, b"meanwhile")
        for path in moved:
            (away / path.name).replace(path)
        until(lambda: "event=database_back" in server.log)
        assert publishes(client, b"after")
        until(lambda: server_of(db) == server.url)
        server.kill()
    assert found(db) == [b"before", b"after"]


def test_a_moved_database_is_whole_without_its_wal(db: Path) -> None:
    """And what is left of the WAL can't harm the file that takes its place."""
    away = db.with_name("away.db")
    with watchful(db) as (server, client):
        subscribed(client, b"one", b"two")
        db.rename(away)
        until(lambda: GONE in server.log and not wal_path(db).stat().st_size)
        assert client.ask(b"p purge --confirm q").startswith(b"p error ")
        until(lambda: not wal_path(db).stat().st_size)
        server.kill()
    assert found(away) == []


def test_a_stop_leaves_the_files_of_others_alone(db: Path) -> None:
    """A restored database with its own WAL, moved into the place of one that is still served."""
    other = db.with_name("other.db")
    with watchful(other) as (server, client):
        subscribed(client, b"restored")
        server.kill()
    with watchful(db) as (server, client):
        subscribed(client, b"old")
        for path in (db, wal_path(db)):
            path.unlink()
        db.with_name("mqks.db-shm").unlink()
        wal_path(other).rename(wal_path(db))
        other.rename(db)
        assert server.stop() == 0
    assert found(db) == [b"restored"]


def test_a_stop_deletes_no_foreign_wal(db: Path) -> None:
    with watchful(db) as (server, client):
        subscribed(client, b"old")
        wal_path(db).unlink()
        wal_path(db).write_bytes(b"theirs")
        assert server.stop() == 0
    assert wal_path(db).read_bytes() == b"theirs"
    assert found(db) == [b"old"]


# ---------------------------------------------------------------------------------------- locks


def test_a_hard_link_is_the_same_database(db: Path) -> None:
    link, copy = db.with_name("link.db"), db.with_name("copy.db")
    with watchful(db) as (_, client):
        subscribed(client)
        os.link(db, link)
        code, log = refusal(link)
        assert (code, "in use" in log) == (EXIT_IN_USE, True), log
        assert main(["compact", "--db", str(link)]) == EXIT_IN_USE
        assert main(["backup", str(copy), "--db", str(db)]) == 0
        assert main(["backup", str(link), "--db", str(copy), "--force"]) == EXIT_IN_USE
        assert server_of(link) == ""
        # SQLite's own locks are as they were.
        with (
            closing(sqlite3.connect(db, isolation_level=None, timeout=0)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("pragma journal_mode = delete")
        assert publishes(client, b"x")
    assert server_of(link) is None


def test_a_lock_file_that_was_deleted_is_made_again(db: Path) -> None:
    with watchful(db) as (server, client):
        subscribed(client)
        lock_path(db).unlink()
        code, log = refusal(db)
        assert code == EXIT_IN_USE, log
        until(lambda: server_of(db) == server.url)
        until(lambda: "level=warning event=lock_file_gone" in server.log)
        code, log = refusal(db)
        assert (code, f"process {server.pid}" in log) == (EXIT_IN_USE, True), log
        assert publishes(client, b"x")
        assert GONE not in server.log
