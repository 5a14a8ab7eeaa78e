"""Reads the database of a server, a file or PostgreSQL; and chooses between the server and it."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Self

from mqks.client import requests
from mqks.client.messages import original
from mqks.client.options import Options
from mqks.errors import InspectionFailed, JournalDamaged, did_you_mean
from mqks.inspection.live import Live
from mqks.inspection.source import EVERY, Note, Row, WantedRows, error_row, message_row, timed
from mqks.journal.contents import StoredMessage
from mqks.journal.default_store import contents
from mqks.journal.sqlite.lock import server_of
from mqks.protocol.masks import MASK, bound_matches, name_masks
from mqks.protocol.meta import has_pairs
from mqks.settings import DatabaseUrl

DAMAGE_SHOWN = 20
_ONLY_OF_A_SERVER = (
    *("memory_bytes", "metadata_bytes", "unacked_bytes", "unhandled_bytes", "unsent_bytes"),
    *("disk_full", "draining", "read_only"),
    *("received", "routed", "unroutable", "confirmed", "delivered", "redelivered"),
    *("acknowledged", "rejected", "dead", "dropped", "duplicates", "replaced", "purged", "errors"),
    "failed_logins",
    *("loop_held", "loop_late", "reverts_seen", "timer_repeats"),
    *("traces", "trace_bytes", "results", "result_bytes"),
)
"""Totals that only a server knows."""
_ARCHIVE = (
    *("archive_state", "archived_seq", "archive_lag", "archive_told_age_s"),
    "archive_commit_age_s",
)
"""What archives have told a server."""


def source_of(
    database: Path | DatabaseUrl, options: Options, note: Note, usual: str | None
) -> "Source":
    """The server that uses this file, or the file, or the server at the URL `usual`, if the file
    was not named. Of PostgreSQL the database."""
    if isinstance(database, DatabaseUrl):
        return StoppedSource(database, note)
    url = server_of(database)
    if url:
        return Live(url, options)
    if url is not None:
        note(f"{database}: a server uses it but can't be found; these are the contents of the file")
    elif usual and (server := usual_server(database, options, usual)):
        return server
    elif usual:  # This may be an old file, and a server may run with another one.
        note(f"{database}: no server uses it; these are the contents of the file")
    return StoppedSource(database, note)


def usual_server(database: Path | DatabaseUrl, options: Options, url: str) -> Live | None:
    """The server at this URL, if there is no such file."""
    if isinstance(database, DatabaseUrl) or database.exists():
        return None
    return Live(url, options, f"there is no file {database} and ")


def errors_of(
    database: Path | DatabaseUrl, note: Note, limit: int, error_id: str | None = None
) -> list[Row]:
    """Like `Live.errors`, for a database, even one that a server uses."""
    with contents(database) as file:
        # No id contains a space, so the id is the last one below this text.
        found = file.errors(limit) if error_id is None else file.errors(1, f"{error_id} ")
        for place, what in file.damage:
            note(f"{place}: {what}")
    return [error_row(each._asdict()) for each in found if error_id in (None, each.id)]


def audit_of(database: Path | DatabaseUrl, note: Note, limit: int) -> list[Row]:
    """Like `Live.audit`, for a database, even one that a server uses."""
    with contents(database) as file:
        found = file.audit(limit)
        for place, what in file.damage:
            note(f"{place}: {what}")
    return [timed(asdict(each)) for each in found]


class StoppedSource:
    """A file that no server uses, or a database in PostgreSQL. On exit it raises JournalDamaged if
    it is damaged."""

    def __init__(self, database: Path | DatabaseUrl, note: Note) -> None:
        self._database = database
        self._note = note
        self._doubtful = 0

    def __enter__(self) -> Self:
        self._file = contents(self._database).read()
        if self._file.server:
            self._note(
                f"{self._database}: {self._file.server} has claimed it; these are the contents of "
                "the database, and --url asks the server"
            )
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        damage = self._file.damage
        if self._file.torn:
            self._note(self._file.torn)
        if kind is not None or not damage:
            return
        for place, what in damage[:DAMAGE_SHOWN]:
            self._note(f"{place}: {what}")
        if self._doubtful:
            self._note(
                f"{self._doubtful} of these messages are in damaged segments: "
                "any byte of them may be wrong, and they may have been acked"
            )
        raise JournalDamaged(
            f"{self._database} is damaged in {len(damage)} places: what can still be read is shown"
        )

    def totals(self) -> Row:
        queues = self._file.queues
        return {
            "name": None,
            "version": None,
            "epoch": self._file.facts.epoch,
            "uptime_s": None,
            "connections": 0,
            "queues": len(queues),
            "consumers": 0,
            "bindings": len(self._file.bindings),
            "messages_ready": sum(queue.ready for queue in queues),
            "messages_unacked": sum(queue.unacked for queue in queues),
            "messages_scheduled": sum(queue.scheduled for queue in queues),
            **dict.fromkeys(_ONLY_OF_A_SERVER),
        }

    def queues(self) -> Iterator[Row]:
        bound = Counter(name for name, _ in self._file.bindings)
        for queue in self._file.queues:
            rule, target = queue.policy.delete_when_unused, queue.policy.dead_letters
            yield {
                "name": requests.decoded(queue.name),
                "ready": queue.ready,
                "unacked": queue.unacked,
                "scheduled": queue.scheduled,
                "leased": None,
                "dead_letters": None if target is None else requests.decoded(target),
                "consumers": 0,
                "bindings": bound[queue.name],
                "rule": None if rule is None else {"delay_s": rule.delay_s},
                "dead": None,
                "paused": queue.policy.pause,
                "paused_until_s": queue.policy.paused_until_s,
                "held_by": None,
                "held_until_s": None,
                "next_seq": queue.next_seq,
                "oldest_age_s": _age_s(queue.oldest_us),
                "readers": None,
                **dict.fromkeys(_ARCHIVE),
                "memory_bytes": None,
            }

    def queue(self, name: str) -> Row:
        row = next((row for row in self.queues() if row["name"] == name), None)
        if row is None:
            raise self._missing(name)
        raw = requests.name(name)
        own = next(queue.policy for queue in self._file.queues if queue.name == raw)
        fields = own.fields().items()
        policy = {field: {"value": value, "from": "set_queue"} for field, value in fields}
        bound = [each for queue, each in self._file.bindings if queue == raw]
        events = [requests.decoded(each) for each in bound if each[:1] != MASK]
        masks = [requests.decoded(each[1:]) for each in bound if each[:1] == MASK]
        row |= {"made_by": own.made_by or None, "policy": policy}
        return row | {"events": events, "masks": masks, "consumer_ids": []}

    def bindings(self, event: str | None) -> Iterator[Row]:
        names = {queue.name for queue in self._file.queues}
        raw = None if event is None else requests.encoded(event)
        for queue, each in self._file.bindings:
            mask = each[1:] if each[:1] == MASK else None
            if raw in (None, each) or (mask is not None and bound_matches(mask, raw)):
                yield {
                    "queue": requests.decoded(queue),
                    "event": requests.decoded(each) if mask is None else None,
                    "mask": None if mask is None else requests.decoded(mask),
                    "exists": queue in names,
                }

    def consumers(self) -> Iterator[Row]:
        return self._nobody("consumers")

    def connections(self) -> Iterator[Row]:
        return self._nobody("connections")

    def message(self, message_id: str) -> Iterator[Row]:
        return self._nobody("steps of messages")

    def traces(self) -> Iterator[Row]:
        return self._nobody("traces")

    def _nobody(self, what: str) -> Iterator[Row]:
        if not self._file.server:
            self._note(f"{self._database}: no server uses it, so there are no {what}")
        return iter(())

    def _missing(self, queue: str) -> InspectionFailed:
        near = did_you_mean(queue, (requests.decoded(each.name) for each in self._file.queues))
        return InspectionFailed(f"{self._database}: there is no queue {queue}{near}")

    def unacked(self, queue: str | None) -> Iterator[Row]:
        if queue is not None and all(row["name"] != queue for row in self.queues()):
            raise self._missing(queue)
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
                        "data_bytes": len(original(message.traits, message.data)),
                        "delivered_us": None,
                        "progress": None,
                        "progress_text": None,
                    }

    def errors(self, limit: int) -> list[Row]:
        return [error_row(each._asdict()) for each in self._file.errors(limit)]

    def schedules(self) -> Iterator[Row]:
        return (row.told(name) for name, row in self._file.schedules.items())

    def batches(self) -> Iterator[Row]:
        members = self._file.members()
        for name, row in self._file.batches.items():
            yield row.listed(name, *members[row.number])

    def results(self) -> Iterator[Row]:
        now_us = time.time() * 1e6
        found = self._file.results()
        return (each.listed() for each in found if not 0 < each.until_us <= now_us)

    def journal(self) -> Row:
        facts, free = self._file.facts, None
        if isinstance(self._database, Path):
            disk = os.statvfs(self._database.absolute().parent)
            free = disk.f_bavail * disk.f_frsize
        return {
            "path": str(self._database),
            "epoch": facts.epoch,
            "db_bytes": facts.db_bytes,
            "wal_bytes": facts.wal_bytes,
            "disk_free_bytes": free,
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

    def messages(self, queue: str, wanted: WantedRows = EVERY) -> Iterator[Row]:
        raw = requests.name(queue)
        if all(each.name != raw for each in self._file.queues):
            raise self._missing(queue)
        is_selected = _selected(wanted.selection)
        found = (
            each
            for each in self._file.messages(raw, wanted.after)
            if wanted.scheduled in (None, each.due_us > 0) and is_selected(each)
        )
        batches = {row.number: name for name, row in self._file.batches.items()}
        for message in islice(found, wanted.limit):
            self._doubtful += message.doubtful
            batch = batches.get(message.batch, b"")
            yield message_row(**message._asdict() | {"batch": batch})


Source = Live | StoppedSource


def _selected(selection: Mapping[str, Any]) -> Callable[[StoredMessage], bool]:
    """As the server selects."""
    if not selection:
        return lambda message: True
    event, id, older_s, where = map(selection.get, ("event", "id", "older_s", "where"))
    pairs = {requests.encoded(key): requests.encoded(value) for key, value in (where or {}).items()}
    matches = name_masks([requests.encoded("**" if event is None else event)])
    raw_id = None if id is None else requests.encoded(id)
    before_us = math.inf if older_s is None else (time.time() - older_s) * 1e6

    def is_selected(message: StoredMessage) -> bool:
        return (
            matches(message.event)
            and raw_id in (None, message.id)
            and message.time_us <= before_us
            and has_pairs(message.meta, pairs)
        )

    return is_selected


def _age_s(time_us: int | None) -> float | None:
    return None if time_us is None else max(0.0, round(time.time() - time_us / 1e6, 3))
