"""A peer that answers `range`, `read` and `trim` as a broker would, and can be told to misbehave.

The one rule: it speaks from what it was given; nothing in it knows the code under test.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from tests.kit.proxy import Peer

ROWS_A_REPLY = 4


class LogPeer(Peer):
    """A queue `q` of messages (number, arrival in µs, text).

    `cut` gives for the n-th read reply how much of it is sent before the connection ends.
    """

    def __init__(self, messages: list[tuple[int, int, bytes]], epoch: str = "one") -> None:
        super().__init__()
        self.messages = {number: (time, text) for number, time, text in messages}
        self.next = max(self.messages, default=0) + 1
        self.epoch = epoch
        self.cut: Callable[[int], int | None] = lambda reply: None
        self.damage: Callable[[bytes], bytes] = lambda text: text
        self.requests: list[bytes] = []
        self.replies = 0

    @property
    def connections(self) -> int:
        return self.accepted

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            self.requests.append(line.rstrip(b"\n"))
            request_id, action, *words = line.split()
            reply, kept = self._reply(request_id, action, words)
            writer.write(reply[:kept])
            await writer.drain()
            if kept is not None:
                writer.close()
                await writer.wait_closed()
                return

    def _reply(
        self, request_id: bytes, action: bytes, words: list[bytes]
    ) -> tuple[bytes, int | None]:
        flags = dict(word[2:].decode().split("=") for word in words if b"=" in word)
        if action in (b"ping", b"auth", b"trim"):
            if action == b"trim":
                for number in [n for n in self.messages if n < int(words[-1])]:
                    del self.messages[number]
            return b"%b ok \n" % request_id, None
        if b"q" not in words:
            return b"%b error E1\n" % request_id, None
        if action == b"range":
            first = min(self.messages, default=self.next)
            told = f"epoch={self.epoch} first={first} next={self.next}"
            if "at" in flags:
                later = (n for n, (time, _) in self.messages.items() if time >= int(flags["at"]))
                told += f" at={min(later, default=self.next)}"
            return b"%b ok %b\n" % (request_id, told.encode()), None
        self.replies += 1
        start, end = int(flags["from"]), int(flags.get("to", self.next))
        numbers = sorted(n for n in self.messages if start <= n < end)[:ROWS_A_REPLY]
        texts = [self.messages[n][1] + b"\n" for n in numbers]
        runs = b"".join(
            struct.pack("<4q", n, 1, self.messages[n][0], len(text))
            for n, text in zip(numbers, texts, strict=True)
        )
        after = numbers[-1] + 1 if numbers else min(end, max(start, self.next))
        body = self.damage(runs + b"".join(texts))
        header = f"--read epoch={self.epoch} runs={len(numbers)} rows={len(numbers)}"
        header += f" next={after} bytes={len(body)}"
        reply = b"%b ok %b\n%b" % (request_id, header.encode(), body)
        return reply, self.cut(self.replies)
