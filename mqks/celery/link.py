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
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any

from mqks.client import requests, urls
from mqks.client.blocking_connection import open_socket
from mqks.client.errors import ClientError, ConnectionLost, ReplyTimeout, RequestFailed
from mqks.client.options import Options
from mqks.client.session import Call, Session
from mqks.errors import reason

READ_BYTES = 256 * 1024
_NOT_NOW = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError


class Consumer:
    """One `consume` of a channel. `deliver` is called with each delivery, as it is on the wire."""

    id = b""

    def __init__(
        self, channel: Any, deliver: Callable[["Consumer", bytes], None], *, acks: bool
    ) -> None:
        self.channel = channel
        self.deliver = deliver
        self.acks = acks
        self.held = 0
        """Unacked messages."""
        self.is_cancelled = False


class Link(Session):
    """The connection of one `kombu.Connection`, its `client`, shared by its channels. It has one
    life: after a loss kombu makes another one.

    Raises ConnectionLost, and AuthenticationFailed when it is made.
    """

    def __init__(self, client: Any, address: urls.Address, options: Options) -> None:
        prefix = secrets.token_hex(6)
        super().__init__(options, address.credentials, prefix=prefix, jitter=lambda: 0.0)
        self.client = client
        self.consumers: dict[bytes, Consumer] = {}
        self.channels: list[Any] = []
        self.exchange_types: dict[str, str] = {}
        self.unconfirmed: list[Call] | None = None
        """Publishes that `pipelined` waits for at its end."""
        self.wake: Callable[[], object] = lambda: None
        """Called when there are deliveries for `drain_events` that the socket does not show."""
        self.unregister: Callable[[], object] = lambda: None
        """Ends what calls `drain_events` when there is something to read."""
        self.on_output = self._write
        self.is_tls = address.tls
        self._deliveries = deque[tuple[Consumer, bytes]]()
        self._lock = RLock()
        self._pid = os.getpid()
        self._socket = open_socket(address, options, options.connect_timeout_s)
        try:
            self.connected(time.monotonic())
            self._until(lambda: self.is_up)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, body: bytes) -> bytes:
        """Send a request and return the text of its answer. Raises RequestFailed with the reason,
        InvalidRequest for one that the server would not read, ReplyTimeout, and ConnectionLost."""
        return self.wait([self.start(body)])[0]

    def start(self, body: bytes, consumer: Consumer | None = None) -> Call:
        """Send a request whose answer is to be waited for; a `consume` with its consumer."""
        call = Call()
        with self._lock:
            request_id = self.request(body, call)
            if consumer is not None:
                consumer.id, self.consumers[request_id] = request_id, consumer
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
        with self._lock:
            left = memoryview(self.take())
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except _NOT_NOW:
                    if not self._wait(select.POLLOUT, ends_s):
                        raise self._lost("the server does not read") from None
                except OSError as error:
                    raise self._lost(reason(error)) from None

    def drain_events(self, timeout: float | None = None) -> None:
        """Pass on the deliveries that are there. Raises TimeoutError after `timeout` seconds
        without one."""
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
        """Ping the server. Raises ConnectionLost if nothing came for two intervals; 0: never."""
        if interval_s and time.monotonic() - self._heard_s > 2 * interval_s:
            raise self._lost(f"nothing was received for {2 * interval_s:g} s")
        self.send(b"ping")

    def settle(self, consumer: Consumer, body: bytes) -> None:
        """Ack, reject or release a delivery; a cancelled consumer ends with its last one."""
        with self._lock:
            consumer.held -= 1
            self.send(body)
            if consumer.is_cancelled and consumer.held <= 0:
                self.end(consumer)

    def cancel(self, consumer: Consumer) -> None:
        """No more messages are delivered; those that are unacked may still be acked."""
        with self._lock:
            consumer.is_cancelled = True
            if consumer.held:
                self.send(b"set_prefetch %b 1" % consumer.id)
            else:
                self.end(consumer)

    def of(self, channel: Any) -> list[Consumer]:
        """Also those that are cancelled, and have unacked messages."""
        return [each for each in self.consumers.values() if each.channel is channel]

    def end(self, *consumers: Consumer) -> None:
        """Their unacked messages return to their places in the queues."""
        for each in consumers:
            self.consumers.pop(each.id, None)
        self.send(*(b"delete_consumer " + each.id for each in consumers))

    def leave(self) -> None:
        """Close it when the server has read all that was sent."""
        if self._pid == os.getpid():
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
        try:
            data = self._socket.recv(READ_BYTES)
        except _NOT_NOW:
            return False
        except OSError as error:
            raise self._lost(reason(error)) from None
        if not data:
            raise self._lost("the server closed the connection")
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
