r"""Transcripts: stories of what clients send and what the server must answer, and their player.

The format is told in `tests/conformance/README.md`. The one rule: a story sees what the wire
shows and nothing else, so the same story is played over TCP and against the bare broker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DEFAULT_NAME = "client"
_ASK_AGAIN_SECONDS = 0.02


class World(Protocol):
    """Where a story is played: a server and the connections to it, each with a name."""

    patience_seconds: float
    """How long a question (`?`) is repeated until its answer is the wanted one."""

    def connect(self, name: str) -> None: ...

    def send(self, name: str, data: bytes) -> None: ...

    def read_line(self, name: str) -> bytes:
        """The next line without its newline.

        TimeoutError when none comes, EOFError when the server closed the connection.
        """
        ...

    def disconnect(self, name: str) -> None:
        """The client goes; on return the server knows it."""
        ...

    def break_off(self, name: str) -> None:
        """The connection is reset; the server may learn of it a little later."""
        ...

    def end_of_stream(self, name: str) -> None:
        """The client closes its sending side and still listens."""
        ...

    def advance(self, seconds: float) -> None:
        """Lets time pass, where time can be made to."""
        ...

    def restart(self, *, crash: bool) -> None:
        """The server is killed (`crash`) or stopped and starts again; all connections are gone."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a story. `data` is what is sent or wanted, `reply` the answer to a question."""

    number: int
    verb: str
    name: str = ""
    data: bytes = b""
    reply: bytes = b""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Story:
    name: str
    settings: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def needs_a_process(self) -> bool:
        return any(step.verb in ("crash", "restart") for step in self.steps)

    @property
    def tells_time(self) -> bool:
        return any(step.verb == "advance" for step in self.steps)


# ---------------------------------------------------------------------------------- parsing

_PATTERNS = {
    "send": re.compile(
        rb"C(?: (?P<name>\w+))?:(?: (?P<data>.*?))?(?: => (?P<reply>(?:ok|error).*))?"
    ),
    "receive": re.compile(rb"S(?: (?P<name>\w+))?:(?: (?P<data>.*))?"),
    "ask": re.compile(rb"\?(?: (?P<name>\w+))?: (?P<data>.+) => (?P<reply>.*)"),
    "disconnect": re.compile(rb"\* (?P<name>\w+) disconnects"),
    "break off": re.compile(rb"\* (?P<name>\w+) breaks off"),
    "end of stream": re.compile(rb"\* (?P<name>\w+) closes its sending side"),
    "closed": re.compile(rb"\* (?P<name>\w+) is closed"),
    "advance": re.compile(rb"\* (?P<seconds>[\d.]+) seconds pass"),
    "crash": re.compile(rb"\* crash"),
    "restart": re.compile(rb"\* restart"),
}
_SETTINGS = re.compile(rb"# settings: (.+)")
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.|$)")
_PLACEHOLDERS = {
    b"{error_id}": b"(?P<error_id>[0-9a-f]{24})",
    b"{time}": rb"\d+(?:\.\d{3})?",
    b"{epoch}": b"(?P<epoch>[^ .]+)",
}
_ESCAPED = {b"t": b"\t", b"r": b"\r", b"n": b"\n", b"\\": b"\\"}


def stories_of(paths: Iterable[Path]) -> Iterator[Story]:
    """The stories in these files: one in a `.txt`, one per ```` ```transcript ```` in a `.md`."""
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=False)
        if path.suffix == ".md":
            starts = [i + 1 for i, line in enumerate(lines) if line == b"```transcript"]
            for start in starts:
                end = lines.index(b"```", start)
                yield parse(f"{path.name}-line-{start}", lines[start:end], start + 1)
        else:
            yield parse(path.stem, lines)


def parse(name: str, lines: list[bytes], first_number: int = 1) -> Story:
    """One story; ValueError names the line that cannot be read."""
    settings = _SETTINGS.fullmatch(lines[0]) if lines else None
    steps: list[Step] = []
    for number, line in enumerate(lines, first_number):
        if line and not line.startswith(b"#"):
            try:
                steps += _steps(number, line)
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}") from None
    if not steps:
        raise ValueError(f"{name}: nothing happens")
    return Story(name, _settings(settings[1].decode()) if settings else {}, tuple(steps))


def _settings(text: str) -> dict[str, Any]:
    pairs = (pair.split("=") for pair in text.split())
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}


def _steps(number: int, line: bytes) -> Iterator[Step]:
    """A request and its reply are two."""
    step = _step(number, line)
    yield step
    if step.verb == "send" and step.reply:
        reply = {b"ok": b"ok ", b"error": b"error {error_id}"}.get(step.reply, step.reply)
        yield Step(number, "receive", step.name, step.data.split(b" ")[0] + b" " + reply)


