"""NATS JetStream: one stream in files, one durable pull consumer per queue.

Pull requests ask for batches and are kept ahead; acks are explicit, cut from the reply subjects.
"""

import json
import re
import socket
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.flow import Flow, Stalled, ask, connect
from benchmarks.messages import MARK, Messages
from benchmarks.servers.base import Server

BATCH = 1_000
BATCHES_AHEAD = 3
HOW_MANY = b'{"batch":%d}' % BATCH
PULL = b"PUB $JS.API.CONSUMER.MSG.NEXT.s.c%d inbox.%d %d\r\n%b\r\n"
CONNECT = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
ACKED_BYTES = 160
"""More than the frame of any delivery beside its payload."""


class Pulls(Flow):
    """Deliveries asked for in batches, each acked through the subject it carries."""

    queue: int
    manual_ack: bool

    parsed = 0
    asked = 0

    def open(self) -> None:
        self.sock.sendall(b"SUB inbox.%d 1\r\nSUB last.%d 2\r\n" % (self.queue, self.queue))
        self.ask_ahead()

    def ask_ahead(self) -> None:
        """Asks for further batches so that some are always waiting at the server."""
        while self.asked < min(self.expected, self.replies + BATCH * BATCHES_AHEAD):
            self.asked += BATCH
            self.offer(PULL % (self.queue, self.queue, len(HOW_MANY), HOW_MANY))

    def count(self, since: int) -> None:
        before = self.replies
        super().count(since)
        if self.manual_ack and self.replies > before:
            self.ack(self.replies == self.expected)
        self.ask_ahead()

    def ack(self, last: bool) -> None:
        """Acks every delivery that has become complete, the very last so that it is answered."""
        end = self.complete
        subjects = re.findall(rb"\$JS\.ACK\S+", self.room[self.parsed : end])
        self.parsed = end
        acks = [b"PUB %b 4\r\n+ACK\r\n" % subject for subject in subjects]
        if last:
            acks[-1] = acks[-1].replace(b" 4\r\n", b" last.%d 4\r\n" % self.queue)
        self.offer(b"".join(acks))

    def allow(self) -> None:
        self.limit = len(self.requests)


class Nats(Server):
    name = "nats"
    refusal: ClassVar[bytes] = b'"error"'
    program = "nats-server"

    def command(self, directory: Path, port: int) -> list[str]:
        place = ["--addr", "127.0.0.1", "--port", str(port)]
        return [self.program, *place, "--jetstream", "--store_dir", str(directory)]

    def connect(self, port: int) -> socket.socket:
        sock = connect(port)
        ask(sock, b"")  # It introduces itself first.
        sock.sendall(CONNECT)
        return sock

    def answers(self, sock: socket.socket) -> bool:
        return ask(sock, b"PING\r\n") == b"PONG\r\n"

    def declare(self, sock: socket.socket, queues: int, manual_ack: bool) -> None:
        sock.sendall(b"SUB api 1\r\n")
        retention = "workqueue" if manual_ack else "limits"
        stream = {"name": "s", "subjects": ["e"], "storage": "file", "retention": retention}
        self.request(sock, "STREAM.CREATE.s", stream)
        for queue in range(queues):
            durable = {
                "durable_name": f"c{queue}",
                "ack_policy": "explicit" if manual_ack else "none",
                "deliver_policy": "all",
                "max_ack_pending": 100_000 if manual_ack else 0,
            }
            config = {"stream_name": "s", "config": durable}
            self.request(sock, f"CONSUMER.DURABLE.CREATE.s.c{queue}", config)

    def request(self, sock: socket.socket, call: str, config: dict[str, Any]) -> None:
        """One call of JetStream's interface; raises `Stalled` when it is refused."""
        body = json.dumps(config).encode()
        head = f"PUB $JS.API.{call} api {len(body)}\r\n".encode()
        reply = ask(sock, head + body + b"\r\n", end=b"}\r\n")
        if self.refusal in reply:
            raise Stalled(f"{call} was answered by {reply!r}")

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        inbox = b"acks.%d" % messages.publishers.start
        sock.sendall(b"SUB %b 1\r\n" % inbox)
        body = b"%d\r\n%b\r\n" % (messages.payload_bytes, messages.payload)
        plain, confirmed = b"PUB e " + body, b"PUB e %b " % inbox + body
        if window is None:
            requests = messages.fill(plain, last=confirmed)
            width = messages.width(plain)
            return Flow(sock, requests, width=width, mark=b"}\r\n", expected=1)
        return Flow(
            sock,
            messages.fill(confirmed),
            width=messages.width(confirmed),
            ahead=window,
            mark=b"}\r\n",
            expected=messages.count,
            room_bytes=80 * messages.count + 4096,
        )

    def consumer(
        self, sock: socket.socket, messages: Messages, queue: int = 0, manual_ack: bool = False
    ) -> Flow:
        flow = Pulls(
            sock,
            mark=MARK + b"\r\n",
            expected=messages.total,
            until=b" 0\r\n\r\n" if manual_ack else b"",
            room_bytes=(messages.payload_bytes + ACKED_BYTES) * messages.total + 4096,
        )
        flow.queue, flow.manual_ack = queue, manual_ack
        return flow

    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        return re.findall(rb"MSG e 1 \S+ %d\r\n(.{%d})\r\n" % (payload_bytes, payload_bytes), raw)
