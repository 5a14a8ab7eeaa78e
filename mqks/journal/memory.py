"""A store in memory: for tests, and as a minimal example of a store.

The one rule: only the last one who opened it has the claim.
"""

import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from anyio.lowlevel import checkpoint

from mqks.broker.spine.log.pending import Entry
from mqks.errors import ClaimLost, JournalFailed
from mqks.journal.segment import NewSegment
from mqks.journal.store import (
    NAMED,
    Head,
    LastWords,
    Metadata,
    Report,
    Store,
    changed_queues,
    keep_queues,
)
from mqks.settings import Settings


class Memory:
    """The data that survives a server. `open` is an `OpenStore`."""

    def __init__(self) -> None:
        self.metadata = Metadata(epoch=secrets.token_hex(8))
        self.segments: dict[int, tuple[bytes, bytes]] = {}
        """Id → head and text."""
        self.holder: Store | None = None

    async def open(self, settings: Settings, report: Report) -> Store:
        self.holder = MemoryStore(self, settings)
        return self.holder


class MemoryStore(Store):
    def __init__(self, memory: Memory, settings: Settings) -> None:
        self.name = "memory"
        self._memory = memory
        self._once_ids_max = settings.once_ids_max
        self._errors_kept_max = settings.errors_kept_max
        self._audit_kept_max = settings.audit_kept_max

    # -- starting

    async def load(self) -> Metadata:
        known = self._memory.metadata
        loaded = replace(
            known,
            queues=dict(known.queues),
            queue_ids_end=known.next_queue_id,
            damage=[],
            notes=[],
        )
        for name in NAMED:
            setattr(loaded, name, dict(getattr(known, name)))
        return loaded

    async def segments(self, metadata: Metadata) -> AsyncIterator[Sequence[Head]]:
        for segment_id, (head, text) in sorted(self._memory.segments.items()):
            yield [Head(segment_id, len(head) + len(text), head)]

    async def salvage(self, metadata: Metadata, damaged: Sequence[int]) -> None:
        self._memory.metadata = replace(metadata, queues=dict(metadata.queues))
        for segment_id in damaged:
            del self._memory.segments[segment_id]

    # -- writing

    async def commit(
        self,
        segments: Sequence[NewSegment],
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        last_words: Iterable[LastWords] = (),
    ) -> None:
        await checkpoint()
        memory, kept = self._memory, self._memory.metadata
        if memory.holder is not self:
            raise ClaimLost("another process has opened this store")
        if missing := set(drop) - memory.segments.keys():
            raise JournalFailed(f"segments {sorted(missing)} are missing")
        for segment in segments:
            memory.segments[segment.id] = segment.head, b"".join(segment.texts)
            kept.next_segment = segment.id + 1
        for segment_id in drop:
            del memory.segments[segment_id]
        entry = entry or Entry()
        kept.next_queue_id = max(kept.next_queue_id, *(each + 1 for each in entry.queues), 1)
        keep_queues(kept.queues, changed_queues(kept.queues, last_words, entry.queues))
        bound = dict.fromkeys(kept.bindings, True) | entry.bindings
        kept.bindings = [key for key, is_bound in bound.items() if is_bound]
        for name in NAMED:
            rows = getattr(kept, name) | getattr(entry, name)
            setattr(kept, name, {each: row for each, row in rows.items() if row is not None})
        once = kept.once + entry.once
        kept.once = once[-self._once_ids_max or len(once) :]
        errors = kept.errors + [record._replace(user=None) for record in entry.errors]
        kept.errors = errors[-self._errors_kept_max or len(errors) :]
        kept.audit = [*deque(kept.audit + entry.audit, self._audit_kept_max)]

    async def become(self, epoch: str) -> None:
        self._memory.metadata.epoch = epoch

    async def skip_to(self, segment_id: int, queue_id: int = 1) -> None:
        kept = self._memory.metadata
        kept.next_segment = segment_id
        kept.next_queue_id = max(kept.next_queue_id, queue_id)

    # -- reading

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        await checkpoint()
        there = self._memory.segments
        return {each: b"".join(there[each]) for each in ids if each in there}
