"""Databases of every schema there was, opened by the present version; and one of a later schema.

`databases/NNNN.sql` has the rows that a server of its time left when it was killed behind these
requests, all of them confirmed. Its tables are those of the migrations up to that one, and were
when it was written: the file has their digest.

- queue `mail` bound to `user.new`, `audit` to `user.new` and `user.gone`, one named by the byte ff
  to `bytes`; `later`, which is no queue, to `user.gone`; `temp` with a rule of 60 seconds
- m1 to m6 published to `user.new`, and one with the byte fe as data to `bytes`
- a consumer of `mail` with manual ack, which was given m1 to m6, acked m1 and rejected m2
- a request in error, and last a message to `user.gone`
- from schema 11 on the batch `night`, which is open

The one rule: a new migration brings its database.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from mqks.commands import main
from mqks.journal.schema import migrations
from mqks.journal.sqlite.rows import row_crc
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal

DATABASES = Path(__file__).parents[1] / "databases"
NEWEST = migrations()[-1][0]
REFUSED = 65
MAIL = [(b"m%d" % n, 1, b"n%d" % n) for n in (3, 4, 5, 6)] + [(b"m2", 2, b"n2")]
AUDIT = [(b"m%d" % n, 0, b"n%d" % n) for n in range(1, 7)] + [(b"z", 0, b"last")]
BYTES = [(b"b", 0, b"\xfe")]


def make_tables(connection: sqlite3.Connection, schema: int) -> None:
    """Empty ones, of this schema."""
    connection.create_function("row_crc", -1, row_crc)
    for _, sql in migrations()[:schema]:
        connection.executescript(sql)
    for (table,) in connection.execute("select name from sqlite_schema where type = 'table'"):
        connection.execute(f"delete from {table}")


def left(db: Path, schema: int, how: str, *, later: str = "") -> None:
    """Put it there as its server left it: folded, or with all of it in the WAL."""
    made = db.with_name("made")
    with closing(sqlite3.connect(made, isolation_level=None)) as connection:
        for pragma in ("auto_vacuum = incremental", "journal_mode = wal", "wal_autocheckpoint = 0"):
            connection.execute(f"pragma {pragma}")
        make_tables(connection, schema)
        rows = (DATABASES / f"{schema:04}.sql").read_text()
        connection.executescript(f"begin; {rows} commit; pragma user_version = {schema}; {later}")
        if how == "killed":
            shutil.copy(made, db)
            shutil.copy(f"{made}-wal", f"{db}-wal")
    if how == "stopped":
        made.rename(db)


@pytest.fixture(params=[pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def contents(db: Path) -> dict[str, bytes]:
    """Of the database and all beside it that a start makes nothing new of."""
    made_anew = "made", f"{db.name}-shm", f"{db.name}.lock"
    files = {file.name: file.read_bytes() for file in db.parent.iterdir() if file.is_file()}
    return {name: content for name, content in files.items() if name not in made_anew}


def text(answer: bytes) -> str:
    return answer.partition(b" ok ")[2].decode("utf-8", "surrogateescape")


def consumed(server: ServerProcess, queue: bytes) -> list[tuple[bytes, int, bytes]]:
    """Id, retry and data of all messages, as a consumer gets them."""
    with LineClient(server.address) as client:
        row = json.loads(text(client.ask(b"s stats queue " + queue)))
        client.send(b"c consume --confirm %b --manual-ack\n" % queue)
        assert client.line() == b"c ok "
        came = [client.line().split(b" ") for _ in range(row["ready"] + row["unacked"])]
        return [(w[2], int(w[3].partition(b",retry=")[2] or 0), w[4]) for w in came]


def is_all_there(server: ServerProcess, schema: int) -> None:
    with LineClient(server.address) as client:
        assert json.loads(text(client.ask(b"e _eval state.events_by_queues"))) == {
            "mail": ["user.new"],
            "audit": ["user.gone", "user.new"],
            "\udcff": ["bytes"],
            "later": ["user.gone"],
        }
        rules = client.ask(b"e _eval state.queues_to_delete_when_unused")
        assert rules == b'e ok {"temp": 60.0}'
        [error] = json.loads(text(client.ask(b"e stats errors")))
        assert error["action"] == "dance"
        if schema >= 9:
            [first, *_] = client.stats("audit")
            assert (first["id"], first["action"]) == (1, "rebind")
        if schema >= 10:
            assert client.ask(b"e result j") == b"e ok done temp"
        if schema >= 11:
            assert [row["name"] for row in client.stats("batches")] == ["night"]
    assert consumed(server, b"mail") == MAIL
    assert consumed(server, b"audit") == AUDIT
    assert consumed(server, b"\xff") == BYTES


def test_each_schema_has_its_database() -> None:
    for schema in range(1, NEWEST + 1):
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            make_tables(connection, schema)
            sql = "select sql from sqlite_schema where name not like 'sqlite_%' order by name"
            tables = "\n".join(text for (text,) in connection.execute(sql))
        digest = sha256(tables.encode()).hexdigest()[:16]
        assert f"-- schema {digest}\n" in (DATABASES / f"{schema:04}.sql").read_text()
    assert len([*DATABASES.iterdir()]) == len(migrations()) == NEWEST


@pytest.mark.parametrize("schema", range(1, NEWEST + 1))
def test_what_an_older_version_left_is_all_there(db: Path, schema: int, how: str) -> None:
    left(db, schema, how)
    with ServerProcess(db) as server:
        upgraded = f"event=upgraded from={schema} to={NEWEST}\n" in server.log
        assert upgraded == (schema < NEWEST)
        is_all_there(server, schema)
        with LineClient(server.address) as client:
            client.send(b"o publish --confirm --once bytes x\nr range mail\n")
            epoch = next(line for line in (client.line(), client.line()) if b"epoch" in line)
            assert epoch.endswith(b" first=3 next=8")
            assert client.ask(b"n publish --confirm user.new next") == b"n ok "
    with ServerProcess(db) as server:
        assert [each[0] for each in consumed(server, b"mail")][-2:] == [b"m2", b"n"]
        # Published once by the version that knew how to, it came no more.
        assert len(consumed(server, b"\xff")) == 1 + (schema == 1)


@pytest.mark.parametrize(
    "schema", [1, NEWEST, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, NEWEST))]
)
def test_what_an_older_version_left_can_be_looked_at_and_backed_up(
    db: Path, schema: int, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left(db, schema, how)
    before, copy = db.read_bytes(), db.with_name("copy.db")
    assert main(["verify", str(db)]) == 0
    capsys.readouterr()
    assert main(["inspect", "messages", "mail", "--json", "--data", "--db", str(db)]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(m["id"].encode(), m["retry"], m["data"].encode()) for m in told] == MAIL
    assert main(["export", "--messages", "--db", str(db)]) == 0
    exported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    named = ({"schedules": 1} if schema >= 8 else {}) | ({"batches": 1} if schema >= 11 else {})
    end = {"kind": "end", "queues": 4, "messages": 13, "bindings": 5} | named
    assert exported[-1] == end
    assert main(["backup", str(copy), "--db", str(db)]) == 0
    assert db.read_bytes() == before
    with ServerProcess(copy) as server:
        is_all_there(server, schema)


@pytest.mark.parametrize(
    ("schema", "harm", "place"),
    [
        (3, "update queue set delete_delay_s = 1 where id = 4", "is damaged: (4, b'temp', "),
        (3, "update queue set crc = crc + 1 where id = 1", "a row is damaged: (1, b'mail', "),
        (3, "delete from queue where id = 1", "table queue: 3 rows are whole, 4 were written"),
        (3, "update tally set sum = sum + 1 where name = 'queue'", "tally: a row is damaged"),
        (1, "update queue set delete_when_unused = x'' where id = 1", "is damaged: (1, b'mail', "),
        (2, "update queue set delete_when_unused = 2 where id = 1", "is damaged: (1, b'mail', "),
        (2, "update queue set delete_delay_s = x'31' where id = 4", "is damaged: (4, b'temp', "),
        (2, "update queue set delete_delay_s = -1 where id = 4", "is damaged: (4, b'temp', "),
        (4, "delete from binding where event = x'6279746573'", "4 rows are whole, 5 were written"),
        (5, "update segment set crc = crc + 1 where id = 1", "its checksum does not match"),
        (6, "delete from segment where id = 2", "messages are missing"),
    ],
)
def test_what_is_damaged_is_not_made_right_by_a_migration(
    db: Path, schema: int, harm: str, place: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left(db, schema, how, later=harm)
    before = contents(db)
    assert main(["verify", str(db)]) == REFUSED
    assert " ".join(place.split()[-4:]) in " ".join(capsys.readouterr().out.split())
    code, log = refusal(db)
    assert code == REFUSED
    assert place in log
    assert contents(db) == before
    with ServerProcess(db, "--salvage") as server:
        assert place in server.log
    assert main(["verify", str(db)]) == 0


@pytest.mark.parametrize("flags", [(), ("--salvage",)])
def test_a_later_schema_is_refused_and_left_alone(
    db: Path, how: str, flags: tuple[str, ...]
) -> None:
    left(db, NEWEST, how, later=f"create table later (x); pragma user_version = {NEWEST + 1};")
    before = contents(db)
    assert main(["verify", str(db)]) == REFUSED
    code, log = refusal(db, *flags)
    assert code == REFUSED
    assert f"schema version {NEWEST + 1}, this mqks supports versions up to {NEWEST}" in log
    assert contents(db) == before
