"""Results of tasks, as messages of queues without consumers, which are read as logs.

The one rule: a process reads each log onwards from where it was, and keeps numbers, not results.
"""

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote

from taskiq import AsyncResultBackend, ResultGetError, TaskiqResult
from taskiq.abc.serializer import TaskiqSerializer
from taskiq.depends.progress_tracker import TaskProgress
from taskiq.serializers import JSONSerializer

from mqks.client import requests
from mqks.client.async_client import AsyncClient
from mqks.client.errors import RequestFailed
from mqks.client.lazy import LazyClient
from mqks.client.messages import PeekedMessage
from mqks.client.options import Options
from mqks.client.requests import PolicyKeywords
from mqks.client.urls import Urls

LOGS = 16
"""The queues among which results are spread by their ids. Who waits for one reads the results of
its queue alone."""
PAGE_MESSAGES = 1000

READS = 8
"""The most readings at a time; a connection may have 16 requests of their kind."""

T = TypeVar("T")
U = TypeVar("U")


class ResultMissing(ResultGetError):
    """There is no result of this task, or not any more."""

    __template__ = "There is no result of the task {task_id}"
    task_id: str


class ResultLog:
    """One queue of results, with the numbers of those that it has. Of several of a task, the last
    one counts."""

    def __init__(self, queue: str, client: AsyncClient, reads: asyncio.Semaphore) -> None:
        self.queue = queue
        self._client = client
        self._reads = reads
        self._lock = asyncio.Lock()
        self._seqs = OrderedDict[str, int]()
        self._epoch = ""
        self._next_seq = 1
        self._read_s = 0.0
        """When the last reading began."""

    async def seq(self, name: str) -> int | None:
        """The number of a result. Raises RequestFailed if there is no such queue."""
        asked_s = time.monotonic()
        async with self._lock:
            if self._read_s <= asked_s:  # Those who have waited share what was read meanwhile.
                self._read_s = time.monotonic()
                async with self._reads:
                    await self._read_on()
        return self._seqs.get(name)

    async def find(self, name: str) -> PeekedMessage | None:
        if (seq := await self.seq(name)) is not None:
            async with self._reads:
                page = await self._client.peek(self.queue, after=seq - 1, limit=1)
            if page and page[0].seq == seq:
                return page[0]
        return None

    async def _read_on(self) -> None:
        answer = await self._client.request("range", self.queue)
        told = requests.fields_told(answer)
        if told["epoch"] != self._epoch:  # The queue is another one of this name.
            self._seqs.clear()
            self._epoch, self._next_seq = told["epoch"], 1
        first, end = int(told["first"]), int(told["next"])
        self._next_seq = max(self._next_seq, first)
        while self._next_seq < end:
            after = self._next_seq - 1
            page = await self._client.peek(self.queue, after=after, limit=PAGE_MESSAGES)
            for message in page:
                self._seqs[message.id] = message.seq
                self._seqs.move_to_end(message.id)
            self._next_seq = page[-1].seq + 1 if page else end
        while self._seqs and next(iter(self._seqs.values())) < first:
            self._seqs.popitem(last=False)  # It has expired, or was one of too many.


class MqksResultBackend(AsyncResultBackend[T]):
    """Keeps each result for `expire_s` seconds, and at most `results_max`, the last ones; so
    with progress. It is in the queues `{queue_prefix}.0` to `.15`, and `{queue_prefix}.progress.0`
    to `.15`."""

    def __init__(
        self,
        url: Urls | None = None,
        *,
        expire_s: float = 3600.0,
        results_max: int = 100_000,
        queue_prefix: str = "taskiq.results",
        serializer: TaskiqSerializer | None = None,
        options: Options | None = None,
    ) -> None:
        self.lazy = LazyClient(url, options)
        self.serializer = serializer or JSONSerializer()
        self._expire_s = expire_s
        self._each_max = -(-results_max // LOGS)
        self._reads: asyncio.Semaphore
        self._results = queue_prefix
        self._progress = f"{queue_prefix}.progress"
        self._logs = dict[str, ResultLog]()
        self._client: AsyncClient
        """That of the logs."""

    async def startup(self) -> None:
        await self.lazy.get()

    async def shutdown(self) -> None:
        await self.lazy.close()

    async def set_result(self, task_id: str, result: TaskiqResult[T]) -> None:
        """Returns when the server has stored it. Raises InvalidRequest for one that is too large,
        and what `client.publish` raises."""
        await self._put(self._results, task_id, result)

    async def is_result_ready(self, task_id: str) -> bool:
        return await self._ask(self._results, task_id, ResultLog.seq) is not None

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[T]:
        """Raises ResultMissing."""
        found = await self._ask(self._results, task_id, ResultLog.find)
        if found is None:
            raise ResultMissing(task_id=task_id)
        result = TaskiqResult[T].model_validate(self.serializer.loadb(found.data))
        if not with_logs:
            result.log = None
        return result

    async def set_progress(self, task_id: str, progress: TaskProgress[Any]) -> None:
        await self._put(self._progress, task_id, progress)

    async def get_progress(self, task_id: str) -> TaskProgress[Any] | None:
        found = await self._ask(self._progress, task_id, ResultLog.find)
        if found is None:
            return None
        return TaskProgress[Any].model_validate(self.serializer.loadb(found.data))

    async def _put(
        self, prefix: str, task_id: str, value: TaskiqResult[T] | TaskProgress[Any]
    ) -> None:
        data = self.serializer.dumpb(value.model_dump(mode="json"))

        async def put(log: ResultLog, name: str) -> None:
            terms: dict[str, Any] = {"to": log.queue, "id": name, "confirm": True}
            await self._client.publish(log.queue, data, **terms)

        await self._ask(prefix, task_id, put)

    async def _ask(
        self, prefix: str, task_id: str, ask: Callable[[ResultLog, str], Awaitable[U]]
    ) -> U:
        client, name = await self.lazy.get(), quote(task_id)
        if client is not self.__dict__.get("_client"):
            self._client, self._reads = client, asyncio.Semaphore(READS)
            self._declaring = asyncio.Lock()
            self._logs.clear()
        queue = f"{prefix}.{zlib.crc32(name.encode()) % LOGS}"
        if (log := self._logs.get(queue)) is None:
            async with self._declaring:
                if (log := self._logs.get(queue)) is None:
                    await self._declare(queue)
                    log = self._logs[queue] = ResultLog(queue, client, self._reads)
        try:
            return await ask(log, name)
        except RequestFailed:  # Mostly since somebody has deleted it.
            await self._declare(queue)
            return await ask(log, name)

    async def _declare(self, queue: str) -> None:
        policy = PolicyKeywords(ttl_s=self._expire_s, messages_max=self._each_max, overflow="drop")
        await self._client.set_queue(queue, **policy)
