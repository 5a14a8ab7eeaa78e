"""Messages that die, and their way to the dead-letter queue.

The one rule: a dead message moves to the dead-letter queue of its queue in one commit, with the
reason. Without such a queue it is dropped and counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mqks.broker.log.pending import NO_MARK
from mqks.broker.message.bodies import NO_BODY
from mqks.broker.message.letters import Letters
from mqks.broker.shared import Fetch
from mqks.errors import MqksError
from mqks.limits import STEP_BYTES, STEP_MESSAGES
from mqks.protocol.requests import shown

if TYPE_CHECKING:
    from mqks.broker.queue.queue import Queue


class Dead(NamedTuple):
    """A message that is no longer in a stretch of its lane. `tries`: how often it was delivered."""

    number: int
    line: bytes
    tries: int


def kill(queue: "Queue", dead: Sequence[Dead], reason: str) -> None:
    """Move or drop these dead messages."""
    if not dead:
        return
    target = _count(queue, len(dead), reason)
    lane = queue.lane
    if target is None:
        lane.settle([each.number for each in dead])
        return
    letters = Letters(reason, queue.name, queue.shared.schedule.wall_us())
    lines = [letters.of(line, tries, partial(queue.arrived_us, n)) for n, line, tries in dead]
    lane.move_out_all([each.number for each in dead])
    target.take_letters(lines)
    lane.pending.moves = True
    target.deliver()


def kill_waiting(queue: "Queue", numbers: Iterable[int], reason: str) -> None:
    """Kill ready messages; those that are only on disk move when they have been read."""
    lane, dead, on_disk = queue.lane, list[Dead](), list[int]()
    has_target = queue.shared.dead_letter_queue(queue) is not None
    for number in numbers:
        # A message that is dropped needs no body.
        line = lane.body(number) if has_target else NO_BODY
        lane.take_out(number)
        if line is None:
            on_disk.append(number)
        else:
            dead.append(Dead(number, line, lane.mark_of(number).retry))
    kill(queue, dead, reason)
    for some in _parts(queue, on_disk):
        then = partial(_kill_read, queue, some, reason)
        queue.shared.fetches.append(Fetch(queue, some, then))


def _parts(queue: "Queue", numbers: Iterable[int]) -> Iterator[list[int]]:
    """Split numbers into parts for one step each."""
    some, size = list[int](), 0
    for number in numbers:
        some.append(number)
        size += queue.shared.facts.bytes_of(queue.id, number)
        if size >= STEP_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _kill_read(queue: "Queue", numbers: list[int], reason: str, lines: dict[int, bytes]) -> None:
    if missing := [number for number in numbers if number not in lines]:
        raise MqksError(f"messages of queue {shown(queue.name)} are missing: {missing[:5]}")
    marks = queue.lane.marks
    dead = [Dead(each, lines[each], marks.get(each, NO_MARK).retry) for each in numbers]
    kill(queue, dead, reason)


def kill_oldest(queue: "Queue", end: int, reason: str, count: int = STEP_MESSAGES) -> None:
    """Kill at most `count` ready messages with numbers below `end`, the oldest first."""
    lane = queue.lane
    if queue.shared.dead_letter_queue(queue) is None:
        _count(queue, lane.trim_some(end, count), reason)
    else:
        fitting = STEP_BYTES * lane.ready // (lane.ready_bytes + 1) + 1
        kill_waiting(queue, lane.oldest_waiting(end, min(count, fitting)), reason)


def _count(queue: "Queue", count: int, reason: str) -> "Queue | None":
    """Count the dead messages; return their dead-letter queue."""
    counters, target = queue.shared.counters, queue.shared.dead_letter_queue(queue)
    counters.dead[reason] += count
    queue.dead += count
    if target is None:
        counters.dropped += count
        queue.shared.on_dropped(queue, count, reason)
    return target
