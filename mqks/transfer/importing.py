"""Imports an export into a server, as `docs/backup.md` describes.

All bindings come last, so that a new queue gets nothing else meanwhile. Scheduled messages keep
their due time; schedules have their first tick after the import.

The one rule: a line is imported completely or not at all, and errors contain the line number.
"""

import json
import re
import secrets
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, groupby
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the stubs
from typing import Any, BinaryIO, Final, NamedTuple
from urllib.parse import quote_from_bytes

from mqks.client import requests
from mqks.client.errors import InvalidRequest
from mqks.client.wire import Wire, rows
from mqks.errors import ImportFailed
from mqks.protocol.escapes import escape
from mqks.transfer.exporting import VERSION

LINE_BYTES_MAX: Final = 64 * 1024 * 1024
BATCH_LINES: Final = 4000
BATCH_BYTES: Final = 256 * 1024
"""Requests that are sent before their replies are read."""
PROGRESS_LINES: Final = 1000
SHORTEST_TTL_S: Final = 0.001
"""The TTL of messages that have expired since the export."""


_EXPORTED: Final = re.compile(
    r'\{"kind": "message", "queue": "([^"\\]*)", "seq": [0-9]+, "time": "[^"\\]*", '
    r'"id": "([^"\\ \t\n]+)", "event": "((?!--)[^"\\ \t\n]+)", "retry": [0-9]+, "data": "'
)
"""How most lines of an export begin."""


