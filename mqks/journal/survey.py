"""From segments to an index: what all of them together say of each queue.

The one rule: first every message finds its place, and only then acks and marks are applied, since
a segment may settle what a later one holds.
"""

from collections.abc import Mapping

from mqks.broker.pending import Mark
from mqks.broker.ranges import Range, subtract, union
from mqks.journal.index import Index, QueueIndex, Segment
from mqks.journal.segment import SegmentDamaged, StoredSection, checksum, decode
from mqks.journal.tables import shown
from mqks.limits import SEQ_MAX


def checked(segment_id: int, crc: object, body: object) -> list[StoredSection]:
    """What a row of `segment` says. Raises SegmentDamaged."""
    if not isinstance(body, bytes) or checksum(segment_id, body) != crc:
        raise SegmentDamaged("its checksum does not match")
    return decode(body)


class Survey:
    """Fills an index whose `queues` are those that exist. What is said of others is passed over:
    they were deleted. But those with ids from `queue_ids_end` on never were; they are `revived`."""

    def __init__(self, index: Index, queue_ids_end: int = SEQ_MAX) -> None:
        self.index = index
        self.revived: set[int] = set()
        self._queue_ids_end = queue_ids_end
        self.marks: dict[int, dict[int, Mark]] = {}
        """Queue id → number → its highest mark."""
        self._said: list[tuple[Segment, list[StoredSection]]] = []

    def place(self, segment_id: int, size: int, sections: list[StoredSection]) -> None:
        """The messages of one segment, of `size` bytes, lie there."""
        segment = self.index.add_segment(segment_id, size)
        self._said.append((segment, sections))
        for section in sections:
            if section.queue_id not in self.index.queues:
                if section.queue_id < self._queue_ids_end:
                    continue
                self.revived.add(section.queue_id)
            queue = self.index.touch(segment, section.queue_id, section.next_seq, section.cursor)
            for run in section.runs:
                size = run.end - run.start
                self.index.add_messages(segment, queue, run.first, run.total, size, run.time_us)

    def finish(self) -> None:
        """All segments are placed: now their acks and marks count."""
        for segment, sections in self._said:
            for section in sections:
                queue = self.index.queues.get(section.queue_id)
                if queue is None:
                    continue
                for first, count in section.acks:
                    self.index.settle(segment, queue, first, count)
                for number, mark in section.marks:
                    self.index.mark(segment, queue, number)
                    known = self.marks.setdefault(section.queue_id, {})
                    known[number] = max(mark, known.get(number, mark))
        for segment, _ in self._said:
            self.index.look_at(segment)
        self._said.clear()

    def name_revived(self, names: Mapping[int, bytes]) -> dict[int, bytes]:
        """Names for those that hold anything; the others are let go. `names` are those in use."""
        named = {}
        for queue_id in sorted(self.revived):
            if any(span.living() for span in self.index.queues[queue_id].spans):
                name = b"queue#%d" % queue_id
                while name in names.values():
                    name += b"#"
                named[queue_id] = name
            else:
                self.index.forget_queue(queue_id)
        return named


def missing(queue: QueueIndex) -> list[Range]:
    """Numbers that were never delivered and are in no segment: these messages are lost."""
    there = [
        (span.first, span.end - span.first)
        for span in queue.overlapping(queue.cursor, queue.next_seq)
    ]
    return subtract(queue.cursor, queue.next_seq, union(there))


def guess(body: object, names: Mapping[int, bytes]) -> str:
    """What a damaged segment says that it held, as far as that can be read; `names` by id."""
    try:
        sections = decode(body) if isinstance(body, bytes) else []
    except (SegmentDamaged, MemoryError):
        sections = []
    told = [
        f"{sum(run.total for run in section.runs)} messages and "
        f"{sum(count for _, count in section.acks)} acks of queue "
        f"{shown(names[section.queue_id])}"
        for section in sections[:20]
        if section.queue_id in names
    ]
    return ", ".join(told) or "what can't be read any more"
