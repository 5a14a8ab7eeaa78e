"""The broker of dramatiq: queues, enqueues, and the consumers of workers.

The one rule: what is unacked, delayed or dead is known to the server alone.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from typing import Any
from uuid import uuid4

from dramatiq import Broker, Consumer, Message, MessageProxy, Middleware
from dramatiq.common import xq_name
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout

from mqks.client import blocking, requests
from mqks.client import messages as deliveries
from mqks.client.errors import (
    ConnectionLost,
    InvalidRequest,
    QueueMissing,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.options import Options
from mqks.client.urls import Urls

DEAD_LETTERS_S = 7 * 86400.0
"""So long dead letters are kept by default."""
ONCE_S = 3600.0
"""So long an enqueue whose confirm was lost may be sent again and is dropped, if it was stored."""
BATCH_MESSAGES = 1000
"""The most that `enqueue_many` waits for together."""
BACKOFF_S = (1, 60)
"""Before a task is tried again of which the retry could not be sent: first and most."""
JOIN_S = 0.05
"""The pause between two looks of `join`."""


class MqksBroker(Broker):
    """A broker for `dramatiq.set_broker`. It connects at its first use, in each process.

    - `url`: as of `mqks.blocking.connect`; by default MQKS_URL, else localhost.
    - `options`: those of its client.
    - `prefix`: what precedes the name of a queue at the server.
    - `dead_letters_s`: how long dead letters are kept, in seconds. None: neither that nor where
      dead letters go is set; the policies of the queues stay as they are.

    Methods raise ConnectionClosed of dramatiq if there is no connection or no reply in time,
    RequestFailed for what the server refuses, and InvalidRequest for what cannot be sent.
    """

    def __init__(
        self,
        url: Urls | None = None,
        *,
        middleware: list[Middleware] | None = None,
        options: Options | None = None,
        prefix: str = "dramatiq.",
        dead_letters_s: float | None = DEAD_LETTERS_S,
    ) -> None:
        super().__init__(middleware)
        self.client = blocking.connect(url, options)
        self.prefix = prefix
        self.dead_letters_s = dead_letters_s
        self.queues: set[str] = set()

    def close(self) -> None:
        """Close the connection. Its consumers end with it."""
        with _closed_if_lost():
            self.client.close()

    def get_declared_queues(self) -> set[str]:
        return self.queues.copy()

    def server_queue(self, queue_name: str) -> str:
        """The server's name of a queue; that of its dead letters ends with `.XQ`."""
        return f"{self.prefix}{queue_name}"

    def declare_queue(self, queue_name: str) -> None:
        """The server gets it with the first message or consumer."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def _create(self, queue_name: str) -> None:
        queue, dead = map(self.server_queue, (queue_name, xq_name(queue_name)))
        self.client.subscribe(queue, [queue])
        if self.dead_letters_s is not None:
            self.client.set_queue(dead, ttl_s=self.dead_letters_s)
            self.client.set_queue(queue, dead_letter_queue=dead)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> "MqksConsumer":
        """A consumer of the queue with a connection of its own, which waits for a message for
        `timeout` milliseconds."""
        self.declare_queue(queue_name)
        with _closed_if_lost():
            self._create(queue_name)
            consumer = self.client.consume(self.server_queue(queue_name), prefetch=prefetch)
            return MqksConsumer(self, consumer.__enter__(), timeout / 1000)

    def enqueue(self, message: Message[Any], *, delay: float | None = None) -> Message[Any]:
        """Returns when the server has stored the message, once. It delivers it after `delay`
        milliseconds."""
        try:
            self.enqueue_many([message], delay=delay)
        except Exception as error:
            if isinstance(message, MqksMessage):
                message.unsent = error
            raise
        return message

    def enqueue_many(self, messages: Iterable[Message[Any]], *, delay: float | None = None) -> None:
        """Like `enqueue`, with one wait for each `BATCH_MESSAGES`. Raises PublishFailed if some are
        refused; then the others of their batch and those before it are stored."""
        terms: requests.Many = {"once_s": ONCE_S, "mandatory": True}
        if delay is not None:
            terms["delay_s"] = delay / 1000
        for (queue_name, terms["priority"]), group in groupby(messages, _place):
            while batch := list(islice(group, BATCH_MESSAGES)):
                self._enqueue(queue_name, batch, delay, terms)

    def _enqueue(
        self,
        queue_name: str,
        batch: list[Message[Any]],
        delay: float | None,
        terms: requests.Many,
    ) -> None:
        self.declare_queue(queue_name)
        for message in batch:
            self.logger.debug("Enqueueing %r on queue %r.", message.message_id, queue_name)
            self.emit_before("enqueue", message, delay)
        event, terms["id_prefix"] = self.server_queue(queue_name), uuid4().hex
        pairs = [(event, message.encode()) for message in batch]
        with _closed_if_lost():
            try:
                self.client.publish_many(pairs, **terms)
            except RequestFailed:  # The queue may be missing. What is stored is not repeated.
                self._create(queue_name)
                self.client.publish_many(pairs, **terms)
        for message in batch:
            self.emit_after("enqueue", message, delay)

    def get_queue_message_counts(self, queue_name: str) -> tuple[int, int, int]:
        """How many messages are ready or unacked, are delayed, and are dead."""
        ready, unacked, delayed = self._counts(queue_name)
        return ready + unacked, delayed, self._counts(xq_name(queue_name))[0]

    def _counts(self, queue_name: str) -> tuple[int, int, int]:
        try:
            with _closed_if_lost():
                told = self.client.stats("queue", self.server_queue(queue_name), "--limit=1")
        except RequestFailed as error:
            if not requests.tells_missing(error.reason):
                raise
            return 0, 0, 0
        return told["ready"], told["unacked"], told["scheduled"]

    def flush(self, queue_name: str) -> None:
        """Drop its messages that no worker has, those that are delayed, and its dead letters."""
        for name in (queue_name, xq_name(queue_name)):
            with _closed_if_lost(), suppress(QueueMissing):
                self.client.purge(self.server_queue(name), scheduled=True)

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: float | None = None) -> None:
        """Wait until all messages of the queue are done, also those that are delayed. Raises
        QueueJoinTimeout after `timeout` milliseconds."""
        ends_s = None if timeout is None else time.monotonic() + timeout / 1000
        while any(self._counts(queue_name)):
            if ends_s is not None and time.monotonic() >= ends_s:
                raise QueueJoinTimeout(queue_name)
            time.sleep(JOIN_S)


class MqksConsumer(Consumer):
    """The consumer of one queue. Any thread may call."""

    def __init__(
        self, broker: MqksBroker, consumer: blocking.BlockingConsumer, timeout_s: float
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._timeout_s = timeout_s

    def __next__(self) -> "MqksMessage | None":
        """The next message; None if none comes in time. Raises ConnectionClosed if the consumer has
        ended, for example with its queue: dramatiq starts another one. A connection that is lost is
        made again meanwhile."""
        try:
            delivery = self._consumer.receive(self._timeout_s)
        except (ConnectionLost, RequestFailed) as error:
            raise ConnectionClosed(error) from None
        except TimeoutError:
            return None
        try:
            return MqksMessage(Message.decode(delivery.data), delivery)
        except DecodeError as error:
            self._broker.logger.exception("Failed to decode message %s.", delivery.id)
            delivery.reject(dead=True, reason=error.error)
            return None

    def ack(self, message: MessageProxy) -> None:
        """It is done, or is tried again under its old message if its retry could not be sent."""
        if message.unsent is None:
            message.delivery.ack()
        elif isinstance(message.unsent, InvalidRequest):  # It is too large, and would be again.
            message.delivery.reject(dead=True, reason=message.unsent)
        else:
            message.delivery.reject(backoff=BACKOFF_S, reason=message.unsent)

    def nack(self, message: MessageProxy) -> None:
        """It is dead, for the reason of its exception."""
        message.delivery.reject(dead=True, reason=message._exception)

    # Nothing to `requeue`: dramatiq closes the consumer behind it.

    def close(self) -> None:
        """What it has unacked returns to its place in the queue."""
        self._consumer.__exit__(None, None, None)


class MqksMessage(MessageProxy):
    def __init__(self, message: Message[Any], delivery: deliveries.Message) -> None:
        super().__init__(message)
        self.delivery = delivery
        self.unsent: Exception | None = None
        """Why its retry was not sent, which dramatiq only logs."""

    @property
    def redelivered(self) -> bool:
        return self.delivery.retry > 0


def _place(message: Message[Any]) -> tuple[str, int | None]:
    return message.queue_name, message.options.get("broker_priority")


@contextmanager
def _closed_if_lost() -> Iterator[None]:
    try:
        yield
    except (ConnectionLost, ReplyTimeout) as error:
        raise ConnectionClosed(error) from None
