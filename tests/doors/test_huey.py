"""huey's storage on a real server: what its own tests cannot ask."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mqks
from mqks import blocking
from mqks.client.messages import Message
from mqks.client.options import Options
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.kit.fixtures import served_to
from tests.kit.ports import free_port
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

pytest.importorskip("huey", reason="the extra huey is not installed")

import huey
from huey import crontab
from huey.constants import EmptyData
from huey.exceptions import TaskException

from mqks.huey import MqksHuey
from mqks.huey.logs import SUMMED_UP
from mqks.huey.storage import LOGS

TOKEN = "0123456789abcdef"


@contextmanager
def made(url: str, **arguments: Any) -> Iterator[Any]:
    instance = MqksHuey("shop", url=url, **arguments)
    try:
        yield instance
    finally:
        instance.storage.close()


@pytest.fixture
def shop(mqks_broker: Broker) -> Iterator[Any]:
    with made(mqks_broker.url) as instance:
        yield instance


@contextmanager
def working(shop: Any, workers: int = 1) -> Iterator[None]:
    consumer = shop.create_consumer(workers=workers, periodic=False)
    consumer.start()
    try:
        yield
    finally:
        consumer.stop(graceful=True)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, called by a thread each."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        begin.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return [*threads.map(run, calls)]


def test_the_server_holds_what_is_delayed(shop: Any) -> None:
    ran = list[int]()

    @shop.task(retries=1, retry_delay=3600)
    def remind(number: int) -> int:
        ran.append(number)
        return 1 // (len(ran) - 1)

    result = remind.schedule((7,), delay=3600)
    assert (shop.pending_count(), shop.scheduled_count()) == (0, 1)
    assert [task.id for task in shop.scheduled()] == [result.id]
    with working(shop):
        until(lambda: shop.storage.client.stats("queue", "shop")["consumers"])
        for runs in (1, 2):  # The second one is the retry.
            until(lambda: shop.scheduled_count() == 1)
            with mock.patch.object(shop, "ready_to_run", return_value=True):
                assert shop.storage.client.promote("shop", None) == 1
                until(lambda: len(ran) == runs)  # noqa: B023
        assert result(blocking=True, timeout=WAIT_S) in (1, None)
    assert shop.scheduled_count() == 0


def test_a_schedule_that_is_read_is_taken(shop: Any) -> None:
    @shop.task()
    def remind(number: int) -> None:
        pass

    for number in range(3):
        remind.schedule((number,), delay=1000 * (number + 1))
    at = shop._get_timestamp() + timedelta(seconds=2500)
    assert [task.args for task in shop.read_schedule(at)] == [(0,), (1,)]
    assert shop.read_schedule() == []
    assert [task.args for task in shop.scheduled()] == [(2,)]
    shop.storage.flush_schedule()
    assert shop.scheduled_count() == 0


def test_a_task_that_cannot_be_read_is_dead(shop: Any) -> None:
    shop.storage.client.set_queue("shop", dead_letter_queue="dead")
    shop.storage.enqueue(shop.serializer.serialize(("1", "no.such_task", *[None] * 13)))
    shop.storage.enqueue(b"no pickle")
    for _ in range(2):
        with pytest.raises((pickle.UnpicklingError, AttributeError, huey.exceptions.HueyException)):
            shop.dequeue()
    first, second = until(lambda: (found := shop.storage.client.peek("dead"))[1:] and found)
    assert first.dead_letter.reason == second.dead_letter.reason == "dead"
    assert "UnpicklingError" in second.dead_letter.why


def test_a_task_is_kept_while_something_of_it_cannot_be_stored(tmp_path: Path) -> None:
    """What tells whether it was revoked; and its retry, since the queue is full."""
    ran = list[int]()

    def fail(number: int) -> None:
        ran.append(number)
        raise ValueError

    with Broker(tmp_path / "db", queues_max=1) as server, made(server.url) as shop:
        shop.task(retries=1)(fail)(0)
        with pytest.raises(mqks.RequestFailed, match="queues_max"):
            shop.execute(shop.dequeue())
        assert (ran, shop.scheduled_count()) == ([], 1)
    with Broker(tmp_path / "db") as server, made(server.url) as shop:
        shop.task(retries=1)(fail)
        shop.storage.client.set_queue("shop", messages_max=1)
        shop.storage.client.promote("shop", None)
        task = shop.dequeue()
        shop.storage.enqueue(b"another one")
        with pytest.raises(mqks.RequestFailed, match="messages_max"):
            shop.execute(task)
        assert (ran, shop.scheduled_count()) == ([0], 1)


def test_local_time(mqks_broker: Broker) -> None:
    with made(mqks_broker.url, utc=False) as shop:

        @shop.task()
        def remind() -> None:
            pass

        remind.schedule(eta=datetime.now() + timedelta(hours=1))
        (waits,) = shop.storage.client.peek("shop", scheduled=True)
        assert 3500 < (waits.due or 0) - time.time() < 3700


def test_a_task_waits_for_its_worker_alone(shop: Any) -> None:
    """One that this thread was given, and has not asked for, is in the queue."""
    storage = shop.storage
    for number in range(3):
        storage.enqueue(b"%d" % number)
    assert storage.dequeue() == b"0"
    assert (storage.queue_size(), storage.enqueued_items(1)) == (2, [b"1"])
    storage.settle(Message.release)
    assert (storage.queue_size(), storage.enqueued_items()) == (3, [b"0", b"1", b"2"])
    assert storage.dequeue() == b"0"
    storage.leave()
    assert storage.dequeue() == b"0"
    storage.flush_queue()
    assert storage.queue_size() == 0
    storage.settle()
    assert storage.client.stats("queue", "shop")["unacked"] == 0


def test_a_thread_that_leaves_gives_back_what_it_was_given(shop: Any) -> None:
    """While another one, which is busy, stays."""
    storage = shop.storage
    storage.enqueue(b"0")
    assert storage.dequeue() == b"0"
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(storage.dequeue).result() is None
        storage.enqueue(b"1")
        until(lambda: storage.client.stats("queue", "shop")["unacked"] == 2)
        thread.submit(storage.leave).result()
        until(lambda: storage.enqueued_items() == [b"1"])
        assert thread.submit(storage.dequeue).result() == b"1"
        storage.enqueue(b"2")
        thread.submit(storage.leave).result()
        until(lambda: storage.enqueued_items() == [b"1", b"2"])
    storage.settle()
    assert storage.dequeue() == b"1"


def test_many_wait(shop: Any) -> None:
    storage = shop.storage
    assert storage.enqueued_items() == []
    storage.enqueue(b"first", 9)
    storage.client.publish_many(("shop", b"%d" % number) for number in range(2_500))
    assert storage.queue_size() == 2_501
    found = storage.enqueued_items()
    assert (len(found), found[0], found[-1]) == (2_501, b"first", b"2499")
    storage.flush_all()
    assert storage.queue_size() == 0


def test_any_bytes(shop: Any) -> None:
    data = bytes(range(256)) * 16
    shop.storage.enqueue(data)
    assert shop.storage.dequeue() == data
    for is_result in (False, True):
        for key in (b"\xff\xfe", "ä ö%&=,", "k" * 500):
            shop.storage.put_data(key, data, is_result=is_result)
            assert shop.storage.pop_data(key) == data
            assert shop.storage.pop_data(key) is EmptyData


def test_what_does_not_fit_is_refused_before_it_is_sent(shop: Any) -> None:
    @shop.task()
    def work(*_: Any) -> None:
        pass

    with pytest.raises(mqks.InvalidRequest, match="line_bytes_max"):
        work("x" * 1024 * 1024)
    with pytest.raises(mqks.InvalidRequest, match="priority"):
        shop.enqueue(work.s(priority=128))
    with pytest.raises(mqks.InvalidRequest, match="line_bytes_max"):
        shop.put_result("a", "x" * 1024 * 1024)
    with pytest.raises(mqks.InvalidRequest, match="meta"):
        shop.put("k" * 5000, 1)
    with pytest.raises(ValueError, match="more than 262144 bytes"):
        shop.put("a", "x" * 300_000)
    with pytest.raises(ValueError, match="more than 262144 bytes"):
        shop.storage.put_data("a", bytes(50_000))
    assert (shop.pending_count(), shop.result_count()) == (0, 0)


def test_locks_counters_and_pops_of_several_processes(mqks_broker: Broker) -> None:
    with ExitStack() as ends:
        each = [ends.enter_context(made(mqks_broker.url)).storage for _ in range(4)]
        for number in range(5):
            asked = (partial(s.put_if_empty, f"lock{number}", b"1") for s in each)
            held = together(*asked)
            assert sorted(held) == [False, False, False, True]
        told = together(*(lambda s=s: [s.incr("n") for _ in range(20)] for s in each))
        assert sorted(chain(*told)) == [*range(1, 81)]
        for is_result in (False, True):
            each[0].put_data("result", b"1", is_result=is_result)
            popped = together(*(lambda s=s: s.pop_data("result") for s in each))
            assert popped.count(b"1") == 1
            assert popped.count(EmptyData) == 3


def test_a_lock_that_expires(shop: Any, mqks_broker: Broker) -> None:
    assert shop.storage.put_if_empty("a", b"1", ttl=0.05)
    with made(mqks_broker.url) as other:
        until(lambda: other.storage.put_if_empty("a", b"2", ttl=3600))
    assert shop.storage.peek_data("a") == b"2"
    ahead_s = time.time() + 7200
    with mock.patch.object(time, "time", return_value=ahead_s):  # A wrong clock gets no lock.
        assert not shop.storage.has_data_for_key("a")
        assert not shop.storage.put_if_empty("a", b"3")


@pytest.mark.slow
def test_a_log_of_data_is_summed_up(shop: Any, mqks_broker: Broker) -> None:
    """While others write. A process that begins then knows as much as those from the beginning."""
    name = next(f"k{number}" for number in range(99) if shop.storage._place(f"k{number}")[1] == 3)
    with ExitStack() as ends:
        first, second = (ends.enter_context(made(mqks_broker.url)).storage for _ in range(2))
        first.put_data(name, b"kept \xff")
        counts = together(
            *(lambda s=s: [s.incr(name) for _ in range(SUMMED_UP)] for s in (first, second))
        )
        assert sorted(chain(*counts)) == [*range(1, 2 * SUMMED_UP + 1)]
        queue = shop.storage._data[3].queue
        told = dict(word.split("=") for word in first.client.request("range", queue).split())
        assert int(told["next"]) - int(told["first"]) < 2 * SUMMED_UP
        assert int(told["first"]) > 1
        for each in (shop.storage, first, second):
            assert (each.incr(name, 0), each.peek_data(name)) == (2 * SUMMED_UP, b"kept \xff")
        first.flush_all()
        assert second.incr(name, 0) == 0
        assert second.result_items() == {}


def test_results_are_bounded(mqks_broker: Broker) -> None:
    with made(mqks_broker.url, results_max=LOGS, expire_s=3600) as shop:
        for number in range(60):
            shop.put_result(f"r{number}", number)
        until(lambda: shop.result_count() <= LOGS)
        assert shop.result("r59", preserve=True) == 59
        assert shop.all_results()["r59"] == shop.serializer.serialize(59)
    with made(mqks_broker.url, expire_s=0.01) as shop:
        shop.put_result("r59", 59)
        until(lambda: shop.result("r59", preserve=True) is None)
        shop.flush()
        assert shop.result_count() == 0


def test_queues_that_somebody_deletes(shop: Any) -> None:
    for number in range(3):
        shop.storage.enqueue(b"%d" % number)
        shop.put("a", number)
        shop.put_result("b", number)
        assert shop.get("a", peek=True) == shop.get("b", peek=True) == number
        assert shop.storage.incr("n") == 1
        assert shop.storage.dequeue() == b"%d" % number
        for row in shop.storage.client.stats("queues"):
            shop.storage.client.delete_queue(row["name"])
        assert shop.get("a") is None
        assert shop.get("b") is None


def test_one_of_several_consumers_enqueues_a_periodic_task(mqks_broker: Broker) -> None:
    now = datetime(2030, 1, 2, 3, 4)
    with ExitStack() as ends:
        for _ in range(3):
            shop = ends.enter_context(made(mqks_broker.url))

            @shop.periodic_task(crontab(), retries=1)
            def tick() -> None:
                raise ValueError

            for minute in (0, 0, 1):
                for task in shop.read_periodic(now + timedelta(minutes=minute)):
                    shop.enqueue(task)
        assert shop.pending_count() == 2
        task = shop.dequeue()
        assert task.id == f"{__name__}.tick@2030-01-02T03:04"
        shop.execute(task)  # A retry has the id, and is enqueued.
        assert shop.pending_count() == 2


def test_a_result_is_seen_when_it_is_there(shop: Any) -> None:
    @shop.task()
    def divide(number: int) -> float:
        return 1 / number

    with working(shop, 2):
        results = divide.map([(number,) for number in range(1, 20)])
        assert results.get(blocking=True, timeout=WAIT_S) == [1 / n for n in range(1, 20)]
        with pytest.raises(TaskException, match="ZeroDivisionError"):
            divide(0)(blocking=True, timeout=WAIT_S)
    with pytest.raises(huey.exceptions.ResultTimeout):
        divide(1)(blocking=True, timeout=0.01)


def test_what_was_lost_with_its_connection_runs_again(mqks_broker: Broker, proxy: Proxy) -> None:
    with made(proxy.url) as shop, made(mqks_broker.url) as direct:
        shop.storage.enqueue(b"a")
        assert until(shop.storage.dequeue) == b"a"
        proxy.cut()
        until(lambda: direct.pending_count() == 1 or shop.storage._held.consumer._session.ready)
        shop.storage.settle()  # Without effect.
        assert until(shop.storage.dequeue) == b"a"
        shop.storage.settle()
        until(lambda: direct.storage.client.stats("queue", "shop")["unacked"] == 0)
        assert direct.pending_count() == 0


def test_an_enqueue_whose_confirm_is_lost_is_one_message(mqks_broker: Broker, proxy: Proxy) -> None:
    with made(proxy.url) as shop, made(mqks_broker.url) as direct:
        shop.storage.enqueue(b"a")
        assert shop.storage.incr("n") == 1
        for act, seen in (
            (lambda: shop.storage.enqueue(b"b"), lambda: direct.pending_count() == 2),
            (lambda: shop.storage.incr("n"), lambda: direct.storage.incr("n", 0) == 2),
        ):
            proxy.is_mute, proxy.swallowed = True, b""
            thread = threading.Thread(target=act)
            thread.start()
            until(lambda: proxy.swallowed)
            until(seen)
            proxy.is_mute = False
            proxy.cut()
            thread.join()
        assert direct.pending_count() == 2
        assert direct.storage.incr("n", 0) == 2


def test_without_a_server(tmp_path: Path) -> None:
    port = free_port()
    options = Options(connect_timeout_s=0.2, timeout_s=0.2)
    with pytest.raises(mqks.ConfigurationError):
        MqksHuey(url="http://a")
    with made(f"mqks://127.0.0.1:{port}", options=options) as shop:
        for ask in (lambda: shop.storage.enqueue(b"a"), shop.storage.dequeue, shop.pending_count):
            with pytest.raises(mqks.ConnectionLost):
                ask()
        with ServerProcess(tmp_path / "db", "--port", str(port)):
            shop.storage.enqueue(b"a")
            assert shop.pending_count() == 1


def test_permissions(tmp_path: Path) -> None:
    """Those of docs/huey.md."""
    names, data = ["shop", "shop.**"], ["shop.**"]
    web = User("web", token=hash_token(TOKEN), publish=names, consume=data, read=data)
    every: dict[str, Any] = dict.fromkeys(("publish", "consume", "read"), names)
    worker = User("worker", token=hash_token(TOKEN[::-1]), bind=["shop"], **every)
    with served_to(tmp_path, web, worker, flags=("--auth=always",)) as server:
        place = server.url.removeprefix("mqks://")
        with (
            made(f"mqks://{TOKEN[::-1]}@{place}") as theirs,
            made(f"mqks://{TOKEN}@{place}") as ours,
        ):

            def add(a: int, b: int) -> int:
                with theirs.lock_task("adding"):
                    return a + b

            theirs.task()(add)
            send = ours.task()(add)
            with pytest.raises(mqks.RequestFailed, match="no permission"):
                send(1, 2)
            with working(theirs):
                until(lambda: theirs.storage._create() or True)
                assert send(1, 2)(blocking=True, timeout=WAIT_S) == 3


def test_a_huey_that_runs_at_once(mqks_broker: Broker) -> None:
    shop = MqksHuey("shop", url=mqks_broker.url, immediate=True)

    @shop.task()
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2)() == 3
    with blocking.connect(mqks_broker.url) as client:
        assert client.stats("queues") == []
