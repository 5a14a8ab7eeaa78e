"""An export: queues, bindings and messages as rows, to be read by any program. Its lines are those
in `docs/backup.md`.

The one rule: memory use does not grow with the number of messages.
"""

import json
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from mqks.errors import InspectionFailed
from mqks.inspection.live import Live, peeked_row
from mqks.inspection.source import EVERY, Row
from mqks.inspection.stopped import Source
from mqks.inspection.text import data_as_text, time_text

VERSION = 1
_OFTEN_EMPTY = {
    *("doubtful", "meta", "due", "expires", "rejects", "losses"),
    *("dead_letter", "letter", "escaped", "priority", "key", "unique", "batch"),
}
"""Fields that are omitted if they have no value."""
_PLAIN = re.compile("([^ ]+) event=([^ ,]+)(?:,retry=([0-9]+))?,seq=([0-9]+),time=([0-9]+) (.*)")
_OF_A_SCHEDULE = (*("name", "cron", "every_s", "tz", "missed", "jitter_s", "paused", "publish"),)
_OF_A_BATCH = "name", "done", "dead", "closed", "publish", "publish_on_dead"


def lines(source: Source, messages: bool, only: list[str]) -> Iterator[str]:
    """The lines of an export. Raises InspectionFailed for a queue that does not exist."""
    encode = json.JSONEncoder().encode
    return (row if isinstance(row, str) else encode(row) for row in _rows(source, messages, only))


def _rows(source: Source, messages: bool, only: list[str]) -> Iterator[Row | str]:
    counts = {"queues": 0, "messages": 0, "bindings": 0}
    yield {"kind": "mqks", "version": VERSION, "messages": messages}
    names = []
    for row in map(source.queue, only) if only else _queues(source):
        counts["queues"] += 1
        names.append(row["name"])
        own = {
            field: told["value"]
            for field, told in row.get("policy", {}).items()
            if told["from"] == "set_queue"
        }
        policy = {"policy": own} if own else {}
        yield {"kind": "queue", "name": row["name"], "rule": row["rule"], **policy}
    batches = set[str]()
    for row in source.batches() if messages and not only else ():
        counts["batches"] = counts.get("batches", 0) + 1
        batches.add(row["name"])
        expires = time_text(row["expires_us"])
        yield {"kind": "batch", "expires": expires, **{field: row[field] for field in _OF_A_BATCH}}
    for name in names if messages else ():
        for message in _messages(source, name, batches):
            counts["messages"] += 1
            yield message
    for row in source.bindings(None):
        if not only or row["queue"] in only:
            counts["bindings"] += 1
            what = "event" if row["mask"] is None else "mask"
            yield {"kind": "binding", "queue": row["queue"], what: row[what]}
    for row in () if only else source.schedules():
        counts["schedules"] = counts.get("schedules", 0) + 1
        yield {"kind": "schedule", **{field: row[field] for field in _OF_A_SCHEDULE}}
    yield {"kind": "end", **counts}


def _queues(source: Source) -> Iterator[Row]:
    """Each queue with all its fields, except queues that are deleted meanwhile."""
    for row in source.queues():
        with suppress(InspectionFailed):
            yield source.queue(row["name"])


def _messages(source: Source, name: str, batches: Set[str]) -> Iterator[Row | str]:
    try:
        if isinstance(source, Live) and not source.queue(name)["scheduled"]:
            for page in source.pages(name, batches=bool(batches)):
                yield from (
                    _plain(name, line) or _row(name, peeked_row(line), batches) for line in page
                )
        else:
            rows = source.messages(name, EVERY._replace(batches=bool(batches)))
            yield from (_row(name, row, batches) for row in rows)
    except InspectionFailed:
        if any(row["name"] == name for row in source.queues()):
            raise
        # The queue was deleted meanwhile.


def _plain(name: str, line: bytes) -> str | None:
    """Of a message that has nothing but id, event and data; None for others."""
    try:
        found = _PLAIN.fullmatch(line.decode())
    except UnicodeDecodeError:
        return None
    if found is None:
        return None
    message_id, event, retry, seq, time_us, data = found.groups()
    return _encoded(name, seq, time_text(int(time_us)), message_id, event, retry or 0, data)


def _row(name: str, row: Row, batches: Set[str]) -> Row | str:
    text = data_as_text(row.pop("data"))
    if row["batch"] not in batches:  # It was opened meanwhile.
        row["batch"] = None
    if "data" in text and not any(map(row.get, _OFTEN_EMPTY)):
        seq, time, message_id, event, retry = map(row.get, ("seq", "time", "id", "event", "retry"))
        return _encoded(name, seq, time, message_id, event, retry, text["data"])
    told = {field: value for field, value in row.items() if value or field not in _OFTEN_EMPTY}
    return {"kind": "message", "queue": name, **told, **text}


def _encoded(
    name: str, seq: Any, time: Any, message_id: Any, event: Any, retry: Any, data: str
) -> str:
    """As the encoder would write it, in a third of the time."""
    return (
        f'{{"kind": "message", "queue": {quoted(name)}, "seq": {seq}, "time": "{time}", '
        f'"id": {quoted(message_id)}, "event": {quoted(event)}, "retry": {retry}, '
        f'"data": {quoted(data)}}}'
    )
