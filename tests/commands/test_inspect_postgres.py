"""`mqks inspect`, `export` and `verify` of a journal in PostgreSQL: they show what they show of a
file, also while a broker serves it, and they hold nothing up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqks.commands import main
from mqks.errors import InspectionFailed, JournalDamaged
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from tests.journal.test_copy import ALONE, copied, something_of_everything
from tests.kit.line_client import LineClient
from tests.kit.postgres import Postgres
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("psycopg", reason="psycopg is not installed")

from mqks.journal.postgres.database import Database

MIB = 1024 * 1024
OF_A_FILE = {"path", "epoch", "oldest_age_s"}
"""What differs between a journal and its copy."""
OF_FILES = {"db_bytes", "wal_bytes", "disk_free_bytes", "page_bytes", "free_pages"}
COMMANDS = [
    *("inspect queues", "inspect queue mail", "inspect queue od\udcffd", "inspect bindings"),
    *("inspect bindings user.new", "inspect messages mail --data --limit 1000"),
    *("inspect messages od\udcffd --data", "inspect messages dead", "inspect messages mail"),
    *("inspect messages mail --scheduled", "inspect unacked", "inspect unacked mail"),
    *(
        *("inspect journal", "inspect stats", "inspect errors", "inspect audit"),
        *("inspect schedules", "inspect batches", "inspect results", "export", "export --messages"),
    ),
]


@contextmanager
def served(url: DatabaseUrl, **limits: int) -> Iterator[LineClient]:
    """By a broker in this process, a client."""
    with (
        Broker(url, db_replication="none", **limits) as broker,
        LineClient(("127.0.0.1", broker.port)) as client,
    ):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        yield client


def shown(capsys: pytest.CaptureFixture[str], command: str, db: str) -> list[dict[str, Any]]:
    words = command.split()
    capsys.readouterr()
    assert main([*words, "--db", db, *(["--json"] if words[0] == "inspect" else [])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    ours = OF_A_FILE | (OF_FILES | {"schema_version"} if words[-1] == "journal" else set())
    return [
        {key: value for key, value in json.loads(line).items() if key not in ours}
        for line in out.splitlines()
    ]


@pytest.mark.slow
def test_a_database_and_a_file_show_the_same(
    journal_url: DatabaseUrl, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    something_of_everything(db)
    assert copied(db, journal_url) == 0
    for command in COMMANDS:
        found = shown(capsys, command, journal_url.text)
        assert found
        assert found == shown(capsys, command, str(db)), command
    assert main(["verify", journal_url.text, "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert main(["verify", str(db), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert verified | {"file": ""} == expected | {"file": ""}


def test_a_journal_is_read_while_it_is_served(
    postgres: Postgres, journal_url: DatabaseUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    """The segments that were listed are dropped and compacted meanwhile."""
    with served(journal_url) as client:
        for number in range(200):
            assert client.ask(b"m%d publish --confirm e %d" % (number, number)).endswith(b"ok ")
        with Database.open(journal_url) as found:
            assert "pid" in found.server
            listed = found.facts.segments
            messages = found.messages(b"q")
            first = [next(messages).id for _ in range(10)]
            assert first == [b"m%d" % number for number in range(10)]
            with postgres.connection() as operator:
                rows = operator.execute(
                    "select state from pg_stat_activity where application_name = 'mqks'"
                )
                assert {state for (state,) in rows} <= {"idle", "active"}
            # All but every tenth message are settled.
            client.send(b"c consume q --manual-ack --prefetch=200\n")
            got = [client.line().split(b" ")[2] for _ in range(200)]
            gone = [b"ack c %b" % each for each in got if not each.endswith(b"7")]
            client.send(b"".join(b"a %b\n" % each for each in gone))
            assert client.ask(b"a trim --confirm q 1") == b"a ok 0"
            until(lambda: segments(journal_url) < listed // 2)
            rest = [message.id for message in messages]
            assert rest[-19:] == [b"m%d7" % number for number in range(1, 20)]
            numbers = [int(each[1:]) for each in rest]
            assert numbers == sorted(set(numbers))
        assert main(["inspect", "queues", "--db", journal_url.text, "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["unacked"] == 20
        assert "has claimed it; these are the contents of the database" in err
        assert main(["inspect", "consumers", "--db", journal_url.text]) == 0


def segments(url: DatabaseUrl) -> int:
    with Database.open(url) as found:
        assert found.damage == []
        return found.facts.segments


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("update segment set text = 'x' where id = 2", "its checksum does not match; it held"),
        ("update segment set head = 'x' where id = 2", "its checksum does not match; it held"),
        ("delete from segment where id = 2", "2 exist, 3 were written"),
    ],
)
def test_damage_is_found(
    postgres: Postgres,
    journal_url: DatabaseUrl,
    capsys: pytest.CaptureFixture[str],
    change: str,
    told: str,
) -> None:
    with served(journal_url) as client:
        for number in range(3):
            assert client.ask(b"m%d publish --confirm e x" % number) == b"m%d ok " % number
    schema = journal_url.text.rpartition("schema=")[2]
    with postgres.connection() as operator:
        operator.execute(change.replace("segment", f"{schema}.segment", 1).encode())
    assert main(["verify", journal_url.text]) == JournalDamaged.exit_code
    assert told in capsys.readouterr().out
    code = main(["inspect", "messages", "q", "--db", journal_url.text, "--json"])
    out = capsys.readouterr().out.splitlines()
    whole = [json.loads(line)["id"] for line in out if not json.loads(line)["doubtful"]]
    assert {"m0", "m2"} <= set(whole)
    # A text is read when its messages are shown.
    assert code == JournalDamaged.exit_code


def test_what_can_not_be_read_is_one_line(
    postgres: Postgres, journal_url: DatabaseUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["inspect", "queues", "--db"], ["verify"], ["export", "--db"]):
        assert main([*command, journal_url.text]) == InspectionFailed.exit_code
        assert "no journal in schema" in capsys.readouterr().err
        nowhere = "postgresql://u:secret@127.0.0.1:1/d"
        assert main([*command, nowhere]) == InspectionFailed.exit_code
        told = capsys.readouterr().err
        assert "can't be read" in told
        assert "secret" not in told
        assert told.count("\n") == 1
    assert main(["new-epoch", "--db", journal_url.text, *ALONE]) == InspectionFailed.exit_code


MEASURED = """
import sys
from mqks.commands import main
code = main(sys.argv[1:])
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
sys.exit(code)
"""


def peak_bytes(*words: str) -> int:
    """Memory of a command at its peak. (`ru_maxrss` would include that of the parent.)"""
    run = [sys.executable, "-c", MEASURED, *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory it was")
def test_verify_takes_little_more_memory_than_the_largest_segment(journal_url: DatabaseUrl) -> None:
    size = 24 * MIB
    limits = {"line_bytes_max": 2 * size, "batch_bytes_max": 2 * size}
    with served(journal_url, **limits) as client:
        least = peak_bytes("verify", journal_url.text)
        for number in range(3):
            name = b"m%d" % number
            assert client.ask(name + b" publish --confirm e " + b"x" * size) == name + b" ok "
    peak = peak_bytes("verify", journal_url.text)
    assert peak < least + 2.5 * size
