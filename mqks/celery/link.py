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
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import Any

from mqks.client import requests, urls
from mqks.client.blocking_connection import open_socket
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    ConnectionLost,
    InvalidRequest,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.options import Options
from mqks.errors import reason
from mqks.protocol.lines import LineSplitter

READ_BYTES = 256 * 1024
_NOT_NOW = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError


@dataclass(slots=True, eq=False)
class Consumer:
    """One `consume` of a channel. `deliver` is called with each delivery, as it is on the wire."""

    channel: Any
    id: bytes
    deliver: Callable[["Consumer", bytes], None]
    acks: bool
    held: int = 0
    """Unacked messages."""
    is_cancelled: bool = False


class Link:
    """The connection of one `kombu.Connection`, its `client`, shared by its channels.

    Raises ConnectionLost, and AuthenticationFailed when it is made.
    """

    def __init__(self, client: Any, address: urls.Address, options: Options) -> None:
        self.client = client
        self.options = options
        self.consumers: dict[bytes, Consumer] = {}
        self.channels: list[Any] = []
        self.exchange_types: dict[str, str] = {}
        self.unconfirmed: list[bytes] | None = None
        """The ids of publishes that `pipelined` waits for at its end."""
        self.wake: Callable[[], object] = lambda: None
        """Called when there are deliveries for `drain_events` that the socket does not show."""
        self.unregister: Callable[[], object] = lambda: None
        """Ends what calls `drain_events` when there is something to read."""
        self._prefix = secrets.token_hex(6).encode()
        self._numbers = count(1)
        self._answers: dict[bytes, requests.Reply | None] = {}
        self._deliveries = deque[tuple[Consumer, bytes]]()
        self._lock = RLock()
        self._splitter = LineSplitter(options.reply_bytes_max, is_server=True)
        self._heard_s = time.monotonic()
        self._pid = os.getpid()
        self._socket = open_socket(address, options, options.connect_timeout_s)
        self.connected = True
        try:
            self.ask(requests.auth(address.credentials) if address.credentials else b"ping")
            if options.client_name:
                self.send(requests.line(self.new_id(), requests.set_name(options.client_name)))
        except RequestFailed as error:
            self.close()
            given = bool(address.credentials)
            raise AuthenticationFailed(error.error_id, given=given) from None
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def new_id(self) -> bytes:
        return b"%b-%d" % (self._prefix, next(self._numbers))

    def ask(self, *bodies: bytes, ids: Sequence[bytes] = ()) -> list[bytes]:
        """Send requests and return the texts of their answers. Raises RequestFailed with the reason
        for the first one that was refused, ReplyTimeout, and ConnectionLost."""
        return self.wait(self.start(*bodies, ids=ids))

    def start(self, *bodies: bytes, ids: Sequence[bytes] = ()) -> Sequence[bytes]:
        """Send requests, and return their ids: their answers are to be waited for."""
        ids = ids or [self.new_id() for _ in bodies]
        lines = [self.line(*each) for each in zip(ids, bodies, strict=True)]
        with self._lock:
            self._answers.update(dict.fromkeys(ids))
            self.send(*lines)
        return ids

    def line(self, request_id: bytes, body: bytes) -> bytes:
        """Raises InvalidRequest for one that the server would not read."""
        line = requests.line(request_id, body)
        if len(line) > (most := self.options.line_bytes_max) + 1:
            raise InvalidRequest(
                f"a message of {len(line)} bytes is longer than line_bytes_max, {most}"
            )
        return line

    def wait(self, ids: Sequence[bytes], *, tell: bool = True) -> list[bytes]:
        """The answers, in order. With `tell`, the reason of an error is asked for."""
        ends_s = time.monotonic() + self.options.timeout_s
        with self._lock:
            try:
                while not all(map(self._answers.get, ids)):
                    if not self._read() and not self._wait(select.POLLIN, ends_s):
                        self._lost("no reply before the timeout")
                        raise ReplyTimeout("no reply before the timeout; it may have been executed")
            finally:
                replies = [self._answers.pop(each) for each in ids]
        if self._deliveries:
            self.wake()
        for each in replies:
            if each is not None and each.is_error:
                error_id = requests.decoded(each.text)
                told = f"the server refused the request, error {error_id}"
                raise RequestFailed(told, error_id, self._reason(error_id) if tell else None)
        return [each.text for each in replies if each is not None]

    def _reason(self, error_id: str) -> str | None:
        with suppress(ClientError):
            asked = self.start(requests.reason(error_id))
            return requests.reason_told(self.wait(asked, tell=False)[0])
        return None

    def send(self, *lines: bytes) -> None:
        """Send lines whose answers nobody waits for, or that of `ask`."""
        ends_s = time.monotonic() + self.options.timeout_s
        with self._lock:
            left = memoryview(b"".join(lines))
            while left:
                if not self.connected:
                    raise ConnectionLost("the connection is closed")
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
        self.send(requests.line(self.new_id(), b"ping"))

    def settle(self, consumer: Consumer, action: bytes, message_id: bytes) -> None:
        """Ack, reject or release a delivery; a cancelled consumer ends with its last one."""
        lines = [requests.line(self.new_id(), action % (consumer.id, message_id))]
        with self._lock:
            consumer.held -= 1
            if consumer.is_cancelled and consumer.held <= 0:
                lines.append(self._end(consumer))
            self.send(*lines)

    def cancel(self, consumer: Consumer) -> None:
        """No more messages are delivered; those that are unacked may still be acked."""
        with self._lock:
            consumer.is_cancelled = True
            if consumer.held:
                self.send(requests.line(self.new_id(), b"set_prefetch %b 1" % consumer.id))
            else:
                self.send(self._end(consumer))

    def of(self, channel: Any) -> list[Consumer]:
        """Also those that are cancelled, and have unacked messages."""
        return [each for each in self.consumers.values() if each.channel is channel]

    def end(self, *consumers: Consumer) -> None:
        """Their unacked messages return to their places in the queues."""
        with self._lock:
            self.send(*map(self._end, consumers))

    def _end(self, consumer: Consumer) -> bytes:
        self.consumers.pop(consumer.id, None)
        return requests.line(self.new_id(), b"delete_consumer " + consumer.id)

    def leave(self) -> None:
        """Close it when the server has read all that was sent."""
        if self.connected and self._pid == os.getpid():
            with suppress(OSError, ClientError):
                self.end(*self.consumers.values())
                self.ask(b"ping")
        self.close()

    def close(self) -> None:
        """Its channels have no connection then: by that kombu knows them from those of the next."""
        self.connected = False
        for each in self.channels:
            each.connection = None
        self.channels.clear()
        self._socket.close()

    def _lost(self, why: str) -> ConnectionLost:
        self.connected = False
        return ConnectionLost(why)

    def _wait(self, what: int, ends_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, what)
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        return bool(poll.poll(None if left_s is None else left_s * 1000))

    def _read(self) -> bool:
        """Read what has come; whether there was anything."""
        if not self.connected:
            raise ConnectionLost("the connection is closed")
        try:
            data = self._socket.recv(READ_BYTES)
        except _NOT_NOW:
            return False
        except OSError as error:
            raise self._lost(reason(error)) from None
        if not data:
            raise self._lost("the server closed the connection")
        self._heard_s = time.monotonic()
        for line in self._splitter.feed(data):
            reply = requests.Reply.parse(line)
            if self._answers.get(reply.request_id, reply) is None:
                self._answers[reply.request_id] = reply
            elif reply.request_id == b"-":
                raise self._lost(requests.refusal(reply.text))
            elif (consumer := self.consumers.get(reply.request_id)) is not None:
                if reply.is_error:
                    raise self._lost(f"a consumer has ended, error {requests.decoded(reply.text)}")
                if not reply.text.startswith(b"--update "):
                    consumer.held += consumer.acks
                    self._deliveries.append((consumer, reply.text))
        if self._splitter.too_long is not None:
            raise self._lost("the peer sent a line longer than reply_bytes_max")
        return True
