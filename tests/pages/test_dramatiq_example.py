"""examples/dramatiq, as its docstring starts it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqks import blocking
from mqks.testing import BrokerProcess
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("dramatiq", reason="the extra dramatiq is not installed")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example(mqks_broker_process: BrokerProcess, tmp_path: Path) -> None:
    place = ROOT / "examples/dramatiq"
    environment = os.environ | {"MQKS_URL": mqks_broker_process.url}
    log, program = tmp_path / "log", str(Path(sys.executable).with_name("dramatiq"))
    with log.open("wb") as file:
        worker = subprocess.Popen(
            [program, "invoices", "-p", "1"], cwd=place, env=environment, stdout=file, stderr=file
        )
    try:
        command = [sys.executable, "invoices.py"]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, check=True)
        assert done.stdout == b"enqueued\n"
        until(lambda: log.read_text().count("is due") == 3, log.read_text)
        assert {*re.findall(r"invoice (\d) is sent", log.read_text())} == {"0", "1", "2"}
        with blocking.connect(mqks_broker_process.url) as client:
            (letter,) = until(lambda: client.peek("dramatiq.invoices.XQ"))
        assert letter.dead_letter is not None
        assert letter.dead_letter.why == "ValueError: there is no customer Ann"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT_S) == 0
    finally:
        worker.kill()
        worker.wait()
