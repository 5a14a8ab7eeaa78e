"""A broker in doubt confirms nothing: an error of its own ends the process, at once and loudly."""

import subprocess
import sys
from pathlib import Path

import pytest

from mqks.errors import MqksError
from tests.line_client import LineClient
from tests.waiting import WAIT_S

SERVE_WITH_A_FAULT = """
import sys
from mqks.{module} import {kind}
def fault(*arguments, **keywords):
    raise KeyError("a fault of our own")
setattr({kind}, "{method}", fault)
from mqks.commands import main
sys.exit(main(["serve", "--db", sys.argv[1], "--port", "0"]))
"""


@pytest.mark.parametrize(
    ("module", "kind", "method"),
    [
        ("broker.broker", "Broker", "publish"),
        ("broker.broker", "Broker", "committed"),
        ("journal.journal", "Journal", "_segment"),
    ],
)
def test_it_ends_the_server(tmp_path: Path, module: str, kind: str, method: str) -> None:
    script = SERVE_WITH_A_FAULT.format(module=module, kind=kind, method=method)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "mqks.db")],
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
        assert process.returncode in (1, MqksError.exit_code), log
        assert "a fault of our own" in log
    finally:
        process.kill()
        process.communicate()
