"""Connections of the blocking client, on plain sockets: each is served by one thread of its own.

The thread reads, writes what has gathered since its last write, and looks at the time. Callers
change the session under its lock and wait for events; any thread may call.

The one rule: the session is touched with the lock held, the socket by its thread alone.
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
from mqks.client.session import Call, Session, State
from mqks.errors import reason

CHUNK_BYTES = 256 * 1024
"""More than a TLS record holds, so that no part of one is left behind where no poll sees it."""
WAIT_MAX_S = 3600.0
JOIN_S_MIN = 0.1
INTERRUPTED = "a thread was interrupted while it used the connection"
IS_WATCHING_AT_ONCE = hasattr(select, "epoll")
"""Whether a thread that already waits notices a change of what it waits for."""
_Poll = select.epoll if IS_WATCHING_AT_ONCE else select.poll
UNKNOWN = -1
POLL_UNITS = 1 if IS_WATCHING_AT_ONCE else 1000
"""Per second."""
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# Names of hosts need it. A child that is forked during its import would wait for it without end.
codecs.lookup("idna")

S = TypeVar("S", bound=Session)


Lock = threading.RLock
"""Of a session. One in Python could be left locked by an exception of a signal handler."""


def guard(lock: Lock, settle: Settle) -> Settle:
    """The same function, called with the lock held."""

    def guarded(message: Message, action: bytes) -> None:
        with lock:
            settle(message, action)

    return guarded


class Event:
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
        `shield` changes nothing."""
        return self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))


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

    def start(self, connection: "Connection[Any]") -> None:
        self.started(connection)
        connection.start()

    def close(self) -> None:
        self.closed()
        for connection in list(self.all):
            connection.close("the client is closed")

    def send_rest(self) -> None:
        self._sent = Event()
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


