"""What must last does, when the disk is full, fails or lies, and when the server is told to go.

Real server processes on real files; what clients were promised is compared with what they get.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from mqks import Message, blocking
from mqks.commands import main
from mqks.errors import CannotWrite, ConfigurationError
from mqks.journal.sqlite.database_file import DatabaseFile
from mqks.journal.sqlite.lock import BESIDE, server_of
from mqks.journal.sqlite.texts import size_of, texts_path
from mqks.server import commits as turn_commits
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from tests.kit.fixtures import served, watchful
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import WAIT_S, until
from tests.server.test_metrics import Web

KIB, MIB = 1024, 1024 * 1024
EXIT_DAMAGED, EXIT_IN_USE, EXIT_CANNOT_WRITE = 65, 69, 74
ERROR = re.compile(rb"\S+ error [0-9a-f]{24}")

DISK_BYTES = 24 * MIB
SHRUNK_FILE_BYTES_MAX = 4 * MIB
SHRUNK_WAL_BYTES_MAX = 17 * MIB


@dataclass(frozen=True, slots=True)
class Delivery:
    message: bytes
    retry: int
    data: bytes


def delivery(line: bytes) -> Delivery:
    found = re.fullmatch(rb"\S+ ok (\S+) event=[^ ,]+(?:,retry=(\d+))? (.*)", line, re.DOTALL)
    assert found, line
    return Delivery(found[1], int(found[2] or 0), found[3])


def published(client: LineClient, message: bytes, event: bytes, data: bytes) -> bool:
    """Publishes with --confirm; whether it was confirmed. It was an error reply otherwise."""
    reply = client.ask(b"%s publish --confirm %s %s" % (message, event, data))
    if reply == message + b" ok ":
        return True
    assert ERROR.fullmatch(reply), reply
    return False


def drained(server: ServerProcess, queue: bytes, event: bytes) -> list[Delivery]:
    """All messages of a queue that is bound to `event`, in order; they are acked."""
    with LineClient(server.address) as client:
        assert published(client, b"end", event, b"")
        client.send(b"drain consume %s --manual-ack\n" % queue)
        found: list[Delivery] = []
        while not found or found[-1].message != b"end":
            found.extend(map(delivery, client.lines()))
        assert client.ask(b"a ack --confirm drain --all") == b"a ok "
    return found[:-1]


def subscribed(client: LineClient, queue: bytes, event: bytes) -> None:
    assert client.ask(b"s subscribe --confirm %s %s" % (queue, event)) == b"s ok "


# ------------------------------------------------------------------------- refusing to start


def test_a_database_behind_a_link_is_the_same_database(db: Path, tmp_path: Path) -> None:
    """Its WAL and its lock are beside the file, not beside the link."""
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(db)
    with served(link) as (_, client):
        subscribed(client, b"q", b"e")
        assert published(client, b"m", b"e", b"text")
        for name in (db, link):
            with DatabaseFile.open(name) as file:
                assert [message.id for message in file.messages(b"q")] == [b"m"]
            assert server_of(name)
        code, log = refusal(db)
        assert code == EXIT_IN_USE, log
    assert [each.name for each in link.parent.iterdir()] == [link.name]


@pytest.mark.parametrize("end", BESIDE)
def test_nothing_beside_a_database_is_opened_through_a_link(db: Path, end: str) -> None:
    victim = db.with_name("victim")
    inside = victim / "epoch" if end == "-texts" else victim
    inside.parent.mkdir(exist_ok=True)
    inside.write_text("precious")
    beside, copy = Path(f"{db}{end}"), db.with_name("copy.db")
    beside.symlink_to(victim)
    link = db.with_name("link.db")
    link.symlink_to(db)
    for name in (db, link):
        code, log = refusal(name)
        assert (code, f"{beside} is a symbolic link" in log) == (
            ConfigurationError.exit_code,
            True,
        ), log
    beside.unlink()
    with ServerProcess(db) as server:
        assert server.stop() == 0
    Path(f"{copy}{end}").symlink_to(victim)
    assert main(["backup", str(copy), "--db", str(db)]) == CannotWrite.exit_code
    assert inside.read_text() == "precious"
    inside.unlink()
    beside.unlink(missing_ok=True)
    beside.symlink_to(inside)
    assert refusal(db)[0] == ConfigurationError.exit_code
    assert not inside.exists()


def test_a_file_with_two_names_is_no_ballast(db: Path) -> None:
    victim = db.with_name("victim")
    victim.write_text("precious")
    os.link(victim, f"{db}.ballast")
    with served(db, "--ballast-bytes", "1MiB"):
        assert Path(f"{db}.ballast").stat().st_size == 1024 * 1024
    assert victim.read_text() == "precious"


# -------------------------------------------------------------------------------- a full disk


TEXTS = ("--text-file-bytes-min", "1")


def check_full_disk(db: Path | str, room: int, data: bytes, *flags: str) -> None:
    """Publishes until there is no room, makes some by acking, and loses nothing meanwhile."""
    confirmed: list[bytes] = []
    errors = 0
    with watchful(db, *flags) as (server, publisher), LineClient(server.address) as consumer:
        subscribed(publisher, b"q", b"e")
        for number in range(5_000):
            message = b"m%d" % number
            if published(publisher, message, b"e", data):
                assert not errors, "there was room again without an ack"
                confirmed.append(message)
            elif (errors := errors + 1) == 5:
                break
            elif errors == 1:
                doubtful = message  # The disk was found to be full only while it was written.
        assert 10 <= len(confirmed) < room // len(data)
        assert errors == 5, "the disk was never full"

        consumer.send(b"c consume q --manual-ack\n")
        got = [delivery(consumer.line()) for _ in confirmed]
        assert got == [Delivery(message, 0, data) for message in confirmed]
        most = len(confirmed) * 9 // 10
        publisher.send(b"".join(b"a ack --confirm c %s\n" % m for m in confirmed[:most]))
        assert {publisher.line() for _ in range(most)} == {b"a ok "}

        attempts = (b"again-%d" % number for number in itertools.count())

        def accepted() -> bytes | None:
            again = next(attempts)
            return again if published(publisher, again, b"e", data) else None

        again = until(accepted, "publishing does not resume")
        rest = [delivery(consumer.line())]
        if rest[0].message == doubtful:
            rest.append(delivery(consumer.line()))
        assert rest[-1] == Delivery(again, 0, data)
        kept = [*confirmed[most:], *(each.message for each in rest)]

    with watchful(db, *flags) as (server, _):
        left = drained(server, b"q", b"e")
    assert left == [Delivery(message, 1, data) for message in kept]


@pytest.mark.parametrize("kind", ["rows", "texts", "schema"])
def test_a_full_database_lets_consumers_make_room(
    db: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    flags = ["--db-bytes-max", str(2 * MIB), "--ballast-bytes", "0", "--db-replication", "none"]
    place = request.getfixturevalue("journal_url").text if kind == "schema" else db
    # One message is less than one page, so that not even a page is left for the acks.
    data = b"x" * (3 if kind == "rows" else 30) * KIB
    # PostgreSQL compresses it.
    room = DISK_BYTES if kind == "schema" else 2 * MIB
    check_full_disk(place, room, data, *flags, *(TEXTS if kind == "texts" else ()))


def test_a_consumer_of_the_commit_that_finds_the_disk_full_gets_messages_later(db: Path) -> None:
    flags = ("--db-bytes-max", str(MIB), "--ballast-bytes", "0")
    data = b"x" * 30 * KIB
    with watchful(db, *flags) as (server, client):
        subscribed(client, b"q", b"e")
        for number in range(100):
            client.send(b"m publish --confirm e %b\nc%d consume --confirm q2 e2\n" % (data, number))
            replies = {client.line() for _ in range(2)}
            assert b"c%d ok " % number in replies
            if b"m ok " not in replies:
                break
            client.send(b"d delete_consumer c%d\n" % number)
        assert client.ask(b"d delete_queue --confirm q") == b"d ok "
        with LineClient(server.address) as publisher:
            until(lambda: published(publisher, b"m2", b"e2", b"x"))
        assert client.line() == b"c%d ok m2 event=e2 x" % number


def test_what_a_stop_loses_on_a_full_disk_is_logged(db: Path) -> None:
    flags = ("--db-bytes-max", str(MIB), "--ballast-bytes", "0")
    with watchful(db, *flags) as (server, client):
        subscribed(client, b"q", b"e")
        while published(client, b"m", b"e", b"x" * 30 * KIB):
            pass
        assert not published(client, b"m", b"e", b"x")  # Not even in memory.
        server.stop()
        assert "event=unwritten_at_stop messages=1 reason=" in server.log


def test_a_schema_that_was_full_is_full_after_a_restart(journal_url: DatabaseUrl) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    flags, data = ("--db-replication", "none", "--db-bytes-max", str(MIB)), b"x" * 30 * KIB
    with watchful(journal_url.text, *flags) as (_, client):
        subscribed(client, b"q", b"e")
        count = 0
        while published(client, b"m%d" % count, b"e", data):
            count += 1
            assert count * len(data) < MIB
    with watchful(journal_url.text, *flags) as (_, client):
        assert not published(client, b"more", b"e", data)
        assert client.ask(b"d delete_queue --confirm q") == b"d ok "
        subscribed(client, b"q", b"e")
        until(lambda: published(client, b"more", b"e", data))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A database that is to be on a file system of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=10, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        yield path / "mqks.db"
    finally:
        subprocess.run(["umount", str(path)], timeout=10, check=True)


@pytest.mark.parametrize(
    ("floor", "ballast", "kib", "more"),
    [("0", "4MiB", 64, ()), ("0", "2MiB", 640, TEXTS), ("6MiB", "2MiB", 64, ())],
    ids=["rows", "texts", "floor"],
)
def test_a_full_file_system_lets_consumers_make_room(
    small_disk: Path, floor: str, ballast: str, kib: int, more: tuple[str, ...]
) -> None:
    flags = ("--disk-free-bytes-min", floor, "--ballast-bytes", ballast, *more)
    check_full_disk(small_disk, DISK_BYTES, b"x" * kib * KIB, *flags)


def test_free_space_stays_above_its_floor(small_disk: Path) -> None:
    flags = ("--disk-free-bytes-min", "8MiB", "--ballast-bytes", "1MiB")
    # A stop does not wait for room.
    with served(small_disk, *flags, "--drain-timeout-s", "3600") as (server, client):
        subscribed(client, b"q", b"e")
        number = 0
        while published(client, b"m%d" % number, b"e", b"x" * 64 * KIB):
            number += 1
            assert number < 400
        client.close()
        assert server.terminate() == 0
        told = r"\d bytes are free on the disk of .*, and disk_free_bytes_min is 8388608"
        assert re.search(told, server.log)
        # What was written between two looks, and the WAL, may go below it a little.
        assert shutil.disk_usage(small_disk.parent).free > 4 * MIB


def test_low_disk_space_is_reported_at_the_start_and_while_nobody_publishes(
    small_disk: Path,
) -> None:
    other = small_disk.with_name("other")
    other.write_bytes(b"x" * 12 * MIB)
    flags = ("--disk-free-bytes-min", "14MiB", "--ballast-bytes", "1MiB", "--http-port", "0")
    with watchful(small_disk, *flags) as (server, client):
        web = Web(server)

        def ready() -> tuple[int, str]:
            answer = web.ask("/readyz")
            return answer.status, answer.text

        until(lambda: server.log.count("event=disk_full") == 1)
        assert "and disk_free_bytes_min is 14680064" in server.log
        assert ready() == (503, "low disk space\n")
        subscribed(client, b"q", b"e")
        for number in range(300):
            assert ERROR.fullmatch(client.ask(b"m%d publish --confirm e x" % number))
        # The state is in the log, and of what it refuses only the first request.
        assert b"low disk space: publishes are refused" in client.ask(b"x stats errors")

        other.unlink()
        until(lambda: "event=disk_has_room refused=300" in server.log)
        assert server.log.count("event=request_failed") == 1
        assert "errors_suppressed" not in server.log
        assert ready() == (200, "ok\n")
        assert published(client, b"m", b"e", b"x")

        other.write_bytes(b"x" * 12 * MIB)
        until(lambda: server.log.count("event=disk_full") == 2)
        assert ready() == (503, "low disk space\n")
        assert ERROR.fullmatch(client.ask(b"m publish --confirm e x"))
        until(lambda: server.log.count("event=request_failed") == 2)


def test_a_burst_on_a_full_disk_is_logged_once_for_each_state(small_disk: Path) -> None:
    flags = ("--disk-free-bytes-min", "0", "--ballast-bytes", "1MiB")
    with served(small_disk, *flags) as (server, client):
        subscribed(client, b"q", b"e")
        client.send(b"m publish --confirm e %s\n" % (b"x" * 64 * KIB) * 600)
        replies = [client.line() for _ in range(600)]
        refused = sum(b" error " in reply for reply in replies)
        assert refused > 100
        client.ask(b"p purge --confirm q")
        # Room that the ballast gives may end the first state at once.
        until(lambda: server.log.count("=disk_has_room ") == server.log.count("=disk_full "))
        counts = [int(count) for count in re.findall(r"=disk_has_room refused=(\d+)", server.log)]
        assert sum(counts) == refused
        assert server.log.count("event=request_failed") == sum(count > 0 for count in counts)


def filled(db: Path) -> Path:
    """A file with all but 1 KiB of its disk, of which the server may take something meanwhile."""
    filler = db.with_name("filler")
    with suppress(OSError):
        filler.write_bytes(bytes(shutil.disk_usage(db.parent).free - KIB))
    return filler


def filled_wholly(db: Path) -> Path:
    filler = db.with_name("filler")
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4 * KIB))
    return filler


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_start_on_a_full_disk_takes_its_ballast(small_disk: Path, end: str) -> None:
    flags = ("--disk-free-bytes-min", "0", "--ballast-bytes", "2MiB")
    with watchful(small_disk, *flags) as (server, client):
        subscribed(client, b"q", b"e")
        assert published(client, b"m", b"e", b"x")
        if end == "stopped":
            client.close()
            assert server.terminate() == 0
    filler = filled_wholly(small_disk)
    with watchful(small_disk, *flags) as (server, client):
        client.send(b"c consume --confirm q --manual-ack\n")
        assert client.line() == b"c ok "
        assert client.line() == b"c ok m event=e x"
        assert client.ask(b"a ack --confirm c m") == b"a ok "
        filler.unlink()
        until(lambda: published(client, b"n", b"other", b"x"))


def test_a_start_on_a_full_disk_without_a_ballast_may_be_tried_again(small_disk: Path) -> None:
    flags = ("--ballast-bytes", "0")
    with ServerProcess(small_disk, *flags):
        pass
    filled_wholly(small_disk)
    code, log = refusal(small_disk, *flags)
    assert code == EXIT_CANNOT_WRITE, log


def test_a_reject_on_a_full_disk_keeps_its_message(small_disk: Path) -> None:
    """A rejected message cannot be written in its new place; acked there, it is back in the old."""
    flags = ("--disk-free-bytes-min", "0")
    with served(small_disk, *flags) as (_, client):
        subscribed(client, b"q", b"e")
        subscribed(client, b"other", b"other")
        data = b"x" * 64 * KIB
        assert all(published(client, b"m%d" % number, b"e", data) for number in range(3))
        filler = filled(small_disk)
        until(lambda: not published(client, b"late", b"other", data))
        client.send(b"c consume q --manual-ack\n")
        assert [delivery(client.line()).message for _ in range(3)] == [b"m0", b"m1", b"m2"]
        assert client.ask(b"a1 ack --confirm c m0") == b"a1 ok "
        client.send(b"r1 reject c m1\n")
        assert delivery(client.line()) == Delivery(b"m1", 1, data)
        assert ERROR.fullmatch(client.ask(b"a2 ack --confirm c m1"))
        assert client.ask(b"a3 ack --confirm c m2") == b"a3 ok "
    filler.unlink()
    with ServerProcess(small_disk, *flags) as server:
        assert [each.message for each in drained(server, b"q", b"e")] == [b"m1"]


def test_on_a_full_disk_no_transaction_is_confirmed(small_disk: Path) -> None:
    """Not even the one that finds it full."""
    confirmed, flags = list[bytes](), ("--disk-free-bytes-min", "0")
    with served(small_disk, *flags) as (_, client):
        subscribed(client, b"q", b"e")
        filler = filled(small_disk)
        for number in itertools.count():
            client.send(b"b begin\nm%d publish e %b\n" % (number, b"x" * 64 * KIB))
            if ERROR.fullmatch(client.ask(b"c commit --confirm")):
                break
            confirmed.append(b"m%d" % number)
    filler.unlink()
    with ServerProcess(small_disk, *flags) as server:
        assert [each.message for each in drained(server, b"q", b"e")] == confirmed


@pytest.mark.parametrize(
    "drop", ["purge --confirm q", "purge --confirm q --id=m1", "trim --confirm q 9"]
)
def test_on_a_full_disk_a_purge_of_moved_messages_is_not_confirmed(
    small_disk: Path, drop: str
) -> None:
    flags = ("--disk-free-bytes-min", "0")
    with served(small_disk, *flags) as (server, client), LineClient(server.address) as worker:
        subscribed(client, b"q", b"e")
        subscribed(client, b"other", b"other")
        data = b"x" * 64 * KIB
        assert all(published(client, b"m%d" % number, b"e", data) for number in range(2))
        filler = filled(small_disk)
        until(lambda: not published(client, b"late", b"other", data))
        # What was published without success was in no other place.
        assert client.ask(b"p purge --confirm other").startswith(b"p ok ")
        worker.send(b"c consume q --manual-ack\n")
        assert [delivery(worker.line()).message for _ in range(2)] == [b"m0", b"m1"]
        worker.send(b"r reject c m1\n")
        assert delivery(worker.line()) == Delivery(b"m1", 1, data)
        assert worker.ask(b"d delete_consumer --confirm c") == b"d ok "
        assert ERROR.fullmatch(client.ask(b"d " + drop.encode()))
    filler.unlink()
    with ServerProcess(small_disk, *flags) as server:
        assert b"m1" in [each.message for each in drained(server, b"q", b"e")]


def test_an_id_is_never_remembered_without_its_message(db: Path) -> None:
    """On a full disk everything but messages is still written."""
    flags = ("--ballast-bytes", "0", "--disk-free-bytes-min")
    with served(db, *flags, "100TiB") as (_, client):
        subscribed(client, b"q", b"e")
        assert ERROR.fullmatch(client.ask(b"m1 publish --confirm --once e data"))
        subscribed(client, b"q2", b"e2")
    with served(db, *flags, "0") as (server, client):
        assert client.ask(b"m1 publish --confirm --once e data") == b"m1 ok "
        assert [d.message for d in drained(server, b"q", b"e")] == [b"m1"]


# ----------------------------------------------------------------------------- a failing disk


def test_a_failed_sync_ends_the_server_before_it_confirms(db: Path, sync_library: Path) -> None:
    trigger = db.with_name("sync-fails")
    environment = {"LD_PRELOAD": str(sync_library), "SYNC_FAILS_ONCE_EXISTS": str(trigger)}
    before = [b"before-%d" % n for n in range(20)]
    with served(db, environment=environment) as (server, client):
        subscribed(client, b"q", b"e")
        for message in before:
            assert published(client, message, b"e", b"safe")
        trigger.touch()
        after = b"".join(b"after-%d publish --confirm e unsafe\n" % n for n in range(20))
        client.send(after + b"s subscribe --confirm q2 e\n")
        assert [reply for reply in client.rest() if reply.endswith(b" ok ")] == []
        assert server.wait() == EXIT_CANNOT_WRITE, server.log
    # What it had not synced can't be written again either: another start may find a better disk.
    server = ServerProcess(db, environment=environment)
    assert server.wait() == EXIT_CANNOT_WRITE, server.log
    assert f"mqks: {db}-wal can't be written again: Input/output error" in server.log
    with ServerProcess(db) as server:
        assert [d.message for d in drained(server, b"q", b"e")][: len(before)] == before


# ------------------------------------------------------------------------------- a clean stop


def publish_on(server: ServerProcess, name: bytes, confirm: bool, begun: Event) -> set[bytes]:
    """Until the server goes; gives what was confirmed, or received before a pong."""
    safe, flag = set[bytes](), b" --confirm" if confirm else b""
    with LineClient(server.address) as client, suppress(EOFError, ConnectionError):
        for burst in range(100_000):
            messages = [b"%s-%d-%d" % (name, burst, n) for n in range(20)]
            lines = [b"%s publish%s e data\n" % (message, flag) for message in messages]
            client.send(b"".join(lines) + b"p ping\n")
            awaited = {b"p ok "} | ({m + b" ok " for m in messages} if confirm else set())
            while awaited:
                awaited.remove(client.line())
            safe.update(messages)
            if burst == 20:
                begun.set()
    return safe


def test_sigterm_under_load_loses_nothing_received(db: Path) -> None:
    with served(db) as (server, client), ThreadPoolExecutor() as threads:
        subscribed(client, b"q", b"e")
        client.close()
        begun = Event(), Event()
        names = (b"confirmed", True, begun[0]), (b"unconfirmed", False, begun[1])
        loads = [threads.submit(publish_on, server, *told) for told in names]
        assert all(each.wait(WAIT_S) for each in begun)
        assert server.stop() == 0, server.log
        safe = set[bytes]().union(*(load.result(WAIT_S) for load in loads))
    assert len(safe) >= 2 * 20 * 20
    with ServerProcess(db) as server:
        messages = [d.message for d in drained(server, b"q", b"e")]
    assert len(messages) == len(set(messages)), "something came twice"
    assert not safe - set(messages)


# --------------------------------------------------------------------------- room given back


def bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.slow
def test_the_file_shrinks_when_a_reader_is_done_and_nothing_is_written(
    client: LineClient, db: Path
) -> None:
    with (
        closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as other,
        closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as reader,
    ):
        subscribed(client, b"q", b"e")
        for number in range(30):
            assert published(client, b"m%d" % number, b"e", b"x" * 100_000)
        until(lambda: bytes_of(db) > 3_000_000)
        reader.execute("begin")
        reader.execute("select count(*) from segment").fetchall()
        assert client.ask(b"p purge --confirm q") == b"p ok 30"

        def checkpoints() -> int:
            return int(client.stats("journal")["checkpoints"])

        until(lambda: other.execute("pragma page_count").fetchone()[0] < 500)
        before = checkpoints()
        until(lambda: checkpoints() > before + 1)
        assert bytes_of(db) > 3_000_000
        reader.rollback()
        until(lambda: bytes_of(db) < 2_500_000)


@pytest.mark.parametrize("text_file_bytes_min", ["0", "64KiB"])
def test_the_files_shrink_when_their_messages_are_gone(db: Path, text_file_bytes_min: str) -> None:
    count, data = 25_000, b"x" * KIB
    wal = db.with_name(db.name + "-wal")
    with served(db, "--text-file-bytes-min", text_file_bytes_min) as (server, client):
        subscribed(client, b"q", b"e")
        for start in range(0, count, 1_000):
            numbers = range(start, start + 1_000)
            client.send(b"".join(b"m%d publish e %s\n" % (n, data) for n in numbers))
            assert client.ask(b"p ping") == b"p ok "
        assert published(client, b"last", b"e", b"")
        texts = size_of(texts_path(db))
        assert bytes_of(db) + bytes_of(wal) + texts > count * KIB
        assert (texts > count * KIB / 2) == (text_file_bytes_min != "0")
        client.send(b"c consume q\n")
        left = count + 1
        while left:
            left -= len(client.lines())
        client.close()

        def is_small() -> bool:
            return bytes_of(db) <= SHRUNK_FILE_BYTES_MAX and bytes_of(wal) <= SHRUNK_WAL_BYTES_MAX

        until(is_small)
        until(lambda: size_of(texts_path(db)) < MIB)
        assert server.stop() == 0
    assert bytes_of(db) + bytes_of(wal) <= SHRUNK_FILE_BYTES_MAX


# ---------------------------------------------------------------------------- after a restart


def test_a_foreign_lock_is_waited_out(db: Path) -> None:
    """Another process that writes, against all advice, delays confirms and loses nothing."""
    with served(db) as (server, client), LineClient(server.address) as other:
        subscribed(client, b"q", b"e")
        foreign = sqlite3.connect(db, isolation_level=None)
        foreign.execute("begin immediate")
        client.send(b"m1 publish --confirm e x\n")
        assert other.ask(b"p ping") == b"p ok "
        answer = client.line()
        foreign.execute("rollback")
        foreign.close()
        assert answer.startswith(b"m1 error ")
        until(lambda: published(client, b"m2", b"e", b"x"))


def test_acks_for_which_nobody_waits_share_a_commit(
    mqks_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commits() -> int:
        return int(client.stats("journal")["commits"])

    def ack(message: Message) -> None:
        before = client.stats()["messages_unacked"]
        message.ack()
        until(lambda: client.stats()["messages_unacked"] == before - 1)

    with monkeypatch.context() as patched:
        patched.setattr(turn_commits, "UNAWAITED_S", 3600)
        with blocking.connect(mqks_broker.url) as client, client.consume("q", ["e"]) as consumer:
            for number in range(4):
                client.publish("e", number, confirm=True)
            messages, before = [next(consumer) for _ in range(4)], commits()
            for message in messages[:3]:
                ack(message)
            assert commits() == before
            client.publish("e", 4, confirm=True)
            assert commits() == before + 1
            ack(messages[3])
            mqks_broker.stop()  # It writes what is put off.
    mqks_broker.start()
    with blocking.connect(mqks_broker.url) as client, client.consume("q") as consumer:
        message, before = next(consumer), commits()
        assert message.json() == 4
        message.ack()
        until(lambda: commits() > before)


def test_a_large_message_for_which_nobody_waits_is_written(
    mqks_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large for a commit in its turn, it is left to the task, and nothing wakes that again."""
    monkeypatch.setattr(turn_commits, "SLOW_PAUSE_FACTOR", 0)
    data = b"d" * 100_000
    with blocking.connect(mqks_broker.url) as client:
        client.set_queue("q", dead_letter_queue="dead")
        with client.consume("q", ["e"]) as consumer:
            client.publish("e", data, confirm=True)
            next(consumer).reject(dead=True)
            until(lambda: [letter.data for letter in client.peek("dead")] == [data])
