"""A client that does what no client should, and one that looks at everything.

The one rule: what they do changes nothing that others see.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from functools import partial

from tests.chaos.checker import Violation
from tests.chaos.crowd import Player
from tests.chaos.wire import Gone

_ERROR = re.compile(rb"[0-9a-f]{24}")
MALFORMED = [
    b"%s" + each + b"\n"
    for each in (
        *(b" dance", b"", b" publish", b" publish l a\tb", b" publish --confirm  double"),
        *(b" consume", b" consume work --manual-ack w", b" consume work --what"),
        *(b" subscribe work", b" rebind", b" rebind work --add", b" ack c", b" reject a b c"),
        *(b" delete_queue work --when-unused=nan", b" purge", b" peek work --limit=1001"),
        *(b" peek work --after=-1", b" range no-such-queue", b" read log", b" read log --from=x"),
        *(b" trim log", b" trim log 1 --epoch=no-such", b" stats nothing", b" help dance"),
        *(b" _eval 1 +", b" _eval --worker=7 1", b" auth nobody", b" \xff\xfe\x00\r\r"),
    )
]
HARMLESS = [b"\n", b"\r\n", b"n ack no-such m\n", b"n reject no-such --all\n", b"n purge none\n"]
HARMLESS += [b"n delete_consumer no-such\n", b"n delete_queue no-such\n", b"n rebind n.x\n"]


class Nuisance(Player):
    async def play(self) -> None:
        rng = self.rng
        self._wrong_credentials = 0
        for _ in range(rng.randrange(3, 20)):
            what = rng.random()
            if what < 0.3:
                await self._malformed(rng.choice([1, 1, 5, 30]))
            elif what < 0.4:
                self.wire.send(b"".join(rng.choices(HARMLESS, k=5)))
            elif what < 0.55:
                await self._chatter()
            elif what < 0.85:
                await self._look()
            elif what < 0.93:
                await self._unused()
            else:
                await self.rest()
            await self.sync()
        what = rng.random()
        if what < 0.1:
            await self._too_long()
        elif what < 0.2:
            await self._web_site()
        if what < 0.3:
            self.wire.send(b"half a line")
        if what < 0.5:
            self.wire.break_off()
            await self.wire.until_closed()
            raise Gone
        await self.finish()

    async def _ask(self, line: bytes) -> tuple[bytes, bytes]:
        """The reply to a line with a place for its id."""
        return (await self._ask_all([line]))[0]

    async def _ask_all(self, lines: list[bytes]) -> list[tuple[bytes, bytes]]:
        told = {self.id("n"): list[tuple[bytes, bytes]]() for _ in lines}
        for name, replies in told.items():
            self.wire.ask(name, partial(self._take, replies))
        self.wire.send(b"".join(line % name for name, line in zip(told, lines, strict=True)))
        await self.wire.until(lambda: all(told.values()))
        return [reply for (reply,) in told.values()]

    @staticmethod
    def _take(replies: list[tuple[bytes, bytes]], word: bytes, rest: bytes) -> bool:
        replies.append((word, rest))
        return True

    async def _malformed(self, count: int) -> None:
        lines = self.rng.choices(MALFORMED, k=count)
        # Three of them cost the connection.
        self._wrong_credentials += (logins := sum(b" auth " in line for line in lines))
        if logins and self._wrong_credentials > 2:
            return
        for word, rest in await self._ask_all(lines):
            if word != b"error" or not _ERROR.fullmatch(rest):
                raise Violation(f"no errors for {lines}: {word!r} {rest!r}")
        if self.plan.flags["errors_kept_max"] == 1000:
            _, told = await self._ask(b"%%s stats errors %s\n" % rest)
            rows = json.loads(told)
            # Where there are many errors, later ones may have taken its place.
            if not rows and self.plan.errors:
                return
            if [row["id"].encode() for row in rows] != [rest] or not rows[0]["reason"]:
                raise Violation(f"an odd error: {rows}")

    async def _chatter(self) -> None:
        """Much at once, and slow to read it."""
        count = self.rng.choice([10, 1000])
        data = b"z" * self.rng.choice([0, 10, 1000])
        if self.rng.random() < 0.5:
            self.wire.pause()
            asyncio.get_running_loop().call_later(0.1, self.wire.resume)
        for word, rest in await self._ask_all([b"%s ping " + data + b"\n"] * count):
            if (word, rest) != (b"ok", data):
                raise Violation(f"{word!r} {rest[:99]!r} for a ping")

    async def _look(self) -> None:
        listed = "queues", "bindings", "consumers", "connections", "unacked --limit=100"
        looks: list[tuple[str, type | None]] = [
            *(("help", None), ("help consume", None), ("stats", dict)),
            *((f"stats {what}", list) for what in (*listed, "errors --limit=5")),
            ("stats journal", dict),
            ("_eval {q: len(state.queues[q]) for q in state.queues}", dict),
            ("_eval [state.published, state.queued, state.consumed]", list),
        ]
        what, form = self.rng.choice(looks)
        line = b"%%s %b\n" % what.encode()
        word, rest = await self._ask(line)
        if word != b"ok":
            raise Violation(f"{line!r} is an error")
        if form is not None and not isinstance(json.loads(rest), form):
            raise Violation(f"{line!r}: {rest[:200]!r}")

    async def _too_long(self) -> None:
        most = int(self.plan.flags["line_bytes_max"])
        first = b"long publish nowhere ".ljust(most, b"x") + b"\n" if most % 2 else b""
        await self._expelled(b"long", first, b"long publish nowhere ".ljust(most + 1, b"x"))

    async def _web_site(self) -> None:
        """What it makes a browser send is not executed."""
        body = b"x purge work\nx delete_queue work\nx trim log 1000000\nx publish l x\n"
        await self._expelled(b"POST", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + body, body)

    async def _expelled(self, request_id: bytes, *chunks: bytes) -> None:
        """Send what ends the connection with one error reply."""
        told: list[tuple[bytes, bytes]] = []
        self.wire.ask(request_id, lambda word, rest: not self._take(told, word, rest))
        self.wire.leaving = True
        for chunk in chunks:
            self.wire.send(chunk)
        await self.wire.until_closed()
        if [word for word, _ in told] != [b"error"] and not self.life.ending:
            raise Violation(f"{told} for {chunks[0][:80]!r}")
        raise Gone

    async def _unused(self) -> None:
        """A queue goes when its last consumer has, not sooner, and certainly."""
        name = b"n." + self.id("q")
        delay = self.rng.choice([None, 0.0, 0.05, 0.2])
        rule = b"" if delay is None else b"=%g" % delay
        consumer = b"nc-" + self.name.encode()
        line = b"%s consume --confirm %s e.%s --delete-queue-when-unused%s\n"
        [(word, _)] = await self.wire.exchange(consumer, line % (consumer, name, name, rule))
        if word == b"error":
            if not self.plan.full:
                raise Violation("a consume is an error")
            return
        if (await self._ask(b"%%s range %s\n" % name))[0] != b"ok":
            raise Violation(f"{name!r} is not there")
        left = time.monotonic()
        word, _ = await self._ask(b"%%s delete_consumer --confirm %s\n" % consumer)
        if word != b"ok" and not self.plan.full:
            raise Violation("a consumer could not be deleted")
        while (await self._ask(b"%%s range %s\n" % name))[0] == b"ok":
            if delay is None or time.monotonic() > left + delay + 60:
                raise Violation(f"{name!r} is still there")
            await asyncio.sleep(0.02)
        if delay is not None and time.monotonic() < left + delay:
            raise Violation(f"{name!r} is gone before its time")
