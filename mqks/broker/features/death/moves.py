"""Moves messages from queue to queue, and those that return to the tail of their own; takes ready
messages wherever in their queue they are, to move or to drop them.

The one rule: one commit settles a message in its old place and appends it in the new one. So it is
never lost and never duplicated, whenever the process is killed. What waits no more when its turn
comes, because a consumer has got it, is left alone and not counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.selection import Chosen
from mqks.broker.spine.queue.shared import Place
from mqks.limits import SEQ_MAX, STEP_BYTES, STEP_MESSAGES

Choose = Callable[[bytes], tuple[Place, bytes] | None]
"""Maps a message to its new queue and its new form; None: it stays."""


def move(
    source: Place, to: Place, deliveries: Sequence[Delivery], marks: Sequence[Mark] | None = None
) -> None:
    """Move messages that are alive in `source`, but no longer ready there, to the end of `to`,
    which may be the same queue: limits do not refuse them. `marks` are their new ones; None: they
    are dead letters. The caller delivers."""
    source.lane.leave_together([number for number, _ in deliveries], dead=marks is None)
    for tracer in source.tracers:
        tracer.moved(source, to, deliveries, to.lane.next_seq)
    lines = [line for _, line in deliveries]
    if source is not to:
        # What is settled here and appended there is of two lanes: no piece may have one alone.
        source.lane.pending.in_one_piece = True
        if to.show is not None:
            to.show(lines)
        if marks and any(mark.expires_us for mark in marks):
            to.timed()
        for tracer in to.tracers:
            tracer.note(to, "joined", enumerate(lines, to.lane.next_seq))
    to.lane.append_all(lines, marks or ())


class Ready:
    """The ready messages of a queue with numbers below `end`, in order; if something is `chosen`,
    only that. What returns behind those that were looked at is not among them."""

    __slots__ = ("_chosen", "_left", "_numbers", "_source")

    def __init__(self, source: Place, end: int, chosen: Chosen | None) -> None:
        self._source = source
        self._chosen = chosen
        self._numbers = self._old_enough(end)
        self._left: Sequence[int] = ()

    def _old_enough(self, end: int) -> Iterator[Sequence[int]]:
        """As many at a time as one step looks at."""
        first = 1
        while first < end:
            stop = end
            if self._chosen is not None:
                first, stop = self._chosen.next_old(self._source, first, end)
            ready = self._source.lane.blocks.after(first, stop, STEP_MESSAGES)
            first = ready[-1] + 1 if len(ready) == STEP_MESSAGES else stop
            yield ready

    def next(self, *, needs_bodies: bool = True) -> Work[dict[int, bytes] | None]:
        """The next ones by number, as many as one step takes, with their bodies wherever these are;
        None after the last one, and when the queue is deleted."""
        source, lane = self._source, self._source.lane
        # Others have had their turns since: some may have left.
        while not (left := [*filter(lane.is_ready, self._left)]):
            some = next(self._numbers, None)
            if some is None or lane.deleted:
                return None
            self._left = some
            yield GOES_ON  # None of a thousand may be old enough.
        if not needs_bodies:
            self._left = ()
            return dict.fromkeys(left, b"")
        lines, self._left = yield from some_bodies(source, left, lane.body)
        if self._chosen is not None:
            lines = yield from self._chosen.by_body(lines.items())
        return None if lane.deleted else lines


def move_ready(
    source: Place,
    choose: Choose,
    limit: int = SEQ_MAX,
    end: int = SEQ_MAX,
    is_stuck: Callable[[], bool] = lambda: False,
    chosen: Chosen | None = None,
) -> Work[int]:
    """Move ready messages of one queue, those that `Ready` has, to the ends of others; return how
    many. It ends early when moved messages cannot be written: `is_stuck`."""
    pending, count, size = source.lane.pending, 0, 0
    ready = Ready(source, min(end, source.lane.next_seq), chosen)
    while count < limit and not is_stuck() and (lines := (yield from ready.next())) is not None:
        moved = _move_these(source, lines, choose, limit - count)
        count, size = count + moved, size + sum(map(len, lines.values()))
        if moved and size >= STEP_BYTES:
            # Moved messages are in memory until they are written.
            entry, size = pending.entry, 0
            while pending.entry is entry and not is_stuck():
                yield WAITS
        yield GOES_ON
    return count


def _move_these(source: Place, lines: dict[int, bytes], choose: Choose, limit: int) -> int:
    """Move the chosen ones of these messages that are still there; return how many."""
    lane, count = source.lane, 0
    gone: dict[Place, list[Delivery]] = {}
    for number, body in lines.items():
        if count < limit and lane.is_ready(number) and (chosen := choose(body)) is not None:
            target, line = chosen
            lane.take_out(number)
            gone.setdefault(target, []).append((number, line))
            count += 1
    move_out(source, gone)
    for target in [*gone, source] if gone else ():
        target.deliver()
    return count


def move_out(source: Place, gone: Mapping[Place, Sequence[Delivery]]) -> None:
    """Move messages that were taken out of the ready ones. The caller delivers."""
    for target, some in gone.items():
        marks = [source.lane.mark_of(number) for number, _ in some]
        kept = [Mark(expires_us=mark.expires_us, batch=mark.batch) for mark in marks]
        move(source, target, some, kept)


def purge_some(queue: Place, chosen: Chosen, limit: int) -> Work[int]:
    """Drop the chosen ones of the ready messages, so many at most; return how many."""
    lane, count, ready = queue.lane, 0, Ready(queue, queue.lane.next_seq, chosen)
    while count < limit:
        found = yield from ready.next(needs_bodies=chosen.needs_bodies)
        if found is None:
            break
        gone = [number for number in found if lane.is_ready(number)][: limit - count]
        for number in gone:
            lane.take_out(number)
        if gone:
            lane.settle(gone, dead=True)
            for tracer in queue.tracers:
                tracer.note(queue, "purged", [(number, found[number]) for number in gone])
            queue.deliver()
        count += len(gone)
        yield GOES_ON
    return count


def some_bodies(
    source: Place, numbers: Sequence[int], body: Callable[[int], bytes | None]
) -> Work[tuple[dict[int, bytes], Sequence[int]]]:
    """Bodies of the first of these messages, as many as one step takes, by ascending numbers as
    they are given, and the numbers of the others. `body` returns a body in memory; messages that
    have left meanwhile may be missing, and those on disk if the queue is deleted."""
    lines: dict[int, bytes] = {}
    on_disk: list[int] = []
    size = count = 0
    for number in numbers[:STEP_MESSAGES]:
        if size >= STEP_BYTES:
            break
        line, count = body(number), count + 1
        if line is None:
            on_disk.append(number)
            size += source.shared.facts.bytes_of(source.id, number)
        else:
            lines[number] = line
            size += len(line)
    if on_disk:
        came: list[dict[int, bytes]] = []
        source.fetch(on_disk, came.append)
        while not (came or source.deleted):
            yield WAITS
        for found in came:
            lines = dict(sorted((lines | found).items()))
    return lines, numbers[count:]
