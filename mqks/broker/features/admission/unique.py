"""Unique messages: while one of a key waits, or until it is acked, another one is dropped or takes
its place.

The one rule: a key is held by a living message, and is written nowhere but in its text. So nothing
can part the two: no crash, no full disk, no move to another queue.

A queue has its keys from the first unique message on until the last one has left. After a start
they are on disk only: the first publish of a unique message waits until all messages have been
read, some at a time, while everything else goes on. Meanwhile messages change their places; so
ready ones are read first, then those that consumers hold, then scheduled ones, and the lane tells
which ones return against that direction.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple, cast

from mqks.broker.features.death.moves import Ready, some_bodies
from mqks.broker.features.order.placed import place_of, put_in_place
from mqks.broker.features.time.times import timed
from mqks.broker.spine.base.ranges import among
from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work, emptied, slices
from mqks.broker.spine.clients.consumer import consumers_of
from mqks.broker.spine.message.mark import NO_MARK
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import UniqueClaim
from mqks.broker.spine.queue.shared import Place
from mqks.limits import SCHEDULED_SEQ, STEP_MESSAGES, STEP_NAMES
from mqks.protocol.meta import split_dead_letter
from mqks.protocol.replies import UNIQUE, message_id, parts, read_traits
from mqks.protocol.requests import UniqueTerms, read_unique

KEY_BYTES: Final = 280
"""Memory of a key besides its length and that of the message's id: entries of two dicts and what
they hold (measured)."""


class KeyHolder(NamedTuple):
    """A message that holds a key."""

    number: int
    message_id: bytes
    until_acked: bool
    ends_us: int
    """Until then, by the monotonic clock; 0: it has no such limit."""


class UniqueKeys:
    """The keys of one queue. What is delivered stays here until it leaves: whether it still holds
    its key is asked when somebody wants that."""

    __slots__ = (
        *("_by_number", "_ending", "_expected", "_holders", "_is_leaving", "_is_reading"),
        *("_is_tidying", "_queue", "_size", "is_known"),
    )

    def __init__(self, queue: Queue, *, is_known: bool = True) -> None:
        self._queue = queue
        self.is_known = is_known
        """False: those of a start are not read yet."""
        self._holders: dict[bytes, KeyHolder] = {}
        self._by_number: dict[int, bytes] = {}
        self._expected: set[bytes] = set()
        """Of messages that come from another queue in this step."""
        self._ending: dict[bytes, int] = {}
        """Ids of the messages that left last, which may come back with new numbers in this step →
        until when they hold their keys."""
        self._is_reading = self._is_leaving = self._is_tidying = False
        self._size = 0

    def __len__(self) -> int:
        return len(self._holders)

    # -- who holds a key

    def holder(self, key: bytes) -> KeyHolder | None:
        found = self._holders.get(key)
        if found is None or 0 < found.ends_us <= self._queue.shared.schedule.clock_us():
            return None
        return found if found.until_acked or self._is_untried(found.number) else None

    def expect(self, key: bytes) -> bool:
        """Whether a message with this key may join in this step."""
        if key in self._expected or self.holder(key) is not None:
            return False
        self._expected.add(key)
        return True

    def _is_untried(self, number: int) -> bool:
        """Whether a message waits for its first delivery."""
        queue, lane = self._queue, self._queue.lane
        return (lane.is_ready(number) or queue.is_put_off(number)) and not self._was_tried(number)

    def _was_tried(self, number: int) -> bool:
        lane = self._queue.lane
        return number < lane.cursor or lane.marks.get(number, NO_MARK).version > 0

    def may_replace(self, holder: KeyHolder) -> bool:
        """Whether it waits, and nobody has it, not for a lease either."""
        queue, number = self._queue, holder.number
        if queue.is_put_off(number):
            return number not in timed(queue).delays.placed
        return queue.lane.is_ready(number)

    def take_out(self, holder: KeyHolder) -> None:
        """Settle a message that waits, in the commit of the one that takes its place."""
        queue, number = self._queue, holder.number
        if queue.is_put_off(number):
            delays = timed(queue).delays
            delays.remove(number)
            if delays.is_untidy and not self._is_tidying:
                self._is_tidying = True
                queue.shared.turns.later(self._tidy())
        else:
            queue.lane.take_out(number)
        queue.lane.leave_together([number])

    def _tidy(self) -> Work[None]:
        yield from self._queue.tidy()
        self._is_tidying = False

    # -- which messages there are

    def hold(self, key: bytes, holder: KeyHolder) -> None:
        """A message holds a key from now on, whoever has held it."""
        self._forget(key)
        self._holders[key] = holder
        self._by_number[holder.number] = key
        self._count(KEY_BYTES + len(key) + len(holder.message_id))

    def _forget(self, key: bytes) -> KeyHolder | None:
        holder = self._holders.pop(key, None)
        if holder is not None:
            self._by_number.pop(holder.number, None)
            self._count(-KEY_BYTES - len(key) - len(holder.message_id))
        return holder

    def _count(self, size: int) -> None:
        self._size += size
        self._queue.shared.memory.used += size

    def joined(self, first: int, lines: Sequence[bytes]) -> None:
        for number, line in enumerate(lines, first):
            if UNIQUE in line:
                self._add(number, line)
        self._expected.clear()

    def returned(self, number: int, line: bytes) -> None:
        if not self.is_known and UNIQUE in line:
            self._add(number, line)

    def left(self, numbers: Sequence[int]) -> None:
        by_number = self._by_number
        self._ending.clear()
        for number in among(numbers, by_number):
            key = by_number.get(number)
            if key is not None and (holder := self._forget(key)) and holder.ends_us:
                self._ending[holder.message_id] = holder.ends_us
        if not (by_number or self._is_leaving):
            self._is_leaving = True
            self._queue.shared.turns.later(self._leave())

    def _leave(self) -> Work[None]:
        """Not at once: a message may have left only for another place in its queue."""
        self._is_leaving = False
        if self.is_known and not self._by_number and self._queue.lane.unique is self:
            self._queue.lane.unique = None
        yield GOES_ON

    def _add(self, number: int, line: bytes) -> None:
        """A message is here that may hold its key; the first one does."""
        wanted = _wanted(line)
        if wanted is None or self.holder(wanted.key) is not None:
            return
        if self._was_tried(number) and not wanted.until_acked:
            return
        its_id, ends_us, for_us = message_id(line), 0, wanted.for_us
        if for_us:
            schedule, published_us = self._queue.shared.schedule, int(parts(line).published)
            left_us = min(for_us, published_us + for_us - schedule.wall_us())
            ends_us = self._ending.get(its_id) or max(1, schedule.clock_us() + left_us)
        self.hold(wanted.key, KeyHolder(number, its_id, wanted.until_acked, ends_us))

    def delete(self) -> Iterator[object]:
        self._count(-self._size)
        self._by_number, holders = {}, self._holders
        self._holders = {}
        return emptied(holders)

    # -- after a start

    def read(self) -> Work[None]:
        """Wait until all are known."""
        if not self._is_reading:
            self._is_reading = True
            self._queue.shared.turns.later(self._read())
        while not (self.is_known or self._queue.deleted):
            yield WAITS

    def _read(self) -> Work[None]:
        queue, lane = self._queue, self._queue.lane
        ready = Ready(queue, lane.next_seq, None)
        while (lines := (yield from ready.next())) is not None:
            self._learn(lines, lane.is_ready)
            yield GOES_ON
        for consumer in [*consumers_of(queue)]:
            for some in slices([*consumer.held()], STEP_MESSAGES):
                held = [(n, line) for n, line, _ in some if consumer.holds(message_id(line), n)]
                self._learn(dict(held), {*dict(held)}.__contains__)
                yield GOES_ON
        if queue.times is not None:
            delays = timed(queue).delays
            for numbers in delays.each():
                left: Sequence[int] = sorted(numbers)
                while left and not queue.deleted:
                    lines, left = yield from some_bodies(queue, left, delays.bodies.get)
                    self._learn(lines, queue.is_put_off)
                    yield GOES_ON
        if not queue.deleted:
            self.is_known = True
            if not self._by_number:
                lane.unique = None
                queue.keep(replace(queue.policy, has_unique=False))

    def _learn(self, lines: dict[int, bytes], is_there: Callable[[int], bool]) -> None:
        for number, line in lines.items():
            if UNIQUE in line and number not in self._by_number and is_there(number):
                self._add(number, line)


def _wanted(line: bytes) -> UniqueTerms | None:
    """The key that a message may hold; None for a dead letter, which holds none."""
    if UNIQUE not in line:
        return None
    told = parts(line)
    text = read_traits(told.traits).unique
    return read_unique(text) if text and split_dead_letter(told.meta)[1] is None else None


def _keys(queue: Place) -> UniqueKeys | None:
    return cast("UniqueKeys | None", queue.lane.unique)


def _made(queue: Place) -> UniqueKeys:
    """Those of a queue that has some from now on."""
    keys = _keys(queue)
    if keys is None:
        if not queue.policy.has_unique:
            queue.keep(replace(queue.policy, has_unique=True))
        keys = queue.lane.unique = UniqueKeys(cast(Queue, queue))
    return keys


def restored(queue: Place) -> None:
    if queue.policy.has_unique and queue.contents[0]:
        queue.lane.unique = UniqueKeys(cast(Queue, queue), is_known=False)


def read(queues: Iterable[Place]) -> Work[None]:
    for number, queue in enumerate([*queues], 1):
        keys = _keys(queue)
        if keys is not None and not keys.is_known:
            yield from keys.read()
        if number % STEP_NAMES == 0:
            yield GOES_ON


def is_new(queue: Place, claim: UniqueClaim) -> bool:
    keys = _keys(queue)
    return keys is None or keys.holder(claim.wanted.key) is None


def takes(queue: Place, claim: UniqueClaim) -> bool:
    keys = _keys(queue)
    holder = None if keys is None else keys.holder(claim.wanted.key)
    if keys is None or holder is None:
        return True
    return claim.wanted.replaces and keys.may_replace(holder)


def admit(queue: Place, claim: UniqueClaim, its_id: bytes, number: int) -> bool:
    wanted, keys, counters = claim.wanted, _keys(queue), queue.shared.counters
    holder = None if keys is None else keys.holder(wanted.key)
    if keys is not None and holder is not None:
        if not (wanted.replaces and keys.may_replace(holder)):
            claim.duplicate = claim.duplicate or holder.message_id
            counters.queued -= 1
            counters.duplicates += 1
            return False
        for tracer in queue.tracers:
            tracer.left(queue, "replaced", [holder.number])
        if number < SCHEDULED_SEQ and queue.lane.is_ready(holder.number):
            put_in_place(queue, number, place_of(queue, holder.number))
        keys.take_out(holder)
        claim.replaced = claim.replaced or holder.message_id
        counters.replaced += 1
    claim.is_placed = True
    ends_us = queue.shared.schedule.clock_us() + wanted.for_us if wanted.for_us else 0
    _made(queue).hold(wanted.key, KeyHolder(number, its_id, wanted.until_acked, ends_us))
    return True


def placed(queue: Place, number: int) -> None:
    lane = queue.lane
    if not (queue.is_put_off(number) or any(chain(*lane.unwritten_numbers(number)))):
        _made(queue).left((number,))


def may_join(queue: Place, line: bytes) -> bool:
    """Whether a message from another queue may join, in this step: no other one holds its key."""
    wanted = _wanted(line)
    return wanted is None or _made(queue).expect(wanted.key)
