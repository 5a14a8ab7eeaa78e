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
from tests.kit.waiting import WAIT_S

MQKS = [sys.executable, "-m", "mqks"]


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(capsys: pytest.CaptureFixture[str], word: str) -> None:
    compiled = " (compiled)" if is_compiled() else ""
    assert run(capsys, word) == (0, f"mqks {mqks.__version__}{compiled}\n", "")


@pytest.mark.parametrize("words", [[], ["ping"], ["inspect", "queues"]])
def test_h_is_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(capsys, *words, "-h") == run(capsys, *words, "--help")
    assert run(capsys, *words, "-h")[0] == 0


@pytest.mark.parametrize("start", [["-m", "mqks"], ["cli.py"]])
def test_the_other_ways_to_start(start: list[str]) -> None:
    root = Path(__file__).parents[2]

    done = subprocess.run(
        [sys.executable, *start, "version"], cwd=root, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"mqks {mqks.__version__}\n"


def test_a_directory_is_no_database_and_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()

    done = subprocess.run(
        [*MQKS, "serve", "--db", tmp_path / "data"], capture_output=True, text=True, timeout=WAIT_S
    )

    assert done.returncode == 78
    assert "data: it is a directory" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("job", ["report", "replay"])
def test_a_lake_that_is_not_there_is_told_before_spark_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, job: str
) -> None:
    """Spark writes its own lines on stderr when it starts."""
    lake = tmp_path / "none"

    assert main(["pipeline", job, str(lake)]) == 65
    assert capfd.readouterr() == ("", f"mqks: there is no lake at {lake}\n")


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


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_an_old_flag_is_not_shown_and_refused_with_the_new_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "outbox" not in run(capsys, command, "--help")[1]
    assert run(capsys, command, "--outboxes-bytes-max", "1MiB") == (
        78,
        "",
        "mqks: --outboxes-bytes-max: this setting was renamed. Write --unsent-bytes-max\n",
    )


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
    assert err.startswith("mqks: mqks.toml:2: host: '192.0.2.1' is not loopback")


def test_the_config_flag_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("prot = 1\n")

    assert run(capsys, "serve", "--config", "mine.toml") == (
        78,
        "",
        "mqks: mine.toml:1: prot: unknown setting; did you mean port?\n",
    )


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
    capsys: pytest.CaptureFixture[str], words: str, path: str, code: int, told: str
) -> None:
    ended, out, err = run(capsys, *words.split(), path)

    assert (ended, out) == (code, "")
    assert err.endswith(told)
    assert err.count("\n") == 1


def test_an_empty_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "queues", "--db", ""], ["copy", "", "x"], ["copy", "x", ""]):
        assert run(capsys, *words) == (78, "", "mqks: --db: must not be empty\n")


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


def test_a_reader_that_has_gone_is_no_drama() -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [*MQKS, "serve", "--help"], stdout=gone, stderr=subprocess.PIPE, check=False
        )

    assert (done.returncode, done.stderr) == (1, b"")
