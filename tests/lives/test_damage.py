"""What the journal says is believed when it is whole; else it is refused, or salvaged, by place."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from mqks.commands import main
from tests import damage
from tests.kit.line_client import LineClient
from tests.kit.seeds import printed_seed
from tests.kit.server_process import ServerProcess, refusal

DAMAGED = 65


def ask(client: LineClient, name: bytes, rest: bytes) -> None:
    assert client.ask(name + b" " + rest) == name + b" ok "


@pytest.fixture
def stopped(db: Path) -> Path:
    """Queues q, with m0 to m4 in a commit each, of which m0 was acked by a segment of its own, and
    temp with a rule; o0 to o2 published once; one error; stopped cleanly."""
    with ServerProcess(db) as server, LineClient(server.address) as client:
        ask(client, b"s", b"subscribe --confirm q e f")
        ask(client, b"r", b"rebind --confirm later e")
        ask(client, b"t", b"consume --confirm temp --delete-queue-when-unused=600")
        ask(client, b"d", b"delete_consumer --confirm t")
        for number in range(5):
            ask(client, b"m%d" % number, b"publish --confirm e text")
        for number in range(3):
            ask(client, b"o%d" % number, b"publish --confirm --once --to=temp nowhere x")
        client.send(b"c consume q --manual-ack\n")
        assert [client.line().split(b" ")[2] for _ in range(5)] == [b"m%d" % n for n in range(5)]
        assert client.ask(b"a ack --confirm c m0") == b"a ok "
        assert client.ask(b"x dance").startswith(b"x error ")
        ask(client, b"r", b"rebind --confirm later f")
        assert server.stop() == 0
    return db


def change(db: Path, sql: str) -> None:
    with closing(sqlite3.connect(db, isolation_level=None)) as connection:
        assert connection.execute(sql).rowcount > 0


def bodies(db: Path, *flags: str) -> tuple[dict[bytes, list[bytes]], str]:
    """Ids of the messages of each queue that has some, as a server finds them; and its log."""
    with ServerProcess(db, *flags) as server, LineClient(server.address) as client:
        found: dict[bytes, list[bytes]] = {}
        for name in (b"q", b"p", b"queue#1"):
            client.send(b"p peek %b --limit=100\n" % name)
            while (line := client.line()) != b"p ok --end":
                found.setdefault(name, []).append(line.split(b" ")[2])
        assert server.stop() == 0
        return found, server.log


def refuses(db: Path, place: str, *flags: str) -> None:
    """A server does, and says where it is damaged."""
    code, log = refusal(db, *flags)
    assert code == DAMAGED
    assert place in log
    assert "Traceback" not in log


ALL = {b"q": [b"m1", b"m2", b"m3", b"m4"]}


@pytest.mark.parametrize(
    ("sql", "place", "left"),
    [
        ("update queue set id = 9 where id = 1", "table queue: a row is damaged: (9, b'q'", "q"),
        ("update queue set name = cast('p' as blob) where id = 1", "(1, b'p'", "q"),
        ("update queue set next_seq = 300 where id = 1", "table queue: a row is damaged", "q"),
        ("update queue set name = 7 where id = 1", "table queue: a row is damaged: (1, 7", "q"),
        ("delete from queue where id = 1", "table queue: 1 rows are whole, 2 were written", "q"),
        ("update queue set policy = '{}' where id = 2", "(2, b'temp', '{}', ", ""),
        (
            "update binding set event = cast('g' as blob) where event = cast('f' as blob)",
            "table binding: a row is damaged: (b'later', b'g'",
            "",
        ),
        ("delete from binding where queue = cast('q' as blob)", "table binding: 1 rows", ""),
        ("update once set ids = cast('o9' as blob) where number = 2", "table once: a row is", ""),
        ("delete from once where number = 3", "table once: 2 rows are whole, 3 were written", ""),
        ("update meta set value = '0123456789abcdef'", "table meta: a row is damaged", ""),
        ("delete from meta", "table meta: there is no epoch", ""),
        ("update tally set next = 1 where name = 'queue'", "table tally: a row is damaged", ""),
        ("delete from tally where name = 'segment'", "the tally of segment is missing", ""),
        ("delete from segment where id = (select max(id) from segment)", "table segment: ", "ack"),
        ("delete from segment where id = (select min(id) from segment)", "table segment: ", ""),
        (
            "update segment set body = 'text' where id in (select max(id) from segment)",
            "segment ",
            "ack",
        ),
    ],
)
def test_a_row_that_is_not_what_was_written_is_refused_and_can_be_salvaged(
    stopped: Path, sql: str, place: str, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(stopped, sql)
    before = stopped.read_bytes()
    refuses(stopped, place)
    assert stopped.read_bytes() == before
    assert main(["verify", str(stopped)]) == DAMAGED
    assert " ".join(place.split()[3:]) in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", "queues", "--db", str(stopped)]) == DAMAGED
    found, log = bodies(stopped, "--salvage")
    assert f"salvaged without it: {place}" in log or place in log
    expected = dict(ALL)
    match left:
        case "q":
            expected[b"queue#1"] = expected.pop(b"q")
        case "ack":
            expected[b"q"] = [b"m0", *expected[b"q"]]
    assert found == expected
    capsys.readouterr()
    assert main(["verify", str(stopped)]) == 0, capsys.readouterr().out
    found, log = bodies(stopped)
    assert found == expected
    assert "journal_damaged" not in log


def test_a_damaged_error_is_told_and_keeps_nobody_out(stopped: Path) -> None:
    change(stopped, "update error set reason = 'another'")
    found, log = bodies(stopped)
    assert found == ALL
    assert "table error: a row is damaged" in log
    _, log = bodies(stopped, "--salvage")
    assert "table error: a row is damaged" in log
    assert "journal_damaged" not in bodies(stopped)[1]


# ------------------------------------------------------------------------------------ the WAL

HEADER, FRAME = 32, 4096 + 24


@pytest.fixture
def killed(db: Path) -> tuple[Path, Path]:
    """A database and its WAL, in which each of m0 to m9 has a commit of its own."""
    with ServerProcess(db) as server, LineClient(server.address) as client:
        ask(client, b"s", b"subscribe --confirm q e")
        for number in range(10):
            ask(client, b"m%d" % number, b"publish --confirm e text-%d" % number)
        server.kill()
    return db, db.with_name(f"{db.name}-wal")


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("at", [4, 20, 9, 17, 2000])
def test_commits_behind_a_damaged_place_of_the_wal_are_missed(
    killed: tuple[Path, Path], at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    db, its_wal = killed
    content = its_wal.read_bytes()
    frame = content.index(b"text-5") // FRAME  # From 0 on.
    flip(its_wal, at if at in (4, 20) else HEADER + frame * FRAME + at)
    place = "its header" if at in (4, 20) else f"frame {frame + 1}"
    before = db.read_bytes(), its_wal.read_bytes()
    refuses(db, f"mqks.db-wal is damaged: {place} is not whole")
    assert (db.read_bytes(), its_wal.read_bytes()) == before
    assert main(["verify", str(db)]) == DAMAGED
    assert f"{place} is not whole" in "".join(capsys.readouterr())
    found, log = bodies(db, "--salvage")
    assert f"salvaged without it: mqks.db-wal is damaged: {place}" in log
    assert found.get(b"q", []) == [b"m%d" % n for n in range(5 if at > 4 and at != 20 else 0)]
    assert main(["verify", str(db)]) == 0


def test_a_torn_last_commit_is_told_and_keeps_nobody_out(
    killed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    db, its_wal = killed
    content = its_wal.read_bytes()
    flip(its_wal, content.rindex(b"text-9"))
    assert main(["verify", str(db)]) == 0
    assert "ends in a torn commit" in capsys.readouterr().err
    for told in (True, False):
        with ServerProcess(db) as server, LineClient(server.address) as client:
            assert ("event=wal_torn" in server.log) == told
            assert client.ask(b"r range q").endswith(b" first=1 next=10" if told else b" next=11")
            ask(client, b"m9", b"publish --confirm e again")
            server.kill()


def test_a_frame_torn_in_its_header_is_the_last_commit(stopped: Path) -> None:
    """It has its salts, and the checksum of what was there before: frames of the WAL's last turn
    follow it by that."""
    its_wal, last = stopped.with_name(f"{stopped.name}-wal"), 63
    with closing(sqlite3.connect(stopped, isolation_level=None)) as connection:
        ((version,),) = connection.execute("pragma user_version")

        def commit(frames: int) -> bytes:
            for _ in range(frames):
                connection.execute(f"pragma user_version = {version}")
            return its_wal.read_bytes()

        commit(last + 20)
        connection.execute("pragma wal_checkpoint(restart)")
        before, after = commit(last - 1), commit(1)
        database = stopped.read_bytes()
    sector = HEADER + (last - 1) * FRAME + 16
    assert sector % 512 == 0
    assert before[:sector] != after[:sector]
    stopped.write_bytes(database)
    its_wal.write_bytes(after[:sector] + before[sector:])
    found, log = bodies(stopped)
    assert found == ALL
    assert "event=wal_torn" in log


def test_a_commit_that_was_not_finished_is_nothing_to_tell(killed: tuple[Path, Path]) -> None:
    db, its_wal = killed
    its_wal.write_bytes(its_wal.read_bytes()[:-FRAME])
    found, log = bodies(db)
    assert found == {b"q": [b"m%d" % n for n in range(9)]}
    assert "level=warning" not in log


def test_commits_without_order_are_what_normal_gives_up(killed: tuple[Path, Path]) -> None:
    db, its_wal = killed
    flip(its_wal, its_wal.read_bytes().index(b"text-5"))
    found, log = bodies(db, "--synchronous", "normal")
    assert found == {b"q": [b"m%d" % n for n in range(5)]}
    assert "event=wal_torn" in log


def test_an_empty_file_beside_a_wal_is_damage(killed: tuple[Path, Path]) -> None:
    db, its_wal = killed
    before = its_wal.read_bytes()
    db.write_bytes(b"")
    assert refusal(db, "--salvage")[0] == DAMAGED
    db.unlink()
    assert refusal(db)[0] == DAMAGED
    assert its_wal.read_bytes() == before


# ---------------------------------------------------------------------------- SQLite's own pages


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        (b"policy text", b"policz text", "table queue: differs from the schema"),
        (b"CREATE TABLE once", b"CREATE TABLE ooce", "malformed database schema"),
        (b"format 3\0\x10\0\2\2", b"format 3\0\x10\0\6\2", "header has unknown formats [6, 2]"),
    ],
)
def test_a_damaged_schema_is_refused(stopped: Path, old: bytes, new: bytes, place: str) -> None:
    content = stopped.read_bytes()
    assert old in content
    stopped.write_bytes(content.replace(old, new))
    for flags in ([], ["--salvage"]):
        refuses(stopped, place, *flags)
    assert main(["verify", str(stopped)]) == DAMAGED


def test_a_database_of_another_program_is_refused(db: Path) -> None:
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("create table queue (x)")
        connection.commit()
    before = db.read_bytes()
    refuses(db, "no version of the schema")
    assert db.read_bytes() == before


# ------------------------------------------------------------------------------- any place at all


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_goes_by_without_a_word(cases: int) -> None:
    """`python -m tests.damage 10000` does the same at length."""
    figures = damage.run(cases, printed_seed())
    assert figures.failures == []
    outcomes: Counter[str] = sum(figures.outcomes.values(), Counter())
    assert outcomes.total() == cases
    assert outcomes["detected"] > cases // 3


def test_a_segment_that_is_listed_and_not_found_ends_in_an_error(db: Path) -> None:
    """A key in an inner page is wrong: a scan comes by what a look-up by id misses."""
    with ServerProcess(db) as server, LineClient(server.address) as client:
        ask(client, b"s", b"subscribe --confirm q e")
        for number in range(40):
            ask(client, b"m%d" % number, b"publish --confirm e " + b"x" * 3000)
        assert server.stop() == 0
    with closing(sqlite3.connect(db)) as connection:
        ((root,),) = connection.execute(
            "select rootpage from sqlite_schema where name = 'segment'"
        ).fetchall()
    at = (root - 1) * 4096
    content = bytearray(db.read_bytes())
    assert content[at] == 5, "no inner page"
    (cells,) = content[at + 4 : at + 5]
    for cell in range(cells):
        place = at + int.from_bytes(content[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
        content[place + 4] = 1  # The greatest id of the page below it.
    db.write_bytes(content)
    refuses(db, "out of order")
    assert main(["verify", str(db)]) == DAMAGED
    assert main(["inspect", "messages", "q", "--db", str(db)]) == DAMAGED
