"""A journal in memory: what it was given in batches, to be read in pages and recovered from.

The one rule: it knows what batches tell and nothing else, so that what a broker forgets to tell is
missing here, too.
"""

from itertools import groupby

from mqks.broker.broker import Broker
from mqks.broker.pending import Entry, Mark, QueueState, Run
from mqks.limits import PAGE_BYTES


class QueueOnDisk:
    def __init__(self) -> None:
        self.next_seq = 1
        self.cursor = 1
        self.lines: dict[int, bytes] = {}
        self.marks: dict[int, Mark] = {}


class Disk:
    def __init__(self) -> None:
        self.queues: dict[int, QueueOnDisk] = {}
        self.states: dict[int, QueueState] = {}
        self.bindings: set[tuple[bytes, bytes]] = set()
        self.once: list[bytes] = []
        self.next_queue_id = 1

    def write(self, entry: Entry) -> None:
        for queue_id, state in entry.queues.items():
            if state is None:
                self.states.pop(queue_id, None)
                self.queues.pop(queue_id, None)
            else:
                self.states[queue_id] = state
                self.queues.setdefault(queue_id, QueueOnDisk())
            self.next_queue_id = max(self.next_queue_id, queue_id + 1)
        for name_and_event, bound in entry.bindings.items():
            (self.bindings.add if bound else self.bindings.discard)(name_and_event)
        self.once += entry.once
        for change in entry.changes:
            queue = self.queues.get(change.lane_id)
            if queue is None:
                continue
            queue.next_seq = max(queue.next_seq, change.next_seq)
            queue.cursor = max(queue.cursor, change.cursor)
            for run in change.runs:
                queue.lines.update(enumerate(run.lines, run.first))
            for number, mark in change.marks.items():
                queue.marks[number] = max(mark, queue.marks.get(number, mark))
            for first, count in (*change.acks, *change.moved):
                for number in range(first, first + count):
                    queue.lines.pop(number, None)
                    queue.marks.pop(number, None)

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

    def recover(self, broker: Broker) -> None:
        """As a server that starts on it."""
        bound: dict[bytes, list[bytes]] = {}
        for name, event in sorted(self.bindings):
            bound.setdefault(name, []).append(event)
        for name, events in bound.items():
            broker.restore_bindings(name, events)
        broker.once.restore(self.once)
        for queue_id, state in sorted(self.states.items()):
            queue = broker.restore_queue(queue_id, state.name, state.policy)
            known = self.queues[queue_id]
            returned = [
                (number, known.marks.get(number, Mark(redelivered=True)))
                for number in known.lines
                if number < known.cursor
            ]
            waiting = {n: mark for n, mark in known.marks.items() if n >= known.cursor}
            queue.restore(known.next_seq, known.cursor, returned, waiting)
        broker.next_queue_id = max(broker.next_queue_id, self.next_queue_id)
        broker.start_timers()
