"""Copies a journal from one store into another, empty one: every segment as it is, and the
metadata.

The copy gets the epoch, and the source a new one. So the positions of programs that read a queue
hold in the copy, and such a program notices when it meets the source again.

The one rule: at no time do both have the epoch. The copy has none, and can't be served, until it is
complete and was read again.
"""

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from mqks.broker.spine.log.pending import Entry, QueueState
from mqks.broker.spine.message.policy import Policy
from mqks.errors import CannotWrite, JournalDamaged, JournalFailed
from mqks.journal.segment import NewSegment
from mqks.journal.store import NAMED, Head, LastWords, Metadata, Store
from mqks.journal.stored import SegmentDamaged, head_bytes
from mqks.journal.survey import sections_of

BYTES_AT_ONCE: Final = 4 * 1024 * 1024
"""Size of the segments in one commit, unless a single one is larger."""
ROWS_AT_ONCE: Final = 1000

T = TypeVar("T")


class Copied(NamedTuple):
    queues: int
    segments: int
    bytes: int
    """Size of all segments."""


async def copy(source: Store, target: Store, progress: Callable[[int], object]) -> Copied:
    """Both are claimed; `progress` is called with the bytes that were copied, and with those that
    were verified.

    Raises JournalDamaged when the source is damaged, CannotWrite when the target is not empty,
    ClaimLost, JournalFailed.
    """
    found = await source.load()
    await _begin(target)
    written = _Digest()
    async for segments in _segments(source, found):
        if segments[0].id > written.end:
            await target.skip_to(segments[0].id)
        await target.commit(segments)
        await _go_on(target)
        written.add(segments, progress)
    _refuse_damage(source, found)
    await _copy_metadata(found, target)
    await target.skip_to(found.next_segment, found.next_queue_id)
    await _verify(found, written, target, progress)
    await source.begin()  # It is still claimed: so nobody has served it meanwhile.
    await source.become(secrets.token_hex(8))
    await target.become(found.epoch)
    return Copied(len(found.queues), written.count, written.bytes)


async def renew_epoch(store: Store) -> str:
    """Give a journal that was restored another epoch, and return it. Raises JournalDamaged."""
    found = await store.load()
    async for _ in store.segments(found):
        pass
    if found.damage:
        place, what = found.damage[0]
        raise JournalDamaged(f"{store.name} is damaged: {place}: {what}; it keeps its epoch")
    await store.begin()
    epoch = secrets.token_hex(8)
    await store.become(epoch)
    return epoch


async def _begin(target: Store) -> None:
    there = await target.load()
    async for _ in target.segments(there):
        there.damage.clear()
        there.next_segment = 0
    rows = there.bindings, there.errors, there.audit, there.schedules, there.results, there.batches
    if there.next_segment != 1 or there.next_queue_id != 1 or any(rows):
        raise CannotWrite(f"{target.name} has a journal already: name one that does not exist")
    await target.begin()
    await target.become("")


async def _segments(store: Store, metadata: Metadata) -> AsyncIterator[list[NewSegment]]:
    """All segments, those with consecutive ids together, up to `BYTES_AT_ONCE`. Raises
    JournalDamaged."""
    async for heads in store.segments(metadata):
        with _damage(store, metadata):
            for head in heads:
                _check(head)
            for some in _groups(heads):
                bodies = await store.bodies([head.id for head in some])
                yield [_whole(head.id, bodies[head.id]) for head in some]


def _check(head: Head) -> None:
    try:
        sections_of(head)
    except SegmentDamaged as error:
        raise SegmentDamaged(f"segment {head.id}: {error}") from None


def _groups(heads: Sequence[Head]) -> Iterator[list[Head]]:
    group: list[Head] = []
    for head in heads:
        size = sum(each.size for each in group) + head.size
        if group and (head.id != group[-1].id + 1 or size > BYTES_AT_ONCE):
            yield group
            group = []
        group.append(head)
    yield group


def _whole(segment_id: int, body: bytes) -> NewSegment:
    size = head_bytes(body)
    return NewSegment(segment_id, body[:size], [body[size:]] if body[size:] else [], len(body))


async def _go_on(target: Store) -> None:
    """Do what is due, such as the beat of a claim. A store that has not begun does it by itself."""
    if target.overdue:
        await target.tidy(idle=False)


async def _copy_metadata(found: Metadata, target: Store) -> None:
    for rows in _some(list(found.queues.values())):
        states = {row.id: QueueState(row.name, Policy.decode(row.policy)) for row in rows}
        await target.commit([], Entry(queues=dict(states)))
        numbers = [LastWords(row.id, row.next_seq, row.cursor) for row in rows]
        await target.commit([], Entry(), last_words=numbers)
    for bindings in _some(found.bindings):
        await target.commit([], Entry(bindings=dict.fromkeys(bindings, True)))
    for ids in _some(found.once):
        await target.commit([], Entry(once=ids))
    for name in NAMED:
        for named in _some([*getattr(found, name).items()]):
            entry = Entry()
            getattr(entry, name).update(named)
            await target.commit([], entry)
    for errors in _some(found.errors):
        await target.commit([], Entry(errors=errors))
    for audit in _some(found.audit):
        await target.commit([], Entry(audit=audit))


def _some(rows: list[T]) -> Iterator[list[T]]:
    return (rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE))


# -- verification


class _Digest:
    """Of all segments in order."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.end = 1
        """The id after the last."""
        self.hash = hashlib.sha256()

    def add(self, segments: Sequence[NewSegment], progress: Callable[[int], object]) -> None:
        for segment in segments:
            for part in (f"{segment.id} {segment.size} ".encode(), segment.head, *segment.texts):
                self.hash.update(part)
            self.count += 1
            self.bytes += segment.size
            self.end = segment.id + 1
            progress(segment.size)


async def _verify(
    wanted: Metadata,
    written: _Digest,
    target: Store,
    progress: Callable[[int], object],
) -> None:
    """Read everything again. Raises JournalFailed."""
    found, read = await target.load(), _Digest()
    async for segments in _segments(target, found):
        read.add(segments, progress)
        await _go_on(target)
    same_segments = (read.count, read.hash.digest()) == (written.count, written.hash.digest())
    if not same_segments or _plain(found) != _plain(wanted):
        raise JournalFailed(f"{target.name} has not what was written: it can't be used")


def _plain(metadata: Metadata) -> Metadata:
    """Without the epoch, which the copy does not have yet, and the order of what has none."""
    return replace(
        metadata,
        epoch="",
        queues=dict(sorted(metadata.queues.items())),
        bindings=sorted(metadata.bindings),
        damage=[damage for damage in metadata.damage if damage.place != "table meta"],
    )


@contextmanager
def _damage(store: Store, metadata: Metadata) -> Iterator[None]:
    try:
        yield
    except (SegmentDamaged, JournalFailed) as error:
        _refuse_damage(store, metadata, str(error))
        raise


def _refuse_damage(store: Store, metadata: Metadata, found: str = "") -> None:
    """Raise JournalDamaged if there is any."""
    places = [*metadata.damage, *metadata.notes]
    told = [*([found] if found else []), *(f"{place}: {what}" for place, what in places)]
    if told:
        raise JournalDamaged(
            f"{store.name} is damaged, so it is not copied: {told[0]}. mqks verify lists all "
            "damage; a server that is started with --salvage continues without it"
        )
