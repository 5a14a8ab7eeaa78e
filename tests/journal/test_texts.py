"""Texts of large segments in files of their own: where they are, when they go, and what a crash, a
full disk, damage and other processes that read them do.

`--text-file-bytes-min 1` puts each text into a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from mqks.commands import main
from mqks.journal.segment import NewSegment
from mqks.journal.sqlite.database_file import DatabaseFile
from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.sqlite.texts import RECYCLED_MAX, size_of, texts_path
from mqks.settings import Settings
from mqks.testing import Broker
from tests.kit.fixtures import served, watchful
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import until

EXIT_DAMAGED, EXIT_CANNOT_WRITE = 65, 74
ALL = ("--text-file-bytes-min", "1")
KIB = 1024


def subscribed(client: LineClient) -> None:
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "


@contextmanager
def serving(db: Path, *flags: str) -> Iterator[tuple[ServerProcess, LineClient]]:
    """By a server that puts each text into a file, one client, and a queue `q` of the event `e`."""
    with watchful(db, *ALL, *flags) as (server, client):
        subscribed(client)
        yield server, client


def published(client: LineClient, name: bytes, data: bytes) -> None:
    assert client.ask(b"%b publish --confirm e %b" % (name, data)) == name + b" ok "


def texts(db: Path) -> list[str]:
    """Names of the files with texts, and what else was put there, but for empty files."""
    found = set[str]()
    with suppress(FileNotFoundError), os.scandir(texts_path(db)) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir() or entry.stat().st_size:
                    found.add(entry.name)
    return sorted(found - {"epoch"})


def stored(db: Path) -> dict[str, int | None]:
    """Which segments there are, by the names that their files would have, and text_bytes."""
    columns = "coalesce(text_file, id), text_bytes"
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as file:
        rows = file.execute(f"select {columns} from segment where length(body) < 200")
        return {f"{number:016}": text_bytes for number, text_bytes in rows}


def messages(db: Path) -> list[bytes]:
    with DatabaseFile.open(db) as file:
        assert file.damage == []
        return [message.id for message in file.messages(b"q")]


def got(server: ServerProcess, count: int) -> dict[bytes, bytes]:
    """Id and data of so many messages, in their order."""
    with LineClient(server.address) as client:
        client.send(b"c consume q --manual-ack\n")
        lines = [client.line().split(b" ") for _ in range(count)]
    return {words[2]: words[4] for words in lines}


def three(db: Path, *flags: str) -> dict[bytes, bytes]:
    """Three messages, each in a segment of its own, and a server that was killed."""
    data = {b"m%d" % n: b"%d" % n * 3000 for n in range(3)}
    with serving(db, *flags) as (_, client):
        for name, text in data.items():
            published(client, name, text)
    assert len(texts(db)) == 3
    return data


@contextmanager
def read_by_another(db: Path) -> Iterator[None]:
    """As long as another process makes a backup."""
    descriptor = os.open(texts_path(db), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------- where texts are


def test_only_large_texts_are_in_files(db: Path) -> None:
    with serving(db, "--text-file-bytes-min", "100KiB") as (_, client):
        published(client, b"small", b"x" * 90 * KIB)
        assert not texts_path(db).exists()
        published(client, b"large", b"y" * 110 * KIB)
        [name] = texts(db)
        text = (texts_path(db) / name).read_bytes()
        assert text == b"large event=e " + b"y" * 110 * KIB
        assert stored(db)[name] == len(text)
    with ServerProcess(db) as server:
        assert got(server, 2) == {b"small": b"x" * 90 * KIB, b"large": b"y" * 110 * KIB}


def test_a_text_of_many_pieces_is_one_file(db: Path) -> None:
    """More than the system writes in one step: of each queue its own."""
    with served(db, *ALL) as (server, client):
        for number in range(1500):
            client.send(b"s subscribe q%d e%d\n" % (number, number))
        with server.paused():
            lines = (b"m%d publish e%d %d\n" % (n, n, n) for n in range(1500))
            client.send(b"".join(lines) + b"p publish --confirm e0 last\n")
        assert client.line() == b"p ok "
    with served(db) as (server, client):
        for number in range(1, 1500, 100):
            told = client.ask(b"c%d consume q%d" % (number, number))
            assert told == b"c%d ok m%d event=e%d %d" % (number, number, number, number)


def test_the_files_go_with_their_messages_and_the_directory_with_the_last(db: Path) -> None:
    with serving(db) as (server, client):
        for number in range(50):
            published(client, b"m%d" % number, b"x" * 3000)
        assert len(texts(db)) == 50
        client.send(b"c consume q --manual-ack\n")
        for _ in range(50):
            client.line()
        client.send(b"a ack --confirm c --all\n")
        assert client.line() == b"a ok "
        until(lambda: not texts(db))
        assert server.stop() == 0
    assert not texts_path(db).exists()


def test_the_files_have_the_mode_of_the_database(db: Path) -> None:
    db.touch(0o640)
    db.chmod(0o640)
    three(db)
    directory = texts_path(db)
    modes = {stat.S_IMODE((directory / name).stat().st_mode) for name in os.listdir(directory)}
    assert (stat.S_IMODE(directory.stat().st_mode), modes) == (0o750, {0o640})


def test_files_with_messages_are_private(db: Path) -> None:
    mask = os.umask(0)
    try:
        with Broker(db, text_file_bytes_min=1) as broker:
            with LineClient(("127.0.0.1", broker.port)) as client:
                subscribed(client)
                published(client, b"m", b"x" * 3000)
            files = [each for each in db.parent.rglob("*") if each.suffix != ".ballast"]
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in files}
    finally:
        os.umask(mask)
    assert {"mqks.db", "mqks.db-wal", "mqks.db-shm", "mqks.db-texts", "mqks.db.lock"} < {*modes}
    assert modes == {name: 0o700 if name == "mqks.db-texts" else 0o600 for name in modes}


def test_size_and_facts_count_the_texts(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(db) as (server, client):
        published(client, b"m", b"x" * 900 * KIB)
        told = client.stats("journal")
        assert told["db_bytes"] > 900 * KIB
        assert server.stop() == 0
    assert main(["inspect", "journal", "--json", "--db", str(db)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["db_bytes"] > 900 * KIB < told["segment_bytes"]


# --------------------------------------------------------------------------------- crashes


def test_a_text_without_a_row_goes_at_the_next_start(db: Path, sync_library: Path) -> None:
    """Of a server that was killed while it waited for the text to be synced."""
    trigger = db.with_name("sync-hangs")
    environment = {"LD_PRELOAD": str(sync_library), "SYNC_HANGS_WHILE_EXISTS": str(trigger)}
    with served(db, *ALL, environment=environment) as (_, client):
        subscribed(client)
        published(client, b"m0", b"there")
        trigger.touch()
        client.send(b"m1 publish --confirm e lost\n")
        until(lambda: len(texts(db)) == 2)
    with served(db, *ALL) as (server, client):
        assert len(texts(db)) == 1
        published(client, b"m2", b"later")
        assert got(server, 2) == {b"m0": b"there", b"m2": b"later"}


def test_a_text_whose_row_was_deleted_goes_at_the_next_start(db: Path) -> None:
    data = three(db)
    with watchful(db, *ALL) as (server, client), read_by_another(db):
        assert got(server, 3) == data
        assert client.ask(b"p purge --confirm q").startswith(b"p ok ")
        until(lambda: not stored(db).keys() & {*texts(db)})
        assert len(texts(db)) == 3
        server.kill()
    with ServerProcess(db, *ALL):
        assert texts(db) == []


# ---------------------------------------------------------------------------------- damage


def lose(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


@pytest.mark.parametrize(
    ("harm", "why"),
    [(lose, "can't be read: No such file"), (shorten, "bytes instead of"), (flip, "checksum")],
)
def test_a_damaged_text_is_refused_and_set_aside(
    db: Path, harm: Callable[[Path], None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = three(db)
    name = texts(db)[1]
    harm(texts_path(db) / name)
    left = sorted(texts_path(db).iterdir())
    code, log = refusal(db)
    assert code == EXIT_DAMAGED
    assert f"segment {int(name)}" in log
    assert why in log
    assert "it held 1 messages and 0 acks of queue q" in log
    assert sorted(texts_path(db).iterdir()) == left
    for command in (["verify", str(db)], ["backup", f"{db}.copy", "--db", str(db)]):
        assert main(command) == EXIT_DAMAGED
        assert why in "".join(capsys.readouterr())
    with ServerProcess(db, "--salvage") as server:
        assert got(server, 2) == {b"m0": data[b"m0"], b"m2": data[b"m2"]}
    aside = [] if harm is lose else [f"{name}.damaged"]
    assert [each for each in texts(db) if "." in each] == aside
    with ServerProcess(db) as server:
        assert got(server, 2)
    assert [each for each in texts(db) if "." in each] == aside


def test_a_file_instead_of_the_directory_is_refused_and_can_be_salvaged(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three(db)
    shutil.rmtree(texts_path(db))
    texts_path(db).touch()
    assert main(["verify", str(db)]) == EXIT_DAMAGED
    assert "its text is missing, with the directory mqks.db-texts" in capsys.readouterr().out
    code, log = refusal(db)
    assert (code, "with the directory mqks.db-texts" in log) == (EXIT_DAMAGED, True)
    with served(db, *ALL, "--salvage") as (server, client):
        published(client, b"new", b"x")
        assert got(server, 1) == {b"new": b"x"}


def test_a_text_that_is_lost_while_it_is_served_ends_the_server(db: Path) -> None:
    three(db)
    with served(db) as (server, client):
        (texts_path(db) / texts(db)[0]).unlink()
        client.send(b"c consume q\n")
        assert server.wait() == EXIT_CANNOT_WRITE
        assert "can't be read: No such file or directory" in server.log


def test_texts_whose_rows_are_lost_are_kept_by_salvage(db: Path) -> None:
    three(db)
    with closing(sqlite3.connect(db, isolation_level=None)) as file:
        file.execute("delete from segment where id = 2")
    code, _ = refusal(db)
    assert code == EXIT_DAMAGED
    first, lost, last = texts(db)
    for flag in ("--salvage", "--no-salvage"):
        with ServerProcess(db, flag):
            assert texts(db) == [first, f"{lost}.damaged", last]


def test_files_that_somebody_else_has_made_are_passed_over(db: Path) -> None:
    with serving(db) as (server, client):
        published(client, b"m0", b"x")
        others = [f"{number:016}" for number in range(9, 12)]
        for other in others:
            (texts_path(db) / other).write_bytes(b"other")
        data = {b"m%d" % number: b"x" * number for number in range(1, 15)}
        for name, text in data.items():
            published(client, name, text)
        assert all((texts_path(db) / other).read_bytes() == b"other" for other in others)
        # Three texts are in rows: each time a file was to be made, and there was one.
        assert len(texts(db)) == len(others) + 15 - 3
        assert got(server, 15) == {b"m0": b"x", **data}


def test_texts_of_schema_6_are_found_by_the_ids_of_their_segments(db: Path) -> None:
    data, copy = three(db), db.with_name("copy")
    with closing(sqlite3.connect(db, isolation_level=None)) as file:
        # The numbers are ids, since nothing was deleted.
        assert file.execute("select id - text_file from segment").fetchall() == [(0,)] * 3
        for table in ("segment", "damaged_segment"):
            file.execute(f"alter table {table} drop column text_file")
        for table in ("schedule", "audit", "result", "batch"):
            file.execute(f"drop table {table}")
        file.execute("delete from tally where name in ('schedule', 'result', 'batch')")
        file.execute("pragma user_version = 6")
    assert messages(db) == [*data]
    assert main(["backup", str(copy), "--db", str(db)]) == 0
    for path in (db, copy):
        with served(path, *ALL) as (server, client):
            published(client, b"m3", b"x" * 900)
            assert got(server, 4) == {**data, b"m3": b"x" * 900}
            server.kill()
        with ServerProcess(path) as server:
            assert got(server, 4) == {**data, b"m3": b"x" * 900}


def test_texts_that_come_back_after_a_salvage_are_kept(db: Path) -> None:
    three(db)
    names, directory = texts(db), texts_path(db)
    directory.rename(directory.with_name("away"))
    code, log = refusal(db)
    assert (code, "with the directory mqks.db-texts" in log) == (EXIT_DAMAGED, True)
    with ServerProcess(db, "--salvage"):
        pass
    directory.with_name("away").rename(directory)
    with ServerProcess(db):
        assert texts(db) == [f"{name}.damaged" for name in names]


def test_texts_of_another_database_are_left_alone(db: Path) -> None:
    data = three(db)
    with ServerProcess(db) as server:
        assert server.stop() == 0
    db.rename(db.with_name("away.db"))
    with served(db, *ALL) as (server, client):
        assert "it has texts of another database" in server.log
        subscribed(client)
        published(client, b"new", b"x")
    [aside] = db.parent.glob("mqks.db-texts.*")
    aside.rename(texts_path(db.with_name("away.db")))
    with ServerProcess(db.with_name("away.db")) as server:
        assert got(server, 3) == data
    with ServerProcess(db) as server:
        assert got(server, 1) == {b"new": b"x"}


def test_a_directory_that_is_moved_is_noticed_and_still_read(db: Path) -> None:
    data = three(db)
    with watchful(db, *ALL) as (server, client):
        texts_path(db).rename(db.with_name("away"))
        until(lambda: "the directory of its texts was deleted or moved" in server.log)
        assert client.ask(b"m publish --confirm e x").startswith(b"m error ")
        assert got(server, 3).items() >= data.items()
        db.with_name("away").rename(texts_path(db))
        until(lambda: "event=database_back" in server.log)
        published(client, b"back", b"x")
    assert messages(db)[-1] == b"back"


# --------------------------------------------------------------------- those who read the file


def test_nothing_is_deleted_while_another_process_reads_an_older_state(db: Path) -> None:
    three(db)
    with watchful(db, *ALL) as (_, client):
        with read_by_another(db):
            names = texts(db)
            assert client.ask(b"p purge --confirm q").startswith(b"p ok ")
            until(lambda: not stored(db).keys() & {*names})
            assert texts(db) == names
        until(lambda: not texts(db))
    # So it is when the server starts meanwhile.
    three(db)
    with read_by_another(db):
        (texts_path(db) / "0000000000009999").write_bytes(b"orphan")
        with ServerProcess(db):
            assert "0000000000009999" in texts(db)
    with ServerProcess(db):
        assert "0000000000009999" not in texts(db)


def test_a_reader_of_an_older_list_reads_a_newer_one(db: Path) -> None:
    three(db)
    with served(db, *ALL) as (_, client), DatabaseFile.open(db) as file:
        found = file.messages(b"q")
        assert next(found).id == b"m0"
        published(client, b"m3", b"x")
        assert client.ask(b"p purge --confirm q").startswith(b"p ok ")
        published(client, b"m4", b"y")
        until(lambda: len(texts(db)) == 1)
        assert [message.id for message in found] == [b"m4"]
        assert file.damage == []


# ---------------------------------------------------------------------------------- limits


@pytest.mark.slow
def test_deleted_texts_wait_for_a_checkpoint_with_less_than_full(db: Path) -> None:
    """But few of them, and not for long."""
    flags = (*ALL, "--synchronous", "normal", "--wal-checkpoint-pages", "1000000")
    with served(db, *flags) as (_, client):
        subscribed(client)
        for number in range(100):
            published(client, b"m%d" % number, b"x" * 900_000)
            assert client.ask(b"p purge --confirm q") == b"p ok 1"
        assert size_of(texts_path(db)) < 90_000_000
        until(lambda: not texts(db))


def test_texts_that_wait_for_another_process_have_a_limit(db: Path) -> None:
    flags = (*ALL, "--wal-bytes-max", "16MiB")
    with watchful(db, *flags) as (server, client):
        subscribed(client)
        published(client, b"first", b"x")
        with read_by_another(db):
            for number in range(100):
                request = b"m%d publish --confirm e %b" % (number, b"x" * 900_000)
                if not client.ask(request).endswith(b" ok "):
                    break
                assert client.ask(b"p purge --confirm q").startswith(b"p ok ")
            assert 10 < number < 99
            until(lambda: "bytes of deleted texts wait for it" in server.log)
        until(lambda: "event=disk_has_room" in server.log)


@pytest.mark.slow
@pytest.mark.anyio
async def test_what_is_read_while_files_are_written_again_is_whole_or_left_out(db: Path) -> None:
    settings = Settings(db=db, text_file_bytes_min=1, ballast_bytes=0)
    store = await SqliteStore.open(settings, print)
    metadata = await store.load()
    assert [heads async for heads in store.segments(metadata)] == []
    await store.begin()
    assert await store.hold_reserves()
    # Shorter and longer ones take each other's place.
    pieces = {n: [1500, 20_000, 40, 9000][n % 4] for n in range(1, 300)}
    new = [NewSegment(n, b"head", [b"%07d" % n * k], 4 + 7 * k) for n, k in pieces.items()]
    whole, left_out = set[int](), set[int]()
    is_done = False

    async def read() -> None:
        while not is_done:
            ids = [*range(max(1, store._next_segment - 6), store._next_segment)]
            bodies = await store.bodies(ids)
            for segment_id, body in bodies.items():
                assert body == new[segment_id - 1].whole()[2]
            whole.update(bodies)
            left_out.update(set(ids) - bodies.keys())

    async with anyio.create_task_group() as reading:
        reading.start_soon(read)
        for segment in new:
            await store.commit([segment], drop=[segment.id - 4] if segment.id > 4 else [])
            await store.tidy(idle=False)
        is_done = True
    there = texts(db)
    await store.close()
    assert whole
    assert left_out
    assert len(there) <= 4 + RECYCLED_MAX
    assert int(there[-1]) < 150, "each text has a file of its own"
