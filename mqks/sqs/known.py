"""What is remembered between requests, so that the broker is not asked each time.

The one rule: all of it may be forgotten. What must outlive a restart is with the broker.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic, time_ns
from typing import Any, Final

import anyio

from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError
from mqks.client.requests import decoded, encoded
from mqks.limits import SQS_QUEUES_MAX, SQS_RECENT_MAX
from mqks.sqs.errors import SqsError, no_queue
from mqks.sqs.queues import SqsQueue
from mqks.sqs.tasks import MoveTasks

DEDUPLICATION_S: Final = 300.0
PURGE_S: Final = 60.0
"""How long a queue that was purged may not be purged again."""
KNOWN_S: Final = 1.0
"""How long the attributes of a queue are not asked for again."""
PAGE_ROWS: Final = 1000
Message = tuple[str, str]
"""The user who sent it, and its id."""


class KnownQueues:
    """`open_client` gives a client of the broker that may do everything."""

    def __init__(self, open_client: Callable[[], AbstractAsyncContextManager[AsyncClient]]) -> None:
        self._open_client = open_client
        self._queues: OrderedDict[str, tuple[float, SqsQueue]] = OrderedDict()
        """Until when an answer of the broker counts, and the answer."""
        self._first: OrderedDict[str, float] = OrderedDict()
        self._sent: OrderedDict[Message, tuple[float, str]] = OrderedDict()
        """Until when a message would be a duplicate, and its sequence number."""
        self._sending: dict[Message, anyio.Event] = {}
        self._last = 0
        self._purged: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Until when queues, by name and time of creation, may not be purged again."""
        self.changes = anyio.Lock()
        """Of attributes and tags, which are read before they are set."""
        self.tasks = MoveTasks()

    async def queue(self, name: str, *, is_fresh: bool = False) -> SqsQueue:
        """What the broker tells about a queue, also to whoever may not ask. Raises SqsError."""
        until_s, queue = self._queues.get(name, (0.0, None))
        if queue is None or is_fresh or monotonic() >= until_s:
            self.forget(name)
            if name.startswith("--") or name.split() != [name]:  # No name at all.
                raise no_queue()
            async with self._open_client() as client:
                queue = SqsQueue.of(await client.stats("queue", name, "--limit=1"))
            _keep(self._queues, name, (monotonic() + KNOWN_S, queue), SQS_QUEUES_MAX)
        return queue

    def forget(self, name: str) -> None:
        self._queues.pop(name, None)

    async def rows(self, after: str, prefix: str) -> AsyncIterator[dict[str, Any]]:
        """What `stats queues` tells of those whose names begin with the prefix."""
        if len((after + prefix).split()) > 1:
            return
        first = encoded(prefix)
        if prefix and not after:  # A name shortly before it.
            after = decoded(first[:-1] + bytes([max(first[-1] - 1, 33), 255]))
        while True:
            words = [f"--after={after}"] if after else []
            async with self._open_client() as client:
                page = await client.stats("queues", f"--limit={PAGE_ROWS}", *words)
            for row in page:
                if row["name"].startswith(prefix):
                    yield row
                elif encoded(row["name"]) > first:
                    return
            if not page:
                return
            after = page[-1]["name"]

    async def exists(self, name: str) -> bool:
        try:
            await self.queue(name, is_fresh=True)
        except (SqsError, ClientError) as failure:
            if SqsError.of(failure).code != "QueueDoesNotExist":
                raise
            return False
        return True

    def first_s(self, message: str, otherwise_s: float) -> float:
        """When a message was received first."""
        if message not in self._first:
            _keep(self._first, message, otherwise_s, SQS_RECENT_MAX)
        return self._first[message]

    @asynccontextmanager
    async def sequence(self, user: str, message_id: str) -> AsyncIterator[str]:
        """The sequence number to send a message with: of a duplicate, that of the first one."""
        message = user, message_id
        while message in self._sending:
            await self._sending[message].wait()
        until_s, number = self._sent.get(message, (0.0, ""))
        if monotonic() >= until_s:
            self._last = max(self._last + 1, time_ns())
            until_s, number = monotonic() + DEDUPLICATION_S, f"{self._last:020}"
        sent = self._sending[message] = anyio.Event()
        try:
            yield number
            _keep(self._sent, message, (until_s, number), SQS_RECENT_MAX)
        finally:
            del self._sending[message]
            sent.set()

    @asynccontextmanager
    async def purge(self, queue: SqsQueue) -> AsyncIterator[None]:
        """The one purge of a queue in its time, unless it fails. Raises SqsError."""
        which = queue.name, queue.created
        if monotonic() < self._purged.get(which, 0.0):
            reason = f"Only one PurgeQueue operation on {queue.name} is allowed every 60 seconds."
            raise SqsError("PurgeQueueInProgress", reason, 403)
        _keep(self._purged, which, monotonic() + PURGE_S, SQS_QUEUES_MAX)
        try:
            yield
        except BaseException:
            self._purged.pop(which, None)
            raise


def _keep(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
