"""A broker in doubt confirms nothing: an error of its own ends the process, at once and loudly."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqks.errors import MqksError
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.waiting import WAIT_S

SERVE_WITH_A_FAULT = """
import sys
from mqks.{module} import {kind}
def fault(*arguments, **keywords):
    raise KeyError("a fault of our own")
getattr({kind}, "{method}")  # What is not there is not replaced.
setattr({kind}, "{method}", fault)
from mqks.commands import main
{more}
sys.exit(main(["serve", "--db", sys.argv[1], "--port", "0"]))
"""

STOP_WHILE_IT_ENDS = """
import signal, anyio
from mqks.journal.sqlite.store import SqliteStore
close, run = SqliteStore.close, anyio.run
async def close_and_stop(store):
    signal.raise_signal(signal.SIGTERM)
    await close(store)
    signal.raise_signal(signal.SIGINT)
def run_and_stop(*arguments, **keywords):
    try:
        return run(*arguments, **keywords)
    finally:
        signal.raise_signal(signal.SIGTERM)
SqliteStore.close, anyio.run = close_and_stop, run_and_stop
"""


@patches_modules
@pytest.mark.parametrize(
    ("module", "kind", "method"),
    [
        ("broker.spine.queue.queue", "Queue", "publish"),
        ("broker.spine.log.answers", "Answers", "committed"),
        ("journal.journal", "Journal", "_written"),
    ],
)
def test_it_ends_the_server(tmp_path: Path, module: str, kind: str, method: str) -> None:
    with ended(tmp_path, module=module, kind=kind, method=method, more="") as (code, log):
        assert code in (1, MqksError.exit_code), log
        assert "a fault of our own" in log


@patches_modules
def test_who_asks_it_to_stop_does_not_cut_the_end_short(tmp_path: Path) -> None:
    fault = {
        "module": "broker.spine.queue.queue",
        "kind": "Queue",
        "method": "publish",
    }
    with ended(tmp_path, **fault, more=STOP_WHILE_IT_ENDS) as (code, log):
        assert code == MqksError.exit_code, log
        last = log.splitlines()[-1]
        assert last == "mqks: the server ended because of the internal error above"


@contextmanager
def ended(tmp_path: Path, **script: str) -> Iterator[tuple[int, str]]:
    """Exit code and log of a server with a fault that a publish runs into."""
    code = SERVE_WITH_A_FAULT.format(**script)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "mqks.db")],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        log = ""
        while "event=listening" not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        host, _, port = log.partition("address=")[2].partition("\n")[0].partition(":")
        with LineClient((host, int(port))) as client:
            client.send(b"s subscribe q e\nm publish --confirm e x\n")
            with pytest.raises(EOFError):
                assert client.line() != b"m ok "
        log += process.communicate(timeout=WAIT_S)[1]
        yield process.returncode, log
    finally:
        process.kill()
        process.communicate()
