"""A network in memory: listeners, and connections whose bytes take their time.

The one rule: bytes of one direction arrive whole and in order; in which pieces, and when, the seed
decides.
"""

import asyncio
import contextvars
import errno
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulation.loop import NOBODY, PROCESS, Process, SimulatedLoop, after, run_into

LATENCY_S = 0.001
PIECE_BYTES = 64 * 1024
AT_ONCE = 0.3
"""How often one more piece is read in a turn."""


class Watch:
    """Of one end of a connection: it is told what it overrides, and may be nothing."""

    def arrived(self, data: bytes) -> None:
        """It was not read yet."""

    def read(self, data: bytes) -> None:
        """By the process, at last."""

    def wrote(self, data: bytes) -> None:
        """Its process has."""

    def leaves(self) -> None:
        """This end closes the connection, which the other end has not."""

    def ended(self) -> None:
        """Nothing more is read, or written."""


class SimulatedSocket:
    """One end of a connection, before it has a transport."""

    family = socket.AF_INET

    def __init__(self, name: tuple[str, int], peer: tuple[str, int]) -> None:
        self.name, self.peer = name, peer
        self.other: SimulatedSocket
        self.transport: Transport | None = None
        self.pending: deque[bytes | None] = deque()
        """What has arrived before it has one."""
        self.closed = False
        self.resets = False
        """What ends it without a close resets the connection: SO_LINGER of 0 seconds."""

    def setblocking(self, blocks: bool) -> None:
        pass

    def setsockopt(self, level: int, option: int, value: object) -> None:
        self.resets |= (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER)

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        return bytes(size) if size else 0

    def fileno(self) -> int:
        return -1 if self.closed else 1000

    def send(self, data: bytes) -> int:
        if (other := self.other.transport) is None:
            raise OSError(errno.EPIPE, "refused")
        other._arrive(data)
        return len(data)

    def close(self) -> None:
        """Without a transport it has read nothing: the other side learns of it, if it has sent."""
        if not (self.closed or self.transport) and (other := self.other.transport) is not None:
            if self.pending:
                other.lose_by_reset()
            else:
                other._arrive(None)
        self.closed = True

    def __enter__(self) -> "SimulatedSocket":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class Listener:
    family = socket.AF_INET

    def __init__(self, network: "Network", address: tuple[str, int]) -> None:
        self._network = network
        self.address = address
        self.backlog: deque[SimulatedSocket] = deque()
        self._loop: SimulatedLoop | None = None
        self._context = contextvars.copy_context()
        self.process = PROCESS.get(None)

    def setblocking(self, blocks: bool) -> None:
        pass

    def setsockopt(self, *args: Any) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def on_reader(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        if self.backlog:
            self.ring()

    def ring(self) -> None:
        if (loop := self._loop) is not None:
            loop.happen(0, lambda: loop.readers.get(self, int)(), self._context)

    def accept(self) -> tuple[SimulatedSocket, tuple[str, int]]:
        if not self.backlog:
            raise BlockingIOError
        sock = self.backlog.popleft()
        return sock, sock.peer

    def close(self) -> None:
        self._network.listeners.pop(self.address[1], None)


class Transport(asyncio.Transport):
    def __init__(self, loop: SimulatedLoop, sock: SimulatedSocket, protocol: Any) -> None:
        super().__init__({"socket": sock, "peername": sock.peer, "sockname": sock.name})
        self._loop, self._sock, self._protocol = loop, sock, protocol
        sock.transport = self
        self.inbox = sock.pending
        """What has arrived; None is the end."""
        self._reads = True
        self._is_reading_scheduled = False
        self._unsent = 0
        self._high, self._low = 64 * 1024, 16 * 1024
        self._is_paused = False
        self._closing = self._lost = self._ended = False
        self._last_s = 0.0
        self._context = contextvars.copy_context()
        self.watch = Watch()
        self.breaks = False
        """It ends in the middle of what is written next."""
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(self._read)

    # -- reading

    def _arrive(self, data: bytes | None) -> None:
        if not self._lost:
            self.inbox.append(data)
            if data:
                self.watch.arrived(data)
            self._schedule()

    def _schedule(self) -> None:
        if self._may_read and not self._is_reading_scheduled:
            self._is_reading_scheduled = True
            self._loop.happen(0, self._read, self._context)

    def _read(self) -> None:
        """One piece, or several and the end in one turn: loops differ."""
        self._is_reading_scheduled = False
        self._read_piece()
        while self._may_read and self._loop.rng.random() < AT_ONCE:
            self._read_piece()
        self._schedule()

    @property
    def _may_read(self) -> bool:
        return self._reads and bool(self.inbox) and not (self._lost or self._closing)

    def _read_piece(self) -> None:
        if not self._may_read:
            return
        data = self.inbox.popleft()
        if data is None:
            self.watch.ended()
            if not self._protocol.eof_received():
                self.close()
        elif isinstance(self._protocol, asyncio.BufferedProtocol):
            buffer = memoryview(self._protocol.get_buffer(-1))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            if size < len(data):
                self.inbox.appendleft(data[size:])
            self._took(data[:size])
            self._protocol.buffer_updated(size)
        else:
            self._took(data)
            self._protocol.data_received(data)

    def _took(self, data: bytes) -> None:
        self.watch.read(data)
        if (other := self.other) is not None:
            self._loop.happen(0, lambda: other._sent(len(data)), other._context)

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self._schedule()

    # -- writing

    def write(self, data: Any) -> None:
        data = bytes(data)
        if self._lost or self._ended or not data:
            return
        self.watch.wrote(data)
        rng = self._loop.rng
        if self.breaks:
            data = data[: rng.randrange(len(data))]
        self._unsent += len(data)
        start = 0
        while start < len(data):
            end = start + rng.choice((1, 7, 500, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES))
            self._deliver(data[start:end])
            start = end
        if self.breaks:
            self.breaks = False
            if rng.random() < 0.5:
                self._loop.happen(self._last_s - self._loop.time(), self.reset, NOBODY)
            else:  # The other side reads what was written before it ends.
                self._deliver(None)
                self._ended = True
                self.lose_by_reset()
        elif self._unsent > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _deliver(self, data: bytes | None) -> None:
        """In order: never before what was sent earlier."""
        now_s = self._loop.time()
        self._last_s = max(after(self._last_s), now_s + self._loop.rng.uniform(0, LATENCY_S))
        self._loop.happen(self._last_s - now_s, lambda: self._hand_over(data), NOBODY)

    def _hand_over(self, data: bytes | None) -> None:
        other = self._sock.other
        if other.transport is not None:
            other.transport._arrive(data)
        else:
            other.pending.append(data)

    def _sent(self, size: int) -> None:
        self._unsent -= size
        if self._is_paused and self._unsent <= self._low:
            self._is_paused = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return max(0, self._unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def write_eof(self) -> None:
        if not self._ended:
            self._ended = True
            self._deliver(None)

    # -- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self.watch.leaves()
            self._closing = True
            self.write_eof()
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._closing:
            self.watch.leaves()
        self._closing = True
        if self._sock.resets:
            self._ended = True
            self._loop.happen(self._loop.rng.uniform(0, LATENCY_S), self._reset_other, NOBODY)
        else:
            self.write_eof()
        self._loop.call_soon(self._lose, None)

    def _reset_other(self) -> None:
        """What is still on its way is lost."""
        if (other := self.other) is not None:
            other.lose_by_reset()

    def cut(self) -> None:
        """Its process was killed, or the connection is reset: the other side learns of it."""
        if not self._lost:
            self._lost = self._closing = True
            self.watch.ended()
            self.write_eof()
            self._sock.close()

    def reset(self) -> None:
        """Both sides lose the connection, and what is on its way."""
        for each in (self, self.other):
            if each is not None:
                each.lose_by_reset()

    def lose_by_reset(self) -> None:
        if not self._lost:
            self._closing = True
            error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            self._loop.happen(0, partial(self._lose, error), self._context)

    @property
    def process(self) -> Process | None:
        return self._context.get(PROCESS)

    @property
    def other(self) -> "Transport | None":
        return self._sock.other.transport

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self.watch.ended()
            self._sock.close()
            self._protocol.connection_lost(error)


class Network:
    def __init__(self) -> None:
        self.listeners: dict[int, Listener] = {}
        self._port = 30000
        self._dialled: dict[int, SimulatedSocket] = {}
        self.transports: list[Transport] = []
        self.watch: Callable[[Transport], Watch] = lambda transport: Watch()
        """What watches an end of a connection."""

    def create_server(self, address: Any, **options: Any) -> Listener:
        port = address[1]
        if not port:
            self._port += 1
            port = self._port
        listener = self.listeners[port] = Listener(self, ("127.0.0.1", port))
        return listener

    def kill(self, process: Process) -> None:
        """Nothing of a process goes on; its sockets are closed."""
        process.dead = True
        for port, listener in [*self.listeners.items()]:
            if listener.process is process:
                del self.listeners[port]
                for sock in listener.backlog:
                    if (waits := sock.other.transport) is not None:
                        waits.reset()
        for transport in self.transports:
            if transport.process is process:
                transport.cut()
        self.tidy()

    def tidy(self) -> None:
        self.transports = [each for each in self.transports if not each.is_closing()]

    def connected(self, transport: Transport) -> Transport:
        self.transports.append(transport)
        transport.watch = watch = self.watch(transport)
        for data in filter(None, transport.inbox):
            watch.arrived(data)
        return transport

    def dial(self, to: tuple[str, int]) -> SimulatedSocket:
        listener = self.listeners.get(to[1])
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._port += 1
        name = "127.0.0.1", self._port
        mine, its = SimulatedSocket(name, to), SimulatedSocket(to, name)
        mine.other, its.other = its, mine
        listener.backlog.append(its)
        listener.ring()
        return mine

    def install(self, loop: SimulatedLoop) -> None:
        async def getaddrinfo(host: str, port: int, **how: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        async def dialled(to: Any) -> SimulatedSocket:
            arrived = loop.create_future()
            loop.happen(loop.rng.uniform(0, LATENCY_S), partial(run_into, arrived, lambda: None))
            await arrived
            return self.dial(to)

        async def sock_connect(sock: socket.socket, to: tuple[str, int]) -> None:
            self._dialled[id(sock)] = await dialled(to)

        async def create_connection(
            factory: Callable[[], Any], *to: Any, sock: socket.socket | None = None, **how: Any
        ) -> tuple[Any, Any]:
            if sock is None:
                mine = await dialled(to)
            else:
                mine = self._dialled.pop(id(sock))
                sock.close()
            return await connect_accepted_socket(factory, mine)

        async def connect_accepted_socket(
            factory: Callable[[], Any], sock: SimulatedSocket
        ) -> tuple[Any, Any]:
            protocol = factory()
            transport = self.connected(Transport(loop, sock, protocol))
            await asyncio.sleep(0)
            return transport, protocol

        for each in (getaddrinfo, sock_connect, create_connection, connect_accepted_socket):
            setattr(loop, each.__name__, each)
