"""Reads and checks the small tables: queues, bindings, ids published once, errors, audit.

The one rule: a row is accepted when its types are right, its checksum matches and its values are
plausible; a table, when its rows match its tally.
"""

import math
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from mqks.audit import AuditRecord
from mqks.broker.spine.log.pending import ErrorRecord
from mqks.broker.spine.message.policy import Policy
from mqks.journal.segment import checksum
from mqks.journal.store import Damage, Head, QueueRow, check_policy
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import DeleteRule

Row = tuple[Any, ...]
CHECKSUMS_SINCE: Final = 3
EPOCH_SINCE: Final = 2
POLICIES_SINCE: Final = 4
TEXTS_SINCE: Final = 6
TEXT_FILES_SINCE: Final = 7
SCHEDULES_SINCE: Final = 8
AUDIT_SINCE: Final = 9
RESULTS_SINCE: Final = 10
BATCHES_SINCE: Final = 11
"""The first schemas that have them."""
ROWS_TOLD_MAX: Final = 20
SHOWN_MAX: Final = 200
"""Damaged rows that are reported per table, and characters of each."""


def row_crc(table: str, *row: int | float | bytes | str | None) -> int:
    """CRC-32 of the table's name and the row's values, as Python prints them as a tuple."""
    return zlib.crc32(repr((table, *row)).encode("utf-8", "backslashreplace"))


def head_of(segment_id: int, crc: object, body: object) -> Head:
    """The head of a segment, followed by its text."""
    found = body if isinstance(body, bytes) else b""
    is_right = found is body and checksum(segment_id, found) == crc
    return Head.checked(segment_id, len(found), found, is_right=is_right)


def is_name(name: bytes) -> bool:
    return name != b"" and b" " not in name and b"\n" not in name


class Tally(NamedTuple):
    """How many rows a table has, the sum of their checksums, and the next id."""

    next: int
    rows: int = 0
    sum: int = 0

    def plus(self, crcs: Sequence[int]) -> "Tally":
        return self._replace(rows=self.rows + len(crcs), sum=self.sum + sum(crcs))

    def minus(self, crcs: Sequence[int]) -> "Tally":
        return self._replace(rows=self.rows - len(crcs), sum=self.sum - sum(crcs))

    def row(self, name: str) -> Row:
        """Its stored form, checksum included."""
        return name, *self, row_crc("tally", name, *self)


def segment_crcs(ids: Iterable[int]) -> list[int]:
    """The values that the tally of segments sums up: they prove that an id exists. A segment's own
    checksum, which includes its id, proves its content."""
    return [row_crc("segment", segment_id) for segment_id in ids]


def queue_crc(row: QueueRow) -> int:
    return row_crc("queue", *row)


def _is_queue(row: Row) -> bool:
    queue_id, name, _, next_seq, cursor = row
    try:
        check_policy(QueueRow(*row))
    except ValueError:
        return False
    return queue_id > 0 and is_name(name) and 1 <= cursor <= next_seq <= SEQ_MAX


def _is_ruled_queue(row: Row) -> bool:
    _, _, flag, delay_s, _, _ = row
    is_rule = flag in (0, 1) and (delay_s is None or (math.isfinite(delay_s) and delay_s >= 0))
    return is_rule and _is_queue(_with_policy(row))


def _with_policy(row: Row) -> Row:
    """Convert the row of a queue from a schema without policies."""
    queue_id, name, flag, delay_s, *numbers = row
    policy = Policy(DeleteRule(delay_s) if flag else None)
    return queue_id, name, policy.encode(), *numbers


def _is_once(row: Row) -> bool:
    number, count, ids = row
    return bool(number > 0 and count == ids.count(b"\n") + 1)


def _is_audit(row: Row) -> bool:
    try:
        AuditRecord.parse(*row)
    except ValueError:
        return False
    return True


def _is_meta(row: Row) -> bool:
    key, value = row
    return key != "epoch" or re.fullmatch("[0-9a-f]{16}", value) is not None


class _Table(NamedTuple):
    columns: str
    types: tuple[type | tuple[type, ...], ...]
    makes_sense: Callable[[Row], bool]


