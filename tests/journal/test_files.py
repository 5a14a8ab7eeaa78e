"""Database files seen from outside: whole ones, served ones, and damaged ones as far as they go."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from mqks.broker.spine.message.policy import Policy
from mqks.commands import main
from mqks.errors import InspectionFailed, JournalDamaged
from mqks.journal.sqlite.database_file import DatabaseFile
from mqks.journal.sqlite.rows import row_crc
from mqks.protocol.requests import DeleteRule
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import until

PAGE = 4096
ROOT = Path(__file__).parents[2]
DAMAGED, WRONG_SETTING = 65, 78


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def stopped(db: Path) -> Path:
    """Two queues with the messages m0 to m49 in a commit each, stopped cleanly."""
    with served(db) as (server, client):
        for queue in (b"q", b"twin"):
            assert client.ask(b"s subscribe --confirm %b e" % queue) == b"s ok "
        publish(client, 50)
        server.terminate()
    return db


def publish(client: LineClient, count: int) -> None:
    for number in range(count):
        line = b"m%d publish --confirm e text %d" % (number, number)
        assert client.ask(line) == b"m%d ok " % number


# ------------------------------------------------------------------------------- the reader


def test_all_that_is_there_is_told(db: Path) -> None:
    with served(db) as (server, client):
        assert client.ask(b"s subscribe --confirm q\xff e f") == b"s ok "
        assert client.ask(b"d delete_queue --confirm q\xff --when-unused=60") == b"d ok "
        assert client.ask(b"r rebind --confirm nobody e") == b"r ok "
        publish(client, 5)
        client.send(b"c consume q\xff --manual-ack --delete-queue-when-unused=60\n")
        assert [client.line().split(b" ")[2] for _ in range(5)][-1] == b"m4"
        assert client.ask(b"a ack --confirm c m0") == b"a ok "
        client.send(b"r reject --confirm c m1\n")
        assert sorted([client.line(), client.line()])[1] == b"r ok "
        error = client.ask(b"x frobnicate").split(b" ")[2].decode()
        assert client.ask(b"p publish --confirm e last") == b"c ok p event=e last"
        assert client.line() == b"p ok "
        with DatabaseFile.open(db) as file:
            found = list(file.messages(b"q\xff"))
            [queue] = file.queues
        server.kill()
    assert (queue.name, queue.policy, queue.next_seq) == (b"q\xff", Policy(DeleteRule(60.0)), 8)
    assert queue.ready + queue.unacked == len(found) == 5
    with DatabaseFile.open(db) as file:
        assert file.damage == []
        assert file.bindings == [(b"nobody", b"e"), (b"q\xff", b"e"), (b"q\xff", b"f")]
        [queue] = file.queues
        assert (queue.ready, queue.unacked) == (0, 5)
        messages = list(file.messages(b"q\xff"))
        assert [(each.seq, each.id, each.event, each.data, each.retry) for each in messages] == [
            (3, b"m2", b"e", b"text 2", 1),
            (4, b"m3", b"e", b"text 3", 1),
            (5, b"m4", b"e", b"text 4", 1),
            (6, b"m1", b"e", b"text 1", 2),
            (7, b"p", b"e", b"last", 1),
        ]
        assert [each.seq for each in file.messages(b"q\xff", after=5)] == [6, 7]
        assert list(file.messages(b"nobody")) == []
        [told] = file.errors()
        assert (told.id, told.action) == (error, b"frobnicate")
        assert file.errors(before=error) == []
        assert file.facts.epoch
        assert file.facts.wal_bytes


def test_a_file_that_is_looked_at_is_as_it_was(stopped: Path) -> None:
    before = stopped.read_bytes()
    there = sorted(stopped.parent.iterdir())
    with DatabaseFile.open(stopped) as file:
        assert [(each.name, each.ready) for each in file.queues] == [(b"q", 50), (b"twin", 50)]
        assert [each.id for each in file.messages(b"q")] == [b"m%d" % n for n in range(50)]
    assert main(["verify", str(stopped)]) == 0
    assert sorted(stopped.parent.iterdir()) == there
    assert stopped.read_bytes() == before


def test_what_moves_while_it_is_read_is_found_again(
    server: ServerProcess, client: LineClient, db: Path
) -> None:
    """The server compacts what the reader has listed but not read yet."""
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    publish(client, 20)
    with DatabaseFile.open(db) as file:
        messages = file.messages(b"q")
        assert file.facts.segments <= 20
        assert [each.id for each in islice(messages, 2)] == [b"m0", b"m1"]
        publish(client, 600)  # Small segments are merged when 512 have gathered.
        with DatabaseFile.open(db) as later:

            def is_merged() -> bool:
                later.refresh()
                return later.facts.segments <= 200

            until(is_merged)
        rest = [each.id for each in messages]
        assert rest[:18] == [b"m%d" % number for number in range(2, 20)]
        assert file.damage == []
    server.terminate()


def test_what_is_no_database_is_refused(db: Path) -> None:
    with pytest.raises(InspectionFailed, match="no such file"):
        DatabaseFile.open(db)
    db.write_bytes(b"")
    with pytest.raises(InspectionFailed, match="no such table"):
        DatabaseFile.open(db)
    db.write_bytes(b"x" * 10_000)
    with pytest.raises(JournalDamaged, match=r"can't be read: file is not a database$"):
        DatabaseFile.open(db)


# ----------------------------------------------------------------------------------- damage


def page_of(db: Path, table: str) -> int:
    with closing(sqlite3.connect(db)) as connection:
        ((page,),) = connection.execute(
            "select rootpage from sqlite_schema where name = ?", (table,)
        )
    return int(page)


def overwrite(db: Path, page: int) -> None:
    with db.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(b"\xa5" * PAGE)


def alive(file: DatabaseFile) -> dict[bytes, list[bytes]]:
    return {each.name: [m.id for m in file.messages(each.name)] for each in file.queues}


ALL = [b"m%d" % number for number in range(50)]


def test_a_flipped_byte_makes_its_segment_doubtful_and_no_other(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = stopped.read_bytes()
    assert raw.count(b"text 33") == 1
    stopped.write_bytes(raw.replace(b"text 33", b"test 33"))
    with DatabaseFile.open(stopped) as file:
        assert alive(file) == {b"q": ALL, b"twin": ALL}
        [doubtful] = [each for each in file.messages(b"q") if each.doubtful]
        assert (doubtful.id, doubtful.data) == (b"m33", b"test 33")
        [damage] = file.damage
    assert damage.place.startswith("segment ")
    assert "checksum" in damage.what
    assert main(["verify", str(stopped), "--json"]) == DAMAGED
    out, err = capsys.readouterr()
    assert json.loads(out)["damage"] == [damage._asdict()]
    assert "damaged: 1 places" in err


def test_a_page_of_segments_is_lost_and_the_others_are_not(stopped: Path) -> None:
    with closing(sqlite3.connect(stopped)) as connection:
        ((pages,),) = connection.execute("pragma page_count")
        roots = {page for (page,) in connection.execute("select rootpage from sqlite_schema")}
    raw = stopped.read_bytes()
    for page in set(range(2, pages + 1)) - roots:
        stopped.write_bytes(raw)
        if page == 2:  # Where SQLite keeps what it needs for a vacuum.
            continue
        overwrite(stopped, page)
        with DatabaseFile.open(stopped) as file:
            found = alive(file)
            if file.damage:
                assert 0 < len(found[b"q"]) < 50
                assert set(found[b"twin"]) == set(found[b"q"])
        assert main(["verify", str(stopped)]) == DAMAGED


@pytest.mark.parametrize("table", ["queue", "binding", "meta", "error", "segment"])
def test_a_lost_table_takes_nothing_else_with_it(stopped: Path, table: str) -> None:
    overwrite(stopped, page_of(stopped, table))
    with DatabaseFile.open(stopped) as file:
        found = alive(file)
        bindings = file.bindings
        places = [place for place, _ in file.damage]
    assert table == "error" or f"table {table}" in places
    assert bindings == ([] if table == "binding" else [(b"q", b"e"), (b"twin", b"e")])
    match table:
        case "queue":  # Its messages are there, under the number that segments know it by.
            assert found == {b"queue#1": ALL, b"queue#2": ALL}
        case "segment":
            assert found == {b"q": [], b"twin": []}
        case _:
            assert found == {b"q": ALL, b"twin": ALL}
    assert main(["verify", str(stopped)]) == DAMAGED


def test_a_file_that_lost_its_end_is_read_up_to_there(stopped: Path) -> None:
    raw = stopped.read_bytes()
    stopped.write_bytes(raw[:-PAGE])
    with DatabaseFile.open(stopped) as file:
        found = alive(file)
        assert file.damage[0].place == "file"
    assert 0 < len(found[b"q"]) < 50
    for size in range(0, len(raw), PAGE // 2):
        stopped.write_bytes(raw[:size])
        assert main(["verify", str(stopped)]) == DAMAGED


def test_rows_without_sense_are_told(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(stopped)) as connection:
        connection.execute("update queue set next_seq = 'many' where name = cast('q' as blob)")
        row = b"a b", b"e", row_crc("binding", b"a b", b"e")
        connection.execute("insert into binding values (?, ?, ?)", row)
        connection.commit()
    assert main(["verify", str(stopped)]) == DAMAGED
    out = capsys.readouterr().out
    assert "a row is damaged: (1, b'q'" in out
    assert "a row is damaged: (b'a b', b'e'" in out


def test_a_served_file_is_verified_but_for_its_structure(
    client: LineClient, db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    publish(client, 5)
    assert main(["verify", str(db)]) == 0
    out, err = capsys.readouterr()
    assert "1 queues, 5 messages" in out
    assert "served" in err


# ------------------------------------------------------------------------------ check-config


def test_each_setting_is_told_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "own.toml"
    config.write_text("port = 1234\nlog_level = 'debug'\n")
    monkeypatch.setenv("MQKS_LOG_LEVEL", "error")
    assert main(["check-config", "--config", str(config), "--db", "x.db", "--json"]) == 0
    told = {
        row.pop("setting"): row for row in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert told["port"] == {"value": 1234, "from": f"{config}: port"}
    assert told["log_level"] == {"value": "error", "from": "MQKS_LOG_LEVEL"}
    assert told["db"] == {"value": "x.db", "from": "--db"}
    assert told["host"] == {"value": "127.0.0.1", "from": "default"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.toml"]


def test_values_are_shown_as_one_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^line_bytes_max +1MiB +default$", out, re.M)
    assert re.search(r"^insecure +false +default$", out, re.M)
    # The sum of what the documentation says.
    memory = re.search(r"^\(memory, at most\) +(\d+)MiB +limits$", out, re.M)
    table = (ROOT / "docs/settings.md").read_text().partition("### Memory use")[2]
    told = re.findall(r"\| (\d+) MiB \|$", table.partition("###")[0], re.M)
    assert memory
    assert sum(map(int, told)) == pytest.approx(int(memory[1]), rel=0.01)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "70000"], "--port: must be from 0 to 65535"),
        (["--port", "x", "--queues-max", "y"], "--queues-max: must be a whole number"),
        (["--db", "nowhere/x.db"], "db: the directory"),
        (["--db", "."], "db: . is not a file"),
        (["--unix", "nowhere/socket"], "unix: the directory"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_is_wrong_is_told(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-config", *flags]) == WRONG_SETTING
    assert told in capsys.readouterr().err


# ------------------------------------------------------------------------------ a start in vain


def test_a_new_database_is_told_or_refused(db: Path) -> None:
    code, log = refusal(db, "--db-must-exist")
    assert code == WRONG_SETTING
    assert log.splitlines()[-1] == f"mqks: {db}: no such file, and db_must_exist is set"
    assert not list(db.parent.iterdir())
    with ServerProcess(db) as server:
        assert f"event=created db={db}\n" in server.log
    with ServerProcess(db, "--db-must-exist") as server:
        assert "event=created" not in server.log


def test_a_directory_that_cannot_be_entered_is_told_in_one_line(tmp_path: Path) -> None:
    (closed := tmp_path / "closed").mkdir()
    closed.chmod(0)
    # Root may do everything, but for these capabilities.
    limited = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if os.geteuid() == 0 and not shutil.which(limited[0]):
        pytest.skip("there is no setpriv")
    tried = ("serve", "x.db"), ("serve", "y/x.db"), ("check-config", "y/x.db")
    program = "import sys; from mqks.commands import main\n" + "".join(
        f"print(main([{command!r}, '--db', {str(closed / path)!r}]), flush=True)\n"
        for command, path in tried
    )
    mqks = [*(limited if os.geteuid() == 0 else []), sys.executable, "-c", program]
    done = subprocess.run(mqks, capture_output=True, text=True, check=False)
    codes = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert codes == [str(WRONG_SETTING)] * 3
    told = [line for line in done.stderr.splitlines() if "event=starting" not in line]
    assert [line[:6] for line in told] == ["mqks: "] * 3, told
    closed.chmod(0o700)


def test_a_read_only_file_system_is_no_wrong_setting(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path} && exec {sys.executable} -m mqks serve --db "
    command = ["unshare", "--mount", "sh", "-c", f"{mount} {tmp_path / 'mqks.db'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "permission" in done.stderr.lower():
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert (done.returncode, "Read-only file system" in done.stderr) == (os.EX_IOERR, True)
