"""The command line from outside: what it prints, and with which code it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mqks
from mqks.commands import main
from mqks.commands.options import duration
from mqks.compiled import is_compiled
from mqks.errors import ConfigurationError, DatabaseLocked, JournalFailed, MqksError
from mqks.settings import SETTINGS
from tests.commands.console import MQKS, Console

NO_SPACE, CLOSED = "No space left on device", "Bad file descriptor"


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


def test_the_version_and_the_help(alone: Console) -> None:
    told = f"mqks {mqks.__version__}{' (compiled)' * is_compiled()}\n"
    assert [alone.out(each) for each in ("version", "--version")] == [told, told]
    help_ = alone.out("--help")
    assert all(each in help_ for each in (" serve ", " inspect ", "Start here: mqks serve --db"))
    for command in ("serve", "check-config"):
        assert "outbox" not in alone.out(command, "--help")


@pytest.mark.parametrize("words", [[], ["ping"], ["inspect", "queues"]])
def test_h_is_help(alone: Console, words: list[str]) -> None:
    assert alone.out(*words, "-h") == alone.out(*words, "--help")


@pytest.mark.parametrize("start", [["-m", "mqks"], ["cli.py"]])
def test_the_other_ways_to_start(start: list[str]) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *start, "version"], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"mqks {mqks.__version__}\n"


def test_serve_help_shows_every_setting_in_groups_on_80_columns(tmp_path: Path) -> None:
    out = Console(tmp_path, COLUMNS="80").out("serve", "--help")
    assert "Example: mqks serve --db mqks.db" in out
    for setting in SETTINGS.values():
        assert f" {setting.flag} " in out
        assert setting.about.group in out


def test_exit_codes_are_those_of_sysexits() -> None:
    assert MqksError.exit_code == os.EX_SOFTWARE
    assert ConfigurationError.exit_code == os.EX_CONFIG
    assert DatabaseLocked.exit_code == os.EX_UNAVAILABLE
    assert JournalFailed.exit_code == os.EX_IOERR


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


@pytest.mark.parametrize(
    ("stream", "words", "code", "why"),
    [
        *((">/dev/full", words, 74, NO_SPACE) for words in ("version", "check-config", "--help")),
        *((">&-", words, 74, CLOSED) for words in ("version", "check-config")),
        ("<&-", "user add x --users users --password-file -", 74, CLOSED),
        ("2>&-", "verify nothing.db", 65, ""),
    ],
)
def test_a_stream_that_is_full_or_closed(stream: str, words: str, code: int, why: str) -> None:
    shell = f'unset PYTHONUNBUFFERED; exec "$@" {stream}'
    command = ["sh", "-c", shell, "sh", *MQKS, *words.split()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    told = f"mqks: can't read or write: {why}\n" if why else ""
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


@pytest.mark.parametrize("words", ["verify", "inspect queues --db", "export --db", "backup x --db"])
def test_a_name_that_is_too_long_for_a_file_is_told(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "x" * 300]) == 74
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.endswith("File name too long\n")) == ("", 1, True)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        *((0, "0s"), (0.25, "0.25s"), (42.42, "42.4s"), (60, "1m00s"), (200, "3m20s")),
        *((3599.9, "59m59s"), (5 * 3600 + 7 * 60 + 59, "5h07m"), (12 * 86400 + 3 * 3600, "12d03h")),
    ],
)
def test_a_span_of_time_is_told_in_two_units(seconds: float, told: str) -> None:
    assert duration(seconds) == told
