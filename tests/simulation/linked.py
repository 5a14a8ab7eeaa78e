"""Players of Celery: producers that publish as `apply_async` does, and workers with the real loop.

The one rule: each has a thread and connections of its own.
"""

import select
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from tests.simulation.world import World

QUEUE = Queue("tasks", Exchange("tasks"), routing_key="tasks")
HEARTBEAT_S = 10.0
BATCH = 5
PREFETCH = 4
RETRIES = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}
"""Celery's own."""
LOST = (*Transport.connection_errors, *Transport.channel_errors, OperationalError)


class Poller(Poll):
    """kombu's, which knows numbers, and seconds. As that of epoll, it forgets what is closed."""

    def register(self, fd: int, flags: int) -> None:  # type: ignore[override]
        if fd in ENDPOINTS:
            super().register(ENDPOINTS[fd], flags)

    def unregister(self, fd: int) -> None:
        del self._wanted[fd]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        open_ones = {fd: each for fd, each in self._wanted.items() if each[0].fileno() == fd}
        self._wanted = open_ones
        return super().poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        self._wanted.clear()


class Set(dict[Any, None]):
    """In the order in which they came: by address it would be another one in each run."""

    def add(self, each: Any) -> None:
        self[each] = None

    def discard(self, each: Any) -> None:
        self.pop(each, None)


class Waker:
    """Of a hub that no other thread wakes."""

    pid = 1

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


def install() -> None:
    replaced = {"select": instead_of(select, poll=Poll), "RLock": RLock}
    put({link: replaced, hubs: {"poll": Poller, "_Waker": Waker, "set": Set}})


def publish(world: "World", number: int, count: int, mean_s: float = 20.0) -> None:
    PROCESS.get().leaves = True  # What it was stopped counts as a wait.
    connection = Connection(world.url)
    producer = Producer(connection)

    def send(name: str, terms: dict[str, Any]) -> None:
        headers = (
            {"eta": datetime.fromtimestamp(terms["at"], UTC).isoformat()} if "at" in terms else {}
        )
        how = {"declare": [QUEUE], "retry": True, "retry_policy": RETRIES, "headers": headers}
        how |= {"priority": terms.get("priority"), "mqks_id": name}
        producer.publish(name, exchange=QUEUE.exchange, routing_key="tasks", **how)

    def some(names: list[str], terms: dict[str, Any]) -> None:
        producer.revive(connection)  # As the pool of producers does.
        if len(names) == 1:
            send(names[0], terms)
        else:
            with pipelined(producer):
                for name in names:
                    send(name, terms)
                    time.sleep(world.rng.expovariate(1 / 0.3))

    for each in range(count):
        names, terms = [f"{number}-{each}"], world.terms()
        if world.rng.random() < 0.3:
            names = [f"{number}-{each}-{part}" for part in range(BATCH)]
        until_done(world, partial(some, names, terms))
        world.has_confirmed("tasks.tasks", *names)
        time.sleep(world.rng.expovariate(1 / mean_s))
    connection.release()


def until_done(world: "World", call: Callable[[], None]) -> None:
    while True:
        try:
            return call()
        except LOST as error:
            world.note("not published:", type(error).__name__, error)
            time.sleep(world.rng.expovariate(1 / 2))


Pool = Callable[[float, Callable[[Any], None], Any], object]
"""Calls, after so long, what settles a message."""


def alone(after_s: float, done: Callable[[Any], None], message: Any) -> None:
    """`--pool solo`."""
    time.sleep(after_s)
    done(message)


def in_thread(*how: Any) -> None:
    Thread(alone, how).start()


def work(world: Any, number: int) -> None:
    PROCESS.get().leaves = True
    hub = hubs.Hub()
    pool = world.rng.choice((alone, in_thread, hub.call_later))
    while True:
        try:
            with Connection(world.url, heartbeat=HEARTBEAT_S) as connection:
                consume(world, number, pool, hub, connection.ensure_connection())
        except LOST as error:
            world.note("worker", number, "begins anew:", type(error).__name__, error)


def consume(world: Any, number: int, pool: Pool, hub: Any, connection: Any) -> None:
    """As a worker does, until the connection is lost."""
    rng, nothing = world.rng, lambda *_: None

    def take(message: Any) -> None:
        world.note("got", number, message.payload)
        change = rng.choice((qos.increment_eventually, qos.decrement_eventually, nothing))
        change()
        pool(rng.expovariate(1 / 0.5), done, message)

    def done(message: Any) -> None:
        try:
            settle = rng.choice((message.requeue, *[message.ack] * 8, message.reject))
            if settle != message.requeue:
                world.handled.add(message.payload)
            settle()
        except LOST as error:
            world.note("not acked:", message.payload, error)

    consumer = Consumer(connection.default_channel, [QUEUE])
    consumer.qos(prefetch_count=PREFETCH)
    qos = QoS(consumer.qos, PREFETCH)
    worker = SimpleNamespace(
        create_task_handler=lambda: take,
        timer_entries_before_start=None,
        event_dispatcher=None,
        controller=SimpleNamespace(register_with_event_loop=nothing),
        register_with_event_loop=nothing,
        perform_pending_operations=nothing,
        on_ready=nothing,
        pool=None,
        restart_count=1,
        connection=connection,
    )
    loop = synloop
    if pool is not alone:
        loop = asynloop
        connection.transport.register_with_event_loop(connection.connection, hub)
    running = SimpleNamespace(state=RUN)
    loop(worker, connection, consumer, running, hub, qos, HEARTBEAT_S, None)
