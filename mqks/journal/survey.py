"""Builds an index from all segments.

The one rule: first all messages are placed, and only then acks and marks are applied, since a
segment may settle messages of a later one.
"""

from collections import deque
from collections.abc import Mapping

from mqks.broker.spine.base.ranges import subtract, union
from mqks.broker.spine.message.policy import Policy
from mqks.journal.dropping import forget_queue
from mqks.journal.index import Index, QueueIndex, Segment
from mqks.journal.living import living_of
from mqks.journal.marks import Marks
from mqks.journal.store import Damage, Head, QueueRow, shown
from mqks.journal.stored import SegmentDamaged, StoredSection, decode
from mqks.limits import SEQ_MAX


def sections_of(head: Head) -> list[StoredSection]:
    """The sections of a segment. Raises SegmentDamaged."""
    if head.damage:
        raise SegmentDamaged(head.damage)
    return decode(head.head)


class Survey:
    """Fills an index. Sections of queues that are not among `queues` are ignored: these queues were
    deleted. But queues with ids from `queue_ids_end` on were not; they get rows again."""

    def __init__(self, index: Index, queues: dict[int, QueueRow], queue_ids_end: int) -> None:
        self.index = index
        self.queues = queues
        self.marks: dict[int, Marks] = {}
        """By queue id. Some may belong to settled messages."""
        self._queue_ids_end = queue_ids_end
        self._revived: set[int] = set()
        self._said: deque[tuple[Segment, list[StoredSection]]] = deque()
        for row in queues.values():
            index.queues[row.id] = QueueIndex(row.next_seq, row.cursor)

    def place(self, segment_id: int, size: int, sections: list[StoredSection]) -> None:
        """Add the messages of one segment, which has `size` bytes."""
        segment = self.index.add_segment(segment_id, size)
        # Runs take most of the memory, and are no longer needed.
        self._said.append((segment, [section._replace(runs=[]) for section in sections]))
        for section in sections:
            if section.queue_id not in self.index.queues:
                if section.queue_id < self._queue_ids_end:
                    continue
                self._revived.add(section.queue_id)
            queue = self.index.touch(segment, section.queue_id, section.next_seq, section.cursor)
            for run in section.runs:
                size = run.end - run.start
                self.index.add_messages(segment, queue, run.first, run.total, size, run.time_us)

    def finish(self) -> list[Damage]:
        """All segments are placed: apply their acks and marks. Return lost rows as damage."""
        while self._said:
            segment, sections = self._said.popleft()
            for section in sections:
                queue = self.index.queues.get(section.queue_id)
                if queue is None:
                    continue
                self.index.settle(segment, queue, section.acks)
                queue.settled_end = max(queue.settled_end, sum(max(section.acks, default=(0, 0))))
                self._mark(segment, queue, section)
        for segment in self.index.segments.values():
            self.index.update_fate(segment)
        return self._revive()

    def _mark(self, segment: Segment, queue: QueueIndex, section: StoredSection) -> None:
        if not any(section.marks):
            return
        known = self.marks.setdefault(section.queue_id, Marks())
        self.index.mark(segment, queue, known.taken(section.marks.items()))

    def _revive(self) -> list[Damage]:
        """Give queues that lost their rows, and hold messages, rows with new names; forget the
        others."""
        damage = []
        names = {row.name for row in self.queues.values()}
        for queue_id in sorted(self._revived):
            if any(living_of(self.index.queues[queue_id], 0, SEQ_MAX)):
                name = b"queue#%d" % queue_id
                while name in names:
                    name += b"#"
                names.add(name)
                self.queues[queue_id] = QueueRow(queue_id, name)
                what = f"its row is lost; its messages are in the queue {shown(name)} now"
                damage.append(Damage(f"queue with id {queue_id}", what))
            else:
                forget_queue(self.index, queue_id)
        return damage

    def missing(self) -> dict[int, Damage]:
        """Queue id → damage, for queues with undelivered numbers that are in no segment: these
        messages are lost, unless the queue may have settled them."""
        damage = {}
        for row in self.queues.values():
            queue = self.index.queues[row.id]
            spans = queue.overlapping(queue.cursor, queue.next_seq)
            there = union((span.first, span.end - span.first) for span in spans)
            lost = sum(n for _, n in subtract(queue.cursor, queue.next_seq, there))
            if lost and not Policy.decode(row.policy).is_sparse:
                what = f"{lost} ready messages are missing"
                damage[row.id] = Damage(f"queue {shown(row.name)}", what)
        return damage


def guess(head: Head, queues: Mapping[int, QueueRow]) -> str:
    """Why a segment is damaged, and what it held, as far as that can be read."""
    why, sections = head.damage, list[StoredSection]()
    try:
        sections = decode(head.head)
    except SegmentDamaged as error:
        why = why or str(error)
    told = [
        f"{sum(run.total for run in section.runs)} messages and "
        f"{sum(count for _, count in section.acks)} acks of queue "
        f"{shown(queues[section.queue_id].name)}"
        for section in sections[:20]
        if section.queue_id in queues
    ]
    held = ", ".join(told) or "content that can't be read any more"
    return f"{why}; it held {held}"
