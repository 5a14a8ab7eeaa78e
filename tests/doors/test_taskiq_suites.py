"""taskiq's own tests of brokers, results and retries on ours. Their files run unmodified
(`tests/kit/taskiq_suites.py`). The packages for other brokers have no tests in their sources."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mqks.testing import Broker
from tools.sdists import DIRECTORY, wanted

pytest.importorskip("taskiq", reason="the extra taskiq is not installed")
KIT = Path(__file__).parents[1] / "kit"

FILES = (
    *("api/test_receiver_task.py", "brokers/test_inmemory.py", "depends/test_progress_tracker.py"),
    *("middlewares/test_task_retry.py", "receiver/test_receiver.py", "test_exceptions_flow.py"),
    *("scheduler/test_label_based_sched.py", "scheduler/test_scheduler.py", "test_kicker.py"),
    *("cli/scheduler/test_send_with_timeout.py", "cli/scheduler/test_updater.py"),
    *("formatters/test_proxy_formatter.py", "test_requeue.py", "test_retry_task.py"),
)
"""Those that use a broker, but for two that look into the queue of theirs (`api/test_scheduler.py`,
`scheduler/test_interval_performance.py`) and one that has a broker of its own for each fault of a
listener (`receiver/test_receiver_listener.py`)."""
IN_MEMORY = "the broker in memory has a list of the tasks that it runs"
WITHOUT = {
    "brokers/test_inmemory.py::test_inmemory_success": IN_MEMORY,
    "brokers/test_inmemory.py::test_wait_all": IN_MEMORY,
    "brokers/test_inmemory.py::test_inline_awaits": "it can run a task before `kiq` returns",
    "brokers/test_inmemory.py::test_cannot_listen": "it has no queue to listen to",
    "brokers/test_inmemory.py::test_startup": "it is client and worker at the same time",
    "brokers/test_inmemory.py::test_shutdown": "it is client and worker at the same time",
    "receiver/test_receiver.py::test_no_result_error": IN_MEMORY,
    "receiver/test_receiver.py::test_result": IN_MEMORY,
    "receiver/test_receiver.py::test_error_result": IN_MEMORY,
    "receiver/test_receiver.py::test_sync_decorator_on_async_function": IN_MEMORY,
    "middlewares/test_task_retry.py::test_wait_result_error": "takes a result out of its dict",
    "middlewares/test_task_retry.py::test_wait_result_no_result": "takes a result out of its dict",
    "depends/test_progress_tracker.py::test_progress_tracker_validation_error": (
        "expects the exception itself: taskiq cannot make a ValidationError from JSON"
    ),
}
"""Tests that do not apply, and why."""


@pytest.mark.slow
def test_taskiq(mqks_broker: Broker, tmp_path: Path) -> None:
    found = DIRECTORY / f"taskiq-{wanted('taskiq')}.tar.gz"
    if not found.exists():
        pytest.skip("the sources of this version are not here: python -m tools.sdists gets them")
    with tarfile.open(found) as sources:
        sources.extractall(tmp_path, filter="data")
    without = (f"--deselect=tests/{each}" for each in WITHOUT)
    command = "pytest", "-q", "-p", "taskiq_suites", "-p", "no:cacheprovider", "--timeout=200"
    done = subprocess.run(
        [sys.executable, "-m", *command, *without, *(f"tests/{each}" for each in FILES)],
        cwd=tmp_path / found.name.removesuffix(".tar.gz"),
        env=os.environ | {"MQKS_URL": mqks_broker.url, "PYTHONPATH": str(KIT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    told = re.search(r"(\d+) passed, (\d+) deselected", done.stdout)
    assert told is not None, done.stdout
    assert int(told[1]) >= 70
    assert int(told[2]) == len(WITHOUT)
