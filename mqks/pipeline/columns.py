"""The columns of `format("mqks")`, and how the text of a `read` reply is split into them.

The one rule: no Python code runs per message but for escaped data and names; numpy finds the edges,
Arrow copies.
"""

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqks.protocol import replies
from mqks.protocol.escapes import unescape

Ints = npt.NDArray[np.integer[Any]]

FIELDS = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(
        pa.field(
            "element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
        )
    ),
    "priority": pa.int32(),
    "ordering_key": pa.string(),
}
"""Kafka's columns: a message's id, its data, its event, 0, its number, arrival and attributes; and
how it is delivered."""

SCHEMA = pa.schema(list(FIELDS.items()))
ORIGIN = pa.field(
    "origin", pa.struct([("queue", pa.string()), ("epoch", pa.string()), ("offset", pa.int64())])
)
"""For readers of attributes: what a message repeats that a replay has published, otherwise null."""
PROPERTIES = pa.schema(
    [
        ("headers", pa.map_(pa.string(), pa.string())),
        *((name, FIELDS[name]) for name in ("priority", "ordering_key")),
    ]
)
"""As a lake has them: the attributes are a map, and without those of an origin."""
ORIGIN_WORDS = "origin_queue=", "&origin_epoch=", "&origin_offset="
"""What is before the quoted queue, the epoch and the number in these attributes."""

_NEWLINE, _SPACE, _TAB = b"\n \t"
_EVENT_BYTES = len(b"event=")
_ESCAPED = replies.ESCAPED
_ORIGIN = (r"^{}(?P<queue>[^&]+){}(?P<epoch>[^&]+){}(?P<offset>[0-9]{{1,18}})(?:&|$)").format(
    *ORIGIN_WORDS
)
_TOLD = (
    r"^(?P<meta>[^,]*)(?P<escaped>,escaped=1)?"
    r"(?:,priority=(?P<priority>-?[0-9]{1,3}))?(?:,key=(?P<key>[^,]+))?"
)


def record_batch(
    text: memoryview,
    runs: Ints,
    schema: pa.Schema = SCHEMA,
    *,
    has_meta: bool = False,
    has_headers: bool = True,
) -> pa.RecordBatch:
    r"""Messages `{id} event={event}[,escaped=1] {data}\n` as columns, with their original data.

    `has_meta`: nothing follows the event, and a tab, attributes and traits the data; without it,
    the columns of these are null, and without `has_headers` that of attributes is.

    Each row of `runs` has the first number, the count and the arrival (microseconds since 1970) of
    consecutive messages. Raises ValueError if the text is something else.

    Finding the edges costs 90 to 150 ns for a message of 100 bytes, the copies 50 ns.
    """
    firsts, counts, times = runs[:, 0], runs[:, 1], runs[:, 2]
    rows = int(counts.sum())
    pieces = _pieces(text, rows, has_meta)
    take = np.arange(0, 6 * rows, 6, dtype=np.int32)
    events = pieces.take(pa.array(take + 2))
    if has_meta:
        meta, escaped, priorities, keys = _told(pieces.take(pa.array(take + 5)))
    else:
        escaped = pc.ends_with(events, _ESCAPED)
    has_escaped = pc.any(escaped).as_py()
    made: dict[str, Any] = {}
    for name in schema.names:
        match name:
            case "key":
                column = pieces.take(pa.array(take))
            case "topic":
                if has_escaped and not has_meta:
                    plain = pc.binary_slice(events, 0, -len(_ESCAPED))
                    events = pc.if_else(escaped, plain, events)
                column = _text(events)
            case "value":
                column = pieces.take(pa.array(take + 4))
                if has_escaped:
                    originals = [unescape(each) for each in column.filter(escaped).to_pylist()]
                    column = pc.replace_with_mask(column, escaped, pa.array(originals, pa.binary()))
            case "partition":
                column = pa.array(np.zeros(rows, dtype=np.int32))
            case "offset":
                before = np.cumsum(counts) - counts
                column = pa.array(np.repeat(firsts - before, counts) + np.arange(rows))
            case "timestamp":
                column = pa.array(np.repeat(times, counts)).view(FIELDS[name])
            case "headers" if has_meta and has_headers:
                column = _headers(meta, schema.field(name).type)
            case "priority" if has_meta:
                column = priorities
            case "ordering_key" if has_meta:
                column = keys
            case "origin":
                column = _origins(meta)
            case _:
                column = pa.nulls(rows, schema.field(name).type)
        made[name] = column
    return pa.RecordBatch.from_arrays(list(made.values()), schema=schema)