def _step(number: int, line: bytes) -> Step:
    if line.endswith((b" ", b"\t", b"\r")):
        raise ValueError("ends in white space; write it as an escape")
    for verb, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(line):
            parts = found.groupdict()
            data = parts.get("data") or b""
            if verb == "send":
                # `\c` at the end, as in echo: exactly these bytes, and no newline after them.
                verb, data = ("send raw", data[:-2]) if data.endswith(b"\\c") else (verb, data)
            return Step(
                number,
                verb,
                (parts.get("name") or DEFAULT_NAME.encode()).decode(),
                _unescaped(data),
                _unescaped(parts.get("reply") or b""),
                float(parts.get("seconds") or 0),
            )
    raise ValueError(f"what is {line.decode(errors='backslashreplace')!r}?")


def _unescaped(text: bytes) -> bytes:
    def byte(found: re.Match[bytes]) -> bytes:
        escape = found[1]
        if escape.startswith(b"x") and len(escape) == 3:
            return bytes.fromhex(escape[1:].decode())
        if escape not in _ESCAPED:
            raise ValueError(f"unknown escape {found[0].decode(errors='backslashreplace')!r}")
        return _ESCAPED[escape]

    return _ESCAPE.sub(byte, text)


# ---------------------------------------------------------------------------------- playing


class StoryError(AssertionError):
    """The server did not do what the story tells; says where and what came instead."""


def play(story: Story, world: World) -> None:
    """Plays one story; StoryError when it does not hold."""
    _Player(story, world).play()


class _Player:
    def __init__(self, story: Story, world: World) -> None:
        self._story = story
        self._world = world
        self._may_send: dict[str, bool] = {}  # of each connection
        self._unsettled: set[str] = set()
        self._pings = 0
        self._last_error_id = b""
        self._epoch = b""
        self._number = 0

    def play(self) -> None:
        for step in self._story.steps:
            self._number = step.number
            self._take(step)
        for name, may_send in self._may_send.items():
            self._settle(name) if may_send else self._expect_end(name)

    def _take(self, step: Step) -> None:
        name, world = step.name, self._world
        if step.verb not in ("receive", "closed"):
            for sender in sorted(self._unsettled):
                self._settle(sender)
            self._unsettled.clear()
        if step.verb in ("send", "send raw", "receive", "ask") and name not in self._may_send:
            world.connect(name)
            self._may_send[name] = True
        match step.verb:
            case "send":
                world.send(name, step.data.replace(b"{epoch}", self._epoch) + b"\n")
                self._unsettled.add(name)
            case "send raw":
                world.send(name, step.data)
            case "receive":
                self._expect(name, step.data)
            case "ask":
                self._ask(name, step.data, step.reply)
            case "disconnect":
                world.disconnect(name)
                del self._may_send[name]
            case "break off":
                world.break_off(name)
                del self._may_send[name]
            case "end of stream":
                world.end_of_stream(name)
                self._may_send[name] = False
            case "closed":
                self._expect_end(name)
                self._unsettled.discard(name)
                del self._may_send[name]
            case "advance":
                world.advance(step.seconds)
            case "crash" | "restart":
                world.restart(crash=step.verb == "crash")
                self._may_send.clear()
                self._last_error_id = b""

    def _settle(self, name: str) -> None:
        """What this connection sent is done, and nothing came that the story does not tell."""
        self._pings += 1
        self._world.send(name, b"settle ping %d\n" % self._pings)
        self._expect(name, b"settle ok %d" % self._pings, "nothing more")

    def _expect(self, name: str, wanted: bytes, meaning: str = "") -> None:
        meaning = meaning or repr(wanted)
        try:
            line = self._world.read_line(name)
        except (TimeoutError, EOFError) as error:
            raise self._error(f"{name} should get {meaning}, but {error}") from None
        found = _matcher(wanted).fullmatch(line)
        if not found:
            raise self._error(f"{name} should get {meaning}, but gets {line!r}")
        told = found.groupdict()
        self._epoch = told.get("epoch") or self._epoch
        if (error_id := told.get("error_id")) is not None:
            if error_id <= self._last_error_id:
                raise self._error(f"error id {error_id!r} sorts before one that is older")
            self._last_error_id = error_id

    def _expect_end(self, name: str) -> None:
        try:
            line = self._world.read_line(name)
        except EOFError:
            return
        except TimeoutError as error:
            raise self._error(f"{name} should be closed, but {error}") from None
        raise self._error(f"{name} should be closed, but gets {line!r}")

    def _ask(self, name: str, question: bytes, wanted: bytes) -> None:
        limit = time.monotonic() + self._world.patience_seconds
        while True:
            self._world.send(name, question + b"\n")
            line = self._world.read_line(name)
            if _matcher(wanted).fullmatch(line):
                return
            if time.monotonic() >= limit:
                raise self._error(f"{name} should be told {wanted!r}, but gets {line!r}")
            time.sleep(_ASK_AGAIN_SECONDS)

    def _error(self, text: str) -> StoryError:
        return StoryError(f"{self._story.name}, line {self._number}: {text}")


def _matcher(wanted: bytes) -> re.Pattern[bytes]:
    pattern = re.escape(wanted)
    for name, meaning in _PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(name), meaning)
    return re.compile(pattern, re.DOTALL)
