"""A connection to the server for kombu: what is sent, what is answered, what is delivered.

The one rule: a thread holds the lock while it reads or writes, and not while it waits for messages,
since other threads ack meanwhile.
"""

import os
import secrets
import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR
from threading import RLock
from typing import Any
from weakref import WeakSet

from mqks.client import requests, urls
from mqks.client.blocking_connection import open_socket
from mqks.client.errors import ClientError, ConnectionLost, ReplyTimeout, RequestFailed
from mqks.client.opened import FORKED
from mqks.client.options import Options
from mqks.client.session import Call, Session
from mqks.errors import reason

READ_BYTES = 256 * 1024
PIPELINED_MAX = 1000
"""The most unconfirmed publishes of `pipelined`."""
_NOT_NOW = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError


class LinkConsumer:
    """One `consume` of a channel. `deliver` is called with each delivery, as it is on the wire."""

    id = b""

    def __init__(
        self, channel: Any, deliver: Callable[["LinkConsumer", bytes], None], *, acks: bool
    ) -> None:
        self.channel = channel
        self.deliver = deliver
        self.acks = acks
        self.held = 0
        """Unacked messages."""
        self.is_cancelled = False


class Pipeline:
    """Publishes that are confirmed together. Those that are unconfirmed when their connection is
    lost are sent again on the next one, under their ids."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._sent: dict[bytes, tuple[bytes, Call]] = {}
        """Requests and their calls, by their ids."""
        self._refused: RequestFailed | None = None

    def publish(self, link: "Link", body: bytes, request_id: bytes) -> None:
        self._go_on(link)
        if len(self._sent) >= PIPELINED_MAX:
            self.wait(link)
        self._sent[request_id] = body, link.start(body, request_id)

    def wait(self, link: "Link") -> None:
        """Raises RequestFailed for the first that was ever refused: kombu may have tried again what
        raised it last time, which was the publish of another message."""
        self._go_on(link)
        try:
            link.wait([call for _, call in self._sent.values()])
        except RequestFailed as error:
            self._refused = self._refused or error
        self._sent.clear()
        if self._refused is not None:
            raise self._refused

    def _go_on(self, link: "Link") -> None:
        if link is not self._link:
            self._link = link
            for id_, (body, call) in self._sent.items():
                if call.error is not None:
                    self._sent[id_] = body, link.start(body, id_)

    def leave_to_parent(self) -> None:
        """In the child of a fork: the parent waits for them."""
        self._sent.clear()


class SharedLinks:
    """What outlives the connections of one `kombu.Connection`."""

    pipeline: Pipeline | None = None
    """Of the `pipelined` that is running."""
    lost: ClientError | None = None
    """What has ended its consumers, until there are others."""


class Link(Session):
    """The connection of one `kombu.Connection`, its `client`, shared by its channels. It has one
    life: after a loss kombu makes another one.

    Raises ConnectionLost, and AuthenticationFailed when it is made.
    """

    def __init__(self, client: Any, address: urls.Address, options: Options) -> None:
        prefix = secrets.token_hex(6)
        super().__init__(options, address.credentials, prefix=prefix, jitter=lambda: 0.0)
        self.client = client
        self.consumers: dict[bytes, LinkConsumer] = {}
        self.channels: list[Any] = []
        self.exchange_types: dict[str, str] = {}
        self.shared: SharedLinks = client.__dict__.setdefault("_mqks", SharedLinks())
        self.is_parents = False
        """Whether it belongs to the process that this one was forked from."""
        self.wake: Callable[[], object] = lambda: None
        """Called when there are deliveries for `drain_events` that the socket does not show."""
        self.unregister: Callable[[], object] = lambda: None
        """Ends what calls `drain_events` when there is something to read."""
        self.on_output = self._write
        self.is_tls = address.tls
        self._deliveries = deque[tuple[LinkConsumer, bytes]]()
        self._lock = RLock()
        self._beat_s = self._silent_s = 0.0
        """The last `beat`, and how long nothing has come as far as those before it can tell."""
        self._socket = open_socket(address, options, options.connect_timeout_s)
        _links.add(self)
        try:
            self.connected(time.monotonic())
            self._until(lambda: self.is_up)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, body: bytes, request_id: bytes | None = None) -> bytes:
        """Send a request and return the text of its answer. Raises RequestFailed with the reason,
        InvalidRequest for one that the server would not read, ReplyTimeout, and ConnectionLost."""
        return self.wait([self.start(body, request_id)])[0]

    def ask_lines(self, body: bytes) -> list[bytes]:
        """All lines of the answer but the last. Raises as `ask`."""
        lines = list[bytes]()
        self.wait([self.start(body, lines=lines)])
        return lines

    def start(
        self,
        body: bytes,
        request_id: bytes | None = None,
        consumer: LinkConsumer | None = None,
        lines: list[bytes] | None = None,
    ) -> Call:
        """Send a request whose answer is to be waited for; a `consume` with its consumer, and one
        that has many `lines` with a list for them."""
        call = Call()
        call.lines = lines
        with self._lock:
            request_id = request_id or self.new_id()
            self._ask(request_id, requests.line(request_id, body), call)
            if consumer is not None:
                consumer.id, self.consumers[request_id] = request_id, consumer
                self.shared.lost = None
        return call

    def wait(self, calls: Sequence[Call]) -> list[bytes]:
        """The texts of the answers, in order. Raises as `ask`, for the first that was refused."""
        self._until(lambda: not any(call.remaining for call in calls))
        if self._deliveries:
            self.wake()
        try:
            return [call.result() for call in calls]
        except RequestFailed as error:
            with suppress(ClientError):
                asked = self.start(requests.reason(error.error_id))
                self._until(lambda: not asked.remaining)
                error.reason = requests.reason_told(asked.result())
            raise

    def _until(self, is_done: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + self._options.timeout_s
        with self._lock:
            while not is_done():
                if not self._read() and not self._wait(select.POLLIN, ends_s):
                    self._lost("no reply before the timeout")
                    raise ReplyTimeout("no reply before the timeout; it may have been executed")

    def send(self, *bodies: bytes) -> None:
        """Send requests whose answers nobody waits for."""
        with self._lock:
            for body in bodies:
                line = requests.line(self.new_id(), body)
                self._check(line)
                self._put(line)

    def _write(self, _: bool) -> None:
        ends_s = time.monotonic() + self._options.timeout_s
        with self._lock, self._whole():
            left = memoryview(self.take())
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except _NOT_NOW:
                    if not self._wait(select.POLLOUT, ends_s):
                        raise TimeoutError("the server does not read") from None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A read or a write. If it is broken off, also by an exception of a signal handler, the
        connection ends, since what follows would continue half a line. Raises ConnectionLost."""
        try:
            yield
        except OSError as error:
            raise self._lost(reason(error)) from None
        except ClientError as error:
            self.fail(error)
            raise
        except BaseException:
            self._lost("a thread was interrupted while it read or wrote")
            raise

    def drain_events(self, timeout: float | None = None) -> None:
        """Pass on the deliveries that are there. Raises TimeoutError after `timeout` seconds
        without one, and ConnectionLost if there are no consumers since they were lost: kombu may
        have connected again for something else."""
        if self.shared.lost is not None and not self.consumers:
            raise self.shared.lost.with_traceback(None)
        ends_s = None if timeout is None else time.monotonic() + timeout
        while not self._deliveries:
            with self._lock:
                came = self._read()
            if not came and not self._wait(select.POLLIN, ends_s):
                raise TimeoutError("no message")
        for _ in range(len(self._deliveries)):
            if self._deliveries:  # A callback may drain, too.
                consumer, text = self._deliveries.popleft()
                consumer.deliver(consumer, text)

    def beat(self, interval_s: float) -> None:
        """Ping the server. Raises ConnectionLost if nothing came for two intervals; 0: never.

        It may not have been called for long, for example during a task: of the time between two
        calls an interval counts at most, and what has come may not have been read yet."""
        now_s = time.monotonic()
        is_silent = self._heard_s < self._beat_s
        passed_s = min(now_s - self._beat_s, interval_s)
        self._silent_s, self._beat_s = is_silent * (self._silent_s + passed_s), now_s
        with self._lock:
            if self._silent_s > 2 * interval_s and not self._read():
                raise self._lost(f"nothing was received for {2 * interval_s:g} s")
            self.send(b"ping")
        if self._deliveries:
            self.wake()

    def settle(self, consumer: LinkConsumer, body: bytes) -> None:
        """Ack, reject or release a delivery; a cancelled consumer ends with its last one."""
        with self._lock:
            consumer.held -= 1
            self.send(body)
            if consumer.is_cancelled and consumer.held <= 0:
                self.end(consumer)

    def cancel(self, consumer: LinkConsumer) -> None:
        """No more messages are delivered; those that are unacked may still be acked."""
        with self._lock:
            consumer.is_cancelled = True
            if consumer.held:
                self.send(b"set_prefetch %b 1" % consumer.id)
            else:
                self.end(consumer)

    def of(self, channel: Any) -> list[LinkConsumer]:
        """Also those that are cancelled, and have unacked messages."""
        return [each for each in self.consumers.values() if each.channel is channel]

    def end(self, *consumers: LinkConsumer) -> None:
        """Their unacked messages return to their places in the queues."""
        for each in consumers:
            self.consumers.pop(each.id, None)
        if self.failure is None:
            self.send(*(b"delete_consumer " + each.id for each in consumers))

    def leave(self) -> None:
        """Close it when the server has read all that was sent."""
        with suppress(OSError, ClientError):
            self.end(*self.consumers.values())
            self.ask(b"ping")
        self.close()

    def close(self) -> None:
        """Its channels have no connection then: by that kombu knows them from those of the next."""
        self._lost("the connection is closed")
        for each in self.channels:
            each.connection = None
        self.channels.clear()
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In the child of a fork, where no other thread is: close what it has of the connection,
        and nothing else. A thread of the parent may have held the lock, and the event loop polls
        for both."""
        self._lock = RLock()
        self.wake = self.unregister = lambda: None
        self._socket.close()
        self._deliveries.clear()
        self.is_parents = True
        lost = ConnectionLost(FORKED)
        self.disown(lost)
        self.client.declared_entities.clear()
        if self.consumers:
            self.shared.lost = lost
        if self.shared.pipeline is not None:
            self.shared.pipeline.leave_to_parent()

    def fail(self, failure: ClientError) -> None:
        if self.failure is None and self.consumers:
            self.shared.lost = failure
        super().fail(failure)
        # The server gets the end of it, and who polls it is woken; its owner closes it.
        with suppress(OSError):
            self._socket.shutdown(SHUT_RDWR)

    def _lost(self, why: str) -> ConnectionLost:
        lost = ConnectionLost(self._refusal or why)
        self.fail(lost)
        return lost

    def _wait(self, what: int, ends_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, what)
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        return bool(poll.poll(None if left_s is None else left_s * 1000))

    def _read(self) -> bool:
        """Read what has come; whether there was anything."""
        self.raise_if_closed()
        with self._whole():
            try:
                data = self._socket.recv(READ_BYTES)
            except _NOT_NOW:
                return False
            if not data:
                raise ConnectionLost("the server closed the connection")
            self.receive(data, time.monotonic())
        return True

    def _reply(self, line: bytes) -> None:
        request_id, _, rest = line.partition(b" ")
        consumer = self.consumers.get(request_id)
        if consumer is None or request_id in self._in_flight:
            super()._reply(line)
        elif not rest.startswith(b"ok "):
            self._lost(f"a consumer has ended, {requests.decoded(rest)}")
        elif not rest.startswith(b"ok --update "):
            consumer.held += consumer.acks
            self._deliveries.append((consumer, rest[3:]))


_links = WeakSet[Link]()


def _in_child() -> None:
    for each in list(_links):
        each.leave_to_parent()


os.register_at_fork(after_in_child=_in_child)
