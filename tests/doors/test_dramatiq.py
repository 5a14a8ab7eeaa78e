"""Dramatiq's broker on a real server: what its own tests cannot ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mqks
from mqks import blocking
from mqks.client.options import Options
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.kit.fixtures import served_to
from tests.kit.ports import free_port
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("dramatiq")

import dramatiq
import dramatiq.broker
import dramatiq.worker
from dramatiq.encoder import PickleEncoder
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout

from mqks.dramatiq import MqksBroker

TOKEN = "0123456789abcdef"
QUEUE, DEAD = "dramatiq.default", "dramatiq.default.XQ"


@contextmanager
def brought(url: str, **options: Any) -> Iterator[Any]:
    made = MqksBroker(url, **options)
    dramatiq.set_broker(made)
    try:
        yield made
    finally:
        made.close()
        dramatiq.broker.global_broker = None


@pytest.fixture
def broker(mqks_broker: Broker) -> Iterator[Any]:
    with brought(mqks_broker.url) as made:
        yield made


@contextmanager
def working(broker: Any, threads: int = 1) -> Iterator[Any]:
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=threads)
    with mock.patch.object(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.01):
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()


def policy(broker: Any, queue: str) -> Any:
    told = broker.client.stats("queue", queue)["policy"]
    return {key: each["value"] for key, each in told.items() if each["from"] == "set_queue"}


def message(*args: Any) -> Any:
    return dramatiq.Message("default", "any", args, {}, {})


def received(consumer: Any) -> Any:
    return until(lambda: next(consumer))


def test_a_dead_letter_tells_why_and_may_run_again(broker: Any) -> None:
    fails, ran = [True], list[int]()

    @dramatiq.actor(max_retries=0)
    def charge(number: int) -> None:
        if fails:
            raise ValueError("no such customer")
        ran.append(number)

    with working(broker):
        charge.send(7)
        until(lambda: broker.get_queue_message_counts("default") == (0, 0, 1))
        assert policy(broker, DEAD) == {"ttl_s": 7 * 86400.0}
        with broker.client.consume(DEAD, meta=True) as consumer:
            letter = consumer.receive(WAIT_S)
            assert letter.dead_letter.why == "ValueError: no such customer"
            assert (letter.json()["actor_name"], letter.json()["args"]) == ("charge", [7])
            letter.release()
        fails.clear()
        assert broker.client.redrive(DEAD) == 1
        broker.join("default")
        until(lambda: ran == [7])


def test_a_task_whose_retry_is_refused_is_kept(broker: Any) -> None:
    """Since its queue is full; or dead, if it became too large with its traceback."""
    why = ["short"]

    @dramatiq.actor
    def fail() -> None:
        broker.client.set_queue(QUEUE, bytes_max=1)
        raise ValueError(*why)

    fail.send()
    with working(broker):
        until(lambda: broker.get_queue_message_counts("default") == (0, 1, 0))
        why[0] = "long" * 1_000_000
        assert broker.client.promote(QUEUE, None) == 1
        until(lambda: broker.get_queue_message_counts("default") == (0, 0, 1))


def test_policies_may_stay_as_they_are(mqks_broker: Broker) -> None:
    with brought(mqks_broker.url, dead_letters_s=None, prefix="") as broker:
        broker.client.set_queue("mails", dead_letter_queue="lost")
        broker.enqueue(message().copy(queue_name="mails"))
        broker.consume("mails").close()
        assert policy(broker, "mails") == {"dead_letters": "lost"}


def test_the_server_holds_what_is_delayed(broker: Any) -> None:
    @dramatiq.actor
    def remind() -> None:
        pass

    task = remind.send_with_options(delay=3_600_000)
    assert "eta" not in task.options
    with working(broker):
        until(lambda: broker.client.stats("queue", QUEUE)["consumers"])
        assert broker.get_queue_message_counts("default") == (0, 1, 0)
        with pytest.raises(QueueJoinTimeout):
            broker.join("default", timeout=100)
        assert broker.client.promote(QUEUE, None) == 1
        broker.join("default")
    broker.enqueue(task, delay=3_600_000)
    broker.flush_all()
    assert broker.get_queue_message_counts("default") == (0, 0, 0)


def test_a_consumer_has_no_more_than_its_prefetch(broker: Any) -> None:
    for number in range(5):
        broker.enqueue(message(number))
    first, second = broker.consume("default", prefetch=2), broker.consume("default", prefetch=1)
    assert [received(first).args for _ in range(2)] == [(0,), (1,)]
    assert received(second).args == (2,)
    assert next(broker.consume("default", prefetch=2, timeout=1)).args == (3,)
    first.close()
    again = received(broker.consume("default"))
    assert (again.args, again.redelivered) == ((0,), True)


@pytest.mark.parametrize("by", ["message", "consumer"])
def test_a_queue_that_is_deleted_comes_back(broker: Any, by: str) -> None:
    ran = list[int]()

    @dramatiq.actor
    def work(number: int) -> None:
        ran.append(number)

    if by == "message":
        work.send(1)
        broker.client.delete_queue(QUEUE)
        work.send(2)
        assert broker.get_queue_message_counts("default") == (1, 0, 0)
    with working(broker):
        until(
            lambda: (
                broker.get_queue_message_counts("default") == (0, 0, 0) and policy(broker, QUEUE)
            )
        )
        broker.client.delete_queue(QUEUE)
        work.send(3)
        until(lambda: ran[-1:] == [3])
    assert policy(broker, QUEUE) == {"dead_letters": DEAD}


def test_any_bytes_are_a_message(broker: Any) -> None:
    before = dramatiq.get_encoder()
    dramatiq.set_encoder(PickleEncoder())
    try:
        data = bytes(range(256)) * 4
        broker.enqueue(message(data, "\r\n\t"))
        assert received(broker.consume("default")).args == (data, "\r\n\t")
    finally:
        dramatiq.set_encoder(before)


@pytest.mark.parametrize("data", ["", "{}", "[1]", '{"args": 1}', "[" * 100_000, "\0"])
def test_what_others_publish_ends_no_worker(broker: Any, data: str) -> None:
    ran = list[int]()

    @dramatiq.actor
    def work(number: int) -> None:
        ran.append(number)

    work.send(1)
    broker.client.publish(QUEUE, data, confirm=True)
    work.send(2)
    with working(broker):
        broker.join("default")
        until(lambda: len(ran) == 2)
    assert broker.get_queue_message_counts("default") == (0, 0, 1)


def test_many_are_enqueued_with_one_wait(broker: Any) -> None:
    @dramatiq.actor
    def work(number: int) -> None:
        pass

    seen = list[Any]()

    class Seeing(dramatiq.Middleware):
        def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            seen.append((message.args, delay))

    broker.add_middleware(Seeing())
    broker.enqueue_many(map(work.message, range(2_500)), delay=60_000)
    assert broker.get_queue_message_counts("default") == (0, 2_500, 0)
    assert (len(seen), seen[0], seen[-1]) == (2_500, ((0,), 60_000), ((2_499,), 60_000))
    broker.flush("default")
    broker.client.set_queue(QUEUE, messages_max=2)
    with pytest.raises(mqks.RequestFailed, match="messages_max"):
        broker.enqueue_many(map(work.message, range(3)))
    assert broker.get_queue_message_counts("default") == (2, 0, 0)


def test_one_that_is_too_long_is_refused_before_it_is_sent(broker: Any) -> None:
    task = message("x" * 1024 * 1024)
    with pytest.raises(mqks.InvalidRequest, match="line_bytes_max"):
        broker.enqueue(task)
    with pytest.raises(mqks.InvalidRequest, match="priority"):
        broker.enqueue(task.copy(args=(), options={"broker_priority": 128}))
    assert broker.get_queue_message_counts("default") == (0, 0, 0)


def test_an_enqueue_whose_confirm_is_lost_is_one_message(mqks_broker: Broker, proxy: Proxy) -> None:
    task = message()
    with brought(proxy.url) as broker, blocking.connect(mqks_broker.url) as client:
        broker.enqueue(task)
        proxy.is_mute = True
        enqueues = threading.Thread(target=broker.enqueue, args=(task,))
        enqueues.start()
        until(lambda: proxy.swallowed and client.stats("queue", QUEUE)["ready"] == 2)
        proxy.is_mute = False
        proxy.cut()
        enqueues.join()
        assert client.stats("queue", QUEUE)["ready"] == 2
        broker.enqueue(task)  # The same one, enqueued again, is another one.
        assert client.stats("queue", QUEUE)["ready"] == 3


def test_a_worker_that_stops_returns_what_waits(broker: Any) -> None:
    @dramatiq.actor
    def work() -> None:
        pass

    with working(broker) as worker:
        for each in worker.workers:
            each.pause()
            each.paused_event.wait()
        work.send()
        work.send()
        until(lambda: worker.work_queue.qsize() == 2)
    told = broker.client.stats("queue", QUEUE)
    assert (told["ready"], told["unacked"], told["consumers"]) == (2, 0, 0)


def test_without_a_server(tmp_path: Path) -> None:
    options = Options(connect_timeout_s=0.2, timeout_s=0.2)
    port = free_port()
    with brought(f"mqks://127.0.0.1:{port}", options=options) as broker:

        @dramatiq.actor
        def work() -> None:
            pass

        with pytest.raises(ConnectionClosed, match="not connected"):
            work.send()
        with pytest.raises(ConnectionClosed, match="not connected"):
            broker.consume("default")
        with ServerProcess(tmp_path / "db", "--port", str(port)):
            work.send()
            assert broker.get_queue_message_counts("default") == (1, 0, 0)


def test_who_enqueues_needs_no_more_than_to_publish(tmp_path: Path) -> None:
    every: dict[str, Any] = {key: ["**"] for key in ("publish", "consume", "bind")}
    web = User("web", token=hash_token(TOKEN), publish=["dramatiq.*"])
    worker = User("worker", token=hash_token(TOKEN[::-1]), **every, admin=True, monitoring=True)
    with served_to(tmp_path, web, worker, flags=("--auth=always",)) as server:
        place = server.url.removeprefix("mqks://")
        task = message()
        with (
            brought(f"mqks://{TOKEN[::-1]}@{place}") as theirs,
            brought(f"mqks://{TOKEN}@{place}") as ours,
        ):
            with pytest.raises(mqks.RequestFailed, match="no permission"):
                ours.enqueue(task)
            consumer = theirs.consume("default")
            ours.enqueue(task)
            assert received(consumer).actor_name == "any"
