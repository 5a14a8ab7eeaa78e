"""The blocking client, on plain sockets: each connection is served by one thread of its own.

The thread reads, writes what has gathered since its last write, and looks at the time. Callers
change the session under the connection's lock and wait on its condition; any thread may call.

The one rule: the session is touched with the lock held, the socket by its thread alone.
"""

import random
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

from mqks.client import requests, urls
from mqks.client.errors import ConnectionLost, ProtocolViolation
from mqks.client.messages import Message, Update
from mqks.client.options import Options
from mqks.client.session import Call, ConsumerSession, Session, State

CHUNK_BYTES = 256 * 1024
"""More than a TLS record holds, so that no part of one is left behind where no poll sees it."""
WAIT_MAX_S = 3600.0
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

S = TypeVar("S", bound=Session)


class _Connection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S) -> None:
        self.session = session
        self.changed = threading.Condition()
        """The lock of the session; notified when something in it has changed."""
        self._address = address
        self._options = options
        self._closed = threading.Event()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"mqks {address}", daemon=True)
        session.on_output = self.ring

    def ring(self) -> None:
        """Make the thread look at the session. Call with the lock held."""
        with suppress(OSError):  # Enough rings wait to be heard, or the thread has ended.
            self._ring.send(b"!")

    def until(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait with the lock held until it is so; False when the time is over."""
        if timeout_s is not None and timeout_s > threading.TIMEOUT_MAX:
            timeout_s = None
        return bool(self.changed.wait_for(predicate, timeout_s))

    def start(self, is_up: Callable[[], bool]) -> None:
        """Start it and wait until it is up. Raises what ends the session, and ConnectionLost."""
        session, limit_s = self.session, self._options.connect_timeout_s
        self._thread.start()
        try:
            with self.changed:
                self.until(lambda: is_up() or session.failure is not None, limit_s)
                if session.failure is not None:
                    raise session.failure
                if not is_up():
                    raise ConnectionLost(
                        f"{self._address}: not within {limit_s:g} s: {session.reason}"
                    )
        except BaseException:
            self.close("it did not start")
            raise

    def close(self, reason: str) -> None:
        with self.changed:
            self.session.fail(ConnectionLost(reason))
            self._closed.set()
            self.ring()
            self.changed.notify_all()
        self._thread.join(self._options.close_timeout_s)

    def _run(self) -> None:
        session = self.session
        with self._bell, self._ring:
            while session.failure is None:
                try:
                    reason = self._live()
                except OSError as error:
                    reason = error.strerror or str(error) or type(error).__name__
                with self.changed:
                    delay_s = session.lost(reason)
                    self.changed.notify_all()
                self._closed.wait(delay_s)

    def _live(self) -> str:
        """Connect and stay so; give the reason of the end."""
        session, out = self.session, memoryview(b"")
        with open_socket(self._address, self._options) as sock:
            with self.changed:
                session.connected(time.monotonic())
            while True:
                with self.changed:
                    if session.failure is not None:
                        return "closed"
                    if not session.tick(time.monotonic()):
                        return f"no answer to a ping for {self._options.keep_alive_s} seconds"
                    if not out and (data := session.take()):
                        out = memoryview(data)
                        self.changed.notify_all()  # There is room again.
                    may_read, wait_s = not session.is_full, session.deadline_s - time.monotonic()
                if out:
                    out = out[self._send(sock, out) :]
                readable = self._wait(sock, may_read, bool(out), wait_s)
                if may_read and readable and (problem := self._receive(sock)):
                    return problem

    def _wait(self, sock: socket.socket, may_read: bool, may_write: bool, wait_s: float) -> bool:
        """Sleep until there is something to do; tell whether there may be something to read."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        wanted = may_read * select.POLLIN | may_write * select.POLLOUT
        if wanted:
            poll.register(sock, wanted)
        happened = dict(poll.poll(min(max(wait_s, 0.0), WAIT_MAX_S) * 1000 + 1))
        if self._bell.fileno() in happened:
            with suppress(BlockingIOError):
                self._bell.recv(4096)
        return bool(happened.get(sock.fileno(), 0) & ~select.POLLOUT)

    @staticmethod
    def _send(sock: socket.socket, out: memoryview) -> int:
        try:
            return sock.send(out)
        except _WOULD_BLOCK:
            return 0

    def _receive(self, sock: socket.socket) -> str:
        """Read what is there; give why there is nothing more to read, if so."""
        try:
            data = sock.recv(CHUNK_BYTES)
        except _WOULD_BLOCK:
            return ""
        if not data:
            return "the server closed the connection"
        with self.changed:
            try:
                self.session.receive(data, time.monotonic())
            except ProtocolViolation as error:
                self.session.fail(error)
                return str(error)
            finally:
                self.changed.notify_all()
        return ""


def open_socket(address: urls.Address, options: Options) -> socket.socket:
    if address.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(options.connect_timeout_s)
        try:
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection((address.host, address.port), options.connect_timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            context = options.ssl_context or ssl.create_default_context()
            with sock:  # Wrapping takes the descriptor over; if it fails, it is closed here.
                sock = context.wrap_socket(sock, server_hostname=address.host)
    sock.setblocking(False)
    return sock


class BlockingClient:
    """A connected client; made by `connect_blocking`. Any thread may use it.

    Every call may raise ConnectionLost (the client is closed), ConfirmTimeout after `timeout_s`
    seconds (by default those of the options), RequestFailed with the server's error id, and
    InvalidRequest before anything is sent. While the connection is away, calls wait.
    """

    def __init__(self, url: str | None, options: Options) -> None:
        self._address = urls.parse(url)
        self._options = options

    def __enter__(self) -> Self:
        self._session = session = Session(
            self._options,
            self._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
        )
        self._connection = _Connection(self._address, self._options, session)
        self._connection.start(lambda: session.state is State.UP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_sent = False
        if kind is None or self._session.state is State.UP:
            is_sent = self._send_rest()
        self._connection.close("the client is closed")
        if kind is None and not is_sent:
            raise ConnectionLost("the client was closed before all it published was sent")

    def _send_rest(self) -> bool:
        """Wait until the server has read all that was published without a confirm."""
        session, connection = self._session, self._connection
        with connection.changed:
            if session.failure or (session.is_idle and session.state is not State.UP):
                return True
            call = Call()
            session.request(b"ping closing", call)
            return connection.until(lambda: not call.remaining, self._options.close_timeout_s)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._options.timeout_s if timeout_s is None else timeout_s)

    def _room(self, deadline_s: float) -> bool:
        session = self._session
        return session.has_room or self._connection.until(
            lambda: session.has_room, deadline_s - time.monotonic()
        )

    def _ask(self, send: Callable[[Call], bytes], timeout_s: float | None) -> bytes:
        call, deadline_s = Call(), self._deadline(timeout_s)
        connection = self._connection
        with connection.changed:
            if self._room(deadline_s):
                request_id = send(call)
                try:
                    connection.until(lambda: not call.remaining, deadline_s - time.monotonic())
                finally:
                    self._session.abandon(call, request_id)
        return call.result()

    def _request(self, body: bytes, timeout_s: float | None) -> bytes:
        return self._ask(lambda call: self._session.request(body, call), timeout_s)

    def publish(
        self,
        event: str,
        data: requests.Data,
        *,
        confirm: bool = False,
        id: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Publish one message and give its id.

        With `confirm`, wait until the server has it on disk; sent again after a reconnect, it may
        arrive twice. Without, it is sent with the next write, and lost if the connection is. With
        `once`, the server drops it if it has seen the `id` already; with `mandatory`, it refuses
        it if no queue is bound to the event, which without `confirm` is only logged.
        """
        session = self._session
        if confirm:
            ids = [b""]

            def send(call: Call) -> bytes:
                ids[0] = session.publish(event, data, id, call, once, mandatory)
                return ids[0]

            self._ask(send, timeout_s)
            return requests.decoded(ids[0])
        with self._connection.changed:
            if not session.has_room and not self._room(self._deadline(timeout_s)):
                Call().result()
            return requests.decoded(session.publish(event, data, id, None, once, mandatory))

    def publish_many(
        self,
        messages: Iterable[tuple[str, requests.Data]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Publish events with their data, all confirmed; give how many.

        With an `id_prefix`, the ids are `PREFIX-1`, `PREFIX-2` …; with `once`, the server drops
        those whose ids it has seen already; with `mandatory`, it refuses those that no queue is
        bound to. Raises PublishFailed, which names those that were refused. Raises InvalidRequest
        at the first that cannot be sent, when those before it may have been.
        """
        return self.publish_batches(
            [messages],
            id_prefix=id_prefix,
            once=once,
            mandatory=mandatory,
            timeout_s=timeout_s,
        )

    def publish_batches(
        self,
        batches: Iterable[Iterable[tuple[str, requests.Data]]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """As `publish_many`, for messages of which some come now and some later: each batch is
        sent at once, while later ones are still to come.

        `timeout_s` counts from when a batch came. After a batch that was refused no more are taken.
        """
        session, connection = self._session, self._connection
        prefix = None if id_prefix is None else requests.name(id_prefix)
        call, deadline_s = Call(), self._deadline(timeout_s)
        try:
            for messages in batches:
                deadline_s = self._deadline(timeout_s)
                for bodies in requests.bodies(messages, once, mandatory):
                    with connection.changed:
                        if not self._room(deadline_s):
                            call.result()
                        session.publish_many(bodies, call, prefix)
                if call.failed:
                    break
            with connection.changed:
                call.settle()
                connection.until(lambda: call.remaining <= 0, deadline_s - time.monotonic())
        finally:
            with connection.changed:
                if call.remaining:
                    session.abandon(call)
        return call.confirmed()

    def consume(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        add: Iterable[str] = (),
        manual_ack: bool = False,
        delete_when_unused: float | bool = False,
    ) -> "BlockingConsumer":
        """A consumer for `with`, on a connection of its own.

        `events` replace what the queue is bound to, `add` is added. `delete_when_unused` is the
        seconds after which the queue goes without consumers; True: at once.
        """
        arguments = requests.consume(queue, events, add, manual_ack, delete_when_unused)
        return BlockingConsumer(self, queue, arguments)

    def subscribe(
        self, queue: str, events: Iterable[str], *, timeout_s: float | None = None
    ) -> None:
        """Make the queue if it is missing, and bind it to these events alone."""
        self._request(requests.subscribe(queue, events), timeout_s)

    def rebind(
        self, queue: str, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change what the queue is bound to, in this order: `replace` its events, `remove` some,
        `remove_mask` those that masks match, `add` some."""
        self._request(requests.rebind(queue, changes), timeout_s)

    def delete_queue(
        self,
        queue: str,
        *,
        when_unused: float | bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Delete the queue with all it holds; or let that happen when it has no consumer."""
        self._request(requests.delete_queue(queue, when_unused), timeout_s)

    def purge(self, queue: str, *, timeout_s: float | None = None) -> int:
        """Drop all messages that wait in the queue; give how many."""
        return requests.number_told(self._request(requests.purge(queue), timeout_s))

    def trim(
        self, queue: str, seq: int, *, epoch: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Drop the messages with numbers below `seq` that wait in the queue; give how many. With
        an `epoch`, only if it is still the queue's."""
        body = requests.trim(queue, seq, epoch)
        return requests.number_told(self._request(body, timeout_s))

    def reason(self, error_id: str, *, timeout_s: float | None = None) -> str | None:
        """Why the server refused a request, as the `error_id` of RequestFailed names it; None when
        it does not know any more, or the request was another user's."""
        body = requests.reason(error_id)
        return requests.reason_told(self._request(body, timeout_s))

    def ping(self, data: str = "", *, timeout_s: float | None = None) -> str:
        """Give the data back from the server."""
        return requests.decoded(self._request(b"ping " + requests.payload(data), timeout_s))

    def evaluate(self, expression: str, *, timeout_s: float | None = None) -> str:
        """What an expression over the broker's `state` gives: a string as it is, else JSON."""
        return requests.decoded(self._request(b"_eval " + requests.payload(expression), timeout_s))

    def request(self, action: str, *arguments: str, timeout_s: float | None = None) -> str:
        """Ask for any action, with its arguments and flags as they stand on the wire; give the
        answer, without `{request_id} ok`.

        It must be answered with one line: pass `--confirm` to an action that has no answer, and
        not to one that has. What arguments mean is not looked at, and they are sent again after a
        reconnect.
        """
        return requests.decoded(self._request(requests.request(action, arguments), timeout_s))


class BlockingConsumer:
    """A consumer for `with`, then `for message in consumer`; made by `consume`.

    Several threads may iterate at once; each message goes to one. The iteration ends after `stop`.
    It raises ConnectionLost when the consumer is closed, and RequestFailed when the server refuses
    to let it start again.
    """

    def __init__(self, client: BlockingClient, queue: str, arguments: bytes) -> None:
        self.queue = queue
        self.on_update: Callable[[Update], object] | None = None
        """Called from the iteration when the queue's subscriptions or delete rule change."""
        self._client = client
        self._arguments = arguments
        self._is_stopping = False

    def __enter__(self) -> Self:
        client = self._client
        if client._session.failure is not None:
            raise client._session.failure.with_traceback(None)
        self._session = session = ConsumerSession(
            client._options,
            client._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
            arguments=self._arguments,
            settle=self._settle,
        )
        self._connection = _Connection(client._address, client._options, session)
        self._connection.start(lambda: session.is_consuming)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        call, connection = Call(), self._connection
        with connection.changed:
            self._session.leave(call)
            connection.ring()  # Reading may have been held back.
            connection.until(lambda: not call.remaining, self._client._options.close_timeout_s)
        connection.close("the consumer is closed")

    def _settle(self, message: Message, action: bytes) -> None:
        with self._connection.changed:
            self._session.settle(message, action)

    def stop(self) -> None:
        """End the iteration; messages not yet handed out go back, if acks are manual."""
        with self._connection.changed:
            self._is_stopping = True
            self._connection.changed.notify_all()

    def _fill(self, timeout_s: float | None = None) -> None:
        """Wait for messages, with the lock held. Raises StopIteration after `stop`."""
        session = self._session
        while True:
            while session.updates:
                update = session.updates.popleft()
                if self.on_update is not None:
                    self.on_update(update)
            if self._is_stopping:
                raise StopIteration
            if session.ready:
                return
            if session.failure is not None:
                raise session.failure.with_traceback(None)
            self._connection.ring()  # Reading may go on.
            if not self._connection.until(
                lambda: session.ready or session.updates or session.failure or self._is_stopping,
                timeout_s,
            ):
                raise TimeoutError("no message within the time given")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        return self._next(None)

    def _next(self, timeout_s: float | None) -> Message:
        session = self._session
        while True:
            if not session.ready or session.updates or self._is_stopping:
                with self._connection.changed:
                    self._fill(timeout_s)
            try:
                return session.ready.popleft()
            except IndexError:  # Another thread was faster.
                continue

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError; and ConnectionLost after `stop`."""
        try:
            return self._next(timeout_s)
        except StopIteration:
            raise ConnectionLost("the consumer was stopped") from None

    def batches(
        self, count_max: int | None = None, timeout_s: float | None = None
    ) -> Iterator[list[Message]]:
        """All messages that wait, at least one and at most `count_max`, again and again.

        Raises TimeoutError when none has come for `timeout_s`."""
        while True:
            with self._connection.changed:
                try:
                    self._fill(timeout_s)
                except StopIteration:
                    return
                batch = self._session.take_ready(count_max)
            yield batch

    def ack(self, messages: Iterable[Message]) -> None:
        """Ack many messages at once."""
        with self._connection.changed:
            self._session.ack_all(messages)

    def rebind(
        self, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change what the consumer's queue is bound to, as `BlockingClient.rebind`."""
        self._client.rebind(self.queue, timeout_s=timeout_s, **changes)


def connect_blocking(url: str | None = None, options: Options | None = None) -> BlockingClient:
    """A client for `with`, which waits until it is connected; otherwise as `connect`."""
    return BlockingClient(url, options or Options())
