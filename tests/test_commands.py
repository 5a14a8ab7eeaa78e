"""The command line from outside: what it prints, and with which code it ends."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import mqks
from mqks.commands import main
from mqks.errors import ConfigurationError, DatabaseLocked, JournalFailed, MqksError
from mqks.settings import SETTINGS

MQKS = [sys.executable, "-m", "mqks"]
EARLY, LATE = "6741f3c2a90be4d5c8000001", "6741f3c3a90be4d5c8000002"


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    """A database in the middle of being served: in WAL mode, with its writer connected."""
    path = tmp_path / "ready #1?.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("pragma journal_mode = wal")
        writer.execute(
            "create table error(id text primary key, time_us integer, connection text,"
            " request_id blob, action blob, reason text)"
        )
        writer.executemany(
            "insert into error values (?, ?, ?, ?, ?, ?)",
            [
                (LATE, 1732375491000250, "127.0.0.1:4711", b"m\xff\x1b[2J", b"publish", "no event"),
                (EARLY, 1732375490123456, "127.0.0.1:4711", None, b"frob", "unknown action"),
            ],
        )
        yield path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "version") == (0, f"mqks {mqks.__version__}\n", "")


@pytest.mark.parametrize("start", [["-m", "mqks"], ["cli.py"]])
def test_the_other_ways_to_start(start: list[str]) -> None:
    root = Path(__file__).parents[1]

    done = subprocess.run(
        [sys.executable, *start, "version"], cwd=root, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"mqks {mqks.__version__}\n"


def test_help_shows_the_commands_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")

    assert code == 0
    for word in ("serve", "inspect", "version", "mqks serve --db mqks.db"):
        assert word in out


def test_serve_help_shows_every_setting_in_groups_on_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "serve", "--help")

    assert code == 0
    assert "Example: mqks serve --db mqks.db" in out
    for setting in SETTINGS.values():
        assert f" {setting.flag} " in out
        assert setting.about.group in out


def test_help_does_not_load_the_broker() -> None:
    code = "import sys, mqks.commands; print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "mqks.settings" in done.stdout
    for room in ("mqks.server", "mqks.broker", "mqks.journal"):
        assert room not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["serve", "--frobnicate"], ["serve", "--port"], ["inspect", "error"]],
)
def test_a_command_line_not_understood_ends_with_64(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(capsys, *arguments)[0] == 64


def test_a_bad_setting_ends_with_one_line_and_78(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "serve", "--port", "70000") == (
        78,
        "",
        "mqks: --port: must be from 0 to 65535, not '70000'\n",
    )


def test_a_switch_can_be_turned_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mqks.toml").write_text('insecure = true\nhost = "192.0.2.1"\n')

    code, _, err = run(capsys, "serve", "--no-insecure")

    assert code == 78
    assert err.startswith("mqks: mqks.toml: host: '192.0.2.1' is not loopback")


def test_the_config_flag_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("prot = 1\n")

    assert run(capsys, "serve", "--config", "mine.toml") == (
        78,
        "",
        "mqks: mine.toml: prot: unknown setting; did you mean port?\n",
    )


def test_exit_codes_are_those_of_sysexits() -> None:
    assert MqksError.exit_code == os.EX_SOFTWARE
    assert ConfigurationError.exit_code == os.EX_CONFIG
    assert DatabaseLocked.exit_code == os.EX_UNAVAILABLE
    assert JournalFailed.exit_code == os.EX_IOERR


@pytest.mark.timeout(30)
def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    fifo = tmp_path / "settings"
    os.mkfifo(fifo)

    with (
        subprocess.Popen([*MQKS, "serve", "--config", fifo], stderr=subprocess.PIPE) as process,
        fifo.open("wb"),  # waits until the command has opened its settings
    ):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()

    assert process.returncode == 130
    assert b"Traceback" not in err


def test_error_tells_all_that_is_kept(capsys: pytest.CaptureFixture[str], database: Path) -> None:
    assert run(capsys, "inspect", "error", EARLY, "--db", database) == (
        0,
        f"id          {EARLY}\n"
        "time        2024-11-23T15:24:50.123456+00:00\n"
        "connection  127.0.0.1:4711\n"
        "request_id  -\n"
        "action      frob\n"
        "reason      unknown action\n",
        "",
    )


def test_error_as_json(capsys: pytest.CaptureFixture[str], database: Path) -> None:
    code, out, _ = run(capsys, "inspect", "error", LATE, "--db", database, "--json")

    assert code == 0
    assert json.loads(out) == {
        "id": LATE,
        "time": "2024-11-23T15:24:51.000250+00:00",
        "connection": "127.0.0.1:4711",
        "request_id": "m\\xff\x1b[2J",
        "action": "publish",
        "reason": "no event",
    }


def test_what_a_client_sent_does_not_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], database: Path
) -> None:
    _, out, _ = run(capsys, "inspect", "error", LATE, "--db", database)

    assert "request_id  m\\xff\\x1b[2J\n" in out


def test_errors_lists_the_newest_first(capsys: pytest.CaptureFixture[str], database: Path) -> None:
    code, out, _ = run(capsys, "inspect", "errors", "--db", database)
    _, newest, _ = run(capsys, "inspect", "errors", "--db", database, "--limit", 1, "--json")

    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()] == [LATE, EARLY]
    assert [json.loads(line)["id"] for line in newest.splitlines()] == [LATE]


def test_inspect_finds_the_database_as_serve_does(
    capsys: pytest.CaptureFixture[str], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQKS_DB", str(database))

    assert LATE in run(capsys, "inspect", "errors")[1]


def test_inspect_leaves_the_files_as_they_are(
    capsys: pytest.CaptureFixture[str], database: Path
) -> None:
    files = [database, database.with_name(database.name + "-wal")]
    before = [file.read_bytes() for file in files]

    assert run(capsys, "inspect", "errors", "--db", database)[0] == 0

    assert [file.read_bytes() for file in files] == before


def test_what_is_not_there_ends_with_65(
    capsys: pytest.CaptureFixture[str], database: Path, tmp_path: Path
) -> None:
    text, empty = tmp_path / "text.db", tmp_path / "empty.db"
    text.write_text("this is no database " * 100)
    empty.touch()

    for arguments, reason in [
        (("error", "nope", "--db", database), f"{database}: no error nope; "),
        (("error", "nope", "--db", "none.db"), "none.db: no such file"),
        (("errors", "--db", tmp_path), f"{tmp_path}: no such file"),
        (("errors", "--db", text), f"{text}: file is not a database"),
        (("errors", "--db", empty), f"{empty}: no such table: error"),
    ]:
        code, out, err = run(capsys, "inspect", *arguments)
        assert (code, out) == (65, "")
        assert err.startswith(f"mqks: {reason}")
        assert err.count("\n") == 1
    assert not Path("none.db").exists()


@pytest.mark.parametrize("arguments", [["serve", "--help"], ["inspect", "errors"]])
def test_a_reader_that_has_gone_is_no_drama(
    database: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("MQKS_DB", str(database))
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run([*MQKS, *arguments], stdout=gone, stderr=subprocess.PIPE, check=False)

    assert (done.returncode, done.stderr) == (1, b"")
