"""Traces the ways of a message through a server: `python -m tools.walk`.

A server on SQLite runs in a thread of this process, and a client sends it one request at a time.
Traced are the calls of functions of `mqks/`, in all threads, from the read of the request, or from
the timer, to the write of the last reply.

The one rule: a figure depends on the code alone, not on the disk or on other programs. So each walk
is walked several times, and the way that was taken most often counts: the others met another timer,
or a checkpoint. Every commit counts as fast.
"""

import inspect
import socket
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mode
from types import CodeType, FrameType
from typing import Final, NamedTuple
from unittest.mock import patch

import mqks
from mqks.compiled import is_compiled
from mqks.server import commits
from mqks.server.client import ServerClient
from mqks.server.turn import Turn
from mqks.testing import WAIT_S, Broker

WARM: Final = 3
WALKS: Final = 7
PAUSE_S: Final = 0.1
"""A backoff, and a time to live."""
ROOT: Final = str(Path(mqks.__file__).parent)
READ: Final = ServerClient.get_buffer.__qualname__
TIMER: Final = Turn._expire.__qualname__
WRITTEN: Final = ServerClient.send.__qualname__
NO_CALLS: Final = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""From Python 3.12 on, some of them are no functions."""
HEADINGS: Final = "walk", "calls / functions / files", "changes of file", "lines run ÷ of the files"

PUBLISH, ACK = "publish → confirm, one consumer", "ack → confirm"
REJECT, DUE = "reject into backoff", "backoff due, redelivered"
EXPIRE = "expiry into dead letters"
NAMES: Final = PUBLISH, ACK, REJECT, DUE, EXPIRE


class Walk(NamedTuple):
    calls: tuple[CodeType, ...]
    """What was called, in order. A coroutine is called each time that it goes on."""

    @property
    def changes(self) -> int:
        """How often another file goes on than that of the call before."""
        return sum(one.co_filename != other.co_filename for one, other in pairwise(self.calls))

    @property
    def functions(self) -> set[CodeType]:
        return set(self.calls)

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.calls}

    @property
    def lines_run(self) -> int:
        """Of the functions, with what they don't reach."""
        lines: dict[str, set[int]] = defaultdict(set)
        for code in self.functions:
            found, first = inspect.getsourcelines(code)
            lines[code.co_filename].update(range(first, first + len(found)))
        return sum(map(len, lines.values()))

    @property
    def lines(self) -> int:
        """Of the files."""
        return sum(len(Path(name).read_bytes().splitlines()) for name in self.files)

    def row(self, name: str) -> list[str]:
        sizes = len(self.calls), len(self.functions), len(self.files)
        lines = f"{self.lines_run:,} ÷ {self.lines:,}"
        return [name, " / ".join(map(str, sizes)), str(self.changes), lines]


class Tracer:
    """Notes calls while a walk is walked."""

    def __init__(self) -> None:
        self.walks: dict[str, list[Walk]] = defaultdict(list)
        self._calls: list[CodeType] = []
        self._begin = ""
        self._end = 0

    def called(self, frame: FrameType, event: str, _: object) -> None:
        """The profile function of the server's threads."""
        code = frame.f_code
        if (
            event == "call"
            and self._begin
            and code.co_filename.startswith(ROOT)
            and code.co_name not in NO_CALLS
            and (self._calls or code.co_qualname == self._begin)
        ):
            if code.co_qualname == self._begin == TIMER:
                self._calls.clear()  # The one before came too early, or too late.
            self._calls.append(code)
            if code.co_qualname == WRITTEN:
                self._end = len(self._calls)

    @contextmanager
    def walk(self, name: str, begin: str = READ) -> Iterator[None]:
        """What happens within is this walk: the last reply that was written ends it."""
        self._calls, self._end, self._begin = [], 0, begin
        yield
        self._begin = ""
        if self._end:  # Otherwise the timer was faster than this thread.
            self.walks[name].append(Walk(tuple(self._calls[: self._end])))


class LineClient:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._replies = self._socket.makefile("rb")

    def get(self, *replies: str) -> None:
        """Wait for so many lines, which begin with these words in any order."""
        got = [self._replies.readline().decode() for _ in replies]
        if missing := [each for each in replies if not any(line.startswith(each) for line in got)]:
            raise SystemExit(f"no {missing} in {got}")

    def ask(self, request: str, *replies: str) -> None:
        self._socket.sendall(request.encode() + b"\n")
        self.get(*replies or [f"{request.split()[0]} ok "])

    def close(self) -> None:
        self._replies.close()
        self._socket.close()


def prepare(client: LineClient) -> None:
    client.ask(f"s1 set_queue --confirm slow --backoff={PAUSE_S}")
    client.ask(f"s2 set_queue --confirm short --ttl={PAUSE_S} --dead-letters=dead")
    client.ask("s3 subscribe --confirm short e3")
    for consumer, binding in {"c1": "plain e1", "c2": "slow e2", "c3": "dead"}.items():
        client.ask(f"{consumer} consume --confirm {binding} --manual-ack")


def walk_all(client: LineClient, tracer: Tracer) -> None:
    with tracer.walk(PUBLISH):
        client.ask("m publish --confirm e1 hello", "m ok ", "c1 ok m ")
    with tracer.walk(ACK):
        client.ask("a ack --confirm c1 m")

    client.ask("m publish --confirm e2 hello", "m ok ", "c2 ok m ")
    with tracer.walk(REJECT):
        client.ask("r reject --confirm c2 m")
    with tracer.walk(DUE, TIMER):
        client.get("c2 ok m ")
    client.ask("a ack --confirm c2 m")

    client.ask("m publish --confirm e3 hello")
    with tracer.walk(EXPIRE, TIMER):
        client.get("c3 ok m ")
    client.ask("a ack --confirm c3 m")


def measure(warm: int = WARM, walks: int = WALKS) -> dict[str, Walk]:
    """Each walk by its name, once everything is warm."""
    if is_compiled():
        raise SystemExit("compiled modules can't be traced")
    tracer = Tracer()
    threading.setprofile(tracer.called)
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            patch.object(commits, "SLOW_COMMIT_S", inf),
            Broker(Path(directory, "mqks.db"), synchronous="normal") as broker,
        ):
            client = LineClient(broker.port)
            prepare(client)
            for _ in range(warm):
                walk_all(client, tracer)
            tracer.walks.clear()
            while any(len(tracer.walks[name]) < walks for name in NAMES):
                walk_all(client, tracer)
            client.close()
    finally:
        threading.setprofile(None)
    return {name: mode(tracer.walks[name]) for name in NAMES}


def table(walks: dict[str, Walk]) -> str:
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(walk.row(name) for name, walk in walks.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(measure()))
