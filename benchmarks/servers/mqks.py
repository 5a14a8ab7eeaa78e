"""MQKS: one line per request, `publish --confirm` answered after commit and fsync."""

import copy
import importlib.util
import re
import socket
import sys
from pathlib import Path
from typing import ClassVar, Self

from benchmarks.flow import Flow, Stalled, ask
from benchmarks.messages import MARK, Messages, Wrong
from benchmarks.servers.base import Server
from tests.kit.postgres import installations

LISTENING = re.compile(r"event=listening .*?address=\S+:(\d+)")
EVENT = b"e"
CONFIRM = b"# ok \n"
WHICH = """
import mqks, mqks.compiled
print(mqks.__version__, *["(compiled)"] * mqks.compiled.is_compiled(), "of", mqks.__path__[0])
"""
DELIVERY = b"%b ok # event=" + EVENT + b" "
ALL_ACKED = b"a ok \n"


class Consumer(Flow):
    """Deliveries come by themselves once the consumer is there."""

    greeting: tuple[bytes, bytes]

    def open(self) -> None:
        if (reply := ask(self.sock, self.greeting[0])) != self.greeting[1]:
            raise Stalled(f"consume was answered by {reply!r}")


class Mqks(Server):
    refusal: ClassVar[bytes] = b" error "
    program = sys.executable
    flags: tuple[str, ...] = ()
    """Of the Python that runs it."""

    def __init__(self, name: str = "mqks", *arguments: str) -> None:
        self.name = name
        self.arguments = arguments

    def run_by(self, python: str) -> Self:
        """The same server, as the Python at this path has it installed: neither the working
        directory nor PYTHONPATH leads it to another one."""
        other = copy.copy(self)
        other.name, other.program, other.flags = f"{self.name} {python}", python, ("-E", "-P")
        return other

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("mqks") else "mqks is not importable"

    def command(self, directory: Path, port: int) -> list[str]:
        database = str(directory / "mqks.db")
        serve = ["-m", "mqks", "serve", "--db", database, "--port", "0"]
        return [self.program, *self.flags, *serve, *self.arguments]

    def listening(self, log: Path, port: int) -> int | None:
        found = LISTENING.search(log.read_text(errors="replace"))
        return int(found[1]) if found else None

    def answers(self, sock: socket.socket) -> bool:
        return ask(sock, b"p ping x\n") == b"p ok x\n"

    def declare(self, sock: socket.socket, queues: int, manual_ack: bool) -> None:
        for queue in range(queues):
            ask(sock, b"s subscribe --confirm q%d %b\n" % (queue, EVENT))

    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        plain = b"# publish " + EVENT + b" " + messages.payload + b"\n"
        confirmed = plain.replace(b"publish", b"publish --confirm")
        if window is None:
            [confirm] = messages.last.each(CONFIRM)
            requests = messages.fill(plain, last=confirmed)
            return Flow(sock, requests, width=messages.width(plain), until=confirm)
        return Flow(
            sock,
            messages.fill(confirmed),
            width=messages.width(confirmed),
            ahead=window,
            mark=b" ok \n",
            expected=messages.count,
            room_bytes=messages.width(CONFIRM) * messages.count + 4096,
        )

    def consume_line(self, consumer: bytes, queue: int, messages: Messages) -> bytes:
        return b"%b consume --confirm q%d" % (consumer, queue)

    def consumer(
        self, sock: socket.socket, messages: Messages, queue: int = 0, manual_ack: bool = False
    ) -> Flow:
        name = b"c%04d" % queue
        ack, last = b"a ack %b #\n" % name, b"a ack --confirm %b #\n" % name
        acks = messages.fill(ack, last=last) if manual_ack else b""
        delivery = DELIVERY % name + messages.payload + b"\n"
        flow = Consumer(
            sock,
            acks,
            width=messages.width(ack),
            ahead=0,
            mark=MARK + b"\n",
            expected=messages.total,
            until=ALL_ACKED if acks else b"",
            room_bytes=messages.width(delivery) * messages.total + 4096,
        )
        line = self.consume_line(name, queue, messages)
        flow.greeting = line + b" --manual-ack" * manual_ack + b"\n", name + b" ok \n"
        return flow

    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        # The message id must be the payload's own number.
        delivery = rb"^c\d{4} ok (\d{12}) event=e (\1.{%d})$" % (payload_bytes - 12)
        return [payload for _, payload in re.findall(delivery, raw, re.MULTILINE)]

    def check_confirms(self, raw: bytes, messages: Messages, window: int | None) -> None:
        confirms = (messages if window else messages.last).each(CONFIRM)
        if sorted(raw.splitlines(keepends=True)) != confirms:
            self.check_no_refusal(raw)
            raise Wrong("each publish must be confirmed once")


class MqksOnPostgres(Mqks):
    """With a database that has one synchronous standby."""

    name = "mqks-postgres"
    is_cluster = True

    def __init__(self) -> None:
        super().__init__(self.name)

    def missing(self) -> str | None:
        return super().missing() or (None if installations() else "PostgreSQL is not installed")

    def command(self, directory: Path, port: int) -> list[str]:
        return [self.program, "-m", "benchmarks.servers.postgres", "--port", "0"]
