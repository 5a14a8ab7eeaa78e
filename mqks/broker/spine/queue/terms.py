"""Publishes messages that have terms: are scheduled, expire, are unique, or members of a batch.

The one rule: messages that are published together have terms of one kind.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from mqks.broker.spine.message.mark import Mark, id_checksum
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import UniqueClaim


class PublishTerms(NamedTuple):
    """The flags of a publish; times in microseconds since 1970, 0 for none."""

    due_us: int = 0
    is_dated: bool = False
    """Due by the wall clock, even when the clock is set; otherwise after a delay."""
    expires_us: int = 0
    clock_us: int = 0
    """When it is due after a delay, by the monotonic clock."""
    batch: int = 0
    """The number of the batch that it joins; 0: none."""
    claim: UniqueClaim | None = None
    """What it wants, if it is unique: then it is put singly."""

    def mark(self, message_id: bytes) -> Mark:
        return Mark(
            is_dated=self.is_dated,
            due_us=self.due_us,
            expires_us=self.expires_us,
            id_crc=id_checksum(message_id),
            batch=self.batch,
        )


class NewMessages(NamedTuple):
    """What is published together, however it comes in: to the same queues, on terms of one kind."""

    ids: list[bytes]
    bodies: list[bytes]
    """In their stored form."""
    terms: PublishTerms | None = None
    """Those of all; with none they have no attributes either."""
    each: Sequence[PublishTerms] = ()
    """The terms of each, if they differ: all are scheduled, all have a TTL, or none."""


def put(queue: Queue, new: NewMessages) -> None:
    """Publish these messages."""
    terms = new.terms
    if terms is None:
        queue.publish(new.ids, new.bodies)
    elif terms.claim is not None:
        _put_unique(queue, new, terms, terms.claim)
    elif not queue.deleted:
        queue.lane.see(new.bodies)
        if terms.due_us:
            _schedule(queue, new, terms)
        elif terms.expires_us or terms.batch:
            _publish_marked(queue, new, terms)
        else:
            queue.publish(new.ids, new.bodies)


def _put_unique(queue: Queue, new: NewMessages, terms: PublishTerms, claim: UniqueClaim) -> None:
    """Publish a message whose key another one may hold."""
    lane, unique = queue.lane, queue.shared.features.unique
    number = lane.next_aside if terms.due_us else lane.next_seq
    if not queue.deleted and unique.admit(queue, claim, new.ids[0], number):
        put(queue, new._replace(terms=terms._replace(claim=None)))
        unique.placed(queue, number)


def _schedule(queue: Queue, new: NewMessages, terms: PublishTerms) -> None:
    lines, all_terms = new.bodies, new.each or [terms] * len(new.ids)
    marks = [own.mark(message_id) for own, message_id in zip(all_terms, new.ids, strict=True)]
    first = queue.lane.append_aside(lines, marks)
    queue.lane.marks.update(
        (number, mark) for number, mark in enumerate(marks, first) if mark.expires_us
    )
    if terms.batch:
        queue.lane.join_batches(dict(enumerate(marks, first)), new=True)
    times = queue.timed()
    due_us = [own.due_us if own.is_dated else own.clock_us for own in all_terms]
    times.add(first, lines, marks, due_us)
    for tracer in queue.tracers:
        tracer.scheduled(queue, enumerate(lines, first), [mark.due_us for mark in marks])
    times.set_alarms()
    queue.update_capacity()


def _publish_marked(queue: Queue, new: NewMessages, terms: PublishTerms) -> None:
    """Publish messages with their own TTL, or of a batch."""
    lane, first = queue.lane, queue.lane.next_seq
    seqs = range(first, first + len(new.ids))
    marks = [Mark(expires_us=own.expires_us, batch=own.batch) for own in new.each or (terms,)]

    def marked(numbers: range) -> dict[int, Mark]:
        if not new.each:
            return dict.fromkeys(numbers, marks[0])
        some = marks[numbers.start - first : numbers.stop - first]
        return dict(zip(numbers, some, strict=True))

    times = queue.timed() if terms.expires_us else None
    if times is not None and new.each:
        times.expiry.add_each(seqs, [mark.expires_us for mark in marks])
    elif times is not None:
        times.expiry.add_new(seqs, terms.expires_us)
    if terms.batch:
        lane.join_batches(marked(seqs), new=True)
    queue.publish(new.ids, new.bodies)
    written = [*lane.unwritten_numbers(first)]
    for numbers in written:
        lane.tell_marks(marked(numbers))
    if sum(map(len, written)) < len(seqs):
        # Consumers without manual ack have taken the others, which never need the disk.
        kept = {*chain.from_iterable(written)}
        gone = [number for number in seqs if number not in kept]
        if times is not None:
            times.expiry.discard(gone)
        lane.forget_marks(gone)
    if times is not None:
        times.set_alarms()
