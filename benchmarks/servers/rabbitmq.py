"""RabbitMQ: persistent messages through a fanout exchange into classic durable queues, AMQP 0-9-1.

The program itself is started, not the wrapper of the same name on the path, which would change to
the user of the machine's own node; and with a port mapper (epmd) of its own in its process group,
since the one it would start by itself outlives it.
"""

import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.flow import UNLIMITED, Flow, Stalled, connect, free_port
from benchmarks.messages import MARK, PLACE, Messages, Wrong
from benchmarks.servers.base import POLICIES, TALKERS, Server

METHOD, HEADER, BODY = 1, 2, 3
END = b"\xce"
HEAD = struct.Struct(">BHI")
ACK = struct.Struct(">BHI4sQ?s")
"""A whole frame: basic.ack looks the same in both directions."""
PREFETCH = 2_000
DELIVERY_BYTES = 100
"""More than the frames of any delivery beside its payload."""
DEATH_BYTES = 400
"""And of the header that tells how it died."""

# Class and method, as they stand at the beginning of a method frame.
CONNECTION_CLOSE, CHANNEL_CLOSE = b"\0\x0a\0\x32", b"\0\x14\0\x28"
START_OK, TUNE_OK, OPEN = b"\0\x0a\0\x0b", b"\0\x0a\0\x1f", b"\0\x0a\0\x28"
CHANNEL_OPEN = b"\0\x14\0\x0a"
EXCHANGE_DECLARE, QUEUE_DECLARE, QUEUE_BIND = (b"\0\x28\0\x0a", b"\0\x32\0\x0a", b"\0\x32\0\x14")
QOS, CONSUME, PUBLISH = b"\0\x3c\0\x0a", b"\0\x3c\0\x14", b"\0\x3c\0\x28"
BASIC_ACK, CONFIRM_SELECT = b"\0\x3c\0\x50", b"\0\x55\0\x0a"
BASIC_REJECT = b"\0\x3c\0\x5a"
QOS_OK = b"\0\x3c\0\x0b"

NO_TABLE = b"\0\0\0\0"
DURABLE, NO_ACK = b"\2", b"\2"
PERSISTENT = b"\x10\0\2"
"""The one property that is sent: delivery-mode 2."""
FORMED = "the cluster is formed"
"""Printed by `benchmarks.clusters` when clients may connect."""
EXPIRING = b"\x11\0\2"
"""Two: behind it comes the expiration, a short string of milliseconds."""


def frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return HEAD.pack(kind, channel, len(payload)) + payload + END


def word(text: bytes) -> bytes:
    """A short string."""
    return bytes([len(text)]) + text


def table(**values: bytes | int) -> bytes:
    """A field table; underscores in a name stand for hyphens."""
    fields = b"".join(
        word(b"x-" + name.replace("_", "-").encode())
        + (
            struct.pack(">ci", b"I", value)
            if isinstance(value, int)
            else struct.pack(">cI", b"S", len(value)) + value
        )
        for name, value in values.items()
    )
    return struct.pack(">I", len(fields)) + fields


