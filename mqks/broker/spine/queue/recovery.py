"""The start of a queue with what the journal has, and its end.

The one rule: a start reads no message. Its numbers are known, and its text stays on disk.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from mqks.broker.spine.base.ranges import Range, compress, subtract, union
from mqks.broker.spine.base.turns import Work, emptied, free
from mqks.broker.spine.message.mark import NO_MARK, Mark
from mqks.broker.spine.message.policy import DEFAULT
from mqks.broker.spine.queue.lane import Lane
from mqks.broker.spine.queue.order import Fifo, Rest
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.rules import set_ttl
from mqks.limits import SCHEDULED_SEQ


def restore(
    queue: Queue,
    next_seq: int,
    cursor: int,
    returned: Iterable[tuple[int, Mark]],
    from_cursor: Iterable[tuple[int, Mark]],
    holes: Iterable[Range] = (),
    mean_bytes: float = 0.0,
    next_aside: int = SCHEDULED_SEQ,
) -> None:
    """Start with the state of the journal: all messages are on disk, with lines of about
    `mean_bytes`, and from the cursor on all are ready but those in `holes`.

    `returned` are the living messages below the cursor, in order, each with its mark; those that a
    consumer held at the crash count as returned once more. `from_cursor` are the marks of messages
    from the cursor on, and of those with a delay.
    """
    lane, aside = queue.lane, list[int]()
    for number, mark in _unscheduled(queue, from_cursor, aside):
        _restore_mark(lane, number, mark)
    holes = union([*holes, *compress(aside)])
    lane.next_seq = lane.taken_end = next_seq
    lane.next_aside = lane.aside_end = next_aside
    lane.cursor = cursor
    blocks = lane.blocks
    # Nothing is read: a start with a million messages learns their numbers only.
    for number, mark in _unscheduled(queue, returned, aside):
        # A message below the cursor without a mark was delivered.
        _restore_mark(lane, number, mark, was_held=not mark.version and mark != NO_MARK)
        blocks.add(number, None)
    lane.returned = len(blocks)
    for first, count in subtract(cursor, next_seq, holes):
        blocks.append_on_disk(first, count)
    blocks.disk_bytes = round(mean_bytes * len(blocks))
    queue.set_order(queue.shared.features.orders.restored(queue, queue.order))
    if queue.times is not None:
        queue.times.restored(mean_bytes)
    queue.shared.features.unique.restored(queue)
    queue.update_capacity()


def _restore_mark(lane: Lane, number: int, mark: Mark, *, was_held: bool = False) -> None:
    if was_held or mark.redelivered:
        mark = mark.returned()
        lane.tell_marks({number: mark})
    lane.restore_mark(number, mark)


def _unscheduled(
    queue: Queue, marked: Iterable[tuple[int, Mark]], aside: list[int]
) -> Iterator[tuple[int, Mark]]:
    """Put the scheduled messages `aside`; yield the others."""
    for number, mark in marked:
        if mark.expires_us:
            queue.timed()
        if not mark.due_us:
            yield number, mark
            continue
        aside.append(number)
        queue.timed().restore(number, mark)
        if mark.version:  # It was returned before: its TTL continues.
            queue.timed().expiry.add(number, mark.expires_us, mark.joined_us)
        if mark.batch:
            queue.lane.join_batches({number: mark})
        elif mark.version or mark.expires_us:
            queue.lane.marks[number] = mark


def start(queue: Queue) -> None:
    """Start after recovery: from now on times count."""
    if queue.times is not None:
        ttl_us = queue.times.expiry.ttl_us
        set_ttl(queue, None)
        set_ttl(queue, ttl_us)
    queue.shared.features.returns.started(queue)
    queue.order.started()
    queue.deliver()


def delete(queue: Queue) -> Work[None]:
    """Forget all messages, also unacked ones, and the policy, at once. The memory is freed in
    turns."""
    # A work that is under way sees `deleted` at its next step, and ends.
    queue.deleted = True
    for tracer in queue.tracers:
        tracer.deleted(queue)
    queue.policy = queue.rules = DEFAULT
    queue.update_throttle()
    queue.capacity.apply(DEFAULT)
    queue.shared.capacities.tight.pop(queue, None)
    queue.shared.outboxes.leave(queue)
    gone = [_forget(queue.lane)]
    if queue.times is not None:
        gone.append(queue.times.delete())
        queue.times = None
    gone.append(queue.order.delete())
    queue.order, queue.lane.watcher = Fifo(queue.lane), None
    for consumer in queue.consumers:
        consumer.rest(Rest.NO_QUEUE)
        gone.append(consumer.let_go())
    queue.ring.clear()  # A `receive` has an end of its own.
    return free(chain.from_iterable(gone))


def _forget(lane: Lane) -> Iterator[object]:
    """Forget all messages at once. The memory is freed step by step by the returned
    iterator."""
    lane.deleted = True
    for batch, count in [*lane.members.items()]:
        lane.count(batch, -count, dead=True)
    lane.returned = 0
    lane.expiry = None
    gone = [lane.blocks.emptied()]
    if lane.unique is not None:
        gone.append(lane.unique.delete())
        lane.unique = None
    gone += [
        emptied(items)
        for items in (
            *(lane.marks, lane.marked, lane.unwritten, lane.unwritten_runs, lane.aside),
            *(lane.acked, lane.acked_ranges, lane.moved),
        )
    ]
    lane.marks, lane.marked = {}, {}
    lane.unwritten, lane.unwritten_runs, lane.aside = [], [], []
    lane.acked, lane.acked_ranges, lane.moved = [], [], []
    return chain.from_iterable(gone)
