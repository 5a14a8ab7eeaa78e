"""A journal in memory: what it was given in batches, to be read in pages and recovered from.

The one rule: it knows what batches tell and nothing else, so that what a broker forgets to tell is
missing here, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from mqks.broker.broker import Broker
from mqks.broker.spine.base.facts import Facts
from mqks.broker.spine.base.ranges import compress
from mqks.broker.spine.log.pending import Entry, QueueState, ResultRow, Run
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.queue.recovery import restore
from mqks.limits import PAGE_BYTES, SCHEDULED_SEQ

K = TypeVar("K")
V = TypeVar("V")
FAR_MORE = 1 << 40
"""Numbers of which not all can have been written."""


class QueueOnDisk:
    def __init__(self) -> None:
        self.next_seq = 1
        self.next_aside = SCHEDULED_SEQ
        self.cursor = 1
        self.lines: dict[int, bytes] = {}
        self.times_us: dict[int, int] = {}
        self.marks: dict[int, Mark] = {}


class Disk:
    def __init__(self) -> None:
        self.queues: dict[int, QueueOnDisk] = {}
        self.states: dict[int, QueueState] = {}
        self.bindings: set[tuple[bytes, bytes]] = set()
        self.once: list[bytes] = []
        self.schedules: dict[bytes, str] = {}
        self.results: dict[bytes, ResultRow] = {}
        self.batches: dict[bytes, str] = {}
        self.next_queue_id = 1

    def write(self, entry: Entry) -> None:
        _replace(self.states, entry.queues)
        for queue_id, state in entry.queues.items():
            if state is None:
                self.queues.pop(queue_id, None)
            else:
                self.queues.setdefault(queue_id, QueueOnDisk())
            self.next_queue_id = max(self.next_queue_id, queue_id + 1)
        for name_and_event, bound in entry.bindings.items():
            (self.bindings.add if bound else self.bindings.discard)(name_and_event)
        self.once += entry.once
        _replace(self.schedules, entry.schedules)
        _replace(self.results, entry.results)
        _replace(self.batches, entry.batches)
        for change in entry.changes:
            queue = self.queues.get(change.lane_id)
            if queue is None:
                continue
            queue.next_seq = max(queue.next_seq, change.next_seq)
            queue.cursor = max(queue.cursor, change.cursor)
            for run in change.runs:
                queue.lines.update(enumerate(run.lines, run.first))
                arrived = range(run.first, run.first + len(run.lines))
                if run.first >= SCHEDULED_SEQ:
                    queue.next_aside = max(queue.next_aside, arrived.stop)
                queue.times_us.update(dict.fromkeys(arrived, entry.time_us))
            for number, mark in change.marks.items():
                queue.marks[number] = max(mark, queue.marks.get(number, mark))
            for first, count in (*change.acks, *change.moved):
                numbers: Sequence[int] = range(first, first + count)
                if count > FAR_MORE:
                    numbers = [number for number in queue.lines if number in numbers]
                for number in numbers:
                    # A journal counts what is settled.
                    assert number in queue.lines, f"{number} of {change.lane_id} is settled twice"
                    del queue.lines[number]
                    queue.marks.pop(number, None)
                    queue.times_us.pop(number, None)

    def page(self, queue_id: int, first: int | None) -> list[Run]:
        """Living messages from this number on, about as many as one read brings."""
        lines = self.queues[queue_id].lines
        numbers, size = [], 0
        for number in sorted(number for number in lines if first is not None and number >= first):
            numbers.append(number)
            size += len(lines[number])
            if size > PAGE_BYTES:
                break
        runs = groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
        return [
            Run(run[0], [lines[number] for number in run])
            for run in ([number for _, number in group] for _, group in runs)
        ]

    def fetch(self, queue_id: int, numbers: Sequence[int]) -> dict[int, bytes]:
        lines = self.queues[queue_id].lines
        return {number: lines[number] for number in numbers if number in lines}

    def recover(self, broker: Broker) -> None:
        bound: dict[bytes, list[bytes]] = {}
        for name, event in sorted(self.bindings):
            bound.setdefault(name, []).append(event)
        for name, events in bound.items():
            broker.bindings.restore(name, events)
        broker.once.restore(self.once)
        broker.schedules.restore(self.schedules)
        broker.results.restore(self.results)
        broker.batches.restore(self.batches)
        for queue_id, state in sorted(self.states.items()):
            queue = broker.restore_queue(queue_id, state.name, state.policy)
            known = self.queues[queue_id]
            returned = [
                (number, known.marks.get(number, Mark(redelivered=True)))
                for number in known.lines
                if number < known.cursor
            ]
            waiting = [each for each in known.marks.items() if each[0] >= known.cursor]
            missing = [n for n in range(known.cursor, known.next_seq) if n not in known.lines]
            # What a start would take for damage.
            assert not missing or state.policy.is_sparse, (state.name, missing)
            holes = compress(missing)
            mean_bytes = sum(map(len, known.lines.values())) / max(1, len(known.lines))
            seqs = known.next_seq, known.cursor
            restore(queue, *seqs, returned, waiting, holes, mean_bytes, known.next_aside)
        broker.next_queue_id = max(broker.next_queue_id, self.next_queue_id)
        broker.start_timers()


def _replace(table: dict[K, V], changes: Mapping[K, V | None]) -> None:
    """What is changed comes last, as in a table in order of its rows."""
    for key, value in changes.items():
        table.pop(key, None)
        if value is not None:
            table[key] = value


class DiskFacts(Facts):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def _queue(self, queue_id: int) -> QueueOnDisk:
        return self._disk.queues.get(queue_id) or QueueOnDisk()

    def arrived_us(self, queue_id: int, number: int) -> int:
        return self._queue(queue_id).times_us.get(number, 0)

    def arrived_by(self, queue_id: int, time_us: int, first: int, end: int) -> tuple[int, int]:
        times_us = self._queue(queue_id).times_us.items()
        old = (number for number, us in times_us if us <= time_us and first <= number < end)
        number = min(old, default=end)
        return number, min(end, number + 1)

    def bytes_of(self, queue_id: int, number: int) -> int:
        return len(self._queue(queue_id).lines.get(number, b""))

    def arrivals(self, queue_id: int) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._queue(queue_id).times_us.items()))