def _pieces(text: memoryview, rows: int, has_meta: bool) -> Any:
    """Six pieces of each message that touch: id, ` event=`, event, space, data, and the newline
    with a tab, attributes and traits before it.

    They share the text and cost one offset each; every sixth of them is a column.
    """
    raw = np.frombuffer(text, np.uint8)
    marks = np.flatnonzero((raw == _NEWLINE) | (raw == _SPACE))
    newlines = np.flatnonzero(raw[marks] == _NEWLINE)
    ends = marks[newlines]
    if len(ends) != rows or (rows and ends[-1] != len(raw) - 1):
        raise ValueError(f"{len(ends)} messages were received instead of {rows}")
    # The first two marks behind each newline are spaces: neither id nor event has one.
    firsts = np.concatenate(([0], newlines[:-1] + 1))[:rows]
    if rows and np.diff(newlines, prepend=-1).min() < 3:
        raise ValueError("a message was received without its event")
    edges = np.empty(6 * rows + 1, np.int32)
    edges[0] = 0
    edges[1::6] = marks[firsts]
    edges[2::6] = edges[1::6] + 1 + _EVENT_BYTES
    edges[3::6] = marks[firsts + 1]
    edges[4::6] = edges[3::6] + 1
    edges[5::6] = ends
    edges[6::6] = ends + 1
    if has_meta:
        tabs = np.flatnonzero(raw == _TAB)
        edges[5::6][np.searchsorted(ends, tabs)] = tabs
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), 6 * rows, buffers)


def _told(tails: Any) -> tuple[Any, Any, Any, Any]:
    r"""Of `[\t{meta}{traits}]\n`: attributes, whether data are escaped, the priority (0 without
    one) and the key."""
    told = pc.binary_slice(tails, 1, -1)
    if not pc.any(pc.match_substring(told, ",")).as_py():
        rows = len(told)
        priorities = pa.array(np.zeros(rows, dtype=np.int32))
        return told, pa.repeat(False, rows), priorities, pa.nulls(rows, pa.string())
    meta, escaped, priorities, keys = pc.extract_regex(told, _TOLD).flatten()
    priorities = pc.if_else(pc.equal(priorities, b""), b"0", priorities).cast(pa.string())
    keys = pc.if_else(pc.equal(keys, b""), None, keys)
    return meta, pc.not_equal(escaped, b""), priorities.cast(pa.int32()), _decoded(keys)


def _headers(meta: Any, kind: pa.DataType) -> Any:
    """Of `{key}={value}&…`, for a lake those behind an origin; null without any."""
    is_map = pa.types.is_map(kind)
    if is_map and pc.any(pc.starts_with(meta, ORIGIN_WORDS[0])).as_py():
        meta = pc.replace_substring_regex(meta, _ORIGIN, "")
    pairs = pc.split_pattern(pc.if_else(pc.equal(meta, b""), None, meta), "&")
    words = pc.split_pattern(pairs.flatten(), "=", max_splits=1).flatten()
    keys, values = map(words.take, map(pa.array, np.arange(len(words)).reshape(-1, 2).T))
    keys, offsets, none = _decoded(keys), pairs.offsets, pairs.is_null()
    if is_map:
        return pa.MapArray.from_arrays(offsets, keys, _decoded(values), kind, mask=none)
    entries = pa.StructArray.from_arrays([keys, _unquoted(values)], fields=[*kind.value_type])
    return pa.ListArray.from_arrays(offsets, entries, kind, mask=none)


def _origins(meta: Any) -> Any:
    if not pc.any(is_told := pc.match_substring_regex(meta, _ORIGIN)).as_py():
        return pa.nulls(len(meta), ORIGIN.type)
    told = pc.if_else(is_told, meta, None)
    queue, epoch, offset = pc.extract_regex(told, _ORIGIN).flatten()
    columns = [_decoded(queue), epoch.cast(pa.string()), offset.cast(pa.string()).cast(pa.int64())]
    return pa.StructArray.from_arrays(columns, fields=[*ORIGIN.type], mask=pc.invert(is_told))


def _decoded(words: Any) -> Any:
    return _text(_unquoted(words))


def _unquoted(words: Any) -> Any:
    return replaced(words, "%", unquote_to_bytes)


def replaced(words: Any, pattern: str, made: Callable[[Any], Any]) -> Any:
    """With each distinct word that matches the pattern made anew once."""
    matches = pc.match_substring_regex(words, pattern)
    if not pc.any(matches).as_py():
        return words
    coded = words.filter(matches).dictionary_encode()
    anew = pa.array(map(made, coded.dictionary.to_pylist()), words.type)
    return pc.replace_with_mask(words, matches, anew.take(coded.indices))


def _text(names: Any) -> Any:
    r"""Names as strings; a byte that is not UTF-8 is written as `\xff`, to keep names distinct."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        coded = names.dictionary_encode()
        texts = [name.decode("utf-8", "backslashreplace") for name in coded.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(coded.indices)


def subset(names: Sequence[str]) -> pa.Schema:
    """Some of the columns, in this order. Raises KeyError."""
    return pa.schema([(name, FIELDS[name]) for name in names])


def type_at(kind: pa.DataType, path: Sequence[str]) -> pa.DataType | None:
    """Of a field within a type; None if there is none."""
    for name in path:
        at = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
        if at < 0:
            return None
        kind = kind.field(at).type
    return kind


def field_of(rows: pa.Table, source: str) -> Any:
    """A column or a field in it, without chunks; None if there is none."""
    name, *path = source.split(".")
    if name not in rows.column_names or type_at(rows.schema.field(name).type, path) is None:
        return None
    column = rows[name].combine_chunks()
    return pc.struct_field(column, path) if path else column
