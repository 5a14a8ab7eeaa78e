"""Segments: what one group commit, or one compaction, puts into one row.

The one rule: a segment says which numbers its messages have and which numbers are settled, so
segments mean the same in whatever order they are read. `docs/storage.md` tells the format.
"""

import struct
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

from mqks.broker.pending import Mark
from mqks.broker.ranges import Range
from mqks.errors import MqksError

MAGIC: Final = b"MQS1"
HEADER: Final = struct.Struct("<4sI")
"""Magic, number of sections."""
SECTION: Final = struct.Struct("<QQQIII")
"""Queue id, next sequence, cursor, number of runs, of ack ranges, of marks."""
RUN: Final = struct.Struct("<QIQQQ")
"""First number, count, time of arrival in microseconds, offset and length of the text."""
MARK: Final = struct.Struct("<QI")
"""Number, twice its retry; one more when it was redelivered, and `_HAS_ATTRIBUTES`."""
_HAS_ATTRIBUTES: Final = 1 << 31


class SegmentDamaged(MqksError):
    """A segment's bytes are not what was written."""


class StoredRun(NamedTuple):
    """Messages with consecutive numbers; their lines are `body[start:end]`, newlines between."""

    first: int
    total: int
    time_us: int
    start: int
    end: int

    def lines(self, body: bytes) -> list[bytes]:
        return body[self.start : self.end].split(b"\n")


class StoredSection(NamedTuple):
    queue_id: int
    next_seq: int
    cursor: int
    runs: list[StoredRun]
    acks: list[Range]
    marks: list[tuple[int, Mark]]


class Lines(NamedTuple):
    """Messages to store."""

    first: int
    time_us: int
    lines: list[bytes]


class Section(NamedTuple):
    """What a segment says of one queue."""

    queue_id: int
    next_seq: int
    cursor: int
    runs: list[Lines]
    acks: list[Range]
    marks: list[tuple[int, Mark]]


def encode(sections: Sequence[Section]) -> bytes:
    """Return the body. Queues that got the very same messages share one copy of the text."""
    pieces = [HEADER.pack(MAGIC, len(sections))]
    texts: list[bytes] = []
    text_bytes = 0
    shared: dict[tuple[int, int, int], tuple[list[bytes], int, int]] = {}
    for section in sections:
        runs, acks, marks = section.runs, section.acks, section.marks
        pieces.append(
            SECTION.pack(
                section.queue_id,
                section.next_seq,
                section.cursor,
                len(runs),
                len(acks),
                len(marks),
            )
        )
        for first, time_us, lines in runs:
            key = (id(lines[0]), id(lines[-1]), len(lines))
            twin = shared.get(key)
            if twin is not None and twin[0] == lines:
                _, offset, length = twin
            else:
                text = b"\n".join(lines)
                offset, length = text_bytes, len(text)
                texts.append(text)
                text_bytes += length
                shared[key] = (lines, offset, length)
            pieces.append(RUN.pack(first, len(lines), time_us, offset, length))
        if acks:
            pieces.append(struct.pack(f"<{2 * len(acks)}Q", *chain.from_iterable(acks)))
        pieces.extend(
            MARK.pack(number, 2 * retry + redelivered + _HAS_ATTRIBUTES * attributes)
            for number, (retry, redelivered, attributes) in marks
        )
    return b"".join(pieces + texts)


def checksum(segment_id: int, body: bytes) -> int:
    """CRC-32 over id and body: a body under another's id is damage, too."""
    return zlib.crc32(body, zlib.crc32(segment_id.to_bytes(8, "little")))


def decode(body: bytes) -> list[StoredSection]:
    """Read what a segment says, leaving its text where it is. Raises SegmentDamaged."""
    try:
        return _decode(body)
    except struct.error as error:
        raise SegmentDamaged("ends too early") from error


def runs_of(body: bytes, queue_id: int) -> list[StoredRun]:
    """One queue's messages in a segment, in the order of their numbers."""
    return sorted(
        run for section in decode(body) if section.queue_id == queue_id for run in section.runs
    )


def _decode(body: bytes) -> list[StoredSection]:
    magic, section_count = HEADER.unpack_from(body)
    if magic != MAGIC:
        raise SegmentDamaged("does not begin as a segment")
    position = HEADER.size
    sections = []
    for _ in range(section_count):
        queue_id, next_seq, cursor, runs, acks, marks = SECTION.unpack_from(body, position)
        position += SECTION.size
        stored_runs = [RUN.unpack_from(body, position + index * RUN.size) for index in range(runs)]
        position += runs * RUN.size
        numbers = struct.unpack_from(f"<{2 * acks}Q", body, position)
        position += 16 * acks
        stored_marks = [_mark(body, position + index * MARK.size) for index in range(marks)]
        position += marks * MARK.size
        sections.append(
            (
                queue_id,
                next_seq,
                cursor,
                stored_runs,
                list(zip(numbers[::2], numbers[1::2], strict=True)),
                stored_marks,
            )
        )
    # The text begins where the last section ends.
    return [
        StoredSection(
            queue_id,
            next_seq,
            cursor,
            [
                StoredRun(first, total, time_us, position + offset, position + offset + length)
                for first, total, time_us, offset, length in runs
            ],
            acks,
            marks,
        )
        for queue_id, next_seq, cursor, runs, acks, marks in sections
    ]


def _mark(body: bytes, position: int) -> tuple[int, Mark]:
    number, stored = MARK.unpack_from(body, position)
    retry = (stored & ~_HAS_ATTRIBUTES) // 2
    return number, Mark(retry, stored % 2 == 1, stored >= _HAS_ATTRIBUTES)
