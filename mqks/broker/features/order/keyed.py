"""The order of a queue whose messages are ordered by key, or whose keys take turns.

The one rule: a known key with ready messages is in `free` once, or has a `HeldKey`, or is being
read from disk. Messages below `frontier` are known. A number that has left the queue meanwhile is
skipped when its turn comes.

A delivery must find the next message that somebody may have without looking at those that nobody
may have: one key may be held with a million messages behind it. So there is an index of numbers by
key (`_ready`), and a key is looked at only when it has a turn: in `_free`, for whoever comes first,
or in the offers of the consumer that holds it. Taking the next message of a key ends its turn, and
begins one anew at the end of the line, unless it has no more.

Only messages in memory have keys that can be read. `learn` goes up from `frontier` as far as they
are in memory; where it meets one that is only on disk, the queue reads a page. It stops early, once
so many keys are free that more of them would not help, so a queue with many messages is not read
whole. What is known may be spilled again: its key leaves the line while its bodies are fetched.

A message that is delivered, or put off, holds its key by its number (`_held`), so acks, moves and
the end of a consumer need no body: the lane tells which numbers have left or returned. That is also
why the index need not be exact for messages that leave it in another way, by a trim, a purge or
their TTL: their numbers are skipped at their turn, and all is made anew if they are too many.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, ClassVar, Final, TypeAlias

from mqks.broker.features.death.deaths import step_parts
from mqks.broker.spine.base.ranges import among
from mqks.broker.spine.base.turns import emptied, free
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.order import PAGE, Order, Rest, Ring, Share, Taker
from mqks.broker.spine.queue.paging import bring_in
from mqks.broker.spine.queue.shared import Place
from mqks.limits import DELIVERY_BYTES, KEYED_MAX, STEP_MESSAGES, STEP_RULED
from mqks.protocol.replies import key_of

FREE_ENOUGH: Final = 1024
"""With so many free keys, no more messages are read from disk to learn theirs."""
FETCHED_MAX: Final = 64
"""Messages of one key that are read from disk at once."""
STALE_MAX: Final = 1024
"""So many more than the ready messages may be in the index, before it is made anew."""

Numbers: TypeAlias = "int | array[int]"
"""Ascending numbers of ready messages. Of several, the first item is the index of the next one."""


def ascending(numbers: list[int]) -> Iterator[list[int]]:
    """The parts of a list in which numbers ascend, in their order."""
    falls = [at for at, (one, next_one) in enumerate(pairwise(numbers), 1) if next_one < one]
    return (numbers[start:end] for start, end in pairwise([0, *falls, len(numbers)]))


class HeldKey:
    """A key with messages that are delivered, by one consumer, or put off."""

    __slots__ = ("count", "is_offered", "key", "put_off", "taker")

    def __init__(self, key: bytes, taker: Taker | None) -> None:
        self.key = key
        self.taker = taker
        self.count = 0
        """Messages that hold the key."""
        self.put_off = 0
        """Those of them that have returned and are scheduled: nobody gets the next one."""
        self.is_offered = False
        """It is in the offers of its consumer."""


class Keyed(Order):
    """`is_ordered`: while a message of a key is unacked, only its consumer gets the next one, and
    nobody if it is put off. Otherwise keys only take turns. Messages without a key take turns
    together, and are not ordered."""

    __slots__ = (
        *("_able", "_count", "_fetched", "_free", "_held", "_holds", "_is_counting", "_offers"),
        *("_put_off", "_queue", "_unread", "_ready", "frontier", "is_ordered"),
    )

    passes_new: ClassVar[bool] = False

    def __init__(self, queue: Place, *, is_ordered: bool) -> None:
        super().__init__(queue.lane)
        self._queue = queue
        self.is_ordered = is_ordered
        self._is_counting = is_ordered
        """It must know which messages of a key are delivered, or put off."""
        self.frontier = 0
        self._free: deque[bytes] = deque()
        """Keys in the order of their turns."""
        self._ready: dict[bytes, Numbers] = {}
        self._count = 0
        """Numbers in `_ready`."""
        self._fetched: set[bytes] = set()
        """Keys of which messages are being read."""
        self._unread = 0
        """Reads of messages that were put off before the keys were known."""
        self._holds: dict[bytes, HeldKey] = {}
        self._held: dict[int, HeldKey] = {}
        self._put_off: set[int] = set()
        self._offers: dict[Taker, deque[HeldKey]] = {}
        """Keys that a consumer holds, of which it may get the next message."""
        self._able: dict[Taker, None] = {}
        """Consumers with offers that may have room for them."""

    @property
    def known(self) -> int:
        """Number of known keys with ready messages."""
        return len(self._ready)

    @property
    def held(self) -> int:
        """Number of keys of which later messages wait for earlier ones."""
        return len(self._holds)

    @property
    def is_reading(self) -> bool:
        return bool(self._fetched or self._unread)

    # -- which messages are ready

    def learn(self) -> bool:
        """Learn the keys of some more ready messages that are in memory; return whether there were
        any."""
        lane = self._lane
        if self._count > 2 * lane.blocks.count + STALE_MAX:
            self._begin_anew()
        if self.frontier >= lane.next_seq or not self._wants_more:
            return False
        count = min(STEP_MESSAGES, KEYED_MAX - self._count)
        bodies, stop = lane.blocks.held_from(self.frontier, count)
        for number, line in bodies:
            self._add(key_of(line), number)
        self.frontier = lane.next_seq if stop is None else stop
        return bool(bodies)

    @property
    def page_first(self) -> int | None:
        return self._lane.blocks.first_on_disk(self.frontier)

    def wants(self) -> Sequence[int] | None:
        """A page, for the keys of more messages."""
        return PAGE if self._wants_more and self.page_first is not None else None

    @property
    def _wants_more(self) -> bool:
        """Whether to learn the keys of more messages: all of them, as one key may have a million
        messages before those of others, but not more than is of use."""
        return len(self._free) < FREE_ENOUGH and self._count < KEYED_MAX

    def _add(self, key: bytes, number: int) -> None:
        """A message is ready; its number is above those known of this key."""
        numbers = self._ready.get(key)
        self._count += 1
        if isinstance(numbers, array):
            numbers.append(number)
            return
        if numbers is not None:
            self._ready[key] = array("q", (1, numbers, number))
            return
        self._ready[key] = number
        self._turn(key)

    def _turn(self, key: bytes) -> None:
        """A key has ready messages now, or is no longer held."""
        hold = self._holds.get(key) if self.is_ordered else None
        if hold is None:
            self._free.append(key)
        else:
            self._offer(hold)

    def _offer(self, hold: HeldKey) -> None:
        taker = hold.taker
        if taker is None or taker.rests & Rest.ENDED or hold.put_off or hold.is_offered:
            return
        hold.is_offered = True
        self._offers.setdefault(taker, deque()).append(hold)
        self._able[taker] = None

    def returned(self, number: int, line: bytes) -> None:
        if number >= self.frontier:
            self._let_go(number)
            return
        key = key_of(line)
        numbers = self._ready.get(key)
        self._count += 1
        if numbers is None:
            self._ready[key] = number
        else:
            known = numbers if isinstance(numbers, array) else array("q", (1, numbers))
            self._ready[key] = known
            first, place = known[0], bisect_left(known, number, known[0])
            if first > 1 and place - first < len(known) - place:
                # Mostly it goes near the front, and there are few to be moved.
                known[first - 1 : place - 1] = known[first:place]
                known[place - 1] = number
                known[0] = first - 1
            else:
                known.insert(place, number)
        if not (self._let_go(number) and self.is_ordered) and numbers is None:
            self._turn(key)

    def _next_of(self, key: bytes) -> Delivery | None:
        """Take the next ready message of a key; None if there is none, or none in memory."""
        blocks = self._lane.blocks
        for number in islice(self._pending(key), STEP_MESSAGES):
            line = blocks.get(number)
            if line is not None:
                self._pop(key)
                return number, line
            if number in blocks:
                self._read(key)
                return None
            self._pop(key)
        if key in self._ready:
            self._turn(key)
        return None

    def _pending(self, key: bytes) -> Iterator[int]:
        """The first ready message of a key, until there is none."""
        while (numbers := self._ready.get(key)) is not None:
            yield numbers[numbers[0]] if isinstance(numbers, array) else numbers

    def _pop(self, key: bytes) -> None:
        """Take out the first ready message of a key."""
        numbers = self._ready[key]
        self._count -= 1
        if isinstance(numbers, array):
            numbers[0] += 1
            if numbers[0] < len(numbers):
                if 2 * numbers[0] > len(numbers) + 64:
                    gone = numbers[0] // 2  # Some of the others may return.
                    del numbers[1 : 1 + gone]
                    numbers[0] -= gone
                return
        del self._ready[key]

    def _read(self, key: bytes) -> None:
        """Read the first messages of a key from disk. It has no turn before they are there."""
        numbers, blocks = self._ready[key], self._lane.blocks
        some: Iterable[int] = [numbers] if isinstance(numbers, int) else numbers[numbers[0] :]
        some = islice(some, FETCHED_MAX)
        missing = [number for number in some if number in blocks and blocks.get(number) is None]
        self._fetched.add(key)
        self._queue.fetch(missing, partial(self._came, key, missing))

    def _came(self, key: bytes, missing: list[int], lines: Mapping[int, bytes]) -> None:
        bring_in(self._queue, missing, lines)
        if key in self._fetched:
            self._fetched.remove(key)
            if key in self._ready:
                self._turn(key)
                if key not in self._holds:
                    self._free.rotate(1)
        self._queue.deliver()

    # -- who gets them

    def next(self, ring: Ring, most: int) -> Iterable[Share] | None:
        """Each consumer gets one message at its turn."""
        if self._unread:
            return None
        self.learn()
        size, room, given = 0, dict[Taker, int](), dict[Taker, list[int]]()
        for _ in range(min(most, STEP_RULED)):
            taker = self._taker(ring)
            if taker is None:
                # Where something was given, the next step looks again: it may have left at once.
                if not given and not self.learn():
                    return None
                break
            if taker not in room:
                room[taker] = taker.room()
            if room[taker] <= 0:
                if taker in given:
                    break
                taker.rest_if_full()
                continue
            if (delivery := self._give(taker)) is not None:
                given.setdefault(taker, []).append(delivery[0])
                room[taker] -= 1
                ring.move_to_end(taker)
                size += len(delivery[1])
                if size >= DELIVERY_BYTES:
                    break
        return self._shares(given)

    def _shares(self, given: Mapping[Taker, list[int]]) -> Iterator[Share]:
        for taker, numbers in given.items():
            for some in ascending(numbers) if taker.is_brief else (sorted(numbers),):
                yield some, self._lane.pick(some)[1], taker

    def consumer_ready(self, taker: Taker) -> None:
        # It lost its turn when it was not in the ring, see `_taker`.
        if taker in self._offers:
            self._able[taker] = None

    def consumer_gone(self, taker: Taker) -> None:
        self._able.pop(taker, None)
        for hold in self._offers.pop(taker, ()):
            hold.is_offered = False

    def _taker(self, ring: Ring) -> Taker | None:
        """The next consumer for which there may be a message."""
        if self._free:
            return next(iter(ring), None)
        while self._able:
            taker = next(iter(self._able))
            if taker in ring:
                return taker
            del self._able[taker]
        return None

    def _give(self, taker: Taker) -> Delivery | None:
        """Take the message that this consumer gets next out of the index."""
        delivery, offers = None, self._offers.get(taker)
        if self._free and not (offers and taker.is_brief):
            key = self._free.popleft()
            if (delivery := self._next_of(key)) is not None:
                self._hold(key, delivery[0], taker)
        elif offers:
            hold = offers.popleft()
            hold.is_offered = False
            if (
                hold.count
                and not hold.put_off
                and (delivery := self._next_of(hold.key)) is not None
            ):
                self._hold(hold.key, delivery[0], taker)
            if not offers:
                del self._offers[taker], self._able[taker]
        return delivery

    def _hold(self, key: bytes, number: int, taker: Taker) -> None:
        """A message is delivered."""
        # Without a key there is no order, and without manual ack nothing that could come back.
        if key and self._is_counting and taker.manual_ack:
            hold = self._holds.get(key)
            if hold is None:
                hold = self._holds[key] = HeldKey(key, taker)
            hold.count += 1
            self._held[number] = hold
        if key in self._ready:
            self._turn(key)

    def left(self, numbers: Sequence[int]) -> None:
        held = self._held
        if held:
            for number in among(numbers, held):
                if self._let_go(number):
                    self._queue.shared.turns.due[self._queue] = None

    def _let_go(self, number: int) -> bool:
        """A message no longer holds its key; return whether it did."""
        hold = self._held.pop(number, None)
        if hold is None:
            return False
        hold.count -= 1
        if number in self._put_off:
            self._put_off.remove(number)
            hold.put_off -= 1
        if not hold.count:  # Whoever comes first may have the key.
            del self._holds[hold.key]
        if hold.key in self._ready and hold.key not in self._fetched:
            self._freed(hold.key)
        return True

    def _freed(self, key: bytes) -> None:
        """A message no longer holds this key, of which others are ready."""
        self._turn(key)

    def put_off(self, number: int) -> None:
        hold = self._held.get(number)
        if hold is not None and number not in self._put_off:
            hold.put_off += 1
            self._put_off.add(number)

    # -- start and end

    def started(self) -> None:
        """Messages that were put off before the keys were known hold theirs back: read them.
        Nothing is delivered before that."""
        marks = self._lane.marks.items() if self._is_counting else ()
        put_off = [
            number
            for number, mark in marks
            if mark.keeps_place and mark.due_us and number not in self._held
        ]
        for numbers in step_parts(self._queue, put_off):
            self._unread += 1
            self._queue.fetch(numbers, self._held_back)

    def _held_back(self, lines: Mapping[int, bytes]) -> None:
        self._unread -= 1
        for number, line in lines.items():
            mark = self._lane.marks.get(number)
            if number in self._held:
                continue
            if (key := key_of(line)) and mark is not None and mark.due_us:
                hold = self._holds.setdefault(key, HeldKey(key, None))
                hold.count += 1
                hold.put_off += 1
                self._held[number] = hold
                self._put_off.add(number)
        self._queue.deliver()

    def _begin_anew(self) -> None:
        """Most numbers that are known have left the queue: forget which messages are ready."""
        gone = self._emptied(self._ready, self._free)
        self._ready, self._free, self._count, self.frontier = {}, deque(), 0, 0
        self._fetched.clear()
        # An offer is of a key with ready messages: it is made again when those are learned.
        for hold in self._holds.values():
            hold.is_offered = False
        self._offers.clear()
        self._able.clear()
        self._queue.shared.turns.later(free(gone))

    def delete(self) -> Iterator[object]:
        return self._emptied(self._ready, self._free, self._held, self._holds, self._put_off)

    @staticmethod
    def _emptied(*things: deque[Any] | dict[Any, Any] | set[Any]) -> Iterator[object]:
        return chain.from_iterable(map(emptied, things))