def frames(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each frame."""
    at = 0
    while at < len(raw):
        kind, _, size = HEAD.unpack_from(raw, at)
        at += HEAD.size + size + len(END)
        yield kind, raw[at - size - len(END) : at - len(END)]


def call(sock: socket.socket, method: bytes, channel: int = 1) -> bytes:
    """Sends one method, gives the method that answers it. Raises `Stalled`."""
    sock.sendall(frame(METHOD, method, channel) if method else b"")
    _, _, size = HEAD.unpack(receive(sock, HEAD.size))
    answer = receive(sock, size + len(END))[:-1]
    if answer[:4] in (CONNECTION_CLOSE, CHANNEL_CLOSE):
        raise Stalled(f"{method!r} was answered by {answer!r}")
    return answer


def receive(sock: socket.socket, size: int) -> bytes:
    got = sock.recv(size, socket.MSG_WAITALL)
    if len(got) < size:
        raise Stalled(f"closed after {got!r}")
    return got


class Confirmed(Flow):
    """Publishes, confirmed one by one or several at once, not always in order."""

    parsed = 0
    through = 0
    """Everything up to this number is confirmed."""
    beyond: set[int]
    """What is confirmed above it."""

    def open(self) -> None:
        self.beyond = set()

    def count(self, since: int) -> None:
        while self.parsed + ACK.size <= self.filled:
            kind, _, _, method, number, multiple, end = ACK.unpack_from(self.raw, self.parsed)
            if (kind, method, end) != (METHOD, BASIC_ACK, END):
                raise Wrong(f"refused: {bytes(self.room[self.parsed : self.filled])[:200]!r}")
            self.parsed += ACK.size
            if multiple:
                self.through = max(self.through, number)
                self.beyond = {each for each in self.beyond if each > number}
            elif number <= self.through or number in self.beyond:
                raise Wrong(f"message {number} was confirmed twice")
            else:
                self.beyond.add(number)
            while self.through + 1 in self.beyond:
                self.through += 1
                self.beyond.remove(self.through)
        self.replies = self.through + len(self.beyond)


class Consumer(Flow):
    greeting: bytes

    def open(self) -> None:
        call(self.sock, self.greeting)


class Redriver(Flow):
    """Publishes each message that comes, and acks it when that is confirmed; the numbers of both
    are the same."""

    greeting: bytes
    head: bytes
    parsed = 0
    acked = 0

    def open(self) -> None:
        call(self.sock, self.greeting)

    def count(self, since: int) -> None:
        out, end = [], self.expected
        while self.parsed + HEAD.size <= self.filled:
            kind, _, size = HEAD.unpack_from(self.raw, self.parsed)
            after = self.parsed + HEAD.size + size + len(END)
            if after > self.filled:
                break
            payload = self.raw[self.parsed + HEAD.size : after - len(END)]
            if kind == BODY:
                out.append(self.head + payload + END)
            elif kind == METHOD and payload[:4] == BASIC_ACK:
                number, multiple = struct.unpack_from(">Q?", payload, 4)
                self.acked += number - self.acked if multiple else 1
                out.append(ACK.pack(1, 1, 13, BASIC_ACK, number, multiple, END))
                if self.acked == end:
                    out.append(frame(METHOD, QOS + struct.pack(">IHB", 0, 0, 0)))
            elif kind == METHOD and payload[:4] in (CONNECTION_CLOSE, CHANNEL_CLOSE):
                raise Wrong(f"refused: {bytes(payload)[:200]!r}")
            self.parsed = after
        self.replies = self.acked
        if out:
            self.offer(b"".join(out))

    def allow(self) -> None:
        self.limit = len(self.requests)


def environment(directory: Path, node: str, port: int, mapper: int) -> dict[str, str]:
    """What a node needs: its files are in `directory`, and `mapper` is the port of epmd."""
    return {
        "HOME": str(directory),  # of the cookie
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(mapper),
        "RABBITMQ_NODENAME": node,
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": str(directory / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RUNNING_UNDER_SYSTEMD": "true",  # no shell between the process and its signals
    }


class Rabbitmq(Server):
    name = "rabbitmq"
    promise = "written to files, fsync now and then"
    refusal: ClassVar[bytes] = CHANNEL_CLOSE
    program = "/usr/lib/rabbitmq/bin/rabbitmq-server"
    scale = 0.3
    queue_arguments = NO_TABLE
    """How queues are declared."""
    skips = frozenset({"fairness", "paging"}) | TALKERS

    def version(self) -> str:
        homes = Path(self.program).parents[1].glob("lib/rabbitmq_server-*")
        return next((home.name.partition("-")[2] for home in homes), "unknown")

    def command(self, directory: Path, port: int) -> list[str]:
        node = environment(directory, "bench@localhost", port, free_port())
        told = [f"{name}={value}" for name, value in node.items()]
        return ["env", *told, "sh", "-c", 'epmd & exec "$0"', self.program]

    def connect(self, port: int) -> socket.socket:
        sock = connect(port)
        sock.sendall(b"AMQP\0\0\x09\x01")
        call(sock, b"", 0)
        login = word(b"PLAIN") + struct.pack(">I", 12) + b"\0guest\0guest" + word(b"en_US")
        tune = call(sock, START_OK + NO_TABLE + login, 0)
        limits = tune[4:10] + b"\0\0"  # as it proposes, but without heartbeats
        sock.sendall(frame(METHOD, TUNE_OK + limits, 0))
        call(sock, OPEN + word(b"/") + b"\0\0", 0)
        call(sock, CHANNEL_OPEN + b"\0")
        return sock

    def answers(self, sock: socket.socket) -> bool:
        return call(sock, self.qos(0))[:4] == QOS_OK

    def qos(self, prefetch: int) -> bytes:
        return QOS + struct.pack(">IHB", 0, prefetch, 0)

    def declare(self, sock: socket.socket, queues: int, manual_ack: bool) -> None:
        self._declare_exchange(sock, b"e")
        for queue in range(queues):
            dead = table(dead_letter_exchange=b"", dead_letter_routing_key=b"dead")
            self._declare_queue(
                sock, b"q%d" % queue, dead if self.wish.kills else self.queue_arguments
            )
            self._bind(sock, b"q%d" % queue, b"e")
        if self.wish.kills:
            self._declare_queue(sock, b"dead", NO_TABLE)
        if self.wish.delay_s:
            waits = table(message_ttl=self.wish.delay_s * 1000, dead_letter_exchange=b"e")
            self._declare_exchange(sock, b"d")
            self._declare_queue(sock, b"delay", waits)
            self._bind(sock, b"delay", b"d")

    def _declare_exchange(self, sock: socket.socket, name: bytes) -> None:
        call(sock, EXCHANGE_DECLARE + b"\0\0" + word(name) + word(b"fanout") + DURABLE + NO_TABLE)

    def _declare_queue(self, sock: socket.socket, name: bytes, about: bytes) -> None:
        call(sock, QUEUE_DECLARE + b"\0\0" + word(name) + DURABLE + about)

    def _bind(self, sock: socket.socket, queue: bytes, exchange: bytes) -> None:
        names = word(queue) + word(exchange)
        call(sock, QUEUE_BIND + b"\0\0" + names + b"\0\0" + NO_TABLE)

    def _publish_head(self, size: int, exchange: bytes, key: bytes = b"") -> bytes:
        """All frames of a publish but for the payload and its end."""
        properties = PERSISTENT
        if self.wish.ttl_s:
            properties = EXPIRING + word(b"%d" % (self.wish.ttl_s * 1000))
        head = frame(METHOD, PUBLISH + b"\0\0" + word(exchange) + word(key) + b"\0")
        head += frame(HEADER, struct.pack(">HHQ", 60, 0, size) + properties)
        head += HEAD.pack(BODY, 1, size)
        if PLACE in head:
            raise ValueError(f"payloads of {size} bytes cannot be built: a length holds {PLACE!r}")
        return head

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        call(sock, CONFIRM_SELECT + b"\0")
        size = messages.payload_bytes
        head = self._publish_head(size, b"d" if self.wish.delay_s else b"e")
        request = head + messages.payload + END
        flow = Confirmed(
            sock,
            messages.fill(request),
            width=messages.width(request),
            ahead=window or UNLIMITED,
            expected=messages.count,
            room_bytes=ACK.size * messages.count + 4096,
        )
        flow.open()
        return flow

    def consumer(
        self,
        sock: socket.socket,
        messages: Messages,
        *,
        number: int = 0,
        queue: int = 0,
        manual_ack: bool = False,
        room_bytes: int | None = None,
    ) -> Flow:
        acks, until = b"", b""
        if manual_ack:
            call(sock, self.qos(self.wish.prefetch or PREFETCH))
            numbers = range(1, messages.total + 1)
            # A reject that does not put back looks like an ack that is not for several.
            method = BASIC_REJECT if self.wish.kills else BASIC_ACK
            acks = b"".join(ACK.pack(1, 1, 13, method, n, False, END) for n in numbers)
            # Behind the last ack goes a request whose answer tells that it was taken.
            acks += frame(METHOD, self.qos(0))
            until = frame(METHOD, QOS_OK)
        frames_bytes = DELIVERY_BYTES + DEATH_BYTES * bool(self.wish.delay_s)
        flow = Consumer(
            sock,
            acks,
            width=ACK.size,
            ahead=0,
            mark=MARK + END,
            expected=messages.total,
            until=until,
            room_bytes=room_bytes
            or (messages.payload_bytes + frames_bytes) * messages.total + 4096,
        )
        flags = b"\0" if manual_ack else NO_ACK
        names = word(b"q%d" % queue) + word(b"c%d" % number)
        flow.greeting = CONSUME + b"\0\0" + names + flags + NO_TABLE
        return flow

    def redriver(self, sock: socket.socket, messages: Messages) -> Flow:
        call(sock, CONFIRM_SELECT + b"\0")
        call(sock, self.qos(PREFETCH))
        frames_bytes = messages.payload_bytes + DELIVERY_BYTES + DEATH_BYTES + ACK.size
        flow = Redriver(
            sock,
            expected=messages.total,
            until=frame(METHOD, QOS_OK),
            room_bytes=frames_bytes * messages.total + 4096 + (1 << 20),
        )
        flow.head = self._publish_head(messages.payload_bytes, b"", b"q0")
        flow.greeting = CONSUME + b"\0\0" + word(b"dead") + word(b"r") + b"\0" + NO_TABLE
        return flow

    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        return [payload for kind, payload in frames(raw) if kind == BODY]

    def check_no_refusal(self, raw: bytes) -> None:
        for kind, payload in frames(raw):
            if kind == METHOD and payload[:4] in (CONNECTION_CLOSE, CHANNEL_CLOSE):
                raise Wrong(f"refused: {payload[:200]!r}")


class RabbitmqCluster(Rabbitmq):
    """Three nodes, and quorum queues."""

    name = "rabbitmq-cluster"
    promise = "written and synced by two of three nodes"
    is_cluster = True
    scale = 0.1
    queue_arguments = table(queue_type=b"quorum")
    skips = Rabbitmq.skips | POLICIES

    def command(self, directory: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.clusters", "rabbitmq", str(directory), str(port)]

    def listening(self, log: Path, port: int) -> int | None:
        return port if FORMED in log.read_text(errors="replace") else None
