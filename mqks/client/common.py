"""What the async and the blocking client have in common: all that waits for nothing.

The one rule: a session is used only while the lock of its connection is held.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from mqks.client import failures, requests, urls
from mqks.client.keywords import strict
from mqks.client.messages import Message, QueueUpdate, reading
from mqks.client.opened import STATE, caller
from mqks.client.options import Options, named
from mqks.client.session import Call, ConsumerSession, Session, SessionState, TailSession

if TYPE_CHECKING:
    from mqks.client.tracing import Tracing


ConsumerT = TypeVar("ConsumerT")
TailT = TypeVar("TailT")
TransactionT = TypeVar("TransactionT")


@strict()
class Client(Generic[ConsumerT, TailT, TransactionT]):
    """A client. While it is connected it has `_connection`, `_session` and `_connections`."""

    _skin: Any
    """The module with its kind of connections."""
    _kinds: Any
    """Its classes of consumers, tails and transactions."""
    _session: Session
    _connections: Any
    _replies: Any = None
    """The connection for replies to calls."""
    _tracing: "Tracing | None" = None

    def __init__(self, url: urls.Urls | urls.Address | None, options: Options) -> None:
        self._address = url if isinstance(url, urls.Address) else urls.parse(url)
        self._options = named(options, self._address.client_name)
        self._made_at = caller()
        if self._options.tracing:
            from mqks.client import tracing

            self._tracing = tracing.Tracing(self._address, self._options.client_name)

    def __getattr__(self, name: str) -> Any:
        if name not in STATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._skin.begin(self)
        return self.__dict__[name]

    def __del__(self) -> None:
        if "_connections" in self.__dict__:
            self._connections.forsaken()

    @property
    def _is_open(self) -> bool:
        return "_connections" in self.__dict__ and self._session.state is not SessionState.CLOSED

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, and every call raises ConnectionLost."""
        return self._session.failure is not None

    @property
    def server(self) -> str:
        """The server that it is connected to, or was last, as `host:port` or `unix:/path`."""
        return self._session.server

    def _new_connection(self, kind: type[Session], **more: Any) -> Any:
        lock, address = self._skin.Lock(), self._address
        session = kind(
            self._options,
            address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
            guard=partial(self._skin.guard, lock),
            **more,
        )
        session.is_tls = address.tls
        if address.tls:
            session.reason = f"no answer to the TLS handshake; perhaps {failures.PLAIN}"
        if address.others:
            session.greeting_s = self._options.connect_timeout_s / len(address.each)
        return self._skin.SessionConnection(address, self._options, session, lock)

    def _deadline(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            timeout_s = self._options.timeout_s
        elif not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
        return time.monotonic() + timeout_s

    def _ask_lines(self, body: bytes, lines: list[bytes], call: Call) -> bytes:
        call.lines = lines
        return self._session.request(body, call)

    def transaction(self, timeout_s: float | None = None) -> TransactionT:
        """Several requests in one commit, as a context: what is published, acked, rejected and
        released through it is sent at the end of the block, and takes effect together or not at
        all. Nothing is sent if the block raises.

        The end waits until the server has stored it, and raises RequestFailed if the server refuses
        it, for example because a consumer does not hold its message any more: then nothing was
        done. After a reconnect it is sent again: what contains an ack is not done twice; other
        messages may be stored twice, unless they have an `id` and `once`.
        """
        made: TransactionT = self._kinds[2](self, timeout_s)
        return made

    def consume(
        self, queue: str, events: Iterable[str] = (), **options: Unpack[requests.Consuming]
    ) -> ConsumerT:
        """A consumer, as a context, on a separate connection.

        - `events` and `masks` are added to the bindings of the queue. With `replace`, they replace
          all its bindings, for every consumer of the queue.
        - `create`: create the queue if it does not exist. The default is to create it if events or
          masks are given; otherwise, entering the consumer raises RequestFailed.
        - `auto_ack`: the server acks messages when it sends them, and those that the program has
          not handled when it ends are lost. Otherwise each must be acked, or it is redelivered.
        - `prefetch`: the most unacked messages of the consumer, by default 10. 0 means as many as
          the server allows: faster, but other consumers of the queue may get nothing.
        - `backoff`: the pause after the second and later losses of a message, if the policy of the
          queue has no `backoff`: seconds, or a pair of first and largest. Not with `auto_ack`.
        - `ack_timeout_s`: its ack timeout, instead of that of the queue. Not with `auto_ack`.
        - `delete_when_unused`: delete the queue after this number of seconds without a consumer;
          True: immediately.
        - `meta`: messages include their attributes.
        - `cancellable`: `message.cancelled` tells whether somebody wants to cancel it.
        """
        if self._tracing is not None:
            options["meta"] = True  # It has the trace.
        made: ConsumerT = self._kinds[0](self, queue, requests.consume(queue, events, **options))
        return made

    def tail(self, *events: str, queue: str | None = None) -> TailT:
        """Messages as they are published, as a context, without consuming them: those that
        match the events and masks or, with a `queue`, those that are added to it. Messages that the
        client reads too slowly are dropped and counted in `tail.dropped`. Messages published during
        a reconnect are neither shown nor counted.
        """
        made: TailT = self._kinds[1](self, queue or "", requests.tail(events, queue))
        return made


class Messages:
    """A consumer or a tail. While it is started it has `_connection` and `_session`."""

    _kind: type[ConsumerSession] = ConsumerSession
    _end: type[Exception]
    """Ends an iteration."""
    _connection: Any
    _session: ConsumerSession
    _tracing: "Tracing | None" = None

    def __init__(self, client: Any, queue: str, arguments: bytes) -> None:
        self.queue = queue
        self._client = client
        self._arguments = arguments
        self._is_stopping = False
        self._handed = 0

    def _connect(self) -> None:
        client = self._client
        client._session.raise_if_closed()
        self._connection = client._new_connection(self._kind, arguments=self._arguments)
        self._session = self._connection.session
        if self._tracing is not None:
            kind = self._tracing.message_type(self.queue)
            self._session.message_type = reading(kind, client._options.json_loads)

    def stop(self) -> None:
        """End the iteration. Messages that were not yet received return to the queue."""
        with self._connection.lock:
            self._is_stopping = True
            self._connection.notify()

    def _tell(self, update: QueueUpdate | int) -> None:
        """Called with updates about the messages."""

    def _is_filled(self) -> bool:
        session = self._session
        with self._connection.lock:
            while session.updates:
                self._tell(session.updates.popleft())
            if self._is_stopping:
                raise self._end
            session.is_awaited = not session.ready
            if session.is_awaited:
                session.raise_if_closed()
                self._connection.resume()
            return bool(session.ready)

    def _has_news(self) -> object:
        session = self._session
        self._connection.resume()  # Another thread may have taken all, and be busy with it.
        return session.ready or session.updates or session.failure or self._is_stopping


class ClientConsumer(Messages):
    on_update: Callable[[QueueUpdate], object] | None = None
    """Called from the iteration when the bindings or the delete rule of the queue change."""

    def __init__(self, client: Any, queue: str, arguments: bytes) -> None:
        super().__init__(client, queue, arguments)
        self._tracing = client._tracing

    def _tell(self, update: QueueUpdate | int) -> None:
        if isinstance(update, QueueUpdate):
            self.queue = update.queue  # It may have been renamed.
            if self.on_update is not None:
                self.on_update(update)

    def ack(self, messages: Iterable[Message]) -> None:
        """Ack several messages."""
        span: AbstractContextManager[None] = nullcontext()
        if self._tracing is not None and not isinstance(messages, Message):
            messages = list(messages)
            span = self._tracing.ack_many(self.queue, messages)
        with span, self._connection.lock:
            self._session.ack_all(messages)

    def set_prefetch(self, prefetch: int) -> None:
        """Change the most unacked messages from now on, while it holds some; 0: as many as the
        server allows."""
        with self._connection.lock:
            self._session.set_prefetch(prefetch)

    def pause(self, for_s: float) -> None:
        """Get no messages for this time, at most 3600 seconds, while others of the queue do. A
        later call replaces it; a reconnect ends it."""
        with self._connection.lock:
            self._session.pause(for_s)


class Tail(Messages):
    _kind = TailSession
    dropped = 0
    """The number of messages dropped so far."""
    on_dropped: Callable[[int], object] | None = None
    """Called from the iteration with the number of dropped messages."""

    def _tell(self, update: QueueUpdate | int) -> None:
        if isinstance(update, int):
            self.dropped += update
            if self.on_dropped is not None:
                self.on_dropped(update)
