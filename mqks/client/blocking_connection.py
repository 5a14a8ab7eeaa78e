"""Connections of the blocking client, on plain sockets: each is served by one thread of its own.

The thread reads, writes what has gathered since its last write, and looks at the time. Callers
change the session under its lock and wait for events; any thread may call.

The one rule: the session is touched with the lock held, the socket by its thread alone.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from mqks.client import failures, urls
from mqks.client.errors import ConnectionLost, ProtocolViolation
from mqks.client.messages import Message, Settle
from mqks.client.options import Options
from mqks.client.session import Session
from mqks.errors import reason

CHUNK_BYTES = 256 * 1024
"""More than a TLS record holds, so that no part of one is left behind where no poll sees it."""
WAIT_MAX_S = 3600.0
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

S = TypeVar("S", bound=Session)


class Lock(threading.Condition):
    """Of a session; notified when something in it has changed."""

    def guard(self, settle: Settle) -> Settle:
        """The same function, called with the lock held."""

        def guarded(message: Message, action: bytes) -> None:
            with self:
                settle(message, action)

        return guarded


class Event(threading.Event):
    """Something that happens once."""

    def wait(self, timeout_s: float | None = None, *, shield: bool = False) -> bool:
        """Wait until it has happened; False when the time is over. Nothing cancels a thread, so
        `shield` changes nothing."""
        return super().wait(_bounded(timeout_s))


_beginning = threading.Lock()


def begin(client: Any) -> None:
    """A client is used that is not connected: connect it, as `with` does. Its user closes it."""
    with _beginning:
        try:
            client.__enter__()
        except BaseException:
            for name in ("_session", "_connection", "_connections"):
                client.__dict__.pop(name, None)
            raise


class Connections:
    """The connections of one client: its own, and those of its consumers, which end with it."""

    def open(self) -> None:
        self._all: WeakSet[Connection[Any]] = WeakSet()

    def start(self, connection: "Connection[Any]") -> None:
        self._all.add(connection)
        connection.start()

    def close(self) -> None:
        for connection in list(self._all):
            connection.close("the client is closed")


class Connection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S, lock: Lock) -> None:
        self.session = session
        session.is_tls = address.tls
        if address.tls:
            session.reason = f"no answer to the TLS handshake; perhaps {failures.PLAIN}"
        self.lock = lock
        self._address = address
        self._options = options
        self._closed = threading.Event()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"mqks {address}", daemon=True)
        self.start = self._thread.start
        session.on_output = self._wake

    def _wake(self) -> None:
        """Make the thread look at the session. Call with the lock held."""
        with suppress(OSError):  # Enough rings wait to be heard, or the thread has ended.
            self._ring.send(b"!")

    def until(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait with the lock held until it is so; False when the time is over."""
        return bool(self.lock.wait_for(predicate, _bounded(timeout_s)))

    def room(self, deadline_s: float) -> bool:
        """Wait with the lock held until the session has room; False when the time is over."""
        session = self.session
        return session.has_room or self.until(
            lambda: session.has_room, deadline_s - time.monotonic()
        )

    def turn(self) -> None:
        """Other threads have theirs by themselves."""

    def notify(self) -> None:
        """Something in the session has changed. Call with the lock held."""
        self._wake()
        self.lock.notify_all()

    def close(self, reason: str) -> None:
        with self.lock:
            self.session.fail(ConnectionLost(reason))
            self._closed.set()
            self.notify()
        self._thread.join(self._options.close_timeout_s)

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
                    self.lock.notify_all()
                self._closed.wait(delay_s)

    def _live(self) -> str:
        """Connect and stay so; give the reason of the end."""
        session, out = self.session, memoryview(b"")
        with open_socket(self._address, self._options) as sock:
            with self.lock:
                session.connected(time.monotonic())
            while True:
                with self.lock:
                    if session.failure is not None:
                        return "closed"
                    if not session.tick(time.monotonic()):
                        return f"no answer to a ping for {self._options.keep_alive_s} seconds"
                    if not out and (data := session.take()):
                        out = memoryview(data)
                        self.lock.notify_all()  # There is room again.
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
        with self.lock:
            try:
                self.session.receive(data, time.monotonic())
            except ProtocolViolation as error:
                self.session.fail(error)
                return str(error)
            finally:
                self.lock.notify_all()
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
            try:
                with sock:  # Wrapping takes the descriptor over; if it fails, it is closed here.
                    sock = context.wrap_socket(sock, server_hostname=address.host)
            except OSError as error:
                raise ConnectionLost(failures.of_handshake(error, address)) from None
    sock.setblocking(False)
    return sock


def _bounded(timeout_s: float | None) -> float | None:
    """What threads can wait for; no end where it is longer."""
    return None if timeout_s is None or timeout_s > threading.TIMEOUT_MAX else timeout_s
