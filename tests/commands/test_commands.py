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


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


def test_what_commands_show(alone: Console, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "mqks.toml").write_text('insecure = true\nhost = "192.0.2.1"\n')
    (tmp_path / "mine.toml").write_text("prot = 1\n")
    alone.play(
        """
        $ mqks version
        mqks VERSION
        $ mqks --version
        mqks VERSION
        $ mqks --help
        …
        … serve …
        …
        … inspect …
        …
        …Start here: mqks serve --db mqks.db…
        …
        $ mqks serve --outboxes-bytes-max 1MiB
        mqks: --outboxes-bytes-max: this setting was renamed. Write --unsent-bytes-max
        [78]
        $ mqks check-config --outboxes-bytes-max 1MiB
        mqks: --outboxes-bytes-max: this setting was renamed. Write --unsent-bytes-max
        [78]
        $ mqks serve --port 70000
        mqks: --port: must be from 0 to 65535, not '70000'
        [78]
        $ mqks serve --no-insecure
        mqks: mqks.toml:2: host: '192.0.2.1' is not loopback…
        [78]
        $ mqks serve --config mine.toml
        mqks: mine.toml:1: prot: unknown setting; did you mean port?
        [78]
        $ mqks inspect queues --db ''
        mqks: --db: must not be empty
        [78]
        $ mqks copy '' x
        mqks: --db: must not be empty
        [78]
        $ mqks copy x ''
        mqks: --db: must not be empty
        [78]
        """,
        VERSION=mqks.__version__ + " (compiled)" * is_compiled(),
    )
    code, _, err = alone("serve", "--config", "/dev/null", "--db", "data")
    assert (code, b"data: it is a directory" in err) == (78, True)
    assert {each.name for each in tmp_path.iterdir()} == {"data", "mine.toml", "mqks.toml"}
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


@pytest.mark.parametrize("job", ["report", "replay"])
def test_a_lake_that_is_not_there_is_told_before_spark_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, job: str
) -> None:
    """Spark writes its own lines on stderr when it starts."""
    lake = tmp_path / "none"

    assert main(["pipeline", job, str(lake)]) == 65
    assert capfd.readouterr() == ("", f"mqks: there is no lake at {lake}\n")


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


@pytest.mark.parametrize("words", [["version"], ["check-config", "--json"], ["--help"]])
def test_a_full_disk_is_told_in_one_line(words: list[str]) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*MQKS, *words], stdout=full, stderr=subprocess.PIPE, env=environment, check=False
        )

    assert done.returncode == 74
    assert done.stderr == b"mqks: can't read or write: No space left on device\n"


@pytest.mark.parametrize(
    ("closed", "words", "code", "told"),
    [
        (">&-", "version", 74, b"mqks: can't read or write: Bad file descriptor\n"),
        (">&-", "check-config", 74, b"mqks: can't read or write: Bad file descriptor\n"),
        (
            "<&-",
            "user add x --users users --password-file -",
            74,
            b"mqks: can't read or write: Bad file descriptor\n",
        ),
        ("2>&-", "verify nothing.db", 65, b""),
    ],
)
def test_a_stream_that_was_closed_before(closed: str, words: str, code: int, told: bytes) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *MQKS, *words.split()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (code, b"", told)


@pytest.mark.parametrize("words", ["verify", "inspect queues --db", "export --db", "backup x --db"])
@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        (".", 65, "mqks: .: is a directory\n"),
        ("/dev/null/x", 65, "mqks: /dev/null/x: no such file\n"),
        ("x" * 300, 74, "File name too long\n"),
    ],
)
def test_what_is_no_file_is_told(
    alone: Console, words: str, path: str, code: int, told: str
) -> None:
    ended, out, err = alone(*words.split(), path)

    assert (ended, out) == (code, b"")
    assert err.decode().endswith(told)
    assert err.count(b"\n") == 1


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0s"),
        (0.25, "0.25s"),
        (42.42, "42.4s"),
        (60, "1m00s"),
        (200, "3m20s"),
        (3599.9, "59m59s"),
        (5 * 3600 + 7 * 60 + 59, "5h07m"),
        (12 * 86400 + 3 * 3600, "12d03h"),
    ],
)
def test_a_span_of_time_is_told_in_two_units(seconds: float, told: str) -> None:
    assert duration(seconds) == told
