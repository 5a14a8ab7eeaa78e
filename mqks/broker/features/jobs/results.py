"""What became of messages that were published with `--keep-result`.

    waiting ─▶ done | dead | cancelled | gone ─▶ forgotten, after the seconds of its publish

The one rule: the end of a message and its row are in one commit, and nobody is told of an end that
is not durable. While a message waits, its row says where it is: so a start knows whose end it has
missed. A queue has this as a tracer only while it has such messages.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, cast

from mqks.broker.features.jobs.waiter import ResultWaiter
from mqks.broker.spine.base.ranges import among
from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.log.pending import ResultRow
from mqks.broker.spine.message.states import KILL, REJECT, Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import NOT_TOLD, Deliveries, Told, Traced
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.routing.masks import Queues
from mqks.errors import BadRequest, LimitExceeded, SchemaTooNew
from mqks.limits import RECEIVES_WAITING_MAX, STEP_NAMES
from mqks.protocol import replies
from mqks.protocol.requests import Publish, shown
from mqks.settings import Settings

RESULT_BYTES: Final = 900
"""Memory of a result besides its id, its event and its data (measured)."""
BUCKET_US: Final = 10_000_000
"""Results that end in the same 10 seconds are forgotten together."""
WAITING: Final = "waiting"
ENDS: Final = {
    "acked": "done",
    "consumed": "done",
    "dead": "dead",
    "purged": "cancelled",
    "trimmed": "cancelled",
    "cancelled": "cancelled",
    "deleted": "cancelled",
    "gone": "gone",
}
"""The state after each step that is an end, as tracers are told of it."""
NAMES: Final = frozenset(("event", "queue", "reason"))
HELD: Final = "delivered", "received"


@dataclass(slots=True, eq=False)
class Result:
    """A message, or what became of it. Times are microseconds since 1970."""

    id: bytes
    event: bytes
    keep_us: int
    queue_id: int
    number: int
    """Where it is, while it waits."""
    state: str = WAITING
    queue: bytes = b""
    """Where it is, or where it has ended."""
    reason: bytes = b""
    until_us: int = 0
    """When it is forgotten; 0: it waits."""
    data: bytes | None = None
    place: Queue | None = None
    """The queue, while it waits."""
    consumer: bytes = b""
    """Who got it last, unless it has come back."""
    cancel: bytes | None = None
    """The reason of the cancel that its consumer was told of."""
    why: bytes = b""
    """The reason of its last reject."""
    unwritten: ResultRow | None = None
    """What the next commits must write of it."""

    @property
    def size(self) -> int:
        return RESULT_BYTES + len(self.id) + len(self.event) + len(self.data or b"")

    def row(self) -> ResultRow:
        told = {
            "event": _text(self.event),
            "keep_us": self.keep_us,
            "state": self.state,
            "queue_id": self.queue_id,
            "number": self.number,
            "queue": _text(self.queue),
            "reason": _text(self.reason),
            "until_us": self.until_us,
            "has_data": self.data is not None,
        }
        stored = {name: value for name, value in told.items() if value}
        return json.dumps(stored), self.data or b""

    def listed(self) -> dict[str, Any]:
        """As `stats` tells it."""
        return {
            "id": _text(self.id),
            "event": _text(self.event),
            "state": self.state,
            "queue": _text(self.queue if self.place is None else self.place.name),
            "reason": _text(self.reason) or None,
            "data_bytes": None if self.data is None else len(self.data),
            "keep_s": self.keep_us / 1e6,
            "until_us": self.until_us or None,
        }

    @classmethod
    def parse(cls, message_id: bytes, row: ResultRow) -> "Result":
        """Raises SchemaTooNew."""
        try:
            told: dict[str, Any] = {"queue_id": 0, "number": 0, **json.loads(row[0])}
            for each in NAMES & told.keys():
                told[each] = _bytes(told[each])
            told["data"] = row[1] if told.pop("has_data", False) else None
            return cls(message_id, **told)
        except TypeError:
            raise SchemaTooNew(
                f"the result of {shown(message_id)} is of a newer mqks: use that"
            ) from None


class Results:
    """`progress_of` gives the progress that a consumer has told of the message with this number, or
    nothing."""

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        progress_of: Callable[[bytes, bytes, int], bytes],
    ) -> None:
        self.rows: dict[bytes, Result] = {}
        self.bytes = 0
        self.waiters: dict[bytes, dict[ResultWaiter, None]] = {}
        """By message id."""
        self._settings, self._shared = settings, shared
        shared.tracers.append(self._tracer_of)
        self._progress_of = progress_of
        self._places: dict[int, dict[int, Result]] = {}
        """Queue id → number → a message that waits."""
        self._buckets: dict[int, dict[bytes, None]] = {}
        """Time in `BUCKET_US` → ids of results that are forgotten then."""
        self._due: list[int] = []
        """Its keys, a heap."""
        self._alarm = Alarm(shared.schedule, self._forget_due, dated=True, what="results")

    def _tracer_of(self, queue: Traced) -> "Results | None":
        return self if queue.id in self._places else None

    # -- requests

    def check(self, wanted: Publish, queues: Queues, others: int = 0) -> None:
        """Raise if the result of a message cannot be kept; so many `others` come before it."""
        settings = self._settings
        if (count := sum(not queue.deleted for queue in queues)) != 1:
            raise BadRequest(f"publish: --keep-result is for one queue, and {count} are bound")
        if wanted.keep_us > settings.results_keep_s_max * 1e6:
            reason = f"a result is kept for {settings.results_keep_s_max:g} s at most "
            reason += "(results_keep_s_max)"
            raise LimitExceeded("results_keep_s_max", reason)
        if len(self.rows) + others >= settings.results_max:
            reason = f"the limit of {settings.results_max} results is reached"
            raise LimitExceeded("results_max", reason)
        self._check_bytes((1 + others) * RESULT_BYTES)

    def _check_bytes(self, size: int) -> None:
        most = self._settings.results_bytes_max
        if self.bytes + size > most:
            raise LimitExceeded("results_bytes_max", f"the limit of {most} bytes is reached")

    def watch(self, message_id: bytes, wanted: Publish, queue: Queue, *, is_due: bool) -> None:
        """The next message that this queue gets is the one that is meant by this id from now on.
        `is_due`: it has no delay."""
        if (earlier := self.rows.get(message_id)) is not None:
            self._forget(earlier)
        number = queue.lane.next_seq if is_due else queue.lane.next_aside
        found = Result(message_id, wanted.event, wanted.keep_us, queue.id, number)
        self.rows[message_id] = found
        self.bytes += found.size
        self._put(found, queue, number)
        self._write(found)

    def watched(self, queue: Queue, number: int) -> Result | None:
        return self._places.get(queue.id, {}).get(number)

    def check_data(self, data: bytes, others: int = 0) -> None:
        """Raise if the data of a result cannot be kept, besides so many bytes."""
        most = self._settings.result_bytes_max
        if len(data) > most:
            reason = f"the result has {len(data)} bytes, the limit is {most}"
            raise LimitExceeded("result_bytes_max", reason)
        self._check_bytes(len(data) + others)

    def give(self, found: Result, data: bytes) -> None:
        """These are the data of its result, if it is acked now."""
        found.data = data
        self.bytes += len(data)

    def told(self, message_id: bytes) -> bytes:
        """As a reply tells it."""
        found = self.found(message_id)
        if found is None:
            return b"none"
        if found.place is None:
            rest = found.data if found.state == "done" else found.reason or None
            words = [found.state.encode(), found.queue, *([] if rest is None else [rest])]
            return b" ".join(words)
        if not found.consumer or found.place.lane.is_ready(found.number):
            return b"waiting " + found.place.name
        progress = self._progress_of(found.consumer, message_id, found.number)
        return b" ".join([b"running", found.place.name, *([progress] if progress else [])])

    def found(self, message_id: bytes) -> Result | None:
        found = self.rows.get(message_id)
        is_over = found is not None and 0 < found.until_us <= self._shared.schedule.wall_us()
        return None if is_over else found

    def ask(
        self, request_id: bytes, connection: Connection, message_id: bytes, for_us: int
    ) -> None:
        """Tell it when it has ended durably, or after this time. Raises LimitExceeded."""
        found = self.found(message_id)
        if found is None or (not found.unwritten if found.until_us else not for_us):
            connection.write(replies.ok(request_id, self.told(message_id)))
            return
        if connection.flow.receivers >= RECEIVES_WAITING_MAX:
            reason = f"the limit of {RECEIVES_WAITING_MAX} waiting receives and results is reached"
            raise LimitExceeded("receives_waiting_max", reason)
        waiter = ResultWaiter(request_id, connection, message_id, self)
        self.waiters.setdefault(message_id, {})[waiter] = None
        if for_us and not found.until_us:
            waiter.timer = self._shared.schedule.after(for_us / 1e6, waiter.waited)

    def is_ending(self, message_id: bytes) -> bool:
        """Whether it has ended, and that is not durable yet."""
        found = self.rows.get(message_id)
        return found is not None and found.until_us > 0 and found.unwritten is not None

    def leave(self, waiter: ResultWaiter) -> None:
        others = self.waiters.get(waiter.message_id, {})
        others.pop(waiter, None)
        if not others:
            self.waiters.pop(waiter.message_id, None)
        if waiter.timer is not None:
            self._shared.schedule.cancel(waiter.timer)
            waiter.timer = None

    def committed(self, rows: Mapping[bytes, ResultRow | None]) -> Work[None]:
        """These are durable: whoever waits for them is told."""
        for some in slices([*rows.items()], STEP_NAMES):
            for message_id, row in some:
                found = self.rows.get(message_id)
                if found is None or found.unwritten is not row:
                    continue
                found.unwritten = None
                if found.until_us:
                    for waiter in [*self.waiters.get(message_id, ())]:
                        waiter.tell()
                        yield GOES_ON
            yield GOES_ON

    # -- rows

    def _put(self, found: Result, queue: Queue, number: int) -> None:
        """It waits there."""
        found.place, found.queue = queue, queue.name
        found.queue_id, found.number = queue.id, number
        if queue.id not in self._places:
            self._places[queue.id] = {}
            queue.update_tracers()
        self._places[queue.id][number] = found

    def _write(self, found: Result) -> None:
        pending = self._shared.pending
        found.unwritten = pending.entry.results[found.id] = found.row()
        pending.records += 1

    def _leave_place(self, found: Result) -> None:
        places = self._places[found.queue_id]
        del places[found.number]
        queue, found.place = found.place, None
        if not places:
            del self._places[found.queue_id]
            if queue is not None:  # Not at once: the queue is telling what happens.
                self._shared.turns.later(self._untrace(queue))

    def _untrace(self, queue: Queue) -> Work[None]:
        queue.update_tracers()
        yield GOES_ON

    def _end(self, found: Result, what: str, told: Mapping[str, Any] = NOT_TOLD) -> None:
        if found.place is not None:
            found.queue = found.place.name  # It may have been renamed.
            self._leave_place(found)
        state, reason = ENDS[what], b""
        if state == "done" and found.data is None and found.cancel is not None:
            state, reason = "cancelled", found.cancel
        elif state == "dead":
            reason = b" ".join(filter(None, (_bytes(told["reason"]), found.why)))
        elif state == "cancelled":
            reason = what.encode() if found.cancel is None else found.cancel
        found.state, found.reason = state, reason
        found.queue_id = found.number = 0
        found.until_us = self._shared.schedule.wall_us() + found.keep_us
        self._write(found)
        self._shared.pending.in_one_piece = True  # The end is a change of its queue.
        self._keep_until(found)

    def _keep_until(self, found: Result) -> None:
        key = found.until_us // BUCKET_US + 1
        if key not in self._buckets:
            self._buckets[key] = {}
            heapq.heappush(self._due, key)
            self._alarm.set(self._due[0] * BUCKET_US)
        self._buckets[key][found.id] = None

    def _forget(self, found: Result) -> None:
        del self.rows[found.id]
        self.bytes -= found.size
        if found.place is not None:
            self._leave_place(found)
        else:
            self._buckets[found.until_us // BUCKET_US + 1].pop(found.id, None)

    def _forget_due(self) -> bool:
        """Forget some of those that are due; return whether there were any."""
        now_us, count, pending = self._shared.schedule.wall_us(), 0, self._shared.pending
        while self._due and self._due[0] * BUCKET_US <= now_us and count < STEP_NAMES:
            bucket = self._buckets[self._due[0]]
            for message_id in [*islice(bucket, STEP_NAMES)]:
                self._forget(self.rows[message_id])
                pending.entry.results[message_id] = None
                count += 1
            if not bucket:
                del self._buckets[heapq.heappop(self._due)]
                count += 1
        pending.records += count
        self._alarm.set(self._due[0] * BUCKET_US if self._due else None)
        return count > 0

    # -- what happens to messages, see `Tracer`

    def note(self, queue: Traced, what: str, some: Deliveries, told: Told = NOT_TOLD) -> None:
        places = self._places.get(queue.id)
        if not places or not (what in ENDS or what in HELD):
            return
        for found in [*filter(None, (places.get(number) for number, _ in some))]:
            if what in HELD:
                found.consumer, found.cancel = _bytes(told["consumer"]), None
            else:
                self._end(found, what, told)

    def left(self, queue: Traced, what: str, numbers: Sequence[int], told: Told = NOT_TOLD) -> None:
        if not (places := self._places.get(queue.id)):
            return
        for found in [*filter(None, map(places.get, among(numbers, places)))]:
            self._end(found, what, told)

    def returned(self, queue: Traced, event: Event, some: Deliveries, why: bytes) -> None:
        places = self._places.get(queue.id, {})
        for number, _ in some:
            if (found := places.get(number)) is not None:
                found.consumer, found.cancel = b"", None
                found.why = why if event is REJECT or event is KILL else b""

    def scheduled(self, queue: Traced, some: Deliveries, due_us: Iterable[int]) -> None:
        """It waits, as before."""

    def moved(self, source: Traced, to: Traced, some: Sequence[Delivery], first: int) -> None:
        places = self._places.get(source.id, {})
        gone = [
            (found, number)
            for number, (old, _) in enumerate(some, first)
            if (found := places.get(old)) is not None
        ]
        for found, _ in gone:
            self._leave_place(found)
        for found, number in gone:
            found.consumer = b""
            self._put(found, cast(Queue, to), number)
            self._write(found)

    def deleted(self, queue: Traced) -> None:
        if places := self._places.get(queue.id):
            self._shared.turns.later(self._end_all([*places.values()], "deleted"))

    def _end_all(self, some: Sequence[Result], what: str) -> Work[None]:
        for part in slices(some, STEP_NAMES):
            for found in part:
                if self.rows.get(found.id) is found and not found.until_us:
                    self._end(found, what)
            yield GOES_ON

    # -- recovery

    def restore(self, rows: Mapping[bytes, ResultRow]) -> None:
        """Raises SchemaTooNew."""
        self.rows = {each: Result.parse(each, row) for each, row in rows.items()}
        self.bytes = sum(found.size for found in self.rows.values())

    def start(self, queues: Iterable[Queue]) -> None:
        """After recovery, before the queues start. A message that waited and is not there has ended
        without its row: by the end of its queue, on a full disk, or by a start with --salvage."""
        by_id = {queue.id: queue for queue in queues}
        for found in self.rows.values():
            queue = by_id.get(found.queue_id)
            if found.until_us:
                self._keep_until(found)
            elif queue is None:
                self._end(found, "deleted")
            elif not (queue.lane.is_ready(found.number) or queue.is_put_off(found.number)):
                self._end(found, "gone")
            else:
                self._put(found, queue, found.number)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