_TABLES: Final = {
    "tally": _Table(
        "name, next, count, sum", (str, int, int, int), lambda row: row[1] > 0 <= row[2]
    ),
    "meta": _Table("key, value", (str, str), _is_meta),
    "queue": _Table("id, name, policy, next_seq, cursor", (int, bytes, str, int, int), _is_queue),
    "binding": _Table("queue, event", (bytes, bytes), lambda row: all(map(is_name, row))),
    "once": _Table("number, count, ids", (int, int, bytes), _is_once),
    "schedule": _Table("name, row", (bytes, str), lambda row: is_name(row[0])),
    "result": _Table("name, row, data", (bytes, str, bytes), lambda row: is_name(row[0])),
    "batch": _Table("name, row", (bytes, str), lambda row: is_name(row[0])),
    "error": _Table(
        "id, time_us, connection, request_id, action, reason",
        (str, int, str, bytes, bytes, str),
        lambda row: True,
    ),
    "audit": _Table("id, row", (int, str), lambda row: row[0] > 0 and _is_audit(row)),
}
LOOSE: Final = ("error", "audit")
"""Tables on which nothing else depends."""


_RULED_QUEUE: Final = _Table(
    "id, name, delete_when_unused, delete_delay_s, next_seq, cursor",
    (int, bytes, int, (float, type(None)), int, int),
    _is_ruled_queue,
)


def is_ruled_queue(*row: Any) -> bool:
    """Whether a row of a schema without policies is plausible."""
    types = _RULED_QUEUE.types
    return all(map(isinstance, row, types)) and _RULED_QUEUE.makes_sense(row)


def _table(name: str, version: int) -> _Table:
    return _RULED_QUEUE if name == "queue" and version < POLICIES_SINCE else _TABLES[name]


def read_by(version: int) -> dict[str, str]:
    """The tables of a database of this schema, and the columns to read of each."""
    since = {"tally": CHECKSUMS_SINCE, "once": EPOCH_SINCE}
    since |= {"schedule": SCHEDULES_SINCE, "result": RESULTS_SINCE, "batch": BATCHES_SINCE}
    crc = ", crc" if version >= CHECKSUMS_SINCE else ""
    return {
        name: _table(name, version).columns + crc
        for name in _TABLES
        if since.get(name, 1) <= version and name not in LOOSE
    }


def segment_columns(version: int) -> str:
    """Without the text, if it is in a file."""
    return f"id, crc, cast(body as blob), {text_columns(version)}"


def text_columns(version: int) -> str:
    """The length of a text in a file, else null; and the number of the file."""
    text_bytes = "text_bytes" if version >= TEXTS_SINCE else "null"
    text_file = "coalesce(text_file, id)" if version >= TEXT_FILES_SINCE else "id"
    return f"{text_bytes}, {text_file}"


def loose_columns(table: str, version: int) -> str:
    """Of a table of `LOOSE`."""
    return _TABLES[table].columns + (", crc" if version >= CHECKSUMS_SINCE else "")


