"""Dramatiq's own tests on its broker for MQKS, unmodified: those of its brokers for RabbitMQ and
Redis, and those of actors, workers, callbacks, pipelines, groups and results.

The one rule: each test that does not pass is named here, with its reason.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.doors.test_sqs_suites import check, unpacked
from tests.kit.server_process import ServerProcess

pytest.importorskip("dramatiq")
COMMON = Path(__file__).parents[1] / "kit/dramatiq_suite.py"
FILES = (
    *("rabbitmq", "redis", "broker", "worker", "actors", "callbacks", "composition", "results"),
    *("generic_actors", "messages"),
)
"""The files that are left out test the stub broker, the command, encoders and rate limits."""
NOT_HERE = {
    "test_rabbitmq_broker_stops_retrying_declaring_queues_when_max_attempts_reached": (
        "replaces a method of the broker; the client connects again by itself"
    ),
    "test_rabbitmq_broker_retries_declaring_queues_when_connection_related_errors_occur": (
        "as the last one"
    ),
    "test_rabbitmq_broker_reconnects_after_enqueue_failure": "closes a connection of pika's",
    "test_rabbitmq_workers_handle_rabbit_failures_gracefully": (
        "runs rabbitmqctl: test_dramatiq_workers.py kills servers"
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
def test_dramatiqs(tmp_path: Path) -> None:
    pytest.importorskip("pika")
    pytest.importorskip("redis")
    unpacked("dramatiq", r"tests/\w+\.py", tmp_path)
    for name in ("conftest", "common"):
        shutil.copy(COMMON, tmp_path / f"tests/{name}.py")
    (tmp_path / "tests/__init__.py").touch()
    with ServerProcess(tmp_path / "mqks.db") as server:
        files = [f"tests/test_{name}.py" for name in FILES]
        files += [f"--deselect=tests/test_redis.py::{name}" for name in TOO_LONG]
        check(tmp_path, files, {"BROKER": server.url}, {*NOT_HERE}, 110)
