"""Clients of whichever broker serves: they publish, consume with acks, and read the log.

The one rule: the history has what they send before it is sent, and what comes after it has come.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tests.takeover.checker import (
    Confirmed,
    Delivered,
    Ended,
    Event,
    Opened,
    Refused,
    Row,
    Sent,
    payload,
)

QUEUE, LOG, EVENT = "work", "log", "e"
LINE_BYTES_MAX: Final = 8 * 1024 * 1024
WINDOW = 16
"""Messages of a publisher that may wait for their confirms."""


class Gone(Exception):
    """The connection is of no use any more."""


@dataclass
class Place:
    """Where brokers listen, by the numbers of their lives, and what has happened so far."""

    history: list[Event] = field(default_factory=list)
    brokers: dict[int, tuple[str, int]] = field(default_factory=dict)
    confirms: int = 0
    """How many publishes were confirmed."""
    links: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    new_socket: Callable[[], socket.socket] = socket.socket
    """Makes one in the network where the clients are."""


class Link:
    """A connection to the broker `life`."""

    def __init__(self, place: Place, life: int) -> None:
        self.number = next(place.links)
        self.life = life
        self.place = place
        self.is_ended = False
        self.refused: list[bytes] = []
        """Requests that got an error."""
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.waiting: dict[bytes, Sent] = {}
        """What was sent and is not confirmed."""

    @classmethod
    @asynccontextmanager
    async def to(cls, place: Place, life: int) -> AsyncIterator[Link]:
        """Gone when it can't be made."""
        link = cls(place, life)
        try:
            address = place.brokers[life]
            raw = place.new_socket()
            try:
                raw.setblocking(False)
                async with asyncio.timeout(5):
                    await asyncio.get_running_loop().sock_connect(raw, address)
            except BaseException:
                raw.close()
                raise
            link._reader, link._writer = await asyncio.open_connection(
                sock=raw, limit=LINE_BYTES_MAX
            )
        except (KeyError, OSError, TimeoutError):
            raise Gone from None
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        place.history.append(Opened(link.number, life))
        try:
            yield link
        finally:
            link.end()

    def end(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.place.history.append(Ended(self.number))
        self._writer.transport.abort()

    def send(self, line: bytes) -> None:
        if self.is_ended or self._writer.transport.is_closing():
            raise Gone
        self._writer.write(line + b"\n")

    def publish(self, message: bytes, flags: str = "") -> None:
        self._ask(Sent(self.number, message, "publish", message))
        line = f"{message.decode()} publish --confirm {flags}{EVENT} ".encode()
        self.send(line + payload(message))

    def settle(self, request: bytes, action: str, message: bytes) -> None:
        """`action` is ack or reject."""
        self._ask(Sent(self.number, request, action, message))
        self.send(b"%b %b --confirm c%d %b" % (request, action.encode(), self.number, message))

    def _ask(self, sent: Sent) -> None:
        self.waiting[sent.request] = sent
        self.place.history.append(sent)

    async def line(self, seconds: float) -> bytes:
        """The next one. Gone if there is none in this time."""
        try:
            async with asyncio.timeout(seconds):
                line = await self._reader.readuntil(b"\n")
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            raise Gone from None
        if line.startswith(b"- error "):  # The server closes the connection.
            raise Gone
        return line[:-1]

    async def ask(self, request: str, seconds: float = 30) -> bytes:
        """What follows `ok` in the reply to a request that has one, while nothing else comes."""
        self.send(b"x " + request.encode())
        _, word, text = (await self.line(seconds)).split(b" ", 2)
        if word != b"ok":
            raise Gone
        return text

    def confirmed(self, line: bytes) -> None:
        """A line that is a reply to one of `waiting`."""
        request, word, _ = line.split(b" ", 2)
        sent = self.waiting.pop(request)
        if word != b"ok":
            self.refused.append(request)
            self.place.history.append(Refused(self.number, request))
            return
        self.place.history.append(Confirmed(self.number, request))
        self.place.confirms += sent.action == "publish"

    async def body(self, size: int) -> bytes:
        try:
            async with asyncio.timeout(30):
                return await self._reader.readexactly(size)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            raise Gone from None


@dataclass
class Client:
    """Connects to brokers, until `ends` says so. It leaves one that says nothing for a while."""

    place: Place
    rng: random.Random
    ends: Callable[[], bool]

    async def run(self) -> None:
        while not self.ends():
            lives = [*self.place.brokers]
            if lives:
                with suppress(Gone, OSError):
                    async with Link.to(self.place, self.rng.choice(lives)) as link:
                        # Who waits long is still there when a broker that was stopped goes on.
                        await self.use(link, self.rng.choice([1.5, 4.0, 30.0]))
            await asyncio.sleep(0.1)

    async def use(self, link: Link, patience_s: float) -> None:
        raise NotImplementedError


@dataclass
class Publisher(Client):
    """With `once`, it publishes again what was not confirmed. Otherwise nobody knows what became of
    that, nor when, so each connection counts for a publisher of its own."""

    name: str
    once: bool
    _number: int = 0
    _open: list[bytes] = field(default_factory=list)
    """Not confirmed, in order."""

    async def use(self, link: Link, patience_s: float) -> None:
        flags = "--once " if self.once else ""
        name = self.name
        if not self.once:
            self._open.clear()
            name += f"-{link.number}"
        for message in self._open:
            link.publish(message, flags)
        uses = self.rng.randrange(100, 3000)
        while not self.ends() or self._open:
            while len(self._open) < self.rng.randrange(1, WINDOW) and not self.ends():
                message = f"{name}.{self._number}".encode()
                self._number += 1
                self._open.append(message)
                link.publish(message, flags)
            if self._open:
                link.confirmed(await link.line(patience_s))
                unknown = {*link.waiting, *link.refused}
                self._open = [each for each in self._open if each in unknown]
                if link.refused:
                    raise Gone
            await asyncio.sleep(self.rng.choice([0, 0.002, 0.02]))
            if (uses := uses - 1) < 0:
                return


@dataclass
class Consumer(Client):
    is_calm: bool = False
    """It acks all, at once."""

    async def use(self, link: Link, patience_s: float) -> None:
        prefetch = self.rng.choice([1, 20, 200])
        link.send(f"c{link.number} consume {QUEUE} --manual-ack --prefetch={prefetch}".encode())
        number, uses = 0, self.rng.randrange(100, 3000)
        me = f"c{link.number} ok ".encode()
        while not self.ends():
            line = await link.line(patience_s)
            if not line.startswith(me):
                link.confirmed(line)
                continue
            message, head, data = line.removeprefix(me).split(b" ", 2)
            retry = int(head.partition(b",retry=")[2] or 0)
            link.place.history.append(Delivered(link.number, message, data, retry))
            number += 1
            calm = self.is_calm or self.rng.random() < 0.97
            if not self.is_calm and self.rng.random() < 0.02:
                await asyncio.sleep(self.rng.random() / 4)
            link.settle(f"a{number}".encode(), "ack" if calm else "reject", message)
            if not self.is_calm and (uses := uses - 1) < 0:
                return


@dataclass
class Reader(Client):
    """Reads the log from where it was, on whichever broker."""

    number: int
    _next: int = 0
    is_at_end: bool = False

    async def use(self, link: Link, patience_s: float) -> None:
        for _ in range(self.rng.randrange(5, 50)):
            if self.ends():
                return
            limit = self.rng.choice([10, 1000])
            told = await link.ask(f"read {LOG} --from={self._next} --limit={limit}", patience_s)
            fields = dict(each.split(b"=") for each in told.split(b" ")[1:])
            body = await link.body(int(fields[b"bytes"]))
            self._rows(fields[b"epoch"], int(fields[b"runs"]), body)
            self._next = int(fields[b"next"])
            self.is_at_end = fields[b"rows"] == b"0"
            if self.is_at_end:
                await asyncio.sleep(0.2)

    def _rows(self, epoch: bytes, runs: int, body: bytes) -> None:
        texts = iter(body[32 * runs :].split(b"\n"))
        for first, count, _, _ in struct.iter_unpack("<4q", body[: 32 * runs]):
            for number in range(first, first + count):
                message, _, data = next(texts).split(b" ", 2)
                self.place.history.append(Row(self.number, epoch, number, message, data))


async def set_up(place: Place, life: int) -> None:
    """The two queues."""
    async with Link.to(place, life) as link:
        for queue in (QUEUE, LOG):
            assert await link.ask(f"subscribe --confirm {queue} {EVENT}") == b""


async def is_empty(place: Place, life: int) -> bool:
    async with Link.to(place, life) as link:
        rows: list[dict[str, Any]] = json.loads(await link.ask("stats queues"))
    [row] = [row for row in rows if row["name"] == QUEUE]
    return not (row["ready"] or row["unacked"])
