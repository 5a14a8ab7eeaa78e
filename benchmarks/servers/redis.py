"""Redis Streams: XADD, and XREADGROUP by a group per queue.

Entry ids are told to start at 1-1000000001 and go up by one, so that every entry has the same
width and the acks can be cut from what came by counting.
"""

import re
import socket
from pathlib import Path
from typing import ClassVar

from benchmarks.flow import UNLIMITED, Flow, Stalled, ask
from benchmarks.messages import Messages
from benchmarks.servers.base import Server

FIRST_ID = 1_000_000_000
BATCH = 1_000
PIPELINE = 10_000
"""Requests in flight when nothing is confirmed: more only fills Redis's buffers."""

READ = re.compile(rb"(?::\d+\r\n)*\*1\r\n\*2\r\n\$1\r\ns\r\n\*(\d+)\r\n")
ENTRY = b"*2\r\n$12\r\n1-0000000000\r\n*2\r\n$1\r\nd\r\n$%d\r\n"


def command(*words: bytes) -> bytes:
    """A request in Redis's protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


class Reads(Flow):
    """One XREADGROUP after the other, each sent with the acks of the one before."""

    group: bytes
    consumer: bytes
    manual_ack: bool
    entry_bytes: int

    parsed = 0
    acked = FIRST_ID

    def open(self) -> None:
        self.offer(self.read())

    def read(self) -> bytes:
        noack = () if self.manual_ack else (b"NOACK",)
        return command(
            *(b"XREADGROUP", b"GROUP", self.group, self.consumer, b"COUNT", b"%d" % BATCH),
            *(b"BLOCK", b"0", *noack, b"STREAMS", b"s", b">"),
        )

    def ack(self, count: int) -> bytes:
        """Acks the next entries and deletes them, as a broker does."""
        ids = [b"1-%d" % n for n in range(self.acked + 1, self.acked + count + 1)]
        self.acked += count
        gone = command(b"XTRIM", b"s", b"MINID", b"1-%d" % (self.acked + 1))
        return command(b"XACK", b"s", self.group, *ids) + gone

    def count(self, since: int) -> None:
        while match := READ.match(self.raw, self.parsed, self.filled):
            count = int(match[1])
            end = match.end() + count * self.entry_bytes
            if end > self.filled:
                return
            self.parsed = end
            self.replies += count
            more = self.read() if self.replies < self.expected else b""
            if self.manual_ack:
                more = self.ack(count) + (more or command(b"PING"))
            self.offer(more)

    def allow(self) -> None:
        self.limit = len(self.requests)


class Redis(Server):
    refusal: ClassVar[bytes] = b"-ERR"
    program = "redis-server"

    def __init__(self, name: str, fsync: str) -> None:
        self.name = name
        self.fsync = fsync

    def command(self, directory: Path, port: int) -> list[str]:
        place = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
        lasting = ["--save", "", "--appendonly", "yes", "--appendfsync", self.fsync]
        return [self.program, *place, *lasting]

    def answers(self, sock: socket.socket) -> bool:
        return ask(sock, command(b"PING")) == b"+PONG\r\n"

    def declare(self, sock: socket.socket, queues: int, manual_ack: bool) -> None:
        groups = [
            (b"XGROUP", b"CREATE", b"s", b"g%d" % i, b"0", b"MKSTREAM") for i in range(queues)
        ]
        for words in [*groups, (b"XSETID", b"s", b"1-%d" % FIRST_ID)]:
            if (reply := ask(sock, command(*words))) != b"+OK\r\n":
                raise Stalled(f"{words!r} was answered by {reply!r}")

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        template = command(b"XADD", b"s", b"1-*", b"d", b"@")
        payload = b"$%d\r\n%b\r\n" % (messages.payload_bytes, messages.payload)
        request = template.replace(b"$1\r\n@\r\n", payload)
        return Flow(
            sock,
            messages.fill(request),
            width=messages.width(request),
            ahead=window or PIPELINE,
            marks=2,
            expected=messages.count,
            room_bytes=len(b"$12\r\n1-1000000000\r\n") * messages.count + 4096,
        )

    def consumer(
        self, sock: socket.socket, messages: Messages, queue: int = 0, manual_ack: bool = False
    ) -> Flow:
        entry_bytes = len(ENTRY % messages.payload_bytes) + messages.payload_bytes + 2
        flow = Reads(
            sock,
            ahead=UNLIMITED,
            expected=messages.total,
            until=b"+PONG\r\n" if manual_ack else b"",
            room_bytes=(entry_bytes + 60) * messages.total + 4096,
        )
        flow.group, flow.consumer = b"g%d" % queue, b"c%d" % queue
        flow.manual_ack, flow.entry_bytes = manual_ack, entry_bytes
        return flow

    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        entry = re.escape(ENTRY % payload_bytes).replace(b"0" * 10, rb"\d{10}")
        return re.findall(entry + rb"(.{%d})\r\n" % payload_bytes, raw, re.DOTALL)
