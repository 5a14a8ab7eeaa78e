"""SQLite's WAL, read to tell whether commits are lost in it.

SQLite takes a WAL to end before the first frame whose checksum is wrong, and says nothing of what
stands behind it. (https://www.sqlite.org/fileformat2.html#the_write_ahead_log)

Each checksum continues the one of the frame before, so a frame behind a damaged place can still be
told to follow its predecessor. A commit is synced before the next one begins, with synchronous =
full: so what a power cut may leave torn is the last commit, and nothing follows that.

The one rule: a WAL that a power cut may have left is told, and never refused.
"""

import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

_HEADER: Final = struct.Struct(">8I")
"""Magic, version, page size, checkpoints, two salts, two checksums."""
_FRAME: Final = struct.Struct(">6I")
"""Page, size of the database after a commit or 0, two salts, two checksums."""
_MAGIC: Final = 0x377F0682
"""One more when checksums are computed from big-endian words."""
_AT_ONCE: Final = 256
"""Frames: 1 MiB."""
PAGE_BYTES: Final = 4096


class Finding(NamedTuple):
    """What is wrong with a WAL."""

    frame: int
    """The first one that SQLite does not believe, from 1 on; 0 is the header."""
    commits: int
    """So many are recognised from there on, at least, and are not read."""
    is_torn: bool
    """It may be the last commit alone, cut short by a power cut before anybody was told of it."""

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


def look(path: Path) -> Finding | None:
    """What is wrong, or None. Raises OSError, for a missing file as well."""
    with path.open("rb") as file:
        return _look(file)


def _look(file: BinaryIO) -> Finding | None:
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
    # As good as all machines compute from little-endian words.
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
        if after_commit and frame.follows:
            is_torn = False
        # A checksum has no salts in it: where they alone are wrong, they are what is damaged.
        is_ours = frame.salts == salts or (is_ours and frame.follows)
        after_commit = is_ours and frame.is_commit
        commits += after_commit
    return Finding(first, commits, is_torn) if commits else None


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
    """SQLite's checksums over frames of this size, or a header, each continuing one of `sums`.

    All frames are done at once, each in 64 bits of large integers: 10 µs for each, and 100 µs if
    done one by one. Of a frame the first 8 bytes count, and the page.
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
