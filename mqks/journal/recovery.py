"""Restores a broker from the journal, to its state at the last commit.

The one rule: damage is reported, and then refused or, with `--salvage`, set aside; nothing is
skipped silently.

A start reads the head of each segment and no message: what is alive follows from runs, acks and
marks, and bodies are paged in when a consumer arrives. So its time depends on commits, not bytes.

First the claim, since before it another broker may still write. Then every segment is placed in the
index, in any order: an entry says the same whether it comes first or last (`log/pending.py`), so a
rewritten segment needs no place among the old ones. Only when all are there, gaps can be told from
what was settled: a number below the queue's next that is in no segment is lost, or its segment is.

A start that refuses damage has changed no segment: they are left for a tool or a backup. With
`--salvage` damaged ones are set aside and what is lost is settled (`Store.salvage`), so that the
next start finds no gap and needs no `--salvage`.

The broker gets its state last. A message below the cursor that has neither ack nor mark was with a
consumer at the crash, so it returns to its place, with one more retry.
"""

import secrets
from itertools import chain, groupby
from operator import itemgetter

from mqks.broker.broker import Broker
from mqks.broker.spine.base.ranges import numbers
from mqks.broker.spine.base.turns import finish
from mqks.broker.spine.message.mark import NO_MARK, Mark
from mqks.broker.spine.message.policy import Policy
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.recovery import restore
from mqks.journal.compaction import Compaction
from mqks.journal.index import Index, QueueIndex, Span
from mqks.journal.journal import Journal
from mqks.journal.living import holes, living_of
from mqks.journal.marks import NO_MARKS, Marks
from mqks.journal.store import Damage, Metadata, Report, refuse
from mqks.journal.stored import SegmentDamaged
from mqks.journal.survey import Survey, guess, sections_of
from mqks.limits import SCHEDULED_SEQ, SEQ_MAX


