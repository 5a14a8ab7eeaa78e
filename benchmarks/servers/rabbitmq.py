"""RabbitMQ: persistent messages through a fanout exchange into classic durable queues, AMQP 0-9-1.

The program itself is started, not the wrapper of the same name on the path, which would change to
the user of the machine's own node; and with a port mapper (epmd) of its own in its process group,
since the one it would start by itself outlives it.
"""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.flow import UNLIMITED, Flow, Stalled, connect, free_port
from benchmarks.messages import MARK, PLACE, Messages, Wrong
from benchmarks.servers.base import TALKERS, Server

METHOD, HEADER, BODY = 1, 2, 3
END = b"\xce"
HEAD = struct.Struct(">BHI")
ACK = struct.Struct(">BHI4sQ?s")
"""A whole frame: basic.ack looks the same in both directions."""
PREFETCH = 2_000
DELIVERY_BYTES = 100
"""More than the frames of any delivery beside its payload."""

# Class and method, as they stand at the beginning of a method frame.
CONNECTION_CLOSE, CHANNEL_CLOSE = b"\0\x0a\0\x32", b"\0\x14\0\x28"
START_OK, TUNE_OK, OPEN = b"\0\x0a\0\x0b", b"\0\x0a\0\x1f", b"\0\x0a\0\x28"
CHANNEL_OPEN = b"\0\x14\0\x0a"
EXCHANGE_DECLARE, QUEUE_DECLARE, QUEUE_BIND = (b"\0\x28\0\x0a", b"\0\x32\0\x0a", b"\0\x32\0\x14")
QOS, CONSUME, PUBLISH = b"\0\x3c\0\x0a", b"\0\x3c\0\x14", b"\0\x3c\0\x28"
BASIC_ACK, CONFIRM_SELECT = b"\0\x3c\0\x50", b"\0\x55\0\x0a"
QOS_OK = b"\0\x3c\0\x0b"

NO_TABLE = b"\0\0\0\0"
DURABLE, NO_ACK = b"\2", b"\2"
PERSISTENT = b"\x10\0\2"
"""The one property that is sent: delivery-mode 2."""


def frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return HEAD.pack(kind, channel, len(payload)) + payload + END


def word(text: bytes) -> bytes:
    """A short string."""
    return bytes([len(text)]) + text


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


def environment(directory: Path, port: int) -> dict[str, str]:
    """What a node needs whose files are in `directory`."""
    return {
        "HOME": str(directory),  # of the cookie
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(free_port()),
        "RABBITMQ_NODENAME": "bench@localhost",
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
    refusal: ClassVar[bytes] = CHANNEL_CLOSE
    program = "/usr/lib/rabbitmq/bin/rabbitmq-server"
    scale = 0.3
    skips = TALKERS

    def command(self, directory: Path, port: int) -> list[str]:
        told = [f"{name}={value}" for name, value in environment(directory, port).items()]
        (directory / "plugins").write_text("[rabbitmq_consistent_hash_exchange].\n")
        # A node that is killed leaves a dump of its tables where it runs.
        return ["env", f"--chdir={directory}", *told, "sh", "-c", 'epmd & exec "$0"', self.program]

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
        exchange = word(b"e") + word(b"fanout") + DURABLE + NO_TABLE
        call(sock, EXCHANGE_DECLARE + b"\0\0" + exchange)
        for queue in range(queues):
            name = word(b"q%d" % queue)
            call(sock, QUEUE_DECLARE + b"\0\0" + name + DURABLE + NO_TABLE)
            call(sock, QUEUE_BIND + b"\0\0" + name + word(b"e") + b"\0\0" + NO_TABLE)

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        call(sock, CONFIRM_SELECT + b"\0")
        size = messages.payload_bytes
        head = frame(METHOD, PUBLISH + b"\0\0" + word(b"e") + b"\0\0")
        head += frame(HEADER, struct.pack(">HHQ", 60, 0, size) + PERSISTENT)
        head += HEAD.pack(BODY, 1, size)
        if PLACE in head:
            raise ValueError(f"payloads of {size} bytes cannot be built: a length holds {PLACE!r}")
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
        self, sock: socket.socket, messages: Messages, queue: int = 0, manual_ack: bool = False
    ) -> Flow:
        acks, until = b"", b""
        if manual_ack:
            call(sock, self.qos(PREFETCH))
            numbers = range(1, messages.total + 1)
            acks = b"".join(ACK.pack(1, 1, 13, BASIC_ACK, n, False, END) for n in numbers)
            # Behind the last ack goes a request whose answer tells that it was taken.
            acks += frame(METHOD, self.qos(0))
            until = frame(METHOD, QOS_OK)
        flow = Consumer(
            sock,
            acks,
            width=ACK.size,
            ahead=0,
            mark=MARK + END,
            expected=messages.total,
            until=until,
            room_bytes=(messages.payload_bytes + DELIVERY_BYTES) * messages.total + 4096,
        )
        flags = b"\0" if manual_ack else NO_ACK
        names = word(b"q%d" % queue) + word(b"c%d" % queue)
        flow.greeting = CONSUME + b"\0\0" + names + flags + NO_TABLE
        return flow

    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        return [payload for kind, payload in frames(raw) if kind == BODY]

    def check_no_refusal(self, raw: bytes) -> None:
        for kind, payload in frames(raw):
            if kind == METHOD and payload[:4] in (CONNECTION_CLOSE, CHANNEL_CLOSE):
                raise Wrong(f"refused: {payload[:200]!r}")
