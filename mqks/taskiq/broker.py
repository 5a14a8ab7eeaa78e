"""The broker of taskiq: tasks are confirmed publishes, deliveries are acked when taskiq says so.

The one rule: a worker that stops takes nothing more, and leaves its queue only after its last ack.
"""

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from mqks.client.async_client import AsyncConsumer
from mqks.client.errors import ClientError, RequestFailed
from mqks.client.lazy import LazyClient
from mqks.client.messages import Message
from mqks.client.options import Options
from mqks.client.requests import PolicyKeywords, Unique
from mqks.client.urls import Urls

PREFETCH = 100
"""As many as a worker of taskiq runs at a time, unless it is told otherwise."""
ONCE_S = 3600.0
"""The most seconds in which a publish that is sent again is dropped; an answer is not awaited for
longer than half of it."""


def _unique(label: Any) -> Unique:
    wanted = Unique.parse(label)
    if wanted.until == "acked":  # A task that sends itself again, to retry, would be dropped.
        raise ValueError(label)
    return wanted


LABELS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "delay": ("delay_s", float),
    "priority": ("priority", int),
    "unique": ("unique", _unique),
}
"""The labels of a task that the server keeps, and what they are of a message."""


def terms_of(labels: dict[str, Any]) -> dict[str, Any]:
    """Options of `client.publish`. Raises ValueError for a label that is wrong, as no number."""
    terms: dict[str, Any] = {}
    for label, (term, read) in LABELS.items():
        if label in labels:
            try:
                terms[term] = read(labels[label])
            except (AttributeError, TypeError, ValueError):
                raise ValueError(f"the label {label} is wrong: {labels[label]!r}") from None
    return terms


class MqksBroker(AsyncBroker):
    """Raises what `mqks.connect` raises for a wrong `url`; the default is that of MQKS_URL.

    - `queue_name`: the queue of its workers, and the event of its tasks. The label `queue_name`
      sends a task to another one.
    - `prefetch`: the most unacked tasks of a worker process.
    - `policy`: that of the queue, as in `client.set_queue`; by default it keeps the one it has.
    """

    def __init__(
        self,
        url: Urls | None = None,
        queue_name: str = "taskiq",
        *,
        prefetch: int = PREFETCH,
        policy: PolicyKeywords | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__()
        self.queue_name = queue_name
        self.prefetch = prefetch
        self.policy = policy
        self.lazy = LazyClient(url, options)
        self._once_s = min(2 * (options or Options()).timeout_s, ONCE_S)
        self._consumers = list[AsyncConsumer]()

    async def startup(self) -> None:
        await self.lazy.get()
        if self.is_worker_process:
            await self.declare(self.queue_name)
        await super().startup()

    async def shutdown(self) -> None:
        try:
            await super().shutdown()
        finally:
            while self._consumers:
                await self._consumers.pop().__aexit__(None, None, None)
            await self.lazy.close()

    async def declare(self, queue: str) -> None:
        """Create a queue, bind it to its tasks, and set the policy. Raises RequestFailed."""
        client = await self.lazy.get()
        if self.policy:
            await client.set_queue(queue, **self.policy)
        await client.subscribe(queue, [queue, scheduled(queue)])

    async def kick(self, message: BrokerMessage) -> None:
        """Returns when the server has stored the task. Raises ValueError for its labels, and what
        `client.publish` raises; taskiq makes a SendTaskError of it."""
        queue = message.labels.get("queue_name") or self.queue_name
        terms = terms_of(message.labels)
        client = await self.lazy.get()
        # Retries of a task have its id, too, but are other messages.
        terms |= {"id": f"{quote(message.task_id)}.{secrets.token_hex(8)}", "once_s": self._once_s}

        async def publish() -> None:
            await client.publish(queue, message.message, confirm=True, mandatory=True, **terms)

        try:
            await publish()
        except RequestFailed:  # Mostly since there is no such queue yet.
            await self.declare(queue)
            await publish()

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Ends by an exception only: ConnectionLost after `shutdown`, and RequestFailed if the
        server refuses the consumer."""
        client, queue, held = await self.lazy.get(), self.queue_name, 0
        consumer = client.consume(queue, [queue, scheduled(queue)], prefetch=self.prefetch)
        await consumer.__aenter__()
        self._consumers.append(consumer)

        def taken(message: Message) -> AckableMessage:
            nonlocal held
            held += 1

            def ack() -> None:
                nonlocal held
                held -= 1
                message.ack()

            return AckableMessage(data=self._data(message), ack=ack)

        try:
            async for message in consumer:
                yield taken(message)
        finally:
            if held and consumer._session.failure is None:
                await self._stop(consumer)
            else:
                self._consumers.remove(consumer)
                await consumer.__aexit__(None, None, None)

    async def _stop(self, consumer: AsyncConsumer) -> None:
        """Take nothing more, and give back what taskiq has not taken. The rest is acked until
        `shutdown`."""
        with suppress(TimeoutError, ClientError):
            await consumer._narrow(1)
        consumer.stop()

    def _data(self, message: Message) -> bytes:
        if message.event == scheduled(self.queue_name):
            task = self.formatter.loads(message.data)
            if not task.task_id:  # Each tick is a task of its own.
                task.task_id = message.id
                return self.formatter.dumps(task).message
        return message.data


def scheduled(queue: str) -> str:
    """The event of tasks that schedules publish for this queue."""
    return f"{queue}.scheduled"
