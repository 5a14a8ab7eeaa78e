"""Segments: what one group commit, or one compaction, writes about messages; a large one writes
several.

A segment is a head and a text. The head has everything but the messages themselves.

The one rule: a segment has the numbers of its messages and the numbers that are settled, so
segments mean the same in any order. `docs/storage.md` describes the format.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import mul
from typing import Final, NamedTuple

from mqks.broker.spine.base.ranges import Range
from mqks.broker.spine.message.mark import Mark
from mqks.errors import MqksError
from mqks.journal.marks import flags_of, mark_of
from mqks.limits import SEGMENT_BYTES_MAX
from mqks.protocol.lines import split

MAGIC: Final = b"MQS2"
MAGIC_OLD: Final = b"MQS1"
"""Sections of these segments have one list of marks."""
MAGIC_BATCHES: Final = b"MQS3"
"""Some of the messages are members of batches."""
HEADER: Final = struct.Struct("<4sI")
"""Magic, number of sections."""
SECTION: Final = struct.Struct("<QQQIIII")
"""Queue id, next sequence, cursor, number of runs, of ack ranges, of short and of long marks."""
SECTION_OLD: Final = struct.Struct("<QQQIII")
SECTION_BATCHES: Final = struct.Struct("<QQQIIIII")
"""One more: the number of member marks."""
RUN: Final = struct.Struct("<QIQQQ")
"""First number, count, time of arrival in microseconds, offset and length of the text."""
SHORT_MARK: Final = struct.Struct("<QIHHHB")
"""Number, version, retry, rejects, losses, flags: a mark without times and checksum."""
LONG_MARK: Final = struct.Struct("<QQIIIBQQQI")
"""As a short mark, wider; then when it is due, expires and joined, and the checksum of its id."""
MEMBER_MARK: Final = struct.Struct("<QQIIIBQQQIQ")
"""As a long mark, then the number of its batch."""
MARK_OLD: Final = struct.Struct("<QI")
"""Number, twice its retry; one more when it was redelivered."""
RANGE_BYTES: Final = 16


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


class NewSegment(NamedTuple):
    """Ids are consecutive and never used again; the pieces of `texts` follow one another."""

    id: int
    head: bytes
    texts: list[bytes]
    size: int

    def whole(self) -> tuple[int, int, bytes]:
        """Its id, and the checksum of head and text, and these."""
        body = b"".join([self.head, *self.texts])
        return self.id, checksum(self.id, body), body


class ArrivedRun(NamedTuple):
    """Messages to store."""

    first: int
    time_us: int
    lines: list[bytes]


class Section(NamedTuple):
    """The part of a segment about one queue."""

    queue_id: int
    next_seq: int
    cursor: int
    runs: list[ArrivedRun]
    acks: list[Range]
    marks: list[tuple[int, Mark]]


def encode(sections: Sequence[Section]) -> tuple[bytes, list[bytes]]:
    """Return the head and the pieces of the text. Queues that received the same list of messages
    share one copy."""
    marked = [_packed(section.marks) for section in sections]
    has_members = any(members for _, _, members in marked)
    magic, form = (MAGIC_BATCHES, SECTION_BATCHES) if has_members else (MAGIC, SECTION)
    pieces = [HEADER.pack(magic, len(sections))]
    texts: list[bytes] = []
    text_bytes = 0
    shared: dict[tuple[int, int, int], tuple[list[bytes], int, int]] = {}
    for section, (short, long, members) in zip(sections, marked, strict=True):
        queue_id, next_seq, cursor, runs, acks, _ = section
        counts = [len(runs), len(acks), len(short), len(long)]
        counts += [len(members)] if has_members else []
        pieces.append(form.pack(queue_id, next_seq, cursor, *counts))
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
        pieces += short
        pieces += long
        pieces += members
    return b"".join(pieces), texts


def _packed(
    marks: Sequence[tuple[int, Mark]],
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The short marks, the long marks and those of members."""
    short, long, members = list[bytes](), list[bytes](), list[bytes]()
    known, rest, to = None, b"", short
    for number, mark in marks:
        if mark is known:  # Most are the same object.
            to.append(number.to_bytes(8, "little") + rest)
            continue
        version, retry, rejects, losses, *_ = mark
        if mark.batch:
            to, stored = members, MEMBER_MARK.pack(number, *mark[:4], flags_of(mark), *mark[7:])
        elif any(mark[7:]) or version >> 32 or (retry | rejects | losses) >> 16:
            to, stored = long, LONG_MARK.pack(number, *mark[:4], flags_of(mark), *mark[7:11])
        else:
            to, stored = short, SHORT_MARK.pack(number, *mark[:4], flags_of(mark))
        to.append(stored)
        known, rest = mark, stored[8:]
    return short, long, members


