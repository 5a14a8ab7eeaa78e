"""One connection under load: prepared bytes out, counted bytes in.

The one rule: while the clock runs nothing is done per message. Requests are slices of bytes built
before; replies are counted by searching for a mark and kept, to be checked when the clock stands.
"""

import select
import socket
import struct

CHUNK_BYTES = 1 << 18
ROOM_BYTES = 1 << 20
SILENCE_S = 60
"""A server that says nothing for so long has lost something."""

UNLIMITED = 1 << 60


class Stalled(ConnectionError):
    """The server closed the connection or fell silent before everything had come."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def connect(port: int) -> socket.socket:
    """A blocking connection to this machine; a read gives up after `SILENCE_S` seconds."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_S)
    # The kernel's own limit: Python's costs a poll before every read and makes the socket
    # non-blocking underneath.
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENCE_S, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def ask(sock: socket.socket, request: bytes, end: bytes = b"\n") -> bytes:
    """Sends one request and reads one reply, which ends with `end`, byte by byte at its end."""
    sock.sendall(request)
    reply = b""
    while not reply.endswith(end):
        byte = sock.recv(1)
        if not byte:
            raise Stalled(f"closed after {request[:60]!r}, {reply!r}")
        reply += byte
    return reply


class Flow:
    """What one connection sends and awaits.

    `requests` holds requests of `width` bytes each (the last may be longer). At most `ahead` more
    of them are sent than replies have come: 1,000 for a window of that size, 0 for acks, which
    follow the deliveries. A reply is counted by its `mark`, which stands `marks` times in it.
    The flow is done when `expected` replies have come, everything is sent, and what has come ends
    with `until`.
    """

    def __init__(
        self,
        sock: socket.socket,
        requests: bytes = b"",
        *,
        width: int = 1,
        ahead: int = UNLIMITED,
        mark: bytes = b"\n",
        marks: int = 1,
        expected: int = 0,
        until: bytes = b"",
        room_bytes: int = ROOM_BYTES,
    ) -> None:
        self.sock = sock
        self.requests = memoryview(requests)
        self.width = width
        self.ahead = ahead
        self.mark = mark
        self.marks = marks
        self.expected = expected
        self.until = until
        self.sent = 0
        self.limit = 0
        self.seen = 0
        self.replies = 0
        self.filled = 0
        self.raw = bytearray(b"\1") * room_bytes  # touched, so that no page fault is clocked
        self.room = memoryview(self.raw)
        self.allow()

    def open(self) -> None:
        """Whatever must be said before the first request; some servers want nothing."""

    def allow(self) -> None:
        """Sets how far the requests may be sent, after something has come."""
        ahead = (self.replies + self.ahead) * self.width
        last = ahead + self.width > len(self.requests)
        self.limit = len(self.requests) if last else ahead

    def offer(self, requests: bytes) -> None:
        """Appends requests that could not be built before."""
        self.requests = memoryview(bytes(self.requests[self.sent :]) + requests)
        self.limit = len(self.requests)
        self.sent = 0

    def push(self) -> bool:
        """Sends what may go now without waiting; False when the socket took only a part."""
        if self.sent < self.limit:
            try:
                rest = self.requests[self.sent : self.limit]
                self.sent += self.sock.send(rest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return self.sent == self.limit

    def pull(self) -> None:
        """Takes one chunk, waiting for it if need be. Raises `Stalled`."""
        try:
            got = self.sock.recv_into(self.room[self.filled : self.filled + CHUNK_BYTES])
        except BlockingIOError:
            got = 0
        if not got:
            raise Stalled(f"{self.replies} of {self.expected} replies")
        since = max(0, self.filled - len(self.mark) + 1)
        self.filled += got
        self.count(since)
        self.allow()

    def count(self, since: int) -> None:
        """Counts the replies that have become complete in `raw[since:filled]`."""
        self.seen += self.raw.count(self.mark, since, self.filled)
        self.replies = self.seen // self.marks

    @property
    def done(self) -> bool:
        return (
            self.replies >= self.expected
            and self.sent == len(self.requests)
            and self.raw.endswith(self.until, 0, self.filled)
        )

    @property
    def received(self) -> bytes:
        """What has come."""
        return bytes(self.room[: self.filled])

    @property
    def complete(self) -> int:
        """Where the last complete reply ends."""
        at = self.raw.rfind(self.mark, 0, self.filled)
        return at + len(self.mark) if at >= 0 else 0


def run(*flows: Flow) -> None:
    """Drives connections until each is done.

    Raises `Stalled` when nothing moves for `SILENCE_S` seconds.
    """
    waiting = {flow.sock.fileno(): flow for flow in flows if not flow.done}
    masks = {}
    with select.epoll() as epoll:
        for fd, flow in waiting.items():
            masks[fd] = select.EPOLLIN if flow.push() else select.EPOLLIN | select.EPOLLOUT
            epoll.register(fd, masks[fd])
        while waiting:
            events = epoll.poll(SILENCE_S)
            if not events:
                short = next(iter(waiting.values()))
                raise Stalled(f"silent after {short.replies} of {short.expected} replies")
            for fd, event in events:
                flow = waiting[fd]
                if event & ~select.EPOLLOUT:
                    flow.pull()
                mask = select.EPOLLIN if flow.push() else select.EPOLLIN | select.EPOLLOUT
                if mask != masks[fd]:
                    masks[fd] = mask
                    epoll.modify(fd, mask)
                if flow.done:
                    epoll.unregister(fd)
                    del waiting[fd]