class Connection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S, lock: Lock) -> None:
        self.session = session
        session.is_tls = address.tls
        if address.tls:
            session.reason = f"no answer to the TLS handshake; perhaps {failures.PLAIN}"
        self.lock = lock
        self._changed = threading.Condition(lock)
        self._servers = urls.Servers(address)
        if self._servers.count > 1:
            session.greeting_s = options.connect_timeout_s / self._servers.count
        self._options = options
        self._closed = threading.Event()
        # Two ways: bytes to the bell wake the thread, bytes to the ring the leader.
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._poll = _Poll()
        self._poll.register(self._bell, select.POLLIN)
        self._sock: socket.socket | None = None
        self._watched = 0
        """What the thread waits for at the socket."""
        self._out = memoryview(b"")
        """What the thread has to send before anything else is sent."""
        self._is_busy = False
        """Whether the thread uses the socket without the lock."""
        self._problem = ""
        """Why the connection must end."""
        self._is_cut = False
        """Whether a write has failed."""
        self._leader: object = None
        """Who reads instead of the thread."""
        self._polled: socket.socket | None = None
        """The socket at which a caller waits; if it is not the connection's any more, that caller
        closes it."""
        self._is_asking = False
        self._waiters = 0
        """Threads that wait for a change of the session, with the lock held."""
        self._waiting: set[Event] = set()
        """What wakes those that wait without it."""
        self._thread = threading.Thread(target=self._run, name=f"mqks {address}", daemon=True)
        self.start = self._thread.start
        session.on_output = self._output

    def _wake(self) -> None:
        """Make the thread look at the session. Call with the lock held."""
        with suppress(OSError):  # Enough rings wait to be heard, or the thread has ended.
            self._ring.send(b"!")

    def _wake_leader(self) -> None:
        """Make the caller that waits at the socket look. Call with the lock held."""
        if self._polled is not None:
            with suppress(OSError):
                self._bell.send(b"!")

    def _output(self) -> None:
        """There is something to send where nothing was. Call with the lock held."""
        if not self._is_asking:
            if self.session.is_prompt and self._is_free:
                self._write_now()
            else:
                self._wake()

    def send(self, send: Callable[[Call], bytes], call: Call) -> bytes:
        """Send a request, and give its id; `answered` follows. Call with the lock held."""
        try:
            self._is_asking = True
            request_id = send(call)
        except BaseException:
            self._wake()
            raise
        finally:
            self._is_asking = False
        if self.session.is_alone and self._is_free and self._polled is None:
            self._lead(call)
            self._write_now()
        else:  # The thread reads and writes for all.
            self._lead(None)
            self._wake()
        return request_id

    def answered(self, call: Call, answered: Event, deadline_s: float) -> None:
        """Wait for the answer to the request sent last by this thread, or until this time."""
        if self._leader is call:
            self._read_until(call, lambda: not call.remaining, deadline_s)
        if call.remaining:
            answered.wait(deadline_s - time.monotonic())

    def arrival(self, predicate: Callable[[], object], timeout_s: float | None) -> bool:
        """Wait until something that arrives makes it so; False when the time is over. Call without
        the lock."""
        me: object = None
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self.lock:
                if predicate():
                    return True
                if self._polled is None and self._is_free and self.session.is_alone:
                    me = object()
                self._lead(me)
                if me is not None and not self.session.is_idle:
                    self._write_now()
            if me is not None:
                self._read_until(me, predicate, deadline_s)
        except BaseException:  # It may lead, and not read yet: others would wait for keep_alive_s.
            self._step_down(me, None)
            raise
        # Not by the condition: its `wait` does not survive an exception of a signal handler.
        while True:
            event = Event()
            with self.lock:
                if predicate():
                    return True
                wait_s = deadline_s - time.monotonic()
                if wait_s <= 0:
                    return False
                self._waiting.add(event)
            try:
                event.wait(wait_s)
            finally:
                with self.lock:
                    self._waiting.discard(event)

    def until(self, predicate: Callable[[], object], timeout_s: float) -> bool:
        """Wait with the lock held until it is so; False when the time is over."""
        return self._wait_for(predicate, timeout_s)

    def _wait_for(self, predicate: Callable[[], object], timeout_s: float) -> bool:
        self._waiters += 1
        try:
            return bool(self._changed.wait_for(predicate, _bounded(timeout_s)))
        finally:
            self._waiters -= 1

    def room(self, deadline_s: float) -> bool:
        """Wait with the lock held until the session has room; False when the time is over."""
        session = self.session
        return session.has_room or self._wait_for(
            lambda: session.has_room, deadline_s - time.monotonic()
        )

    def turn(self) -> None:
        """Other threads have theirs by themselves."""

    def resume(self) -> None:
        """Read on if that was held back. Call with the lock held."""
        self._watch()

    def notify(self) -> None:
        """Something in the session has changed. Call with the lock held."""
        self._wake()
        self._wake_leader()
        self._notify()

    def _notify(self) -> None:
        if self._waiters:
            self._changed.notify_all()
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            for event in waiting:
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
        """Wait until its thread has ended."""
        self._thread.join(timeout_s)

    def leave_to_parent(self, failure: ConnectionLost) -> None:
        """In the child of a fork, where no other thread is: close what it has of the connection,
        and nothing else. The parent's threads may have held the lock."""
        cast(Any, self.lock)._at_fork_reinit()
        self._closed = threading.Event()
        for each in (self._sock, self._polled, self._bell, self._ring):
            if each is not None:
                each.close()
        self._sock = self._polled = None
        if IS_WATCHING_AT_ONCE:
            cast(Any, self._poll).close()
        self.session.disown(failure)

    # -- the callers' side, with the lock held

    @property
    def _is_free(self) -> bool:
        """Whether callers may use the socket."""
        return not (
            self._sock is None
            or self._is_busy
            or self._out
            or self._problem
            or self.session.state is not State.UP
        )

    def _lead(self, leader: object) -> None:
        """Who reads from now on; None: the thread. An earlier leader waits like all others."""
        if self._leader is not leader:
            self._leader = leader
            self._wake_leader()
            self._watch()

    def _write_now(self) -> None:
        """Send all that can be sent."""
        sock = self._sock
        assert sock is not None
        # An exception of a signal handler may come between any two steps: then the connection ends.
        self._problem = INTERRUPTED
        try:
            data = self.session.take()
            sent = self._send(sock, data) if data else 0
            if sent < len(data):
                self._out = memoryview(data)[sent:]
                self._wake()
            self._problem = ""
        except OSError as error:
            self._problem = reason(error)
        finally:
            if self._problem:
                self._wake()
        if self._waiters or self._waiting:
            self._notify()  # There is room again.

    def _read_until(self, me: object, predicate: Callable[[], object], deadline_s: float) -> None:
        """Read while this caller leads, until it is so or the time is over. Call without the
        lock."""
        # An exception of a signal handler may come between any two steps, also while a lock is
        # waited for: nothing is held then, and what is to be done in the end is done again.
        happened: list[tuple[int, int]] = []
        sock: socket.socket | None = None
        try:
            while True:
                with self.lock:
                    if sock is None and self._leader is me and self._polled is None:
                        self._polled = sock = self._sock
                    if sock is None:
                        return
                    for descriptor, _ in happened:
                        if descriptor != sock.fileno():
                            with suppress(OSError):
                                self._ring.recv(4096)
                        elif self._leader is me and self._sock is sock:
                            self._receive_here(sock)
                    wait_s = deadline_s - time.monotonic()
                    is_over = predicate() or wait_s <= 0 or self._problem
                    if is_over or self._leader is not me or self._sock is not sock:
                        return
                    poll = self._arrival.poll
                happened = poll(min(wait_s, WAIT_MAX_S) * 1000)
        finally:
            try:
                self._step_down(me, sock)
            except BaseException:
                self._step_down(me, sock)
                raise

    def _step_down(self, me: object, sock: socket.socket | None) -> None:
        with self.lock:
            if self._polled is sock:
                self._polled = None
            if self._leader is me:
                self._leader = None
            if self._problem:
                self._wake()
            self._watch()
            if sock is not None and self._sock is not sock:
                sock.close()

    def _receive_here(self, sock: socket.socket) -> None:
        self._problem = INTERRUPTED
        try:
            data = sock.recv(CHUNK_BYTES)
        except _WOULD_BLOCK:
            self._problem = ""
        except OSError as error:
            self._problem = reason(error)
        else:
            self._problem = self._received(data)

    def _watch(self) -> None:
        """Let the thread wait for what there is to do at the socket."""
        sock = self._sock
        if sock is None:
            return
        may_read = self._leader is None and not self.session.is_full
        wanted = may_read * select.POLLIN | bool(self._out) * select.POLLOUT
        if wanted != self._watched:
            watched, self._watched = self._watched, UNKNOWN
            if watched:
                self._unwatch(sock)
            if wanted:
                self._poll.register(sock, wanted)
            self._watched = wanted
            if not IS_WATCHING_AT_ONCE and wanted:
                self._wake()

    def _unwatch(self, sock: socket.socket) -> None:
        with suppress(KeyError, FileNotFoundError):  # An interrupted `_watch` leaves it unknown.
            self._poll.unregister(sock)

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
        address, sock = _dialled(self._servers, self._options)
        try:
            with self.lock:
                self.session.is_tls, self.session.server = address.tls, str(address)
                self._sock, self._out, self._problem = sock, memoryview(b""), ""
                self._is_cut = False
                self._leader, self._is_busy, self._watched = None, False, 0
                self._arrival = select.poll()
                self._arrival.register(sock, select.POLLIN)
                self._arrival.register(self._ring, select.POLLIN)
                self.session.connected(time.monotonic())
            return self._serve(sock)
        finally:
            with self.lock:
                if self._is_cut:
                    # The server may have said why, before it closed the connection.
                    with suppress(OSError):
                        while not self._received(sock.recv(CHUNK_BYTES)):
                            pass
                self._unwatch(sock)
                self._sock, self._leader = None, None
                if self._polled is sock:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # It wakes the leader, who closes it.
                else:
                    sock.close()

    def _serve(self, sock: socket.socket) -> str:
        session = self.session
        while True:
            with self.lock:
                if session.failure is not None:
                    return "closed"
                if self._problem:
                    return self._problem
                if not session.tick(time.monotonic()):
                    return self.session.silence
                if self._polled is None:
                    self._leader = None  # An exception may have ended it before it read.
                if not self._out and (data := session.take()):
                    self._out = memoryview(data)
                    self._notify()  # There is room again.
                out = self._out
                self._is_busy = bool(out)
                self._watch()
                wait_s = session.deadline_s - time.monotonic()
            if out:
                sent = self._send(sock, out)
                with self.lock:
                    self._out, self._is_busy = out[sent:], False
                    self._watch()
            if self._wait(sock, wait_s):
                with self.lock:
                    if self._leader is not None or session.is_full or self._problem:
                        continue
                    self._is_busy = True
                try:
                    data = sock.recv(CHUNK_BYTES)
                except _WOULD_BLOCK:
                    self._is_busy = False
                    continue
                with self.lock:
                    self._is_busy = False
                    if problem := self._received(data):
                        return problem

    def _wait(self, sock: socket.socket, wait_s: float) -> bool:
        """Sleep until there is something to do; tell whether there may be something to read."""
        happened = dict(self._poll.poll((min(max(wait_s, 0.0), WAIT_MAX_S) + 0.001) * POLL_UNITS))
        if self._bell.fileno() in happened:
            with suppress(BlockingIOError):
                self._bell.recv(4096)
        return bool(happened.get(sock.fileno(), 0) & ~select.POLLOUT)

    def _send(self, sock: socket.socket, out: bytes | memoryview) -> int:
        try:
            return sock.send(out)
        except _WOULD_BLOCK:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            self._is_cut = True
            raise

    def _received(self, data: bytes) -> str:
        """Pass on what was read; give why there is nothing more to read, if so. Call with the lock
        held."""
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


def open_socket(address: urls.Address, options: Options) -> socket.socket:
    """To the first of its servers that accepts a connection."""
    return _dialled(urls.Servers(address), options)[1]


def _dialled(servers: urls.Servers, options: Options) -> tuple[urls.Address, socket.socket]:
    failures: list[tuple[urls.Address, str]] = []
    for address in servers.round():
        try:
            return address, _open(address, options, options.connect_timeout_s / servers.count)
        except OSError as error:
            if servers.count == 1:
                raise
            failures.append((address, reason(error)))
    raise ConnectionLost(urls.told(failures))


def _open(address: urls.Address, options: Options, timeout_s: float) -> socket.socket:
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


def _bounded(timeout_s: float | None) -> float | None:
    """What threads can wait for; no end where it is longer."""
    return None if timeout_s is None or timeout_s > threading.TIMEOUT_MAX else timeout_s
