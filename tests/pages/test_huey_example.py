"""examples/on_huey, as its docstring starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqks.testing import BrokerProcess
from tests.kit.waiting import WAIT_S

pytest.importorskip("huey", reason="the extra huey is not installed")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example(mqks_broker_process: BrokerProcess, tmp_path: Path) -> None:
    place = ROOT / "examples/on_huey"
    environment = os.environ | {"MQKS_URL": mqks_broker_process.url}
    program = str(Path(sys.executable).with_name("huey_consumer"))
    with (tmp_path / "log").open("wb") as file:
        consumer = subprocess.Popen(
            [program, "reports.huey"], cwd=place, env=environment, stdout=file, stderr=file
        )
    try:
        command = [sys.executable, "monthly.py"]
        done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE)
        told = [*(f"report of month {month}" for month in (1, 2, 3)), "month 3 ends"]
        assert done.stdout.decode().splitlines() == told
        consumer.send_signal(signal.SIGINT)
        assert consumer.wait(WAIT_S) == 0
    finally:
        consumer.kill()
        consumer.wait()
