"""Where what is looked into comes from: the server that has a database, or the file without one.

Both tell the same rows, as `stats` names them; what a source cannot know is None.

The one rule: looking changes nothing, and nothing is held in memory that grows with the messages.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from mqks.client import requests
from mqks.client.dialogue import Dialogue
from mqks.client.errors import ConnectionLost, ProtocolViolation, RequestFailed
from mqks.client.options import Options
from mqks.commands.options import printable
from mqks.errors import InspectionFailed, JournalDamaged
from mqks.journal.sqlite.lock import server_of
from mqks.journal.sqlite.reader import DatabaseFile, no_file

PAGE = 1000
"""Rows asked for at once, so that no answer keeps a server for long."""
PAUSE_S_MAX = 0.1
DAMAGE_SHOWN = 20

Row = dict[str, Any]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PEEKED = re.compile(rb"event=(.*?)(?:,retry=(\d+))?,seq=(\d+),time=(\d+)")


class Source(Protocol):
    """A context. Names are text with surrogate escapes; raises InspectionFailed for a queue that is
    not there."""

    def totals(self) -> Row: ...
    def queues(self) -> Iterator[Row]: ...
    def queue(self, name: str) -> Row: ...
    def bindings(self, event: str | None) -> Iterator[Row]: ...
    def consumers(self) -> Iterator[Row]: ...
    def connections(self) -> Iterator[Row]: ...
    def unacked(self, queue: str | None) -> Iterator[Row]: ...
    def journal(self) -> Row: ...
    def messages(self, queue: str, after: int) -> Iterator[Row]:
        """seq, time, id, event, data (bytes), retry, doubtful: all there are, as they are taken."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def source_of(database: Path, options: Options, *, is_named: bool) -> Source:
    """The server that has this file, or the file, or, unless it was named, the usual server."""
    url = server_of(database)
    if url:
        return Live(url, options)
    if url is not None:
        note(f"{database}: a server that can't be found has it; this is what the file says")
    elif not is_named and not database.exists():
        return Live(None, options, f"there is no file {database} and ")
    elif not is_named:  # An old file may lie here, and a server with another one run.
        note(f"{database}: no server has it; this is what the file says")
    return Stopped(database)


def errors_of(database: Path, limit: int, error_id: str | None = None) -> list[Row]:
    """Error replies, the newest first; or that one, if it is there."""
    if not database.is_file():
        raise no_file(database)
    with DatabaseFile(database, thorough=False) as file:
        # No id has a space, so it is the last one below that.
        found = file.errors(limit) if error_id is None else file.errors(1, f"{error_id} ")
        for place, what in file.damage:
            note(f"{place}: {what}")
    return [_error(each._asdict()) for each in found if error_id in (None, each.id)]


def _error(row: Row) -> Row:
    """Of a file or a server, as it is told."""
    told = {
        name: requests.decoded(value) if isinstance(value, bytes) else value
        for name, value in row.items()
    }
    del told["time_us"]
    return {"id": row["id"], "time": time_text(row["time_us"])} | told


def time_text(time_us: int) -> str:
    """Microseconds since 1970 as ISO 8601, in UTC."""
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds")


def note(text: str) -> None:
    print(f"mqks: {printable(text)}", file=sys.stderr)