def segments(sections: list[Section], first_id: int) -> list[tuple[NewSegment, list[Section]]]:
    """These sections as one segment, or as several of at most `SEGMENT_BYTES_MAX` each (or of a
    single larger message), each with its sections."""
    if not sections:
        return []
    encoded = _encoded(first_id, sections)
    if encoded.size <= SEGMENT_BYTES_MAX:
        return [(encoded, sections)]
    del encoded
    parts = enumerate(cut(sections, SEGMENT_BYTES_MAX), first_id)
    return [(_encoded(segment_id, part), part) for segment_id, part in parts]


def _encoded(segment_id: int, sections: Sequence[Section]) -> NewSegment:
    head, texts = encode(sections)
    return NewSegment(segment_id, head, texts, len(head) + sum(map(len, texts)))


def cut(sections: Sequence[Section], size_max: int) -> Iterator[list[Section]]:
    """Split sections into parts of about `size_max` bytes, or of a single larger message."""
    part: dict[int, Section] = {}
    room = size_max
    for size, piece in _pieces(sections, size_max):
        if part and size > room:
            yield list(part.values())
            part, room = {}, size_max
        room -= size
        for section in piece:
            known = part.setdefault(section.queue_id, section._replace(runs=[], acks=[], marks=[]))
            known.runs.extend(section.runs)
            known.acks.extend(section.acks)
            known.marks.extend(section.marks)
    yield list(part.values())


def _pieces(sections: Sequence[Section], size_max: int) -> Iterator[tuple[int, list[Section]]]:
    """The smallest parts and their sizes. Queues that share a text still share it."""
    texts: dict[tuple[int, int, int], list[tuple[Section, ArrivedRun]]] = {}
    count = max(1, size_max // MEMBER_MARK.size)
    for section in sections:
        bare = section._replace(runs=[], acks=[], marks=[])
        yield SECTION.size, [bare]
        for start in range(0, len(section.acks), count):
            acks = section.acks[start : start + count]
            yield RANGE_BYTES * len(acks), [bare._replace(acks=acks)]
        for start in range(0, len(section.marks), count):
            marks = section.marks[start : start + count]
            yield MEMBER_MARK.size * len(marks), [bare._replace(marks=marks)]
        for run in section.runs:
            key = (id(run.lines[0]), id(run.lines[-1]), len(run.lines))
            twins = texts.setdefault(key, [])
            if twins and twins[0][1].lines != run.lines:
                twins = texts[(len(texts), 0, 0)] = []
            twins.append((bare, run))
    for twins in texts.values():
        for start, lines, size in _stretches(twins[0][1].lines, size_max):
            yield (
                size + len(twins) * (SECTION.size + RUN.size),
                [
                    bare._replace(runs=[ArrivedRun(run.first + start, run.time_us, lines)])
                    for bare, run in twins
                ],
            )


def _stretches(lines: list[bytes], size_max: int) -> Iterator[tuple[int, list[bytes], int]]:
    """For each stretch the index of its first line, its lines, and its size."""
    start = size = 0
    for position, line in enumerate(lines):
        if size + len(line) >= size_max and position > start:
            yield start, lines[start:position], size
            start, size = position, 0
        size += len(line) + 1
    yield start, lines[start:], size


def checksum(segment_id: int, *pieces: bytes) -> int:
    """CRC-32 of id and body, whole or in pieces: a body under another id counts as damaged, too."""
    crc = zlib.crc32(segment_id.to_bytes(8, "little"))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


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