class Line(NamedTuple):
    number: int
    row: dict[str, Any]
    parts: tuple[str, str] | None = None
    """If the row has nothing but id, event and data, which is known: the id, and the others as a
    request has them."""

    def wrong(self, reason: str) -> ImportFailed:
        return ImportFailed(f"line {self.number}: {reason}")

    def text(self, field: str) -> str:
        value = self.row.get(field)
        if not isinstance(value, str):
            raise self.wrong(f"{field} must be text")
        return value

    def raw(self, field: str) -> bytes:
        try:
            return self.text(field).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise self.wrong(f"{field} holds half a surrogate pair") from None

    def name(self, field: str) -> bytes:
        raw = self.raw(field)
        if b"\n" in raw or b"\t" in raw:
            raise self.wrong(f"{field} must not hold a newline or a tab")
        if not raw or b" " in raw or (raw.startswith(b"--") and field != "id"):
            raise self.wrong(f"{field} is not a valid name: {self.text(field)[:80]!r}")
        return raw

    def plain(self, words: str) -> bytes | None:
        """The request of a message that has nothing but id, event and data, in a fourth of the
        time, with these words behind the id; None for what takes a closer look."""
        if self.parts is None:
            return None
        try:
            return words.join(self.parts).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return None

    def data(self) -> tuple[bytes, bytes]:
        """The flag of the data, followed by a space, and the data of a request."""
        if "data_base64" not in self.row:
            raw = self.raw("data")
        else:
            try:
                raw = b64decode(self.text("data_base64"), validate=True)
            except ValueError as error:
                raise self.wrong(f"data_base64: {error}") from None
        if self.row.get("escaped") or b"\n" in raw or b"\t" in raw:
            return b"--escaped ", escape(raw)
        return b"", raw

    def flags(self, now_s: float) -> bytes:
        """The flags of a publish with the same attributes, priority, key, due time and expiry, each
        followed by a space."""
        flags = [b"--meta=%b " % self.name("meta")] if self.row.get("meta") else []
        if self.row.get("dead_letter"):
            flags.append(b"--dead-letter=%b " % self._letter(self.row["dead_letter"]))
            # A living message would be dropped if another one of its key was imported before.
            flags += [b"--unique=%b " % self.name("unique")] if self.row.get("unique") else []
        try:
            told = {name: self.row.get(name) or None for name in ("priority", "key")}
            flags += [b"%b " % flag for flag in requests.flags("publish", told)]
        except (InvalidRequest, TypeError) as error:
            raise self.wrong(str(error)) from None
        due_s, expires_s = self._time_s("due"), self._time_s("expires")
        if due_s:
            flags.append(b"--at=%.6f " % due_s)
        if expires_s:
            flags.append(b"--ttl=%.6f " % max(SHORTEST_TTL_S, expires_s - max(now_s, due_s)))
        return b"".join(flags)

    def _letter(self, told: Any) -> bytes:
        """The attributes that the server gave a dead letter."""
        if not isinstance(told, dict):
            raise self.wrong("dead_letter must be an object")
        line = Line(self.number, told)
        pairs = [
            (b"reason", line.raw("reason")),
            (b"queue", line.raw("queue")),
            (b"tries", b"%d" % (told["tries"] if isinstance(told.get("tries"), int) else 0)),
            *((name.encode(), b"%.3f" % line._time_s(name)) for name in ("published", "died")),
            *([(b"why", line.raw("why"))] if told.get("why") else []),
        ]
        return b"&".join(
            b"%b=%b" % (name, quote_from_bytes(value, safe="").encode()) for name, value in pairs
        )

    def _time_s(self, field: str) -> float:
        """Seconds since 1970; 0 for none."""
        if self.row.get(field) is None:
            return 0
        try:
            return datetime.fromisoformat(self.text(field)).timestamp()
        except (ValueError, OverflowError):
            raise self.wrong(f"{field} is not a time: {self.text(field)[:80]!r}") from None

    def rule(self) -> tuple[bool, float | None]:
        """Whether there is one, and its seconds."""
        match self.row.get("rule"):
            case None:
                return False, None
            case {"delay_s": None}:
                return True, None
            case {"delay_s": int() | float() as delay_s} if 0 <= delay_s <= 1e9:
                return True, float(delay_s)
        raise self.wrong("rule must be null or an object with delay_s")

    def policy(self) -> bytes:
        """The request that sets it; empty without one."""
        fields = self.row.get("policy", {})
        if not isinstance(fields, dict):
            raise self.wrong("policy must be an object")
        try:
            return requests.set_queue(self.text("name"), requests.policy(fields)) if fields else b""
        except InvalidRequest as error:
            raise self.wrong(f"policy: {error}") from None

    def published(self, field: str) -> bytes:
        """What follows the word `publish` in a request."""
        publish = self.raw(field)
        if b"\n" in publish or b"\t" in publish:
            raise self.wrong(f"{field} must not hold a newline or a tab")
        return publish

    def batch(self, now_s: float) -> list[bytes]:
        """The requests that open it, without their ids; none if it has expired."""
        name, for_s, counts = self.name("name"), self._time_s("expires") - now_s, list[int]()
        for field in ("done", "dead"):
            count = self.row.get(field)
            if type(count) is not int or count < 0:
                raise self.wrong(f"{field} must be a number")
            counts.append(count)
        words = [b"open_batch --confirm %b --for=%.6f" % (name, for_s)]
        # It takes a permission that others do not.
        words += [b"--restored=%d,%d" % (*counts,)] if any(counts) else []
        if self.row.get("publish") is not None:
            words += [b"publish", self.published("publish")]
        bodies = [b" ".join(words)]
        if self.row.get("publish_on_dead") is not None:
            follows = name, self.published("publish_on_dead")
            bodies.append(b"open_batch --confirm %b --on-dead publish %b" % follows)
        return bodies if for_s > 0 else []

    def schedule(self) -> bytes:
        """The request that adds it, without its id."""
        fields = ("every_s", "tz", "missed", "jitter_s")
        timing = {each: self.row.get(each) or None for each in fields}
        timing["pause"] = self.row.get("paused") is True
        cron = None if self.row.get("cron") is None else self.text("cron")
        publish = self.published("publish")
        try:
            return b"%b %b" % (requests.timed(self.text("name"), cron, timing), publish)
        except (InvalidRequest, TypeError) as error:
            raise self.wrong(str(error)) from None


def lines_of(file: BinaryIO, advance: Callable[[int], object]) -> Iterator[Line]:
    """The lines of an export; `advance` is called with the bytes processed. Raises ImportFailed."""
    number = read = 0
    while raw := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        try:
            line = _exported(number, raw) or Line(number, json.loads(raw))
        except (ValueError, RecursionError) as error:
            raise ImportFailed(f"line {number}: not valid JSON: {error}") from None
        if not isinstance(line.row, dict) or len(raw) > LINE_BYTES_MAX:
            raise ImportFailed(f"line {number}: not a JSON object, or too long")
        yield line
        read += len(raw)
        if number % PROGRESS_LINES == 0:
            advance(read)
            read = 0
    advance(read)