class Live:
    """A running server, page by page."""

    def __init__(self, url: str | None, options: Options, otherwise: str = "") -> None:
        self._server = Dialogue(url, options)
        self._otherwise = otherwise

    def __enter__(self) -> Self:
        try:
            self._server.__enter__()
        except ConnectionLost as error:
            raise ConnectionLost(f"{self._otherwise}{error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def totals(self) -> Row:
        return self._object()

    def queues(self) -> Iterator[Row]:
        return self._rows(["queues"], lambda row: [row["name"]])

    def queue(self, name: str) -> Row:
        try:
            return self._object("queue", name)
        except RequestFailed:
            raise InspectionFailed(f"{self._server.address}: there is no queue {name}") from None

    def bindings(self, event: str | None) -> Iterator[Row]:
        return self._rows(["bindings", *_given(event)], lambda row: [row["queue"], row["event"]])

    def consumers(self) -> Iterator[Row]:
        return self._rows(["consumers"], lambda row: [row["id"]])

    def connections(self) -> Iterator[Row]:
        return self._rows(["connections"], lambda row: [row["id"]])

    def unacked(self, queue: str | None) -> Iterator[Row]:
        return self._rows(["unacked", *_given(queue)], lambda row: [row["queue"], row["seq"]])

    def journal(self) -> Row:
        return self._object("journal")

    def errors(self, limit: int, error_id: str | None = None) -> list[Row]:
        """As `errors_of`."""
        rows = self._ask(["errors", *_given(error_id), f"--limit={limit}"])
        return [_error(row) for row in reversed(rows)]

    def messages(self, queue: str, after: int) -> Iterator[Row]:
        self.queue(queue)
        while True:
            ask = b"peek %b --after=%d --limit=%d" % (requests.name(queue), after, PAGE)
            last = after
            for line in self._server.ask_lines(ask):
                message_id, attributes, data = line.split(b" ", 2)
                found = _PEEKED.fullmatch(attributes)
                if found is None:
                    raise ProtocolViolation(f"the peer sent {line[:80]!r} for a message")
                event, retry, seq, time_us = found.groups()
                last = int(seq)
                yield {
                    "seq": last,
                    "time": time_text(int(time_us)),
                    "id": requests.decoded(message_id),
                    "event": requests.decoded(event),
                    "data": data,
                    "retry": int(retry or 0),
                    "doubtful": False,
                }
            if last == after:
                return
            after = last

    def _rows(self, words: list[str], key: Callable[[Row], list[Any]]) -> Iterator[Row]:
        flags = [f"--limit={PAGE}"]
        while True:
            began_s = time.monotonic()
            page = self._ask([*words, *flags])
            took_s = time.monotonic() - began_s
            yield from page
            if len(page) < PAGE:
                return
            # The busier it is, the longer it is left in peace.
            time.sleep(min(took_s, PAUSE_S_MAX))
            flags[1:] = [
                f"--{flag}={part}"
                for flag, part in zip(["after", "then"], key(page[-1]), strict=False)
            ]

    def _object(self, *words: str) -> Row:
        told: Row = self._ask(list(words))
        return told

    def _ask(self, words: list[str]) -> Any:
        body = b" ".join([b"stats", *map(_flag_or_name, words)])
        return json.loads(self._server.ask(body))


class Stopped:
    """A file that nobody serves. Leaving it raises JournalDamaged if not all of it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._doubtful = 0

    def __enter__(self) -> Self:
        self._file = DatabaseFile.open(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        damage = self._file.damage
        if self._file.torn:
            note(self._file.torn)
        if kind is not None or not damage:
            return
        for place, what in damage[:DAMAGE_SHOWN]:
            note(f"{place}: {what}")
        if self._doubtful:
            note(
                f"{self._doubtful} of these messages stand in damaged segments: "
                "any byte of them may be wrong, and they may have been acked"
            )
        raise JournalDamaged(
            f"{self._path} is damaged in {len(damage)} places: what can still be read is shown"
        )

    def totals(self) -> Row:
        queues = self._file.queues
        return {
            "version": None,
            "epoch": self._file.facts.epoch,
            "uptime_s": None,
            "connections": 0,
            "queues": len(queues),
            "consumers": 0,
            "bindings": len(self._file.bindings),
            "messages_ready": sum(queue.ready for queue in queues),
            "messages_unacked": sum(queue.unacked for queue in queues),
            **dict.fromkeys(
                ["memory_bytes", "metadata_bytes", "unacked_bytes", "unsent_bytes", "disk_full"]
            ),
            **dict.fromkeys(
                ["received", "routed", "unroutable", "confirmed", "delivered", "redelivered"]
            ),
            **dict.fromkeys(
                ["acknowledged", "rejected", "purged", "errors", "loop_held", "loop_late"]
            ),
        }

    def queues(self) -> Iterator[Row]:
        bound: dict[bytes, int] = {}
        for name, _ in self._file.bindings:
            bound[name] = bound.get(name, 0) + 1
        for queue in self._file.queues:
            rule = queue.rule
            yield {
                "name": requests.decoded(queue.name),
                "ready": queue.ready,
                "unacked": queue.unacked,
                "consumers": 0,
                "bindings": bound.get(queue.name, 0),
                "rule": None if rule is None else {"delay_s": rule.delay_s},
                "next_seq": queue.next_seq,
                "oldest_age_s": _age_s(queue.oldest_us),
                "memory_bytes": None,
            }

    def queue(self, name: str) -> Row:
        row = next((row for row in self.queues() if row["name"] == name), None)
        if row is None:
            raise InspectionFailed(f"{self._path}: there is no queue {name}")
        raw = requests.name(name)
        events = [requests.decoded(event) for queue, event in self._file.bindings if queue == raw]
        return row | {"events": events, "consumer_ids": []}

    def bindings(self, event: str | None) -> Iterator[Row]:
        names = {queue.name for queue in self._file.queues}
        for queue, each in self._file.bindings:
            if event is None or requests.decoded(each) == event:
                yield {
                    "queue": requests.decoded(queue),
                    "event": requests.decoded(each),
                    "exists": queue in names,
                }

    def consumers(self) -> Iterator[Row]:
        return self._nobody("consumers")

    def connections(self) -> Iterator[Row]:
        return self._nobody("connections")

    def _nobody(self, what: str) -> Iterator[Row]:
        note(f"{self._path}: no server has it, so there are no {what}")
        return iter(())

    def unacked(self, queue: str | None) -> Iterator[Row]:
        for each in self._file.queues:
            name = requests.decoded(each.name)
            if not each.unacked or queue not in (None, name):
                continue
            for message in self._file.messages(each.name):
                if message.unacked:
                    yield {
                        "queue": name,
                        "consumer": None,
                        "id": requests.decoded(message.id),
                        "event": requests.decoded(message.event),
                        "seq": message.seq,
                        "retry": message.retry,
                        "data_bytes": len(message.data),
                    }

    def journal(self) -> Row:
        facts, disk = self._file.facts, os.statvfs(self._path.absolute().parent)
        return {
            "path": str(self._path),
            "epoch": facts.epoch,
            "db_bytes": facts.db_bytes,
            "wal_bytes": facts.wal_bytes,
            "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            "disk_full": None,
            "unwritable": None,
            "segments": facts.segments,
            "segment_bytes": facts.segment_bytes,
            "messages": sum(queue.ready + queue.unacked for queue in self._file.queues),
            **dict.fromkeys(["commits", "commit_records", "commit_seconds", "checkpoints"]),
            **dict.fromkeys(["once_ids", "once_bytes"]),
            "schema_version": facts.schema_version,
            "page_bytes": facts.page_bytes,
            "free_pages": facts.free_pages,
            "set_aside": facts.set_aside,
        }

    def messages(self, queue: str, after: int) -> Iterator[Row]:
        raw = requests.name(queue)
        if all(each.name != raw for each in self._file.queues):
            raise InspectionFailed(f"{self._path}: there is no queue {queue}")
        for message in self._file.messages(raw, after):
            self._doubtful += message.doubtful
            yield {
                "seq": message.seq,
                "time": time_text(message.time_us),
                "id": requests.decoded(message.id),
                "event": requests.decoded(message.event),
                "data": message.data,
                "retry": message.retry,
                "doubtful": message.doubtful,
            }


def _age_s(time_us: int | None) -> float | None:
    return None if time_us is None else max(0.0, round(time.time() - time_us / 1e6, 3))


def _given(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _flag_or_name(word: str) -> bytes:
    """A flag's value comes from the server itself; a name comes from whoever asks."""
    return word.encode("utf-8", "surrogateescape") if word[:2] == "--" else requests.name(word)
