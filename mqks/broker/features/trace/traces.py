"""`trace`: what becomes of some messages is noted, in memory, for a time.

    12:00:00.1 published 10.0.0.7:5123 alice    12:00:00.1 joined orders 17
    12:00:00.2 delivered worker-1               12:00:00.9 rejected "no order 5"

The one rule: while nothing is traced, no queue has a tracer, so a batch costs one look at an
attribute that is None. What is noted has a limit in bytes: what is beyond it pushes out the oldest.
The texts of messages are not kept.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

from mqks.audit import Who
from mqks.broker.spine.base.ranges import among
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import NOT_TOLD, Deliveries, Told, Traced
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.queue.terms import NewMessages
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.publishing import Publishing
from mqks.errors import LimitExceeded
from mqks.limits import STEP_NAMES, TRACES_MAX
from mqks.protocol.masks import name_masks

STEP_BYTES: Final = 320
TOLD_BYTES: Final = 250
VALUE_BYTES: Final = 60
"""Memory of a step besides its id, of what else it tells, which steps may share, and of each value
of that besides its length (measured)."""
EVENTS_KEPT: Final = 4096
"""Of so many events it is known whether they are traced."""
WORDS: Final = {
    Event.REJECT: "rejected",
    Event.KILL: "rejected",
    Event.RELEASE: "released",
    Event.LOSS: "lost",
    Event.UNDELIVERED: "undelivered",
    Event.END: "returned",
}
LEAVES: Final = frozenset(("acked", "moved", "dead", "purged", "trimmed", "cancelled", "replaced"))
"""Steps after which a message is no longer where it was."""


class MessageStep(NamedTuple):
    id: int
    """Grows by one with each step."""
    time_us: int
    what: str
    message_id: bytes
    """Empty: all messages of the queue."""
    queue_id: int
    """0: none."""
    queue: bytes
    number: int
    told: Mapping[str, Any]
    size: int

    def row(self) -> dict[str, Any]:
        """As `stats` tells it."""
        queue = self.queue.decode("utf-8", "surrogateescape")
        where = {"queue": queue, "seq": self.number or None} if self.queue_id else {}
        row = {"step": self.id, "time_us": self.time_us, "what": self.what}
        return {**row, "queue": None, "seq": None, **where, **self.told}


class Trace(NamedTuple):
    """What is traced under a name: the messages with this id, those whose event this is, or
    matches as a mask, and those in the queue of this name."""

    who: Who
    until_s: float
    """By the broker's clock."""
    timer: int
    """The entry in the schedule that ends it."""


