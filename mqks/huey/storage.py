"""The storage of huey: tasks are messages of a queue, delayed and ordered by the server.

The one rule: a thread holds one task at most, and the server knows which. The threads of a process
share a consumer, so that its death is one loss: with one each, what it ran could be delivered to
those whose end the server has not seen yet, and be lost again.
"""

import secrets
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from huey.constants import EmptyData
from huey.storage import BaseStorage

from mqks.client import blocking, requests
from mqks.client.blocking import BlockingConsumer
from mqks.client.errors import ClientError, RequestFailed
from mqks.client.messages import Message, PeekedMessage
from mqks.client.options import Options
from mqks.client.urls import Urls
from mqks.huey.logs import LISTED_MAX, ONCE_S, HueyData, HueyResults, KeyLog
from mqks.limits import SEQ_MAX

READ_TIMEOUT_S = 1.0
"""So long a worker waits for a task until it looks whether it should end."""
LOGS = 16
"""The logs among which keys are spread, of results and of other data."""


class TaskData(bytes):
    """A task as huey's serializer writes it, with what the server has to know."""

    id: str
    is_tick: bool
    """Whether it is the run of a periodic task at one minute: there may be one with this id."""
    priority: float | None
    eta: datetime | None


class OfThread(threading.local):
    """What a thread has of the queue."""

    consumer: BlockingConsumer | None = None
    message: Message | None = None


