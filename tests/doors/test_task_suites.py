"""Own tests of libraries of tasks on ours, unmodified: huey's of storages, the API, consumers,
priorities, signals and tasks that are run at once, taskiq's of brokers, results and retries,
dramatiq's of its brokers for RabbitMQ and Redis, of actors, workers, callbacks, pipelines, groups
and results, and Celery's where our commands of workers are and of its part for Django.

The one rule: each test that does not pass is named here, with its reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mqks.testing import Broker
from tests.doors.test_sqs_suites import check, unpacked

KIT = Path(__file__).parents[1] / "kit"


def with_plugin(name: str, broker: Broker, **more: str) -> dict[str, str]:
    """The environment of a run with a plugin of the kit."""
    addopts = f"-p {name} --timeout=200"
    return {"MQKS_URL": broker.url, "PYTHONPATH": str(KIT), "PYTEST_ADDOPTS": addopts, **more}


HUEY = (
    *("storage.py::TestMemoryStorage", "api.py", "consumer.py", "priority.py", "signals.py"),
    *("asyncio.py", "immediate.py", "registry.py"),
)
"""The files that are left out test other storages, serializers, crontabs and what needs none."""
EARLIER = "a worker should get a task before it is due, and schedule it then: the server does it"
NOT_OF_HUEY = {
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
    pytest.importorskip("huey", reason="the extra huey is not installed")
    unpacked("huey", r"huey/.*\.py", tmp_path)
    environment = with_plugin("huey_suites", mqks_broker, HUEY_SLOW_TESTS="1")
    files = [f"huey/tests/test_{name}" for name in HUEY]
    check(tmp_path, files, environment, {*NOT_OF_HUEY}, 175)


TASKIQ = (
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
NOT_OF_TASKIQ = {
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
def test_taskiqs(mqks_broker: Broker, tmp_path: Path) -> None:
    pytest.importorskip("taskiq", reason="the extra taskiq is not installed")
    unpacked("taskiq", r"tests/.*", tmp_path)
    files = ["-o", "anyio_mode=auto", *(f"tests/{each}" for each in TASKIQ)]
    files += [f"--deselect=tests/{each}" for each in NOT_OF_TASKIQ]  # Some wait for minutes.
    check(tmp_path, files, with_plugin("taskiq_suites", mqks_broker), set(), 70)


DRAMATIQ = (
    *("rabbitmq", "redis", "broker", "worker", "actors", "callbacks", "composition", "results"),
    *("generic_actors", "messages"),
)
"""The files that are left out test the stub broker, the command, encoders and rate limits."""
NOT_OF_DRAMATIQ = {
    "test_rabbitmq_broker_stops_retrying_declaring_queues_when_max_attempts_reached": (
        "replaces a method of the broker; the client connects again by itself"
    ),
    "test_rabbitmq_broker_retries_declaring_queues_when_connection_related_errors_occur": (
        "as the last one"
    ),
    "test_rabbitmq_broker_reconnects_after_enqueue_failure": "closes a connection of pika's",
    "test_rabbitmq_workers_handle_rabbit_failures_gracefully": (
        "runs rabbitmqctl: test_task_workers.py kills servers"
    ),
    "test_rabbitmq_connections_can_be_deleted_multiple_times": "deletes a connection of pika's",
    "test_rabbitmq_channels_can_be_deleted_multiple_times": "deletes a channel of pika's",
    "test_rabbitmq_broker_consuming_messages_re_declares_queues_when_declared_queue_disappears": (
        "deletes the queue by a channel of pika's: test_dramatiq.py"
    ),
    "test_rabbitmq_broker_enqueueing_message_re_declares_queues_when_declared_queue_disappears": (
        "as the last one"
    ),
    "test_redis_unacked_messages_can_be_requeued": "reads keys of Redis",
    "test_redis_messages_can_be_dead_lettered": "reads keys of Redis; RabbitMQ's test passes",
    "test_redis_messages_belonging_to_missing_actors_are_rejected": (
        "reads keys of Redis; RabbitMQ's test passes"
    ),
    "test_redis_requeues_unhandled_messages_on_shutdown": "reads keys of Redis: test_dramatiq.py",
    "test_redis_requeues_unhandled_delay_messages_on_shutdown": (
        "reads keys of Redis; no worker gets a message that is delayed"
    ),
    "test_redis_broker_can_connect_via_url": "needs Redis",
    "test_redis_broker_can_connect_via_client": "needs Redis",
    "test_redis_consumer_ack_can_retry_on_connection_error": "replaces a script of Redis",
    "test_redis_consumer_nack_can_retry_on_connection_error": "replaces a script of Redis",
    "test_redis_consumer_nack_does_not_raise_on_missing_id": (
        "rejects what is no delivery; one that was lost with its connection: test_dramatiq.py"
    ),
    "test_actors_can_be_sent_messages": "reads the lists of the stub broker",
    "test_worker_handles_non_numeric_eta_and_logs_warning": "puts into a list of the stub broker",
    "test_worker_handles_none_eta": "puts into a list of the stub broker",
}
"""Others need no server, or are skipped by themselves."""
TOO_LONG = {
    "test_redis_join_race_condition": "its actor reads keys of Redis, and is retried for days",
    "test_redis_dead_lettered_messages_are_cleaned_up": (
        "reads keys of Redis after 16,000 tracebacks: test_dramatiq.py"
    ),
}


@pytest.mark.slow
def test_dramatiqs(mqks_broker: Broker, tmp_path: Path) -> None:
    for each in ("dramatiq", "pika", "redis"):
        pytest.importorskip(each)
    unpacked("dramatiq", r"tests/\w+\.py", tmp_path)
    for name in ("conftest", "common"):
        shutil.copy(KIT / "dramatiq_suite.py", tmp_path / f"tests/{name}.py")
    (tmp_path / "tests/__init__.py").touch()
    files = [f"tests/test_{name}.py" for name in DRAMATIQ]
    files += [f"--deselect=tests/test_redis.py::{name}" for name in TOO_LONG]
    check(tmp_path, files, {"BROKER": mqks_broker.url}, {*NOT_OF_DRAMATIQ}, 110)


CELERY = "fixups", "worker/test_control.py", "app/test_control.py", "tasks/test_tasks.py"
OTHER_BROKER = """
from celery import Celery
from celery.contrib.testing.worker import start_worker
import mqks.celery.control

app = Celery("other", broker="memory://", backend="cache+memory://")
app.conf.broker_transport_options = {"polling_interval": 0.01}
with start_worker(app, perform_ping_check=False):
    inspect = app.control.inspect(timeout=10, limit=1)
    assert [*inspect.scheduled().values()] == [[]]
    app.control.revoke("a", reply=True, limit=1, timeout=10)
    assert [*inspect.revoked().values()] == [["a"]]
"""


@pytest.mark.slow
def test_celerys(tmp_path: Path) -> None:
    for each in ("celery", "django"):
        pytest.importorskip(each)
    unpacked("celery", r"t/.*", tmp_path)
    flags = "-p", "mqks.celery.control", "--timeout=200"
    check(tmp_path, [*flags, *(f"t/unit/{each}" for each in CELERY)], {}, set(), 100)


def test_a_worker_of_another_broker_does_what_it_did() -> None:
    pytest.importorskip("celery")
    subprocess.run([sys.executable, "-c", OTHER_BROKER], check=True, timeout=100)
