"""Segments: what one group commit, or one compaction, writes about messages; a large one writes
several.

A segment is a head and a text. The head has everything but the messages themselves.

The one rule: a segment has the numbers of its messages and the numbers that are settled, so
segments mean the same in any order. `docs/storage.md` describes the format.
"""

import struct
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

from mqks.broker.spine.base.ranges import Range
from mqks.broker.spine.message.mark import Mark
from mqks.journal.marks import flags_of

MAGIC: Final = b"MQS2"
MAGIC_BATCHES: Final = b"MQS3"
"""Some of the messages are members of batches."""
HEADER: Final = struct.Struct("<4sI")
"""Magic, number of sections."""
SECTION: Final = struct.Struct("<QQQIIII")
"""Queue id, next sequence, cursor, number of runs, of ack ranges, of short and of long marks."""
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
RANGE_BYTES: Final = 16


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


def checksum(segment_id: int, *pieces: bytes) -> int:
    """CRC-32 of id and body, whole or in pieces: a body under another id counts as damaged, too."""
    crc = zlib.crc32(segment_id.to_bytes(8, "little"))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def new_segment(segment_id: int, sections: Sequence[Section]) -> NewSegment:
    head, texts = encode(sections)
    return NewSegment(segment_id, head, texts, len(head) + sum(map(len, texts)))