class Traces:
    """The tracer of all queues, and of what is published."""

    def __init__(
        self,
        bytes_max: int,
        shared: Shared,
        publishing: Publishing,
        queues: Callable[[], Sequence[Queue]],
    ) -> None:
        self.rows: dict[bytes, Trace] = {}
        self.steps: deque[MessageStep] = deque()
        self.bytes = 0
        self._bytes_max = bytes_max
        self._ids = count(1)
        self._last: dict[int, dict[int, MessageStep]] = {}
        """Queue id → number → the last step of that message which is kept."""
        self._matches = name_masks(())
        self._events: dict[bytes, bool] = {}
        self._shared, self._publishing, self._queues = shared, publishing, queues
        shared.tracers.append(self._tracer_of)

    # -- what is traced

    def _tracer_of(self, queue: Traced) -> "Traces | None":
        return self if self.rows else None

    def begin(self, name: bytes, for_s: float, who: Who) -> Work[None]:
        """Trace what has this name, for so long, in place of an earlier trace of it."""
        if name not in self.rows and len(self.rows) >= TRACES_MAX:
            raise LimitExceeded("traces_max", f"the limit of {TRACES_MAX} traces is reached")
        self._leave(name)
        schedule = self._shared.schedule
        timer = schedule.after(for_s, partial(self._end_in_time, name))
        self.rows[name] = Trace(who, schedule.clock_us() / 1e6 + for_s, timer)
        yield from self._install()

    def _leave(self, name: bytes) -> bool:
        trace = self.rows.pop(name, None)
        if trace is not None:
            self._shared.schedule.cancel(trace.timer)
        return trace is not None

    def end(self, name: bytes | None) -> Work[bool]:
        """End the trace of this name; None: all of them, and forget what was noted. Return whether
        that changed anything."""
        names = [*self.rows] if name is None else [name]
        changed = sum(map(self._leave, names)) > 0
        if name is None:
            changed = changed or bool(self.steps)
            self.steps, self._last, self.bytes = deque(), {}, 0
        yield from self._install()
        return changed

    def _end_in_time(self, name: bytes) -> None:
        del self.rows[name]
        self._shared.turns.add(self._install())

    def _install(self) -> Work[None]:
        self._matches = name_masks(name for name in self.rows if b"*" in name)
        self._events.clear()
        self._publishing.tracer = self if self.rows else None
        for some in slices(self._queues(), STEP_NAMES):
            for queue in some:
                queue.update_tracers()
            yield GOES_ON

    def _has_event(self, event: bytes) -> bool:
        found = self._events.get(event)
        if found is None:
            found = event in self.rows or self._matches(event)
            if len(self._events) >= EVENTS_KEPT:
                self._events.clear()
            self._events[event] = found
        return found

    def _traced_id(self, line: bytes, *, whole: bool) -> bytes | None:
        """The id of a message that is traced."""
        end = line.index(b" ")
        message_id = line[:end]
        if whole or message_id in self.rows:
            return message_id
        start = end + len(b" event=")
        return message_id if self._has_event(line[start : line.index(b" ", start)]) else None

    # -- what happens

    def published(self, who: Who | None, queues: Queues, new: NewMessages) -> None:
        whole = any(queue.name in self.rows for queue in queues)
        by_event: dict[bytes, list[tuple[int, bytes]]] = {}
        for line in new.bodies:
            if (message_id := self._traced_id(line, whole=whole)) is not None:
                start = len(message_id) + len(b" event=")
                event = line[start : line.index(b" ", start)]
                by_event.setdefault(event, []).append((0, message_id))
        for event, some in by_event.items():
            told = {"event": event.decode("utf-8", "surrogateescape")}
            self._add("published", None, some, told if who is None else told | who._asdict())

    def note(self, queue: Traced, what: str, some: Deliveries, told: Told = NOT_TOLD) -> None:
        whole, found = queue.name in self.rows, list[tuple[int, bytes]]()
        for number, line in some:
            if not line:
                self.left(queue, what, (number,), told)
            elif (message_id := self._traced_id(line, whole=whole)) is not None:
                found.append((number, message_id))
        self._add(what, queue, found, told)

    def left(self, queue: Traced, what: str, numbers: Sequence[int], told: Told = NOT_TOLD) -> None:
        last = self._last.get(queue.id)
        if not last:
            return
        known = among(numbers, last)
        steps = [(number, step) for number in known if (step := last.get(number)) is not None]
        self._add(what, queue, [(number, step.message_id) for number, step in steps], told)

    def returned(self, queue: Traced, event: Event, some: Deliveries, why: bytes) -> None:
        told = {"reason": why.decode("ascii", "backslashreplace")} if why else NOT_TOLD
        self.note(queue, WORDS[event], some, told)

    def scheduled(self, queue: Traced, some: Deliveries, due_us: Iterable[int]) -> None:
        for delivery, each_us in zip(some, due_us, strict=True):
            self.note(queue, "scheduled", [delivery], {"until_us": each_us})

    def moved(self, source: Traced, to: Traced, some: Sequence[Delivery], first: int) -> None:
        if source is to:
            lines = [line for _, line in some]
            self.note(source, "joined", enumerate(lines, first))
        else:  # What joins another queue is noted by that, too.
            told = {"to": to.name.decode("utf-8", "surrogateescape")}
            self.note(source, "moved", some, told)

    def deleted(self, queue: Traced) -> None:
        if self._last.pop(queue.id, None):
            self._add("deleted", queue, [(0, b"")], NOT_TOLD)

    def _add(
        self,
        what: str,
        queue: Traced | None,
        found: Iterable[tuple[int, bytes]],
        told: Mapping[str, Any],
    ) -> None:
        """A step of each of these messages: number, 0 for none, and id."""
        told_bytes = STEP_BYTES + bool(told) * TOLD_BYTES
        told_bytes += sum(VALUE_BYTES + len(str(value)) for value in told.values())
        queue_id, name = (0, b"") if queue is None else (queue.id, queue.name)
        now_us, last = self._shared.schedule.wall_us(), self._last.setdefault(queue_id, {})
        for number, message_id in found:
            size = told_bytes + len(message_id)
            step = MessageStep(
                next(self._ids), now_us, what, message_id, queue_id, name, number, told, size
            )
            self.steps.append(step)
            self.bytes += size
            if number:
                last[number] = step
        if not last:
            del self._last[queue_id]
        while self.bytes > self._bytes_max:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self.steps.popleft()
        self.bytes -= oldest.size
        last = self._last.get(oldest.queue_id)
        if last is not None and last.get(oldest.number) is oldest:
            del last[oldest.number]
            if not last:
                del self._last[oldest.queue_id]

    # -- what is told

    def told(self, message_id: bytes, after: int, limit: int) -> Iterator[list[dict[str, Any]]]:
        """The steps of the messages with this id, the oldest first."""
        places, left = set[int](), limit
        for some in slices([*self.steps], STEP_NAMES):
            rows = list[dict[str, Any]]()
            for step in some:
                if step.message_id == message_id:
                    (places.discard if step.what in LEAVES else places.add)(step.queue_id)
                elif step.message_id or step.queue_id not in places:
                    continue
                if step.id > after and left:
                    rows.append(step.row())
                    left -= 1
            yield rows