class Recovery:
    """One start of one server. `report` is called with a line for each damaged place."""

    def __init__(self, journal: Journal, broker: Broker, report: Report) -> None:
        self._journal = journal
        self._store = journal.store
        self._index = journal.index
        self._broker = broker
        self._report = report
        self._damaged: list[int] = []

    async def run(self, *, salvage: bool, wait: bool = False) -> None:
        """Claim the store, and restore queues, bindings, policies and messages; unacked messages
        return to their places with one more retry.

        While another process has the store, wait. Raises DatabaseLocked, unless `wait`;
        JournalDamaged, unless `salvage`; JournalFailed when what is salvaged can't be written.
        """
        store = self._store
        await store.claim(wait=wait)
        metadata = await store.load()
        survey = Survey(self._index, metadata.queues, metadata.queue_ids_end)
        metadata.damage += await self._place(survey, metadata)
        metadata.damage += survey.finish()
        gaps = survey.missing()
        lost = [*metadata.damage, *gaps.values()]
        if not salvage:
            refuse(store.name, lost, self._report)
        if lost or (metadata.notes and salvage):
            self._settle(metadata, gaps)
            await store.salvage(metadata, self._damaged)
            self._tell("salvaged without it: ", lost)
        self._tell("", metadata.notes)
        self._restore(metadata, survey, gaps)
        await store.begin()
        await Compaction(self._journal).drop_settled()

    def _tell(self, outcome: str, damage: list[Damage]) -> None:
        for place, what in damage:
            self._report(f"{outcome}{place}: {what}")

    async def _place(self, survey: Survey, metadata: Metadata) -> list[Damage]:
        """Check and place every segment; return the damage."""
        damage = []
        async for heads in self._store.segments(metadata):
            for head in heads:
                self._journal.next_segment = head.id + 1
                try:
                    survey.place(head.id, head.size, sections_of(head))
                except SegmentDamaged:
                    self._damaged.append(head.id)
                    damage.append(Damage(f"segment {head.id}", guess(head, metadata.queues)))
        return damage

    def _settle(self, metadata: Metadata, gaps: dict[int, Damage]) -> None:
        """Settle what is lost, so that a gap is reported once: afterwards the queue has no
        undelivered messages."""
        metadata.epoch = metadata.epoch or secrets.token_hex(8)
        queues = metadata.queues
        metadata.next_queue_id = max(metadata.next_queue_id, *(i + 1 for i in queues), 1)
        for queue_id in gaps:
            next_seq = self._index.queues[queue_id].next_seq
            queues[queue_id] = queues[queue_id]._replace(next_seq=next_seq, cursor=next_seq)

    def _restore(self, metadata: Metadata, survey: Survey, gaps: dict[int, Damage]) -> None:
        journal, broker = self._journal, self._broker
        _join(self._index)
        journal.epoch = metadata.epoch
        journal.next_segment = max(journal.next_segment, metadata.next_segment)
        broker.last_errors.extend(metadata.errors)
        broker.audit.restore(metadata.audit)
        for name, bound in groupby(sorted(metadata.bindings), key=itemgetter(0)):
            broker.bindings.restore(name, [event for _, event in bound])
        broker.once.restore(metadata.once)
        broker.schedules.restore(metadata.schedules)
        broker.results.restore(metadata.results)
        broker.batches.restore(metadata.batches)
        queues = [
            (row.id, broker.restore_queue(row.id, row.name, Policy.decode(row.policy)))
            for row in metadata.queues.values()
        ]
        finish(broker.policies.apply_all())
        # A deleted queue's id is never used again.
        broker.next_queue_id = max(broker.next_queue_id, metadata.next_queue_id)
        for queue_id, queue in queues:
            # Free memory for the next queue.
            marks = survey.marks.pop(queue_id, NO_MARKS)
            self._messages(queue_id, queue, marks, whole=queue_id not in gaps)

    def _messages(self, queue_id: int, queue: Queue, marks: Marks, *, whole: bool) -> None:
        """All messages stay on disk until a consumer arrives. Those that were delivered and are
        alive are returned to the queue. In a queue with gaps all messages are returned, since
        their numbers are not consecutive."""
        index = self._index.queues[queue_id]
        cursor = index.cursor if whole else index.next_seq
        # Below the cursor without a mark: delivered once, held at the crash.
        held = living_of(index, 0, index.cursor)
        missed = living_of(index, index.cursor, cursor)
        returned = chain(
            marks.of_each(numbers(held), Mark(redelivered=True)),
            marks.of_each(numbers(missed), NO_MARK),
        )
        # One that has lost its mark is due.
        delayed = numbers(living_of(index, SCHEDULED_SEQ, SEQ_MAX))
        waiting = chain(
            marks.among(living_of(index, cursor, index.next_seq)),
            marks.of_each(delayed, Mark(due_us=1)),
        )
        # No segment may settle or mark a number that is given out from now on.
        known = [SCHEDULED_SEQ + index.next_seq, index.settled_end, marks.end]
        next_aside = max(known + [span.end for span in index.spans[-1:]])
        unused = holes(index, cursor, index.next_seq)
        mean_bytes = _mean_bytes(index)
        restore(queue, index.next_seq, cursor, returned, waiting, unused, mean_bytes, next_aside)
        if not whole:
            queue.lane.tell_cursor()


def _join(index: Index) -> None:
    """Join neighbouring spans. Only when all segments are in the index."""
    for queue in index.queues.values():
        spans: list[Span] = []
        for span in queue.spans:
            last = spans[-1] if spans else span
            if (
                last is not span
                and last.segment is span.segment
                and last.reaches(span.first, span.time_us, len(span.settled))
            ):
                last.extend(span.first, span.end, span.count, span.bytes, span.latest_us)
                last.add_settled(span.settled, span.settled_count)
            else:
                spans.append(span)
        if len(spans) < len(queue.spans):
            queue.spans, queue.firsts = spans, [span.first for span in spans]
    for segment in index.segments.values():
        segment.spans = [span for span in segment.spans if span.queue.find(span.first) is span]


def _mean_bytes(queue: QueueIndex) -> float:
    """Approximate mean length of a line: gaps within spans count as messages."""
    count = sum(span.end - span.first for span in queue.spans)
    return sum(span.bytes for span in queue.spans) / count if count else 0.0