class Rows:
    """The undamaged rows, and in `damage` all damage. `raw` has for each table of `read_by` its
    rows as they were read."""

    def __init__(self, version: int, raw: Mapping[str, Iterable[Row]]) -> None:
        self.damage: list[Damage] = []
        self.aside: list[tuple[str, str]] = []
        """Table and content of each damaged row."""
        self.tallies: dict[str, Tally] = {}
        """Tallies of the existing rows; `next` is taken from the stored tally, if any."""
        self._has_checksums = version >= CHECKSUMS_SINCE
        self._version = version
        self._raw = raw
        self._told = {name: Tally(*rest) for name, *rest in self._whole("tally")}
        meta = dict(self._whole("meta"))
        self.epoch: str | None = meta.get("epoch")
        if self.epoch is None and version >= EPOCH_SINCE:
            self.damage.append(Damage("table meta", "there is no epoch"))
        rows = self._whole("queue")
        if version < POLICIES_SINCE:
            rows = [*map(_with_policy, rows)]
        rows = [QueueRow(*row) for row in rows]
        self.queues = {row.id: row for row in rows}
        if not len(rows) == len(self.queues) == len({row.name for row in rows}):
            self.damage.append(Damage("table queue", "two queues have the same name or id"))
        self.bindings: list[tuple[bytes, bytes]] = self._whole("binding")
        self.once: list[tuple[int, int, bytes]] = self._whole("once")
        self._count("queue", max(self.queues, default=0) + 1)
        self._count("binding", 1)
        self.schedules: dict[bytes, str] = dict(self._whole("schedule"))
        if version >= SCHEDULES_SINCE:
            self._count("schedule", 1)
        self.results = {row[0]: (row[1], row[2]) for row in self._whole("result")}
        if version >= RESULTS_SINCE:
            self._count("result", 1)
        self.batches: dict[bytes, str] = dict(self._whole("batch"))
        if version >= BATCHES_SINCE:
            self._count("batch", 1)
        self._count("once", max((number for number, _, _ in self.once), default=0) + 1)
        queues_are_whole = all(place != "table queue" for place, _ in self.damage)
        self.queue_ids_end = self.tallies["queue"].next if self._has_checksums else SEQ_MAX
        """A queue without a row was deleted if its id is below this one; ids from here on were
        never used."""
        if not queues_are_whole:
            self.queue_ids_end = 0

    def _whole(self, table: str) -> list[Any]:
        whole, crcs, aside = _sifted(table, self._raw.get(table, ()), self._version)
        self.damage += _told_damage(table, aside)
        self.aside += ((table, repr(row)) for row in aside)
        self.tallies[table] = Tally(1).plus(crcs)
        return whole

    def _count(self, name: str, next_id: int) -> None:
        """Compare the existing rows with the stored tally."""
        found = self.tallies[name]
        told = self._told.get(name) if self._has_checksums else Tally(next_id, *found[1:])
        if told is None:
            self.damage.append(Damage("table tally", f"the tally of {name} is missing"))
            told = Tally(next_id, *found[1:])
        if next_id > told.next or found[1:] != told[1:]:
            what = f"{found.rows} rows are whole, {told.rows} were written"
            if found.rows == told.rows:
                what = "its rows are not those that were written"
            self.damage.append(Damage(f"table {name}", what))
        self.tallies[name] = found._replace(next=max(next_id, told.next))

    def count_segments(self, ids: list[int]) -> list[Damage]:
        """Compare the sorted ids of all segments with the stored tally, and store a new tally."""
        told = self._told.get("segment")
        next_id = max(ids, default=0) + 1
        self.tallies["segment"] = Tally(next_id).plus(segment_crcs(ids))
        if told is None:
            missing = Damage("table tally", "the tally of segment is missing")
            return [missing] if self._has_checksums else []
        self.tallies["segment"] = self.tallies["segment"]._replace(next=max(next_id, told.next))
        before = ids[: bisect_left(ids, told.next)]
        found = Tally(told.next).plus(segment_crcs(before))
        damage = []
        if found != told:
            what = f"{found.rows} with ids below {told.next} exist, {told.rows} were written"
            damage.append(Damage("table segment", what))
        after = [told.next - 1, *ids[len(before) :]]
        gaps = ((low, high) for low, high in pairwise(after) if high != low + 1)
        damage += (
            Damage("table segment", f"those with ids from {low + 1} to {high - 1} are missing")
            for low, high in islice(gaps, ROWS_TOLD_MAX)
        )
        return damage


def errors(version: int, rows: Iterable[Row]) -> tuple[list[ErrorRecord], list[Damage]]:
    """The undamaged error records, and the damage. Nothing else depends on them."""
    whole, _, aside = _sifted("error", rows, version)
    return [ErrorRecord(*row) for row in whole], _told_damage("error", aside)


def audit(version: int, rows: Iterable[Row]) -> tuple[list[AuditRecord], list[Damage]]:
    """The undamaged records, and the damage."""
    whole, _, aside = _sifted("audit", rows, version)
    return [AuditRecord.parse(*row) for row in whole], _told_damage("audit", aside)


def _told_damage(table: str, aside: list[Row]) -> list[Damage]:
    told = [
        Damage(f"table {table}", f"a row is damaged: {repr(row)[:SHOWN_MAX]}")
        for row in aside[:ROWS_TOLD_MAX]
    ]
    if len(aside) > len(told):
        told.append(Damage(f"table {table}", f"{len(aside) - len(told)} more rows are damaged"))
    return told


def _sifted(
    table: str, rows: Iterable[Row], version: int
) -> tuple[list[Row], list[int], list[Row]]:
    """The undamaged rows without their checksums; their checksums; and the damaged rows."""
    _, types, makes_sense = _table(table, version)
    has_checksums = version >= CHECKSUMS_SINCE
    whole: list[Row] = []
    crcs: list[int] = []
    aside: list[Row] = []
    for row in rows:
        values = row[:-1] if has_checksums else row
        crc = row_crc(table, *values)
        is_right = not has_checksums or crc == row[-1]
        if is_right and all(map(isinstance, values, types)) and makes_sense(values):
            whole.append(values)
            crcs.append(crc)
        else:
            aside.append(row)
    return whole, crcs, aside
