"""Connections of the blocking client: each is served by one thread of its own, TLS or not.

The thread reads, writes what has gathered since its last write, and looks at the time. Callers
change the session under its lock and wait for events; what should not wait for the thread they
write themselves. Any thread may call.

The one rule: the session and the socket are used with the lock held.
"""

import codecs
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from mqks.client import failures, urls
from mqks.client.errors import ConnectionLost, ProtocolViolation
from mqks.client.messages import Message, Settle
from mqks.client.opened import STATE, Opened
from mqks.client.options import Options
from mqks.client.session import CATCH_UP_S, LATE_S, Call, Session
from mqks.errors import reason

CHUNK_BYTES = 256 * 1024
"""More than a TLS record holds, so that no part of one is left behind where no poll sees it."""
WAIT_MAX_S = 3600.0
JOIN_S_MIN = 0.1
INTERRUPTED = "a thread was interrupted while it wrote"
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# Names of hosts need it. A child that is forked during its import would wait for it without end.
codecs.lookup("idna")

S = TypeVar("S", bound=Session)


Lock = threading.RLock
"""Of a session. One in Python could be left locked by an exception of a signal handler."""


def guard(lock: Lock, settle: Settle) -> Settle:
    """`settle`, called with the lock held."""

    def guarded(message: Message, action: bytes) -> None:
        with lock:
            settle(message, action)

    return guarded


class OneTimeEvent:
    """Something that happens once. One thread waits for it."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Call with the lock of the session held."""
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout_s: float, *, shield: bool = False) -> bool:
        """Wait until it has happened; False when the time is over. Nothing cancels a thread, so
        `shield` changes nothing. After a pause of the process what came meanwhile is read first."""
        late_from_s = time.monotonic() + timeout_s + LATE_S
        if self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            return True
        return time.monotonic() > late_from_s and self._lock.acquire(timeout=CATCH_UP_S)


_beginning = threading.Lock()
os.register_at_fork(after_in_child=cast(Any, _beginning)._at_fork_reinit)


def begin(client: Any) -> None:
    """A client is used that is not connected: connect it, as `with` does. Its user closes it."""
    with _beginning:
        try:
            client.__enter__()
        except BaseException:
            for name in STATE:
                client.__dict__.pop(name, None)
            raise


class Connections(Opened):
    """The connections of one client, each with its thread."""

    def open(self) -> None:
        """Nothing: each connection has its own thread."""

    def start(self, connection: "SessionConnection[Any]") -> None:
        self.started(connection)
        connection.start()

    def close(self) -> None:
        self.closed()
        for connection in list(self.all):
            connection.close("the client is closed")

    def send_rest(self) -> None:
        self._sent = OneTimeEvent()
        with self.main.lock:
            self.main.session.send_rest(Call(self._rest_is_sent))

    def _rest_is_sent(self) -> None:
        self._sent.set()
        if self.is_forsaken:
            self.closed()
            self._end_all()

    def is_sent(self, deadline_s: float) -> bool:
        return self._sent.wait(deadline_s - time.monotonic())

    def _end_all(self) -> None:
        for connection in list(self.all):
            connection.end("nobody refers to the client")

    def end(self, deadline_s: float) -> None:
        self._end_all()
        for connection in list(self.all):
            connection.join(max(deadline_s - time.monotonic(), JOIN_S_MIN))


