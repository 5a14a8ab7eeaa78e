"""A backup, made of a server under load, is whole; one that is not made whole has no name."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event

import pytest

from mqks.commands import main
from mqks.journal.sqlite.database_file import DatabaseFile
from mqks.journal.sqlite.texts import texts_path
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import refusal
from tests.kit.waiting import WAIT_S, until

DAMAGED, IN_USE, CANNOT_WRITE = 65, 69, 73
MIB = 1024 * 1024


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "backups").mkdir()
    return tmp_path / "backups" / "copy.db"


def beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


def filled(db: Path, count: int, data: bytes = b"x") -> None:
    """A database, stopped cleanly, whose queue `q` holds m0, m1 …, some of them in one commit."""
    with served(db) as (server, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for number in range(count):
            client.send(b"m%d publish e %b\n" % (number, data))
        assert client.ask(b"p publish --confirm nobody x") == b"p ok "
        server.terminate()


def ids(db: Path, queue: bytes = b"q") -> list[bytes]:
    with DatabaseFile.open(db) as file:
        assert file.damage == []
        return [message.id for message in file.messages(queue)]


def epoch(db: Path) -> str | None:
    with DatabaseFile.open(db) as file:
        return file.facts.epoch


class Load:
    """Publishes with confirm and acks with confirm, until told to stop.

    `confirmed` and `acked` grow only by what the server has confirmed.
    """

    def __init__(self, client: LineClient, address: tuple[str, int]) -> None:
        self.confirmed, self.acked = list[bytes](), list[bytes]()
        self.asked: list[bytes] = []
        """Acks that were sent, confirmed or not."""
        self._address = address
        for queue in (b"q", b"kept"):
            assert client.ask(b"s subscribe --confirm %b e" % queue) == b"s ok "

    def _publish(self, stopping: Event) -> None:
        with LineClient(self._address) as client:
            while not stopping.is_set():
                first = len(self.confirmed)
                batch = [b"m%d" % number for number in range(first, first + 20)]
                lines = [b"%b publish --confirm e %b\n" % (m, b"." * 2000) for m in batch]
                client.send(b"".join(lines))
                for message in batch:
                    assert client.line() == message + b" ok "
                    self.confirmed.append(message)

    def _ack(self, stopping: Event) -> None:
        with LineClient(self._address) as client:
            client.send(b"c consume q --manual-ack\n")
            while not stopping.is_set():
                message = client.line().split(b" ")[2]
                client.send(b"%b ack --confirm c %b\n" % (message, message))
                self.asked.append(message)
                # Deliveries that come in between are acked without a confirm.
                while (line := client.line()) != message + b" ok ":
                    self.asked.append(line.split(b" ")[2])
                    client.send(b"l ack c %b\n" % self.asked[-1])
                self.acked.append(message)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The acks stop first: with the publishes at an end, they would wait for a message."""
        with ThreadPoolExecutor() as threads:
            works = [(work, Event()) for work in (self._ack, self._publish)]
            running = [(threads.submit(work, stopping), stopping) for work, stopping in works]
            try:
                yield
            finally:
                for each, stopping in running:
                    stopping.set()
                    each.result(WAIT_S)

    def until(self, confirmed: int) -> None:
        until(lambda: len(self.confirmed) >= confirmed and len(self.acked) >= 20)


@pytest.mark.parametrize(
    "flags",
    [pytest.param((), marks=pytest.mark.slow), ("--text-file-bytes-min", "1")],
    ids=["rows", "files"],
)
def test_a_backup_under_load_holds_all_that_was_confirmed_before(
    db: Path, copy: Path, flags: tuple[str, ...]
) -> None:
    with served(db, *flags) as (server, client):
        load = Load(client, server.address)
        # A reader keeps the WAL from being folded, so that most of the journal is in it.
        with closing(sqlite3.connect(f"{db.as_uri()}?mode=ro", uri=True)) as reader:
            reader.execute("begin")
            reader.execute("select count(*) from segment").fetchone()
            with load.running():
                load.until(confirmed=2000)
                if flags:
                    assert len(list(texts_path(db).iterdir())) > 20
                else:
                    assert db.with_name("mqks.db-wal").stat().st_size > 4 * MIB
                for _ in range(3):
                    confirmed, acked = list(load.confirmed), list(load.acked)
                    assert main(["backup", str(copy), "--db", str(db), "--force"]) == 0
                    assert beside(copy) == ["copy.db"]
                    load.until(confirmed=len(confirmed) + 100)
        server.kill()
    assert main(["verify", str(copy)]) == 0
    assert epoch(copy) not in (None, epoch(db))
    with served(copy) as (server, client):
        assert client.ask(b"p publish --confirm e end") == b"p ok "
        kept = delivered(client, b"kept")
        assert kept[: len(confirmed)] == confirmed
        waiting = delivered(client, b"q")
        assert len(set(waiting)) == len(waiting)
        assert not set(acked) & set(waiting)
        assert set(confirmed) - set(waiting) <= set(load.asked)


def delivered(client: LineClient, queue: bytes) -> list[bytes]:
    """All messages of a queue up to the one with the data `end`."""
    client.send(b"c-%b consume %b\n" % (queue, queue))
    found = []
    while not (line := client.line()).endswith(b" end"):
        found.append(line.split(b" ")[2])
    return found


