"""examples/faststream, as its docstring starts it."""

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

pytest.importorskip("faststream", reason="the extra faststream is not installed")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example(mqks_broker_process: BrokerProcess, tmp_path: Path) -> None:
    place, log = ROOT / "examples/faststream", tmp_path / "log"
    environment = os.environ | {"MQKS_URL": mqks_broker_process.url}
    program = [sys.executable, "orders.py"]
    with log.open("wb") as file, blocking.connect(mqks_broker_process.url) as client:
        client.set_queue("orders.dead")
        app = subprocess.Popen(program, cwd=place, env=environment, stdout=file, stderr=file)
        try:
            until(lambda: len(client.stats("consumers")) == 3, log.read_text)
            done = subprocess.run(
                [*program, "send"], cwd=place, env=environment, capture_output=True, check=True
            )
            assert done.stdout == b"tea is 1.5\nsent\n"
            until(lambda: log.read_text().count("is paid") == 3)
            assert {*re.findall(r"order (\d) is paid", log.read_text())} == {"0", "1", "3"}
            (letter,) = until(lambda: client.peek("orders.dead"))
            assert letter.dead_letter is not None
            assert letter.dead_letter.why == "order 2 has no customer"
            app.send_signal(signal.SIGTERM)
            assert app.wait(WAIT_S) == 0
        finally:
            app.kill()
            app.wait()
