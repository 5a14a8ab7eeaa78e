"""Moves messages from queue to queue, and those that return to the tail of their own.

The one rule: one commit settles a message in its old place and appends it in the new one. So it is
never lost and never duplicated, whenever the process is killed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work
from mqks.broker.spine.log.pending import NO_MARK, Mark
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.selection import Chosen
from mqks.broker.spine.queue.shared import Place
from mqks.limits import SEQ_MAX, STEP_BYTES, STEP_MESSAGES

Choose = Callable[[bytes], tuple[Place, bytes] | None]
"""Maps a message to its new queue and its new form; None: it stays."""


def move(
    source: Place,
    to: Place,
    deliveries: Sequence[Delivery],
    marks: Sequence[Mark] | None = None,
) -> None:
    """Move messages that are alive in `source`, but no longer ready there, to the end of `to`,
    which may be the same queue. `marks` are their new ones; None: they have attributes and no
    marks. The caller delivers."""
    source.lane.leave_together([number for number, _ in deliveries])
    if source is not to:
        source.lane.pending.in_one_piece = True
        to.take_in([line for _, line in deliveries], marks)
    else:
        marks = marks or [NO_MARK] * len(deliveries)
        for (_, line), mark in zip(deliveries, marks, strict=True):
            to.lane.append_marked(line, mark)


def move_ready(
    source: Place,
    choose: Choose,
    limit: int = SEQ_MAX,
    end: int = SEQ_MAX,
    is_stuck: Callable[[], bool] = lambda: False,
    chosen: Chosen | None = None,
) -> Work[int]:
    """Move ready messages of one queue with numbers below `end` to the ends of others, in order,
    wherever their bodies are; return how many. If something is `chosen`, only that moves. It ends
    early when moved messages cannot be written: `is_stuck`."""
    lane, count, size = source.lane, 0, 0
    for left in ready_numbers(source, min(end, lane.next_seq), chosen):
        while left and count < limit and not (lane.deleted or is_stuck()):
            lines, left = yield from chosen_bodies(source, left, chosen)
            moved = move_these(source, lines, choose, limit - count)
            count, size = count + moved, size + sum(map(len, lines.values()))
            if moved and size >= STEP_BYTES:
                # Moved messages are in memory until they are written.
                entry, size = lane.pending.entry, 0
                while lane.pending.entry is entry and not is_stuck():
                    yield WAITS
            yield GOES_ON
            left = [*filter(lane.is_ready, left)]
        if count >= limit or lane.deleted or is_stuck():
            break
        if chosen is not None:
            yield GOES_ON  # None of a thousand may be old enough.
    return count


def move_these(source: Place, lines: dict[int, bytes], choose: Choose, limit: int) -> int:
    """Move the chosen ones of these messages that are still there; return how many."""
    lane, count = source.lane, 0
    gone: dict[Place, list[Delivery]] = {}
    for number in sorted(lines):
        # It may have left the queue meanwhile.
        if count >= limit or lane.deleted or not lane.is_ready(number):
            continue
        chosen = choose(lines[number])
        if chosen is not None and not chosen[0].deleted:
            target, line = chosen
            lane.take_out(number)
            gone.setdefault(target, []).append((number, line))
            count += 1
    move_out(source, gone)
    for target in gone:
        target.deliver()
    if gone:
        source.deliver()
    return count


def move_out(source: Place, gone: Mapping[Place, Sequence[Delivery]]) -> None:
    """Move messages that were taken out of the ready ones. The caller delivers."""
    for target, some in gone.items():
        expires_us = [source.lane.mark_of(number).expires_us for number, _ in some]
        move(source, target, some, [Mark(expires_us=each) for each in expires_us])


def ready_numbers(source: Place, end: int, chosen: Chosen | None) -> Iterator[Sequence[int]]:
    """Numbers of ready messages, those that are old enough if some are chosen, in order: as many
    at a time as one step looks at. What returns behind them is not among them."""
    first = 1
    while first < end:
        stop = end
        if chosen is not None:
            first, stop = chosen.next_old(source, first, end)
        numbers, first = source.lane.ready_numbers(first, stop)
        yield numbers


def chosen_bodies(
    source: Place, numbers: Sequence[int], chosen: Chosen | None
) -> Work[tuple[dict[int, bytes], Sequence[int]]]:
    """Like `some_bodies`, of ready messages, without those that are not chosen."""
    lines, left = yield from some_bodies(source, numbers, source.lane.body)
    if chosen is not None:
        lines = yield from chosen.by_body(sorted(lines.items()))
    return lines, left


def some_bodies(
    source: Place, numbers: Sequence[int], body: Callable[[int], bytes | None]
) -> Work[tuple[dict[int, bytes], Sequence[int]]]:
    """Bodies of the first of these messages, as many as one step takes, and the numbers of the
    others. `body` returns a body in memory; messages that have left meanwhile may be missing."""
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
        lines |= yield from fetched(source, on_disk)
    return lines, numbers[count:]


def fetched(source: Place, numbers: list[int]) -> Work[dict[int, bytes]]:
    """Read bodies from disk; none if the queue is deleted meanwhile."""
    came: list[dict[int, bytes]] = []
    source.fetch(numbers, came.append)
    while not (came or source.deleted):
        yield WAITS
    return came[0] if came else {}
