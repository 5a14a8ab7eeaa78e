"""How the rows of a lake are laid out in files: partitions, the order in a file, names of fields.

    date, hour, event, parsed                   day and hour of arrival, and what the message is
    day(data.created_at), hour(…), month(…)     of a time in the payload, or in another column
    bucket(16, key)                             a hash, as Iceberg has it, modulo 16
    data.country                                the value itself

A partition is told by this text wherever a lake keeps it. Its column is named after it:
`data_created_at_day`, `key_bucket`, `data_country`.

The one rule: a row whose value is missing goes to the partition of null, and no row is refused.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqks.pipeline.columns import FIELDS, ORIGIN, PROPERTIES, field_of, type_at
from mqks.pipeline.errors import BadOption, LakeUnfit
from mqks.pipeline.upsert import Upsert

PLAIN = {"date": pa.date32(), "hour": pa.int32(), "event": pa.string(), "parsed": pa.bool_()}
"""The partitions that every queue has, with their types, in their order; `date` always is one."""
PARTITIONS_MAX = 10_000
"""Of one file of a task before it is split by them: each is a file of its own."""
BUCKETS_MAX = 10_000
_PARTITION = re.compile(r"(?:(day|hour|month)\(|(bucket)\((\d{1,5}),)?([^(),]+)(\))?")
_COLUMNS = {
    **{name: FIELDS[name] for name in ("key", "value", "topic", "offset", "timestamp")},
    "queue": pa.string(),
    "epoch": pa.string(),
    "archived": FIELDS["timestamp"],
    **{f"origin_{each.name}": each.type for each in ORIGIN.type},
    **{each.name: each.type for each in PROPERTIES},
}
_FORMATS = {"hour": "%Y-%m-%d-%H", "month": "%Y-%m"}
_TYPES = pa.types
_IS_TEXT = _TYPES.is_string, _TYPES.is_integer, _TYPES.is_date
_FIT: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "day": (_TYPES.is_timestamp, _TYPES.is_date),
    "month": (_TYPES.is_timestamp, _TYPES.is_date),
    "hour": (_TYPES.is_timestamp,),
    "bucket": (*_IS_TEXT, _TYPES.is_binary, _TYPES.is_timestamp),
    "identity": (*_IS_TEXT, _TYPES.is_boolean),
    "key": (*_IS_TEXT, _TYPES.is_binary),
    "boolean": (_TYPES.is_boolean,),
    "sort": (_TYPES.is_primitive, *_IS_TEXT, _TYPES.is_binary, _TYPES.is_decimal),
}


class Layout(NamedTuple):
    """How a lake is to be laid out; pickles."""

    by: tuple[str, ...] | None = None
    """Its partitions; None: as the lake was created."""
    sort: tuple[str, ...] = ()
    """The order of the rows of a file, by columns and fields; as they come, without any."""
    partitions_max: int = PARTITIONS_MAX
    """Of the messages that a task writes at once, of which each partition gets a file."""
    names: Mapping[str, str] = {}
    """Fields of payloads, by dots, that have another name in the lake."""
    upsert: Upsert | None = None
    """If the lake has only the last value of each key."""

    @property
    def partitions(self) -> tuple[str, ...]:
        return self.by or ("date",)

    @property
    def sources(self) -> list[str]:
        """Columns and fields by which readers look for rows."""
        keys = [self.upsert.key] if self.upsert else []
        told = (each for by in self.partitions if (each := partition(by).source))
        return [*dict.fromkeys([*keys, *self.sort, *told])]

    def plain(self) -> "Layout":
        """Of a lake whose payloads have no fields: its partitions alone."""
        return Layout(self.by and tuple(each for each in self.by if not is_of_data(each)))

    def kept(self, place: object, has: Iterable[str], upsert: Upsert | None = None) -> "Layout":
        """With the partitions and the keys that the lake at this place has. Raises LakeUnfit if
        others are wanted."""
        by = tuple(has)
        if self.by not in (None, by):
            told = ",".join(by[1:]) or "day"
            raise LakeUnfit(f"{place} was created with --by {told}: use --by {told}")
        if self.upsert not in (None, upsert):
            told = upsert.option if upsert else "without --upsert"
            raise LakeUnfit(f"{place} was created {told}: use that, or another table")
        return self._replace(by=by, upsert=upsert)

    def check(self, data: pa.DataType | None) -> None:
        """Whether payloads of this type have its fields. Raises LakeUnfit."""
        every = [(f"--by: {each}", *partition(each)[1:3]) for each in self.partitions]
        every += [(f"--sort: {each}", "sort", each) for each in self.sort]
        if self.upsert:
            every.append((f"--upsert: {self.upsert.key}", "key", self.upsert.key))
            where = self.upsert.delete_where or ""
            every.append((f"--delete-where: {where}", "boolean", where))
        for told, transform, source in every:
            if data is not None and source.startswith("data."):
                try:
                    _check(told, transform, type_at(data, source.split(".")[1:]))
                except BadOption as error:
                    raise LakeUnfit(str(error)) from None


USUAL = Layout()


class Partition(NamedTuple):
    column: str
    transform: str
    """`day`, `hour`, `month`, `bucket` or `identity`; empty for a plain one."""
    source: str
    buckets: int = 0

    @property
    def type(self) -> pa.DataType:
        kinds = PLAIN | {"day": pa.date32(), "bucket": pa.int32()}
        return kinds.get(self.transform or self.column, pa.string()) if self.is_typed else _TEXT

    @property
    def is_typed(self) -> bool:
        return self.transform in ("", "day", "bucket")

    def values(self, rows: pa.Table) -> Any:
        """Of each row, without chunks; a value for each partition."""
        match self.column if not self.transform else self.transform:
            case "date":
                return rows["timestamp"].cast(pa.date32()).combine_chunks()
            case "event":
                return rows["topic"].combine_chunks()
            case "parsed":
                has_data = "data" in rows.column_names
                told = rows["data"].is_valid() if has_data else pa.repeat(False, len(rows))
                return told.combine_chunks() if has_data else told
            case "hour" if not self.transform:
                return pc.hour(rows["timestamp"]).combine_chunks()
        found = field_of(rows, self.source)
        match self.transform:
            case _ if found is None:
                return pa.nulls(len(rows), self.type)
            case "day":
                return pc.floor_temporal(found, unit="day").cast(pa.date32())
            case "bucket":
                return bucket(found, self.buckets)
            case "identity":
                return found
        return pc.floor_temporal(found, unit=self.transform)

    def texts(self, values: Any) -> Any:
        """Of some of the values, as they stand in the names of directories."""
        form = _FORMATS.get(self.transform)
        if form and not pa.types.is_string(values.type):
            return pc.strftime(values.cast(pa.timestamp("s")), form)
        return values.cast(pa.string())


_TEXT = pa.string()


@cache
def partition(text: str) -> Partition:
    """Raises BadOption."""
    if text in PLAIN:
        return Partition(text, "", "")
    found = _PARTITION.fullmatch(text)
    time, is_bucket, count, source, end = found.groups() if found else (None,) * 5
    is_known = source and (source.startswith("data.") or _column(source))
    if not source or not is_known or bool(time or is_bucket) != bool(end):
        raise BadOption(
            f"--by: {text} is none of day, hour, event, parsed, day(FIELD), hour(FIELD),"
            " month(FIELD), bucket(NUMBER,FIELD), FIELD, such as data.created_at or a column"
        )
    if source == "timestamp" and not is_bucket:
        raise BadOption(f"--by: {text} is of the arrival: use day or hour")
    if is_bucket and not 0 < int(count or 0) <= BUCKETS_MAX:
        raise BadOption(f"--by: {text} has not 1 to {BUCKETS_MAX:,} buckets")
    transform = time or is_bucket or "identity"
    # A column of the same name is in the files.
    end = "_value" if "." not in source else ""
    column = source.replace(".", "_") + (end if transform == "identity" else f"_{transform}")
    return Partition(column, transform, source, int(count or 0))


def partitions(by: str | None) -> tuple[str, ...] | None:
    """Of a list such as `event,day(data.created_at)`. Raises BadOption."""
    if by is None:
        return None
    told = re.findall(r"[^,(]+(?:\([^)]*\)?)?[^,]*", re.sub(r"\s", "", by))
    wanted = {"date": None} | dict.fromkeys("date" if each == "day" else each for each in told)
    names = [partition(each).column for each in wanted]
    if len({*map(str.lower, names)}) < len(names):
        raise BadOption(f"--by {by}: two partitions would have the same name")
    for each in wanted:
        if (found := partition(each)).transform and not found.source.startswith("data."):
            _check(f"--by: {each}", found.transform, _column(found.source))
    return (*(each for each in PLAIN if each in wanted), *(e for e in wanted if e not in PLAIN))


def is_of_data(by: str) -> bool:
    return partition(by).source.startswith("data.")


def order(sort: str | None) -> tuple[str, ...]:
    """Of columns and fields with commas between. Raises BadOption."""
    told = tuple(re.sub(r"\s", "", sort or "").split(",")) if sort else ()
    return tuple(column("--sort", each, "sort") for each in told)


def column(option: str, name: str, use: str) -> str:
    """The name of a column or field that an option has. Raises BadOption."""
    if not name.startswith("data."):
        _check(f"{option}: {name}", use, _column(name))
    return name


def _check(told: str, transform: str, kind: pa.DataType | None) -> None:
    if kind is None:
        raise BadOption(f"{told}: there is no such column, and the schema has no such field")
    if not any(fits(kind) for fits in _FIT[transform]):
        raise BadOption(f"{told}: this cannot be of the type {kind}")


def _column(name: str) -> pa.DataType | None:
    """Its type, if files have it."""
    return _COLUMNS.get(name)


def rows_by(
    table: pa.Table, by: Sequence[str], most: int = PARTITIONS_MAX
) -> Iterator[tuple[list[str | None], pa.Table]]:
    """The rows of each partition, in their order. Raises LakeUnfit if there are more."""
    told = [*map(partition, by)]
    coded = {each.column: each.values(table).dictionary_encode() for each in told}
    codes = pa.table({name: each.indices for name, each in coded.items()})
    keys = [(name, "ascending") for name in coded]
    counted = codes.group_by([*coded]).aggregate([([], "count_all")]).sort_by(keys)
    if len(counted) > most:
        raise LakeUnfit(
            f"{len(counted):,} partitions of {len(table):,} messages, and each is a file: raise"
            f" --partitions-max ({most:,}), lower --batch, or archive into a lake with another --by"
        )
    if len(counted) > 1:
        table = table.take(pc.sort_indices(codes, keys))  # It is stable.
    values = [
        each.texts(coded[each.column].dictionary).take(counted[each.column]).to_pylist()
        for each in told
    ]
    at = 0
    for *names, count in zip(*values, counted["count_all"].to_pylist(), strict=True):
        yield names, table.slice(at, count)
        at += count


def sorted_by(rows: pa.Table, sort: Iterable[str]) -> pa.Table:
    """Rows in the order of these columns and fields, of which those that it lacks do not count."""
    told = {name: column for name in sort if (column := field_of(rows, name)) is not None}
    if not told:
        return rows
    return rows.take(pc.sort_indices(pa.table(told), [(name, "ascending") for name in told]))


def bucket(values: Any, count: int) -> Any:
    """The hash of each value by the specification of Iceberg (32-bit Murmur3), modulo `count`.

    230 ns for a text of 19 bytes."""
    kind, none = values.type, values.is_null()
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        _, edges, content = values.buffers()
        offsets = np.frombuffer(edges, np.int32)[values.offset :][: len(values) + 1]
        starts, sizes = offsets[:-1].astype(np.int64), np.diff(offsets)
        raw = np.frombuffer(content or b"", np.uint8)
    else:
        is_date = pa.types.is_date(kind)
        numbers = (values.cast(pa.int32()) if is_date else values).cast(pa.int64())
        raw = pc.fill_null(numbers, 0).to_numpy().astype("<i8").view(np.uint8)
        starts, sizes = np.arange(0, len(raw), 8), np.full(len(values), 8, np.int32)
    hashed = (_murmur3(raw, starts, sizes) & 0x7FFFFFFF) % count
    return pc.if_else(none, None, pa.array(hashed.astype(np.int32)))


_Words = npt.NDArray[np.uint32]


def _murmur3(
    raw: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
) -> _Words:
    raw = np.concatenate((raw, np.zeros(4, np.uint8)))

    def mixed(places: npt.NDArray[np.int64], wide: int) -> _Words:
        word = np.zeros(len(places), np.uint32)
        for byte in range(wide):
            word |= raw[places + byte].astype(np.uint32) << np.uint32(8 * byte)
        return _turned(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)

    found, blocks, at = np.zeros(len(sizes), np.uint32), sizes // 4, 0
    left = np.flatnonzero(blocks)
    while len(left):
        word = found[left] ^ mixed(starts[left] + 4 * at, 4)
        found[left] = _turned(word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        at += 1
        left = left[blocks[left] > at]
    for wide in (1, 2, 3):
        left = np.flatnonzero(sizes % 4 == wide)
        found[left] ^= mixed(starts[left] + 4 * blocks[left], wide)
    found ^= sizes.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        found = (found ^ (found >> np.uint32(shift))) * np.uint32(factor)
    return found


def _turned(word: _Words, bits: int) -> _Words:
    return cast(_Words, (word << np.uint32(bits)) | (word >> np.uint32(32 - bits)))


# Names.


def renames(file: Path) -> dict[str, str]:
    """From JSON or TOML: `{"old.field": "new"}`, where the field is in the payload, and gets
    another name in its place. Raises BadOption."""
    try:
        text = file.read_text(encoding="utf-8")
        told = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise BadOption(f"--rename {file}: {error}") from None
    is_right = isinstance(told, dict) and all(
        isinstance(new, str) and new and "." not in new for new in told.values()
    )
    if not is_right:
        raise BadOption(f'--rename {file} is not of names, as in {{"old.field": "new"}}')
    return cast("dict[str, str]", told)


def renamed(kind: pa.DataType, names: Mapping[str, str], within: str = "") -> pa.DataType:
    """A type whose fields have their new names, also those in arrays. Raises BadOption."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(renamed(kind.value_type, names, within)))
    if not pa.types.is_struct(kind):
        return kind
    fields = []
    for field in kind:
        path = f"{within}{field.name}"
        new = pa.field(names.get(path, field.name), renamed(field.type, names, f"{path}."))
        fields.append(new)
    told = [field.name for field in fields]
    if twice := {name for name in told if told.count(name) > 1}:
        raise BadOption(f"--rename: there would be two fields {within}{min(twice)}")
    return pa.struct(fields)


def named(kind: pa.DataType, like: pa.DataType) -> pa.DataType:
    """The type with the names that the fields of another, of the same form, have."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(named(kind.value_type, like.value_type)))
    if not pa.types.is_struct(kind):
        return kind
    pairs = zip(kind, like, strict=True)
    return pa.struct([(other.name, named(own.type, other.type)) for own, other in pairs])