def test_a_backup_of_a_stopped_server_leaves_it_as_it_was(db: Path, copy: Path) -> None:
    filled(db, 100)
    before, there = db.read_bytes(), beside(db)
    assert main(["backup", str(copy), "--db", str(db)]) == 0
    assert db.read_bytes() == before
    assert beside(db) == there
    assert ids(copy) == ids(db) == [b"m%d" % number for number in range(100)]
    assert copy.stat().st_mode == db.stat().st_mode


def test_a_name_that_is_taken_is_kept(
    db: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(db, 1)
    copy.write_text("something else")
    assert main(["backup", str(copy), "--db", str(db)]) == CANNOT_WRITE
    assert copy.read_text() == "something else"
    assert main(["backup", str(db), "--db", str(db), "--force"]) == CANNOT_WRITE
    link = copy.with_name("link.db")
    link.symlink_to(db)
    assert main(["backup", str(link), "--db", str(db), "--force"]) == CANNOT_WRITE
    assert "is the database itself" in capsys.readouterr().err
    assert main(["backup", str(copy), "--db", str(db), "--force"]) == 0
    assert ids(copy) == [b"m0"]
    # A WAL of another state would be taken for that of the copy.
    copy.with_name("copy.db-wal").write_bytes(b"x")
    assert main(["backup", str(copy), "--db", str(db), "--force"]) == CANNOT_WRITE
    assert main(["backup", str(copy / "deeper"), "--db", str(db)]) == CANNOT_WRITE


def test_what_is_damaged_is_not_backed_up(db: Path, copy: Path) -> None:
    filled(db, 3)
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("update segment set crc = crc + 1")
        connection.commit()
    assert main(["backup", str(copy), "--db", str(db)]) == DAMAGED
    assert beside(copy) == []
    db.write_bytes(b"no database at all" * 1000)
    assert main(["backup", str(copy), "--db", str(db)]) == DAMAGED
    assert main(["backup", str(copy), "--db", str(db) + "-not-there"]) == DAMAGED
    assert beside(copy) == []


def test_a_killed_backup_has_no_name_and_the_next_one_tidies_up(
    db: Path, copy: Path, sync_library: Path
) -> None:
    filled(db, 40)
    partial, hangs = copy.with_name("copy.db.partial"), db.with_name("sync-hangs")
    hangs.touch()  # It never comes to syncing what it has copied.
    preload = {"LD_PRELOAD": str(sync_library), "SYNC_HANGS_WHILE_EXISTS": str(hangs)}
    command = [sys.executable, "-m", "mqks", "backup", str(copy), "--db", str(db)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | preload) as backup:
        until(lambda: partial.exists() and partial.stat().st_size)
        backup.kill()
    assert backup.returncode == -signal.SIGKILL
    assert not copy.exists()
    assert partial.exists()
    assert main(command[3:]) == 0
    assert "copy.db.partial" not in beside(copy)
    assert len(ids(copy)) == 40


# ----------------------------------------------------------------------------------- compact


def test_compaction_gives_room_back_and_keeps_what_lives(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(db) as (server, client):
        for queue in (b"q", b"twin"):
            assert client.ask(b"s subscribe --confirm %b e" % queue) == b"s ok "
        for number in range(300):
            message = b"m%d" % number
            reply = client.ask(b"%b publish --confirm e %b" % (message, b"x" * 5000))
            assert reply == message + b" ok "
        client.send(b"c consume q --manual-ack\n")
        for number in range(300):
            assert client.line().split(b" ")[2] == b"m%d" % number
        for number in range(0, 300, 3):
            client.send(b"a ack c m%d\n" % number)
        assert main(["compact", "--db", str(db)]) == IN_USE
        assert "compacts its file automatically" in capsys.readouterr().err
        server.kill()
    before = {queue: ids(db, queue) for queue in (b"q", b"twin")}
    assert main(["compact", "--db", str(db)]) == 0
    assert {queue: ids(db, queue) for queue in (b"q", b"twin")} == before
    with DatabaseFile.open(db) as file:
        assert file.facts.free_pages == 0
    # Both queues hold the same text: it is there once.
    assert db.stat().st_size < 300 * 5000 * 1.2
    assert main(["verify", str(db)]) == 0
    assert not db.with_name("mqks.db-wal").exists()


def test_a_file_that_still_needs_its_wal_is_not_reported_as_compacted(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(db, 3)
    with closing(sqlite3.connect(db, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from segment").fetchall()
        assert main(["compact", "--db", str(db)]) == CANNOT_WRITE
        assert "its WAL could not be copied into it" in capsys.readouterr().err
    assert main(["compact", "--db", str(db)]) == 0


def test_what_is_damaged_is_not_compacted(db: Path) -> None:
    filled(db, 3)
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("update segment set crc = crc + 1")
        connection.commit()
    assert main(["compact", "--db", str(db)]) == DAMAGED
    code, _ = refusal(db)
    assert code == DAMAGED
    assert main(["compact", "--db", str(db) + "-not-there"]) == DAMAGED
