"""Checks whether commits are lost in SQLite's WAL.

SQLite takes a WAL to end before the first frame with a wrong checksum, and does not report what
follows. (https://www.sqlite.org/fileformat2.html#the_write_ahead_log)

Each checksum continues that of the frame before, so a frame after a damaged place can still be
shown to follow its predecessor. With synchronous = full a commit is synced before the next one
begins, so a power cut can tear only the last commit, and nothing follows it but frames of before
the WAL began again.

The one rule: a WAL that a power cut may have left is reported, and never refused.
"""

import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from mqks.durable import no_link

_HEADER: Final = struct.Struct(">8I")
"""Magic, version, page size, checkpoints, two salts, two checksums."""
_FRAME: Final = struct.Struct(">6I")
"""Page, size of the database after a commit or 0, two salts, two checksums."""
_MAGIC: Final = 0x377F0682
"""One more when checksums are computed from big-endian words."""
_AT_ONCE: Final = 256
"""Frames: 1 MiB."""
PAGE_BYTES: Final = 4096
TURNS_MAX: Final = 1_000_000
"""So often a WAL has begun again, at most, since a frame was written that is still there."""


class Finding(NamedTuple):
    """What is wrong with a WAL."""

    frame: int
    """The first frame that SQLite does not accept, from 1 on; 0 is the header."""
    commits: int
    """At least this many commits from there on exist, and are not read."""
    is_torn: bool
    """It may be only the last commit, torn by a power cut before it was confirmed."""

    def __str__(self) -> str:
        where = f"frame {self.frame}" if self.frame else "its header"
        lost = f"{self.commits} commits can't be read from there on"
        if self.is_torn:
            return f"ends in a torn commit: {where} is not whole, {lost}"
        return f"is damaged: {where} is not whole, {lost}: confirmed messages may be missing"


class _Frame(NamedTuple):
    is_commit: bool
    salts: tuple[int, int]
    follows: bool
    """Its checksum continues that of the frame before."""


def check(path: Path) -> Finding | None:
    """The damage, or None. Raises OSError, also for a missing file."""
    with open(path, "rb", opener=no_link) as file:
        return _check(file)


def _check(file: BinaryIO) -> Finding | None:
    raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        return None
    magic, _, page_bytes, _, salt1, salt2, *sums = _HEADER.unpack(raw)
    swapped = bool(magic & 1)
    is_header_whole = magic & ~1 == _MAGIC and _followed(raw[:24], 24, [(0, 0)], swapped) == [
        tuple(sums)
    ]
    if is_header_whole and page_bytes != PAGE_BYTES:
        return None  # Another program's.
    salts: tuple[int, int] | None = (salt1, salt2) if is_header_whole else None
    # Nearly all machines compute checksums from little-endian words.
    frames = _frames(file, (sums[0], sums[1]), swapped and is_header_whole)
    is_believed = is_ours = is_header_whole
    is_torn, after_commit, commits, first = True, False, 0, 0
    for number, frame in enumerate(frames, 1):
        if is_believed:
            is_believed = frame.follows and frame.salts == salts
            first = number
        if is_believed:
            continue
        salts = salts or frame.salts
        # What a frame has overwritten in part is followed by what followed that before.
        follows = frame.follows and not _is_older(frame.salts, salts)
        if after_commit and follows:
            is_torn = False
        # A checksum does not cover the salts: if only they are wrong, they are damaged.
        is_ours = frame.salts == salts or (is_ours and follows)
        after_commit = is_ours and frame.is_commit
        commits += after_commit
    return Finding(first, commits, is_torn) if commits else None


def _is_older(salts: tuple[int, int], than: tuple[int, int]) -> bool:
    """Whether a frame with them was there before the WAL began again: each time, 1 is added to the
    first of its salts, and the second is random."""
    return 0 < (than[0] - salts[0]) % (1 << 32) <= TURNS_MAX and salts[1] != than[1]


def _frames(file: BinaryIO, sums: tuple[int, int], swapped: bool) -> Iterator[_Frame]:
    """`sums` are those of the header."""
    size = _FRAME.size + PAGE_BYTES
    while raw := file.read(_AT_ONCE * size):
        raw = raw[: len(raw) // size * size]
        told = [_FRAME.unpack_from(raw, at) for at in range(0, len(raw), size)]
        before = [sums, *((sum1, sum2) for *_, sum1, sum2 in told)]
        computed = _followed(raw, size, before[:-1], swapped)
        for (_, pages, salt1, salt2, *_), its, right in zip(
            told, before[1:], computed, strict=True
        ):
            yield _Frame(pages > 0, (salt1, salt2), its == right)
        sums = before[-1]


def _followed(
    raw: bytes, size: int, sums: list[tuple[int, int]], swapped: bool
) -> list[tuple[int, int]]:
    """SQLite's checksums of frames of this size, or of a header, each continuing one of `sums`.

    All frames are computed at once, each in 64 bits of large integers: 10 µs per frame, instead of
    100 µs one by one. The checksum covers the first 8 bytes of a frame, and the page.
    """
    if swapped:
        words = array("I", raw)
        words.byteswap()
        raw = words.tobytes()
    pairs, stride, count = memoryview(raw).cast("Q"), size // 8, len(sums)
    mask = int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * count, "little")
    sum1 = int.from_bytes(struct.pack(f"<{count}Q", *(first for first, _ in sums)), "little")
    sum2 = int.from_bytes(struct.pack(f"<{count}Q", *(second for _, second in sums)), "little")
    for place in range(stride):
        if size > _FRAME.size and 0 < place < _FRAME.size // 8:
            continue
        both = int.from_bytes(pairs[place::stride].tobytes(), "little")
        sum1 = (sum1 + (both & mask) + sum2) & mask
        sum2 = (sum2 + (both >> 32 & mask) + sum1) & mask
    firsts = struct.unpack(f"<{count}Q", sum1.to_bytes(8 * count, "little"))
    seconds = struct.unpack(f"<{count}Q", sum2.to_bytes(8 * count, "little"))
    return list(zip(firsts, seconds, strict=True))
