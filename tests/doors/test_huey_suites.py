"""huey's own tests on our storage, unmodified (`tests/kit/huey_suites.py`): those of storages, the
API, consumers, priorities, signals, and tasks that are run at once.

The one rule: each test that does not pass is named here, with its reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqks.testing import Broker
from tests.doors.test_sqs_suites import check, unpacked

pytest.importorskip("huey", reason="the extra huey is not installed")
KIT = Path(__file__).parents[1] / "kit"
FILES = (
    *("storage.py::TestMemoryStorage", "api.py", "consumer.py", "priority.py", "signals.py"),
    *("asyncio.py", "immediate.py", "registry.py"),
)
"""The files that are left out test other storages, serializers, crontabs and what needs none."""
EARLIER = "a worker should get a task before it is due, and schedule it then: the server does it"
NOT_HERE = {
    "test_schedule_methods": "expects tasks of the year 2000 in the schedule: they are due at once",
    "test_pending_scheduled_unregistered": EARLIER,
    "test_read_schedule": EARLIER,
    "test_reschedule": EARLIER,
    "test_schedule_s": EARLIER,
    "test_scheduling": EARLIER,
    "test_scheduling_expires": EARLIER,
    "test_task_id": EARLIER,
    "test_chord_scheduling": EARLIER,
    "test_storage_wrappers": EARLIER,
    "test_consumer_schedule_task": EARLIER,
    "test_schedule_priority": EARLIER,
    "test_signals_simple": EARLIER,
    "test_chord_bookkeeping_cleared": "reads a dict of the storage in memory",
    "test_consumer_periodic_tasks": (
        "expects a task of one minute twice: of several consumers, one enqueues it"
    ),
}


@pytest.mark.slow
def test_hueys(mqks_broker: Broker, tmp_path: Path) -> None:
    unpacked("huey", r"huey/.*\.py", tmp_path)
    environment = {
        "MQKS_URL": mqks_broker.url,
        "PYTHONPATH": str(KIT),
        "HUEY_SLOW_TESTS": "1",
        "PYTEST_ADDOPTS": "-p huey_suites",
    }
    files = [f"huey/tests/test_{name}" for name in FILES]
    check(tmp_path, files, environment, {*NOT_HERE}, 175)
