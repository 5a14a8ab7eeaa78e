"""Players of Celery: producers that publish as `apply_async` does, and workers with the real loop.

The one rule: each has a thread and connections of its own.
"""

import select
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from celery.bootsteps import RUN
from celery.worker.loops import asynloop, synloop
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.asynchronous import hub as hubs
from kombu.common import QoS
from kombu.exceptions import OperationalError

from mqks.celery import link
from mqks.celery.transport import Transport, pipelined
from tests.simulation.loop import PROCESS, put
from tests.simulation.threads import ENDPOINTS, Poll, RLock, Thread, instead_of

QUEUE = Queue("tasks", Exchange("tasks"), routing_key="tasks")
HEARTBEAT_S = 10.0
BATCH, PREFETCH = 5, 4
LOST = (*Transport.connection_errors, *Transport.channel_errors, OperationalError)


class Poller(Poll):
    """kombu's, which knows numbers, and seconds. As that of epoll, it forgets what is closed."""

    def register(self, fd: int, flags: int) -> None:  # type: ignore[override]
        if fd in ENDPOINTS:
            super().register(ENDPOINTS[fd], flags)

    def unregister(self, fd: int) -> None:
        del self._wanted[fd]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self._wanted = {fd: each for fd, each in self._wanted.items() if each[0].fileno() == fd}
        return super().poll(None if timeout is None else timeout * 1000)

    close = int


class Set(dict[Any, None]):
    """In the order in which they came: by address it would be another one in each run."""

    def add(self, each: Any) -> None:
        self[each] = None

    def discard(self, each: Any) -> None:
        self.pop(each, None)


def install() -> None:
    # Nobody wakes a hub.
    wakers = partial(SimpleNamespace, pid=1, fileno=lambda: -1, close=int)
    replaced = {"select": instead_of(select, poll=Poll), "RLock": RLock}
    put({link: replaced, hubs: {"poll": Poller, "_Waker": wakers, "set": Set}})


def publish(world: Any, number: int, count: int, mean_s: float) -> None:
    PROCESS.get().leaves = True  # What it was stopped counts as a wait.
    connection = Connection(world.url)
    producer = Producer(connection)

    def send(name: str, *, priority: Any = None, at: float | None = None, **_: Any) -> None:
        how: dict[str, Any] = {"exchange": QUEUE.exchange, "declare": [QUEUE], "mqks_id": name}
        how |= {"retry": True, "retry_policy": {"max_retries": 3, "interval_start": 0}}
        headers = {} if at is None else {"eta": datetime.fromtimestamp(at, UTC).isoformat()}
        producer.publish(name, "tasks", priority=priority, headers=headers, **how)

    def are_confirmed(names: list[str], terms: dict[str, Any]) -> bool:
        try:
            producer.revive(connection)  # As the pool of producers does.
            if len(names) == 1:
                send(*names, **terms)
                return True
            with pipelined(producer):
                for name in names:
                    send(name, **terms)
                    time.sleep(world.rng.expovariate(1))
        except LOST as error:
            world.note("not published:", type(error).__name__, error)
            return False
        return True

    for each in range(count):
        names, terms = [f"{number}-{each}"], world.terms()
        if world.rng.random() < 0.5:
            names = [f"{number}-{each}-{part}" for part in range(BATCH)]
        while not are_confirmed(names, terms):
            time.sleep(world.rng.expovariate(1 / 2))
        world.has_confirmed("tasks.tasks", *names)
        time.sleep(world.rng.expovariate(1 / mean_s))
    connection.release()


def alone(after_s: float, done: Callable[[Any], None], message: Any) -> None:
    """`--pool solo`; others do so in threads, or in processes, which tell the hub."""
    time.sleep(after_s)
    done(message)


def work(world: Any, number: int) -> None:
    PROCESS.get().leaves = True
    hub = hubs.Hub()
    pool = world.rng.choice((alone, lambda *how: Thread(alone, how).start(), hub.call_later))
    while True:
        try:
            with Connection(world.url, heartbeat=HEARTBEAT_S) as connection:
                consume(world, number, pool, hub, connection.ensure_connection())
        except LOST as error:
            world.note("worker", number, "begins anew:", type(error).__name__, error)


def consume(world: Any, number: int, pool: Any, hub: Any, connection: Any) -> None:
    """As a worker does, until the connection is lost."""
    rng = world.rng

    def take(message: Any) -> None:
        world.note("got", number, message.payload)
        rng.choice((qos.increment_eventually, qos.decrement_eventually, int))()
        pool(rng.expovariate(1 / 0.5), done, message)

    def done(message: Any) -> None:
        settle = rng.choice((message.requeue, *[message.ack] * 8, message.reject))
        if settle != message.requeue:
            world.handled.add(message.payload)
        try:
            settle()
        except LOST as error:
            world.note("not acked:", message.payload, error)

    consumer = Consumer(connection.default_channel, [QUEUE])
    consumer.qos(prefetch_count=PREFETCH)
    qos = QoS(consumer.qos, PREFETCH)
    worker = Mock(timer_entries_before_start=None, event_dispatcher=None, pool=None)
    worker.create_task_handler = lambda: take
    loop = synloop
    if pool is not alone:
        loop, worker.pool = asynloop, Mock()
        connection.transport.register_with_event_loop(connection.connection, hub)
    running = SimpleNamespace(state=RUN)
    loop(worker, connection, consumer, running, hub, qos, HEARTBEAT_S, None)