class SessionConnection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S, lock: Lock) -> None:
        self.session = session
        self.lock = lock
        self._servers = urls.Servers(address)
        self._options = options
        self._closed = threading.Event()
        self._bell, self._ring = socket.socketpair()
        """What is written to the second wakes the thread."""
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._sock: socket.socket | None = None
        self._out = memoryview(b"")
        """What has to be sent before anything else is sent."""
        self._is_held = False
        """Whether reading is held back, since enough waits to be handled."""
        self._problem = ""
        """Why the connection must end."""
        self._is_cut = False
        """Whether a write has failed."""
        self._waiting: set[OneTimeEvent] = set()
        """What wakes those that wait for a change of the session."""
        self._thread = threading.Thread(target=self._run, name=f"mqks {address}", daemon=True)
        self.start = self._thread.start
        session.on_output = self._output

    # -- the callers' side, with the lock held, but for the waits

    def _wake(self) -> None:
        """Make the thread look at the session."""
        with suppress(OSError):  # Enough rings wait to be heard, or the thread has ended.
            self._ring.send(b"!")

    def _output(self, is_prompt: bool) -> None:
        """There is something to send. The thread sends what gathers meanwhile; what is `is_prompt`
        does not wait for it."""
        try:
            if is_prompt and not self._out:
                self._write()
        finally:
            if not is_prompt or self._out or self._problem or self.session.has_unsent:
                self._wake()

    def arrival(self, predicate: Callable[[], object], timeout_s: float | None) -> bool:
        """Wait until it is so; False when the time is over. Call without the lock."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # Not by a condition: its `wait` does not survive an exception of a signal handler.
        while True:
            event = OneTimeEvent()
            try:
                with self.lock:
                    # Before the look: a signal handler may change what it looks at.
                    self._waiting.add(event)
                    if predicate():
                        return True
                    wait_s = deadline_s - time.monotonic()
                    if wait_s <= 0:
                        return False
                event.wait(wait_s)
            finally:
                with self.lock:
                    self._waiting.discard(event)

    def until(self, predicate: Callable[[], object], timeout_s: float) -> bool:
        """Wait until it is true, with the lock held, which is released meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while not predicate():
            self.lock.release()
            try:
                if not self.arrival(predicate, deadline_s - time.monotonic()):
                    return False
            finally:
                self.lock.acquire()
        return True

    def room(self, deadline_s: float) -> bool:
        """Wait until the session has room; False when the time is over."""
        session = self.session
        return session.has_room or self.until(
            lambda: session.has_room, deadline_s - time.monotonic()
        )

    def turn(self) -> None:
        """Other threads have theirs by themselves."""

    def resume(self) -> None:
        """Read on if that was held back."""
        if self._is_held and not self.session.is_full:
            self._is_held = False
            self._wake()

    def notify(self) -> None:
        """Something in the session has changed."""
        self._wake()
        self._notify()

    def _notify(self) -> None:
        # Each stays until it has seen it: an exception of a signal handler may come in between.
        for event in tuple(self._waiting):
            event.set()

    def close(self, reason: str) -> None:
        self.end(reason)
        self.join(self._options.close_timeout_s)

    def end(self, reason: str) -> None:
        with self.lock:
            self.session.fail(ConnectionLost(reason))
            self._closed.set()
            self.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def leave_to_parent(self, failure: ConnectionLost) -> None:
        """In the child of a fork, where no other thread is: close what it has of the connection,
        and nothing else. The parent's threads may have held the lock."""
        cast(Any, self.lock)._at_fork_reinit()
        self._closed = threading.Event()
        for each in (self._sock, self._bell, self._ring):
            if each is not None:
                each.close()
        self._sock = None
        self.session.disown(failure)

    def _write(self) -> None:
        sock = self._sock
        if sock is None or self._problem:
            return
        # An exception of a signal handler may come between any two steps: then the connection ends.
        self._problem = INTERRUPTED
        try:
            self._out = self._out or memoryview(self.session.take())
            if self._out:
                self._out = self._out[sock.send(self._out) :]
                self._notify()  # There is room again.
            self._problem = ""
        except _WOULD_BLOCK:
            self._problem = ""
        except OSError as error:
            self._is_cut = isinstance(error, BrokenPipeError | ConnectionResetError)
            self._problem = reason(error)

    # -- the thread

    def _run(self) -> None:
        session = self.session
        with self._bell, self._ring:
            while session.failure is None:
                try:
                    why = self._live()
                except OSError as error:
                    why = reason(error)
                with self.lock:
                    delay_s = session.lost(why)
                    self._notify()
                self._closed.wait(delay_s)

    def _live(self) -> str:
        """Connect and stay so; give the reason of the end."""
        address, sock = dialled(self._servers, self._options)
        try:
            with self.lock:
                self.session.is_tls, self.session.server = address.tls, str(address)
                self._sock, self._out, self._problem = sock, memoryview(b""), ""
                self._is_cut = False
                self.session.connected(time.monotonic())
            return self._serve(sock)
        finally:
            with self.lock:
                self._sock = None
                # The server may have said why, before it closed the connection.
                with suppress(OSError):
                    while self._is_cut and not self._received(sock.recv(CHUNK_BYTES)):
                        pass
                self._watch(sock, 0)
                sock.close()

    def _serve(self, sock: socket.socket) -> str:
        session = self.session
        while True:
            with self.lock:
                if session.failure is not None:
                    return "closed"
                if not session.tick(time.monotonic()):
                    return session.silence
                self._write()
                if self._problem:
                    return self._problem
                self._is_held = session.is_full
                wanted = (not self._is_held) * select.POLLIN | bool(self._out) * select.POLLOUT
                self._watch(sock, wanted)
                wait_s = min(max(session.deadline_s - time.monotonic(), 0.0), WAIT_MAX_S)
            happened = dict(self._poll.poll(wait_s * 1000 + 1))
            with self.lock:
                if self._bell.fileno() in happened:
                    self._bell.recv(4096)
                if happened.get(sock.fileno(), 0) & ~select.POLLOUT and not self._is_held:
                    with suppress(*_WOULD_BLOCK):
                        if problem := self._received(sock.recv(CHUNK_BYTES)):
                            return problem

    def _watch(self, sock: socket.socket, wanted: int) -> None:
        if wanted:
            self._poll.register(sock, wanted)
        else:  # Otherwise its end would wake the thread again and again.
            with suppress(KeyError):
                self._poll.unregister(sock)

    def _received(self, data: bytes) -> str:
        """Pass on what was read; give why there is nothing more to read, if so."""
        if not data:
            return "the server closed the connection"
        try:
            self.session.receive(data, time.monotonic())
        except ProtocolViolation as error:
            self.session.fail(error)
            return str(error)
        finally:
            self._notify()
        return ""


def dialled(servers: urls.Servers, options: Options) -> tuple[urls.Address, socket.socket]:
    """The first of the servers that accepts a connection. Raises ConnectionLost."""
    limit_s = options.connect_timeout_s / servers.count
    return servers.first(lambda each: (each, open_socket(each, options, limit_s)))


def open_socket(address: urls.Address, options: Options, timeout_s: float) -> socket.socket:
    """To the one server of this address. It does not block. Raises OSError."""
    if address.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        try:
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection((address.host, address.port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            context = options.ssl_context or ssl.create_default_context()
            try:
                with sock:  # Wrapping takes the descriptor over; if it fails, it is closed here.
                    sock = context.wrap_socket(sock, server_hostname=address.host)
            except OSError as error:
                raise ConnectionLost(failures.of_handshake(error, address)) from None
    sock.setblocking(False)
    return sock
