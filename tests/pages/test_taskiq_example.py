"""examples/taskiq, as its docstring starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mqks import blocking
from mqks.testing import BrokerProcess
from tests.kit.waiting import WAIT_S

pytest.importorskip("taskiq", reason="the extra taskiq is not installed")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_thumbnails(mqks_broker_process: BrokerProcess) -> None:
    where: dict[str, Any] = {"cwd": ROOT / "examples/taskiq", "start_new_session": True}
    where["env"] = os.environ | {"MQKS_URL": mqks_broker_process.url}
    worker = [sys.executable, "-m", "taskiq", "worker", "thumbnails:broker", "--workers", "1"]
    program = [sys.executable, "thumbnails.py", "a.png", "b.png"]
    with subprocess.Popen(worker, **where) as running:
        try:
            done = subprocess.run(
                program, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, **where
            )
            assert (done.returncode, done.stdout) == (0, "small-a.png\nsmall-b.png\n")
            with blocking.connect(mqks_broker_process.url) as client:
                (schedule,) = client.schedules()
            assert schedule["name"] == "thumbnails:sweep"
        finally:
            os.killpg(running.pid, signal.SIGKILL)
