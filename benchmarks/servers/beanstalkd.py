"""beanstalkd with its binlog: put, reserve, delete; a job is gone only once it is deleted.

It has one tube to a queue and no copies, so it takes no part in fan-out.
"""

import re
import socket
from pathlib import Path
from typing import ClassVar

from benchmarks.flow import Flow, ask
from benchmarks.messages import MARK, Messages
from benchmarks.servers.base import Server

AHEAD = 100
RESERVE = b"reserve\r\n"


class Reserves(Flow):
    """Reserves kept ahead of the jobs; each job is deleted once it has come."""

    parsed = 0

    def open(self) -> None:
        self.offer(RESERVE * min(AHEAD, self.expected))

    def count(self, since: int) -> None:
        before = self.replies
        super().count(since)
        end = self.complete
        jobs = re.findall(rb"RESERVED (\d+) ", self.room[self.parsed : end])
        self.parsed = max(self.parsed, end)
        # No reserve may be left over: behind one that waits, no delete is read.
        more = self._reserves(self.replies) - self._reserves(before)
        ending = b"list-tube-used\r\n" if before < self.replies == self.expected else b""
        self.offer(b"".join([b"delete %b\r\n" % job for job in jobs]) + RESERVE * more + ending)

    def _reserves(self, replies: int) -> int:
        return min(replies + AHEAD, self.expected)

    def allow(self) -> None:
        self.limit = len(self.requests)


class Beanstalkd(Server):
    name = "beanstalkd"
    promise = "fsync after each put"
    refusal: ClassVar[bytes] = b"_ERROR"
    program = "beanstalkd"
    version_flags: ClassVar[list[str]] = ["-v"]
    scale = 0.02
    skips = frozenset({"fanout"})

    def command(self, directory: Path, port: int) -> list[str]:
        return [self.program, "-l", "127.0.0.1", "-p", str(port), "-b", str(directory), "-f", "0"]

    def answers(self, sock: socket.socket) -> bool:
        return ask(sock, b"list-tube-used\r\n") == b"USING default\r\n"

    def declare(self, sock: socket.socket, queues: int, manual_ack: bool) -> None:
        """The default tube is there already."""

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        put = b"put 1 0 600 %d\r\n%b\r\n" % (messages.payload_bytes, messages.payload)
        return Flow(
            sock,
            messages.fill(put),
            width=messages.width(put),
            ahead=window or 10_000,
            expected=messages.count,
            room_bytes=len(b"INSERTED 1000000000\r\n") * messages.count + 4096,
        )

    def consumer(
        self,
        sock: socket.socket,
        messages: Messages,
        *,
        number: int = 0,
        queue: int = 0,
        manual_ack: bool = False,
    ) -> Flow:
        return Reserves(
            sock,
            mark=MARK + b"\r\n",
            expected=messages.total,
            until=b"USING default\r\n",
            room_bytes=(messages.payload_bytes + 60) * messages.total + 4096,
        )

    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        return re.findall(rb"RESERVED \d+ %d\r\n(.{%d})\r\n" % (payload_bytes, payload_bytes), raw)