class HueyStorage(BaseStorage):
    """The queue `name`, and the logs `{name}.results.0` to `.15` and `{name}.data.0` to `.15`.

    - `url`, `options`: as of `mqks.blocking.connect`; by default MQKS_URL, else localhost.
    - `policy`: that of the queue of tasks, as in `client.set_queue`.
    - `expire_s`, `results_max`: so long, in seconds, and so many results are kept, the last ones.
    - `data_bytes_max`: the most bytes in one log of data, as JSON.
    - `read_timeout_s`: how long `dequeue` waits.
    - `utc`: whether times are in UTC; otherwise in local time.
    """

    blocking = True

    def __init__(
        self,
        name: str = "huey",
        *,
        url: Urls | None = None,
        options: Options | None = None,
        policy: requests.PolicyKeywords | None = None,
        expire_s: float = 86_400.0,
        results_max: int = 100_000,
        data_bytes_max: int = 256 * 1024,
        read_timeout_s: float = READ_TIMEOUT_S,
        utc: bool = True,
    ) -> None:
        super().__init__(name)
        self.client = blocking.connect(url, options)
        self._policy = policy
        self._read_timeout_s = read_timeout_s
        self._utc = utc
        self._held = OfThread()
        self._lock = threading.Lock()
        self._consumer: BlockingConsumer | None = None
        self._threads = 0
        """How many receive from it."""
        each_max = -(-results_max // LOGS)
        kept = requests.PolicyKeywords(ttl_s=expire_s, messages_max=each_max, overflow="drop")
        at = self.client, name
        self._results = [HueyResults(*at, number, kept) for number in range(LOGS)]
        self._data = [HueyData(*at, number, data_bytes_max) for number in range(LOGS)]

    def close(self) -> None:
        """Close the connections; what threads hold returns to the queue. The next use opens them
        again."""
        self.client.close()
        self._held, self._consumer = OfThread(), None

    # -- tasks

    def enqueue(self, data: bytes, priority: float | None = None) -> None:
        """Returns when the server has stored the task, once. One with an ETA is delayed."""
        self._publish(data, priority, getattr(data, "eta", None))

    def add_to_schedule(self, data: bytes, ts: datetime) -> None:
        self._publish(data, getattr(data, "priority", None), ts)

    def _publish(self, data: bytes, priority: float | None, eta: datetime | None) -> None:
        terms: dict[str, Any] = {"confirm": True, "mandatory": True, "once_s": ONCE_S}
        terms["priority"] = None if priority is None else int(priority)
        if eta is not None:
            now = datetime.now(UTC).replace(tzinfo=None) if self._utc else datetime.now()
            terms["delay_s"] = max(0.0, (eta - now).total_seconds())
        terms["id"] = quote(getattr(data, "id", "task"))
        if not getattr(data, "is_tick", False):  # Retries of a task have its id, too.
            terms["id"] += f".{secrets.token_hex(8)}"
        try:
            self.client.publish(self.name, bytes(data), **terms)
        except RequestFailed:  # Mostly since there is no such queue yet.
            self._create()
            self.client.publish(self.name, bytes(data), **terms)

    def _create(self) -> None:
        if self._policy:
            self.client.set_queue(self.name, **self._policy)
        self.client.subscribe(self.name, [self.name])

    def dequeue(self) -> bytes | None:
        """The next task, which is this thread's until `settle`, its next `dequeue`, or `leave`.
        None after `read_timeout_s`."""
        self.settle()
        held = self._held
        if held.consumer is None:
            held.consumer = self._join()
        try:
            held.message = held.consumer.receive(self._read_timeout_s)
        except TimeoutError:
            return None
        except ClientError:
            consumer, held.consumer = held.consumer, None
            with self._lock:
                if consumer is self._consumer:
                    self._end(consumer)
            raise
        return held.message.data

    def _join(self) -> BlockingConsumer:
        """The consumer, which may hold one task more from now on."""
        with self._lock:
            if self._consumer is None:
                self._create()
                consumer = self.client.consume(self.name, prefetch=1)
                self._consumer, self._threads = consumer.__enter__(), 1
            else:
                self._consumer.set_prefetch(self._threads + 1)
                self._threads += 1
            return self._consumer

    def _end(self, consumer: BlockingConsumer) -> None:
        self._consumer = None
        with suppress(ClientError):
            consumer.__exit__(None, None, None)

    def settle(self, how: Callable[[Message], None] = Message.ack) -> None:
        """Ack the task of this thread, if it has one, or do something else with it."""
        message, self._held.message = self._held.message, None
        if message is not None:
            how(message)

    def leave(self) -> None:
        """This thread gets no more tasks. What it has returns to the queue."""
        consumer, self._held.consumer = self._held.consumer, None
        with self._lock:
            if consumer is not None and consumer is self._consumer:
                self._threads -= 1
                if self._threads:
                    with suppress(ClientError):
                        consumer._narrow(self._threads)
                else:
                    self._end(consumer)
        self.settle(Message.release)

    def _told(self) -> dict[str, Any]:
        """What the server tells of the queue. A task that waits for this thread is in the queue."""
        if self._held.message is None:
            self.leave()
        try:
            told: dict[str, Any] = self.client.stats("queue", self.name, "--limit=1")
        except RequestFailed as error:
            if not requests.tells_missing(error.reason):
                raise
            return {"ready": 0, "scheduled": 0}
        return told

    def queue_size(self) -> int:
        return int(self._told()["ready"])

    def schedule_size(self) -> int:
        return int(self._told()["scheduled"])

    def enqueued_items(self, limit: int | None = None) -> list[bytes]:
        if not self.queue_size():
            return []
        run = {row["seq"] for row in self.client.stats("unacked", self.name, "--limit=10000")}
        found = [each for each in self._peek() if each.seq not in run]
        found.sort(key=lambda each: -each.priority)
        return [each.data for each in found[:limit]]

    def scheduled_items(self, limit: int | None = None) -> list[bytes]:
        return [each.data for each in self._scheduled()[:limit]]

    def read_schedule(self, ts: datetime) -> list[bytes]:
        due_s = (ts.replace(tzinfo=UTC) if self._utc else ts).timestamp()
        due = [each for each in self._scheduled() if (each.due or 0.0) <= due_s]
        return [each.data for each in due if self.client.cancel(self.name, each.id)]

    def _scheduled(self) -> list[PeekedMessage]:
        found = self._peek(scheduled=True) if self.schedule_size() else []
        return sorted(found, key=lambda each: each.due or 0.0)

    def _peek(self, *, scheduled: bool = False) -> list[PeekedMessage]:
        return self.client.peek(self.name, limit=LISTED_MAX, scheduled=scheduled)

    def flush_queue(self) -> None:
        if self.queue_size():
            self.client.trim(self.name, SEQ_MAX)

    def flush_schedule(self) -> None:
        if self.schedule_size():
            self.client.cancel(self.name, None)

    # -- what is kept under keys

    def _place(self, key: str | bytes) -> tuple[str, int]:
        """The key as text, and the number of its log."""
        name = key.decode(errors="surrogateescape") if isinstance(key, bytes) else key
        return name, zlib.crc32(name.encode(errors="surrogateescape")) % LOGS

    def _logs(self, key: str | bytes) -> tuple[str, list[KeyLog]]:
        """The key as text, and the logs that may have it. Those of huey's own that are for no
        result are not looked for among results."""
        name, number = self._place(key)
        if name.startswith(("r:", "rt:", f"{self.name}.lock.", f"{self.name}.rl.")):
            return name, [self._data[number]]
        return name, [self._data[number], self._results[number]]

    def put_data(self, key: str | bytes, value: bytes, is_result: bool = False) -> None:
        name, number = self._place(key)
        (self._results if is_result else self._data)[number].put(name, value)

    def peek_data(self, key: str | bytes) -> Any:
        name, logs = self._logs(key)
        values = (log.get(name) for log in logs)
        return next((value for value in values if value is not None), EmptyData)

    def pop_data(self, key: str | bytes) -> Any:
        name, logs = self._logs(key)
        values = (log.pop(name) for log in logs)
        return next((value for value in values if value is not None), EmptyData)

    def has_data_for_key(self, key: str | bytes) -> bool:
        name, logs = self._logs(key)
        return any(log.has(name) for log in logs)

    def put_if_empty(self, key: str | bytes, value: bytes, ttl: float | None = None) -> bool:
        """Whether it was put. After `ttl` seconds it may be put again, by the clock of the server;
        who only looks does it by the clock of this machine."""
        name, number = self._place(key)
        return self._data[number].add(name, value, ttl)

    def wait_result(
        self,
        key: str | bytes,
        timeout: float | None = None,
        backoff: float = 1.15,
        max_delay: float = 1.0,
    ) -> bool:
        """Sees a result as soon as it is stored; looks again after at most `max_delay` seconds."""
        if self.has_data_for_key(key):
            return True
        ends_s = None if timeout is None else time.monotonic() + timeout
        log, delay_s = self._logs(key)[1][-1], 0.05
        with self.client.tail(queue=log.queue) as tail:
            while not self.has_data_for_key(key):
                left_s = max_delay if ends_s is None else ends_s - time.monotonic()
                if left_s <= 0:
                    return False
                with suppress(TimeoutError):
                    tail.receive(min(left_s, delay_s, max_delay))
                delay_s *= backoff
        return True

    def incr(self, key: str | bytes, amount: int = 1) -> int:
        name, number = self._place(key)
        return int(self._data[number].ask("incr", name, b"%d" % amount))

    def delete_counter(self, key: str | bytes) -> None:
        name, number = self._place(key)
        self._data[number].ask("reset", name)

    def result_store_size(self) -> int:
        return sum(len(log.entries()) for log in [*self._data, *self._results])

    def result_items(self) -> dict[str, bytes]:
        logs = [*self._results, *self._data]
        return {name: value for log in logs for name, value in log.items()}

    def flush_results(self) -> None:
        for log in [*self._data, *self._results]:
            log.clear()

    def flush_counters(self) -> None:
        for log in self._data:
            log.clear_counters()