def _exported(number: int, raw: bytes) -> Line | None:
    """A line as most of an export are; None for others."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if (found := _EXPORTED.match(text)) is None:
        return None
    queue, message_id, event = found.groups()
    data, end = scanstring(text, found.end())
    if text[end:] != "}\n" or "\n" in data or "\t" in data:
        return None
    row = {"kind": "message", "queue": queue, "id": message_id, "event": event, "data": data}
    return Line(number, row, (message_id, f"{event} {data}"))


class Import:
    """One import. `run` raises ImportFailed, and what a Wire raises when the server is gone.

    `only` names the queues to import, all if it is empty; `event` replaces each message's event;
    `note` is called with what was not imported.
    """

    def __init__(
        self,
        server: Wire,
        *,
        only: Sequence[bytes] = (),
        event: bytes | None = None,
        merge: bool = False,
        note: Callable[[str], object],
    ) -> None:
        self._server = server
        self._note = note
        self._only = only
        self._event = event
        self._merge = merge
        self._last = Line(0, {})
        self._there: set[bytes] = set()
        """Queues that existed on the server before."""
        self._queues: dict[bytes, Line] = {}
        self._batches: dict[bytes, bool] = {}
        """Those that messages join, and whether each is closed at the end."""
        self._batch: list[tuple[int, bytes]] = []
        self._batch_bytes = 0
        self._sent: list[tuple[int, bytes]] = []
        """Those of an earlier batch, whose replies have not been read."""
        self._counts = Counter(queues=0, messages=0, bindings=0)
        self._left_out = Counter[str]()
        """How many lines of each kind were skipped."""

    def run(self, lines: Iterable[Line]) -> dict[str, int]:
        """Import everything; return the counts."""
        stages = {
            "mqks": self._begin,
            "queue": self._make_queues,
            "batch": self._open_batches,
            "message": self._fill_queues,
            "binding": self._bind,
            "schedule": self._schedule,
            "end": self._end,
        }
        left = list(stages)
        for kind, found in groupby(self._passing(lines), key=lambda line: line.row.get("kind")):
            if kind not in left or (kind != "mqks" and "mqks" in left):
                raise self._last.wrong(f"a line of kind {kind!r} is not allowed here")
            del left[: left.index(kind) + 1]
            try:
                stages[kind](found)
            finally:
                self._flush()
        if left:
            raise self._last.wrong("the export is incomplete: its last line is missing")
        return self._counts

    def _passing(self, lines: Iterable[Line]) -> Iterator[Line]:
        for self._last in lines:
            yield self._last

    def _wanted(self, lines: Iterable[Line], what: str, field: str) -> Iterator[Line]:
        """The lines whose queue, in `field`, is to be imported; `what` is their kind."""
        for line in lines:
            if self._only and line.name(field) not in self._only:
                self._left_out[what] += 1
            else:
                yield line

    def _begin(self, lines: Iterator[Line]) -> None:
        for line in lines:
            if line.number != 1 or line.row.get("version") != VERSION:
                raise line.wrong(f"this is not an export of version {VERSION}")
        self._there = {requests.encoded(row["name"]) for row in self._rows(b"queues", "name")}

    def _make_queues(self, lines: Iterator[Line]) -> None:
        for line in self._wanted(lines, "queues", "name"):
            line.rule()
            line.policy()
            if self._queues.setdefault(line.name("name"), line) is not line:
                raise line.wrong("this queue occurs twice")
        self._check_all_are_told()
        bound: dict[bytes, list[bytes]] = {}
        for row in self._rows(b"bindings", "queue", "event", "mask"):
            if (name := requests.encoded(row["queue"])) in self._queues and name not in self._there:
                flag = b"--add " if row["mask"] is None else b"--add-mask "
                each = flag + requests.encoded(row["event"] or row["mask"])
                bound.setdefault(name, []).append(each)
        for name, line in self._queues.items():
            if not self._merge and (name in self._there or name in bound):
                raise line.wrong("the queue exists, or its name is bound; --merge adds to it")
        # Binding creates a queue; nobody publishes this event.
        nothing = b"--add mqks-import-%b" % secrets.token_hex(8).encode()
        for name, line in self._queues.items():
            self._counts["queues"] += 1
            if name in self._there:
                continue
            first, *others = bound.get(name, [nothing])
            self._ask(line, b"subscribe --confirm %b %b" % (name, first.removeprefix(b"--add ")))
            for each in others:
                self._ask(line, b"rebind --confirm %b %b" % (name, each))
            if first is nothing:
                unbind = nothing.replace(b"--add ", b"--remove ")
                self._ask(line, b"rebind --confirm %b %b" % (name, unbind))

    def _check_all_are_told(self) -> None:
        if missing := set(self._only) - self._queues.keys():
            raise self._last.wrong(f"there is no queue {_shown(min(missing))} in this export")

    def _open_batches(self, lines: Iterator[Line]) -> None:
        there = {row["name"] for row in self._rows(b"batches", "name")}
        for line in lines:
            name, bodies = line.name("name"), line.batch(time.time())
            if self._only or not bodies:
                self._left_out["batches"] += 1
                if not self._only:
                    self._note(f"batch {_shown(name)}: it has expired, and was not imported")
                continue
            if is_there := line.text("name") in there:
                if not self._merge:
                    raise line.wrong("the batch exists; with --merge, messages join it")
                bodies = []
            for body in bodies:
                self._ask(line, body)
            self._batches[name] = line.row.get("closed") is True and not is_there
            self._counts["batches"] += 1

    def _fill_queues(self, lines: Iterator[Line]) -> None:
        wanted = self._wanted(lines, "messages", "queue")
        for _, found in groupby(wanted, key=lambda line: line.row.get("queue")):
            self._fill(found)

    def _fill(self, lines: Iterator[Line]) -> None:
        first = next(lines)
        name = first.name("queue")
        if name not in self._queues:
            raise first.wrong("there is no queue line before it for its queue")
        words = b" publish --confirm --to=%b " % name
        shown = requests.decoded(words)
        for line in chain([first], lines):
            request = None if self._event else line.plain(shown)
            if request is None:
                message_id, (escaped, data) = line.name("id"), line.data()
                flags = escaped + line.flags(time.time())
                if line.row.get("batch") and (batch := line.name("batch")) in self._batches:
                    flags += b"--batch=%b " % batch
                event = self._event or line.name("event")
                request = b"%b%b%b%b %b" % (message_id, words, flags, event, data)
            self._put(line, request)
            self._counts["messages"] += 1

    def _bind(self, lines: Iterator[Line]) -> None:
        for line in self._wanted(lines, "bindings", "queue"):
            name = line.name("queue")
            what, flag = ("mask", b"--add-mask") if "mask" in line.row else ("event", b"--add")
            bound = line.name(what)
            if name in self._there and not self._merge:
                raise line.wrong("the queue exists; --merge adds to it")
            self._ask(line, b"rebind --confirm %b %b %b" % (name, flag, bound))
            self._counts["bindings"] += 1

    def _schedule(self, lines: Iterator[Line]) -> None:
        there = {row["name"] for row in self._rows(b"schedules", "name")}
        for line in lines:
            if self._only:
                self._left_out["schedules"] += 1
                continue
            if line.text("name") in there and not self._merge:
                raise line.wrong("the schedule exists; --merge changes it")
            self._ask(line, line.schedule())
            self._counts["schedules"] += 1

    def _end(self, lines: Iterator[Line]) -> None:
        line = next(lines)
        if more := next(lines, None):
            raise more.wrong("there are lines after the end line")
        self._check_all_are_told()
        kinds = {**self._counts, **self._left_out, **line.row}.keys() - {"kind"}
        were = {what: self._counts[what] + self._left_out[what] for what in sorted(kinds)}
        if (told := {what: line.row.get(what, 0) for what in were}) != were:
            raise line.wrong(f"its counts are {told}, but the file has {were}")
        for name, line in self._queues.items():
            if name in self._there:
                continue
            if policy := line.policy():
                self._ask(line, policy)
            has_rule, delay_s = line.rule()
            if not has_rule:
                continue
            if delay_s is None:
                self._note(
                    f"queue {_shown(name)}: its delete rule without a delay was not imported: "
                    "it would delete the queue at once; its next consumer can set it"
                )
            else:
                self._ask(line, b"delete_queue --confirm %b --when-unused=%a" % (name, delay_s))
        # Last: what follows one of which all is done finds its queues.
        for name, is_closed in self._batches.items():
            if is_closed:
                self._ask(self._last, b"close_batch --confirm %b" % name)

    # -- requests

    def _rows(self, what: bytes, *keys: str) -> Iterator[dict[str, Any]]:
        return rows(self._server.stats, requests.decoded(what), *keys)

    def _ask(self, line: Line, body: bytes) -> None:
        self._put(line, b"%d %b" % (line.number, body))

    def _put(self, line: Line, request: bytes) -> None:
        self._batch.append((line.number, request))
        self._batch_bytes += len(request)
        if len(self._batch) >= BATCH_LINES or self._batch_bytes >= BATCH_BYTES:
            self._send()

    def _send(self) -> None:
        """The server works on this batch while the next one is read."""
        self._take_replies()
        self._sent, self._batch, self._batch_bytes = self._batch, [], 0
        self._server.send_many([request for _, request in self._sent])

    def _flush(self) -> None:
        self._send()
        self._take_replies()

    def _take_replies(self) -> None:
        batch, self._sent = self._sent, []
        refused = self._server.refused(len(batch))
        for request_id, error_id in refused:
            number = next(n for n, request in batch if request.startswith(request_id + b" "))
            reason = self._server.reason(error_id) or "the server gives no reason"
            raise ImportFailed(
                f"line {number}: the server refused it, error {error_id}: {reason}; others up to "
                f"line {batch[-1][0]} are imported"
            )


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
