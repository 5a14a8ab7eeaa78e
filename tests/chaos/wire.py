"""Connections of one life of a server: lines both ways, and all that rude clients do to them.

The one rule: nothing is judged here but the form of what comes; each reply goes to whom has asked.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tests.chaos.checker import Checker, Link, Violation

WAIT_S = 60.0
TRANSCRIPT_BYTES_MAX = 64 * 1024 * 1024
_BODY = re.compile(rb"\S+ ok --read epoch=\S+ runs=\d+ rows=\d+ next=\d+ bytes=(\d+)")

Told = Callable[[bytes, bytes], bool]
"""Gets `ok` or `error` and what follows it; true when no more is due."""


class Gone(Exception):
    """The server has closed the connection, or the life is over."""


@dataclass(slots=True)
class Life:
    """What all connections of one life share."""

    address: tuple[str, int]
    checker: Checker
    wait_s: float = WAIT_S
    """Only a fault takes longer."""
    ending: bool = False
    """The server was told to end, or killed."""
    events: int = 0
    """Chunks that came in, about."""
    transcript: list[tuple[str, bytes]] = field(default_factory=list)
    transcript_bytes: int = 0
    links: int = 0
    open: dict[str, Wire] = field(default_factory=dict)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    first: BaseException | None = None
    """What was wrong first; others may come of it."""

    def note(self, who: str, data: bytes) -> None:
        if self.transcript_bytes < TRANSCRIPT_BYTES_MAX:
            self.transcript_bytes += len(data)
            self.transcript.append((who, data))

    def happened(self, count: int) -> None:
        self.events += count
        self.progress.set()

    async def close(self) -> None:
        """Whatever a failure has left open."""
        for wire in [*self.open.values()]:
            wire.break_off()
        await asyncio.sleep(0)


class Wire(asyncio.Protocol):
    """One connection. `on_line` gets each line that nobody has asked for: id, `ok`, the rest."""

    def __init__(self, life: Life, name: str) -> None:
        life.links += 1
        self.life = life
        self.name = f"{name}:{life.links}"
        self.link: Link = life.checker.connect(self.name.encode())
        self.asked: dict[bytes, Told] = {}
        self.on_line: Callable[[bytes, bytes, bytes], None] = self._unexpected
        self.later: list[bytes] = []
        """What the checker knows already, to be sent before whatever comes next."""
        self.closed = self.leaving = False
        """We are about to close it, so the server may."""
        self._transport: asyncio.Transport
        self._tail = b""
        self._body: tuple[bytes, int] | None = None
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    @classmethod
    async def open(cls, life: Life, name: str) -> Wire:
        wire = cls(life, name)
        try:
            await asyncio.get_running_loop().create_connection(lambda: wire, *life.address)
        except OSError:
            if not life.ending:
                raise
            raise Gone from None
        return wire

    # -- the loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.life.open[self.name] = self
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.life.note(f"{self.name} <", data)
        if self._failure is None:
            try:
                self._take(data)
            except BaseException as failure:
                self._failure = failure
                self.life.first = self.life.first or failure
        self._changed.set()

    def _take(self, data: bytes) -> None:
        data = self._tail + data
        start = count = 0
        while True:
            if self._body is not None:
                header, size = self._body
                if len(data) - start < size:
                    break
                self._line(header, data[start : start + size])
                start, self._body = start + size, None
            end = data.find(b"\n", start)
            if end < 0:
                break
            line, start = data[start:end], end + 1
            count += 1
            if b" ok --read epoch=" in line and (found := _BODY.fullmatch(line)):
                self._body = line, int(found[1])
            else:
                self._line(line, b"")
        self._tail = data[start:]
        self.life.happened(count)

    def _line(self, line: bytes, body: bytes) -> None:
        parts = line.split(b" ", 2)
        if len(parts) != 3 and not (len(parts) == 2 and parts[1] == b"ok"):
            raise Violation(f"no reply: {line[:200]!r}")
        name, word, rest = parts if len(parts) == 3 else (*parts, b"")
        if body:
            rest = rest + b"\n" + body
        told = self.asked.get(name)
        if told is None:
            self.on_line(name, word, rest)
        elif told(word, rest):
            self.asked.pop(name, None)

    def _unexpected(self, name: bytes, word: bytes, rest: bytes) -> None:
        raise Violation(f"nobody asked for it: {name!r} {word!r} {rest[:200]!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.life.open.pop(self.name, None)
        self.life.note(f"{self.name} closed", repr(exc).encode())
        if not (self.leaving or self.life.ending) and self._failure is None:
            self._failure = Violation(f"the server closed {self.name}: {exc!r}")
        self._changed.set()

    # -- the client's side

    def send(self, data: bytes = b"") -> None:
        self.check()
        if self._transport.is_closing():
            raise Gone
        later, self.later = self.later, []
        data = b"".join([*later, data])
        self.life.note(f"{self.name} >", data)
        self._transport.write(data)

    async def send_in_pieces(self, data: bytes, rng: random.Random, pieces: int) -> None:
        """The whole of it, cut anywhere, with pauses."""
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(pieces))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if start < end:
                self.send(data[start:end])
                await asyncio.sleep(0)

    def ask(self, name: bytes, told: Told) -> None:
        if name in self.asked:
            raise AssertionError(f"{name!r} is asked twice")
        self.asked[name] = told

    async def exchange(
        self,
        name: bytes,
        data: bytes,
        last: Callable[[bytes], bool] = lambda rest: True,
        then: Callable[[], object] = lambda: None,
    ) -> list[tuple[bytes, bytes]]:
        """Send a request, and wait for its answer to the line that is the last, or an error; `then`
        is called when that comes."""
        told: list[tuple[bytes, bytes]] = []
        is_over = False

        def take(word: bytes, rest: bytes) -> bool:
            nonlocal is_over
            told.append((word, rest))
            is_over = word == b"error" or last(rest)
            if is_over:
                then()
            return is_over

        self.ask(name, take)
        self.send(data)
        await self.until(lambda: is_over)
        return told

    async def answer(
        self, name: bytes, line: bytes, last: Callable[[bytes], bool] = lambda rest: True
    ) -> list[bytes]:
        """The same, where an error would be a fault: what follows `ok` in each line."""
        told = await self.exchange(name, b"%b %b\n" % (name, line), last)
        if told[-1][0] != b"ok":
            raise Violation(f"an error for {line!r}")
        return [rest for _, rest in told]

    async def close(self) -> None:
        """When all that is due has come."""
        self.finish()
        await self.until_closed()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise Gone

    async def until(self, look: Callable[[], object]) -> None:
        """Gone when it is closed before that."""
        limit = asyncio.get_running_loop().time() + self.life.wait_s
        while True:
            if self._failure is not None:
                raise self._failure
            if look():
                return
            self.check()
            self._changed.clear()
            try:
                async with asyncio.timeout_at(limit):
                    await self._changed.wait()
            except TimeoutError:
                if self.life.ending:
                    raise Gone from None
                raise Violation(f"{self.name} waits in vain, for {list(self.asked)[:5]}") from None

    async def until_closed(self) -> None:
        with suppress(Gone):
            await self.until(lambda: self.closed)
        if self._failure is not None:
            raise self._failure

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def finish(self) -> None:
        """Close the sending side."""
        self.leaving = True
        if not self._transport.is_closing():
            with suppress(OSError):  # The server may be faster.
                self._transport.write_eof()

    def break_off(self) -> None:
        """Reset it, as a machine that dies would."""
        self.leaving = True
        raw = self._transport.get_extra_info("socket")
        if raw is not None and not self._transport.is_closing():
            with suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
