"""Segments as they are stored: their heads are read, and their texts where somebody asks for lines.

The one rule: what is not as it was written is damaged, and never guessed.
"""

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise, repeat
from operator import mul
from typing import Final, NamedTuple

from mqks.broker.spine.base.ranges import Range
from mqks.broker.spine.message.mark import Mark
from mqks.errors import MqksError
from mqks.journal.marks import mark_of
from mqks.journal.segment import (
    HEADER,
    LONG_MARK,
    MAGIC,
    MAGIC_BATCHES,
    MEMBER_MARK,
    RANGE_BYTES,
    RUN,
    SECTION,
    SECTION_BATCHES,
    SHORT_MARK,
)
from mqks.protocol.lines import split

MAGIC_OLD: Final = b"MQS1"
"""Sections of these segments have one list of marks."""
SECTION_OLD: Final = struct.Struct("<QQQIII")
MARK_OLD: Final = struct.Struct("<QI")
"""Number, twice its retry; one more when it was redelivered."""


class SegmentDamaged(MqksError):
    """The bytes of a segment are not those that were written."""


class StoredRun(NamedTuple):
    """Messages with consecutive numbers. Their lines are `body[start:end]`, separated by newlines.
    `body` is the head followed by the text."""

    first: int
    total: int
    time_us: int
    start: int
    end: int

    def lines(self, body: bytes) -> list[bytes]:
        return split(body[self.start : self.end])


class StoredMarks(NamedTuple):
    """Marks in their stored form, which takes a fifth of the memory."""

    short: bytes = b""
    long: bytes = b""
    members: bytes = b""
    old: bytes = b""

    def items(self) -> Iterator[tuple[int, Mark]]:
        for number, stored in MARK_OLD.iter_unpack(self.old):
            yield number, Mark(stored, retry=stored // 2, redelivered=stored % 2 == 1)
        stored = (self.short, SHORT_MARK), (self.long, LONG_MARK), (self.members, MEMBER_MARK)
        for marks, form in stored:
            for number, *fields in form.iter_unpack(marks):
                yield number, mark_of(*fields)


class StoredSection(NamedTuple):
    queue_id: int
    next_seq: int
    cursor: int
    runs: list[StoredRun]
    acks: list[Range]
    marks: StoredMarks


def decode(body: bytes) -> list[StoredSection]:
    """Decode the head of a segment; any bytes may follow it. Raises SegmentDamaged."""
    try:
        return _decode(body)
    except (struct.error, MemoryError) as error:
        raise SegmentDamaged("ends too early") from error


def runs_of(body: bytes, queue_id: int) -> list[StoredRun]:
    """One queue's messages in a segment, in the order of their numbers."""
    return sorted(
        run for section in decode(body) if section.queue_id == queue_id for run in section.runs
    )


def head_bytes(body: bytes) -> int:
    """The length of the head of a segment. Raises SegmentDamaged."""
    try:
        return _layout(body)[-1]
    except struct.error as error:
        raise SegmentDamaged("ends too early") from error


class _Form(NamedTuple):
    """How the sections of a segment are stored, by its magic."""

    section: struct.Struct
    marks: tuple[struct.Struct, ...]
    names: tuple[str, ...] = ("short", "long", "members")
    """Of the lists of marks, in `StoredMarks`."""


_FORMS: Final = {
    MAGIC_OLD: _Form(SECTION_OLD, (MARK_OLD,), ("old",)),
    MAGIC: _Form(SECTION, (SHORT_MARK, LONG_MARK)),
    MAGIC_BATCHES: _Form(SECTION_BATCHES, (SHORT_MARK, LONG_MARK, MEMBER_MARK)),
}


def _layout(body: bytes) -> tuple[int, _Form, tuple[int, ...], int]:
    """The number of sections, the form of each, the sizes of what they list, and the length of the
    head."""
    magic, section_count = HEADER.unpack_from(body)
    form = _FORMS.get(magic)
    if form is None:
        raise SegmentDamaged("does not begin as a segment")
    sizes = (RUN.size, RANGE_BYTES, *(mark.size for mark in form.marks))
    text = HEADER.size
    for _ in range(section_count):
        _, _, _, *counts = form.section.unpack_from(body, text)
        text += form.section.size + sum(map(mul, counts, sizes))
    if text > len(body):
        raise SegmentDamaged("ends too early")
    return section_count, form, sizes, text


def _decode(body: bytes) -> list[StoredSection]:
    section_count, form, sizes, text = _layout(body)
    sections, at = [], HEADER.size
    for _ in range(section_count):
        queue_id, next_seq, cursor, *counts = form.section.unpack_from(body, at)
        runs_at, acks_at, *marks_at = accumulate(
            map(mul, counts, sizes), initial=at + form.section.size
        )
        at = marks_at[-1]
        numbers = struct.unpack_from(f"<{2 * counts[1]}Q", body, acks_at)
        lists = [body[start:end] for start, end in pairwise(marks_at)]
        sections.append(
            StoredSection(
                queue_id,
                next_seq,
                cursor,
                [
                    StoredRun(first, total, time_us, text + offset, text + offset + length)
                    for first, total, time_us, offset, length in map(
                        RUN.unpack_from, repeat(body), range(runs_at, acks_at, RUN.size)
                    )
                ],
                list(zip(numbers[::2], numbers[1::2], strict=True)),
                StoredMarks(**dict(zip(form.names, lists, strict=False))),
            )
        )
    return sections
