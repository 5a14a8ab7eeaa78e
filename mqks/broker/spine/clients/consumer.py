"""One consumer: its unacked deliveries, and why it rests.

The one rule: with manual ack, every delivery is in `unacked`, and counted, until it is acked or
returned.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, cast

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.turns import GOES_ON, Work, emptied, ordered, slices
from mqks.broker.spine.clients.outbox import Outbox
from mqks.broker.spine.log.pending import NO_MARK
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.held_since import HeldSince
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.taker import UNLIMITED, Rest, Taker
from mqks.broker.spine.queue.timers import AckTimers
from mqks.limits import STEP_MESSAGES
from mqks.protocol import replies
from mqks.protocol.requests import ACK_TIMEOUT, BACKOFF, policy_text

UNACKED_OVERHEAD_BYTES: Final = 288
"""Memory of a delivery besides the length of its message: four objects and a dict entry (measured),
and a second copy of its id. Adding the lengths of ids would cost 3 % of an ack, and none is longer
than `name_bytes_max`."""


class Consumer(Taker):
    __slots__ = (
        *("budget", "connection", "prefix", "queue", "repeated"),
        *(
            "ack_timeout_us",
            "deadlines",
            "defaults",
            "meta",
            "prefetch",
            "prefetch_max",
            "separator",
            "since",
        ),
        *("unacked", "unacked_bytes", "unacked_max", "update_due"),
    )

    def __init__(
        self,
        consumer_id: bytes,
        connection: Outbox,
        queue: Queue,
        manual_ack: bool,
        unacked_max: int,
        *,
        prefetch: int = 0,
        meta: bool = False,
        defaults: Policy = DEFAULT,
    ) -> None:
        super().__init__(consumer_id, manual_ack)
        self.connection = connection
        self.queue = queue
        self.prefetch = prefetch
        """Requested maximum of unacked messages; 0: none requested."""
        self.prefetch_max = unacked_max
        """What the server allows."""
        self.unacked_max = min(prefetch or unacked_max, unacked_max)
        self.meta = meta
        """Its deliveries have attributes."""
        self.defaults = defaults
        """What applies to its losses where its queue has no rule."""
        timeout_s = defaults.ack_timeout_s
        self.ack_timeout_us = None if timeout_s is None else round(timeout_s * 1e6)
        """Its own ack timeout, instead of that of its queue."""
        self.deadlines: AckTimers | None = None
        """When it must have acked what it holds, once there is an ack timeout or a touch."""
        self.budget: Budget = connection.flow.unacked
        self.prefix = consumer_id + b" ok "
        self.separator = b"\n" + self.prefix
        self.update_due = False
        """Its queue's bindings or rule have changed, and the update is not sent yet."""
        self.unacked: dict[bytes, Delivery] = {}
        """Message id → its oldest unsettled delivery."""
        self.repeated: dict[bytes, OrderedDict[int, bytes]] = {}
        """Message id → later deliveries under the same id: number → message."""
        self.unacked_bytes = 0
        self.since = HeldSince(queue.shared.schedule.wall_us)
        """Since when it holds each of them."""

    @property
    def deleted(self) -> bool:
        return bool(self.rests & Rest.ENDED)

    @property
    def unacked_count(self) -> int:
        return len(self.unacked) + sum(map(len, self.repeated.values()))

    # -- whether it can take messages

    def _stop(self) -> None:
        self.queue.ring.pop(self, None)

    def _go_on(self) -> None:
        queue = self.queue
        if self in queue.consumers:
            queue.serve(self)
            queue.deliver()

    def room(self) -> int:
        """How many more messages it can take now. It may always hold one; otherwise consumers that
        never ack would starve all others."""
        if self.connection.rests:
            return 0
        if not self.manual_ack:
            return UNLIMITED
        if self.budget.is_short:
            return 0 if self.unacked else 1
        return self.unacked_max - self.unacked_count

    def rest_if_full(self) -> None:
        if self.connection.rests:
            self.rest(Rest.SLOW)
        elif self.manual_ack and self.unacked:
            if self.unacked_count >= self.unacked_max:
                self.rest(Rest.UNACKED)
            elif self.budget.is_short:
                self.rest(Rest.ALL_UNACKED)
                self.budget.wait(self, self._has_budget)

    def set_prefetch(self, prefetch: int) -> None:
        """Hold at most so many unacked messages from now on; those that it has stay."""
        self.prefetch = prefetch
        self.unacked_max = min(prefetch or self.prefetch_max, self.prefetch_max)
        if self.unacked_count < self.unacked_max:
            self.resume(Rest.UNACKED)
        else:
            self.rest(Rest.UNACKED)

    def _has_budget(self) -> None:
        self.resume(Rest.ALL_UNACKED)

    # -- unacked deliveries

    def take(
        self, numbers: Sequence[int], lines: Sequence[bytes], ids: Sequence[bytes] | None
    ) -> None:
        told = lines
        lane = self.queue.lane
        if self.meta:
            told = self._tell_meta(numbers, lines)
        elif lane.has_attributes:
            told = replies.all_plain(lines)
        if lane.marks and not lane.marks.keys().isdisjoint(numbers):
            told = self._tell_marks(numbers, lines, told)
        if self.manual_ack:
            if ids is None:
                ids = [line[: line.index(b" ")] for line in lines]
            is_long = self.since.add(numbers, len(self.unacked))
            taken = dict(zip(ids, zip(numbers, lines, strict=True), strict=True))
            # Python iterates over the shorter one of two views, but over all of a dict.
            if len(taken) == len(ids) and taken.keys().isdisjoint(self.unacked.keys()):
                self.unacked.update(taken)
            else:
                for message_id, number, line in zip(ids, numbers, lines, strict=True):
                    if message_id in self.unacked:
                        self.repeated.setdefault(message_id, OrderedDict())[number] = line
                    else:
                        self.unacked[message_id] = (number, line)
            if is_long:
                self.since.keep([number for number, _ in self.held()])
            size = sum(map(len, lines)) + UNACKED_OVERHEAD_BYTES * len(lines)
            timeout_us = self.timeout_us
            if timeout_us is not None or self.deadlines is not None:
                self._awaited().add([*zip(ids, numbers, strict=True)], timeout_us)
            self.unacked_bytes += size
            self.budget.used += size
        self.connection.write(self.prefix + self.separator.join(told) + b"\n")

    def _tell_marks(
        self, numbers: Sequence[int], lines: Sequence[bytes], told: Sequence[bytes]
    ) -> list[bytes]:
        """Tell the retry of messages that have one, and mark them as delivered again."""
        lane, told = self.queue.lane, [*told]
        for place, number in enumerate(numbers):
            mark = lane.marks.get(number)
            if mark is None:
                continue
            if mark.retry:
                if not self.meta:
                    told[place] = replies.with_retry(lines[place], mark.retry)
                self.queue.shared.counters.redelivered += 1
            if self.manual_ack:
                lane.mark(number, mark.delivered())
        return told

    def _tell_meta(self, numbers: Sequence[int], lines: Sequence[bytes]) -> list[bytes]:
        marks = self.queue.lane.marks
        return [
            replies.with_meta(line, marks.get(number, NO_MARK).retry)
            for number, line in zip(numbers, lines, strict=True)
        ]

    @property
    def timeout_us(self) -> int | None:
        """The ack timeout of new deliveries."""
        own_us = self.ack_timeout_us
        return self.queue.ack_timeout_us if own_us is None else own_us

    def _awaited(self) -> AckTimers:
        if self.deadlines is None:
            shared = self.queue.shared
            self.deadlines = shared.features.ack_timers(shared.schedule, shared.turns, self)
        return self.deadlines

    def settle(self, message_ids: Iterable[bytes]) -> list[Delivery]:
        """Take the oldest delivery of each id from the unacked; unknown ids are ignored."""
        pop, repeated = self.unacked.pop, self.repeated
        deliveries = [
            delivery
            for message_id in message_ids
            if (delivery := pop(message_id, None)) is not None
            and (not repeated or self._promote(message_id))
        ]
        size = self.unacked_bytes
        if self.unacked:
            size = sum([len(line) for _, line in deliveries])
            size += UNACKED_OVERHEAD_BYTES * len(deliveries)
        self._give_back(size)
        return deliveries

    def take_back(self, message_ids: Iterable[bytes]) -> list[Delivery]:
        """Take messages that return to the queue, which delivers nothing before that:
        otherwise later messages would take their place at the consumer."""
        self.queue.returning += 1
        deliveries = self.settle(message_ids)
        self.queue.returning -= 1
        return deliveries

    def _give_back(self, size: int) -> None:
        self.unacked_bytes -= size
        self.budget.give_back(size)
        if self.rests & Rest.UNACKED and self.unacked_count < self.unacked_max:
            self.resume(Rest.UNACKED)
        if self.rests & Rest.ALL_UNACKED and not self.unacked:
            self.budget.leave(self)
            self.resume(Rest.ALL_UNACKED)

    def _promote(self, message_id: bytes) -> bool:
        """Make the next delivery with a settled id its oldest. Always returns True."""
        if later := self.repeated.get(message_id):
            self.since.out_of_order = True
            self.unacked[message_id] = later.popitem(last=False)
            if not later:
                del self.repeated[message_id]
        return True

    def let_go(self) -> Iterator[Delivery]:
        unacked, repeated = self.unacked, self.repeated
        self.unacked, self.repeated = {}, {}
        self.since.clear()
        if self.deadlines is not None:
            self.deadlines.clear()
        self._give_back(self.unacked_bytes)
        return _each(unacked, repeated)

    # -- ack timeout

    def held_since_us(self, message_id: bytes, number: int) -> int | None:
        """When this delivery was made, in microseconds since 1970; None if it is settled."""
        return self.since.time_us(number) if self.holds(message_id, number) else None

    def oldest_us(self) -> int | None:
        """When the oldest of its unacked deliveries was made, in microseconds since 1970."""
        unacked = self.unacked
        if not unacked:
            return None
        if self.since.out_of_order:
            return self.since.first_us(number for number, _ in unacked.values())
        return self.since.time_us(next(iter(unacked.values()))[0])

    def holds(self, message_id: bytes, number: int) -> bool:
        """Whether this delivery is unacked."""
        held = self.unacked.get(message_id)
        return held is not None and (
            number == held[0] or number in self.repeated.get(message_id, ())
        )

    def touch(self, message_id: bytes, for_us: int | None) -> None:
        """Restart the ack timeout of this message, or set it to `for_us`."""
        timeout_us = self.timeout_us if for_us is None else for_us
        if timeout_us is not None and message_id in self.unacked:
            self._awaited().touch([(message_id, self.unacked[message_id][0])], timeout_us)

    def touch_all(self) -> None:
        """Restart the ack timeout of all its messages that have one."""
        if self.deadlines is not None and self.timeout_us is not None:
            self.deadlines.touch_all(self.timeout_us)

    def touch_each(self, for_us: int) -> Work[None]:
        """Set the ack timeout of all that it holds now, whether or not they have one."""
        for some in slices((yield from ordered(self.held())), STEP_MESSAGES):
            ids = ((line[: line.index(b" ")], number) for number, line in some)
            if held := [each for each in ids if self.holds(*each)]:
                self._awaited().touch(held, for_us)
            yield GOES_ON

    def too_late(self, late: list[tuple[bytes, int]]) -> None:
        """Return these to the queue, as if the consumer were lost."""
        self.queue.give_back(self._take_numbered(late), Event.LOSS, defaults=self.defaults)

    def held(self) -> Iterator[Delivery]:
        """All unacked deliveries, in no order."""
        later = map(OrderedDict.items, self.repeated.values())
        return chain(self.unacked.values(), chain.from_iterable(later))

    def take_these(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Take back those of the deliveries that are still unacked."""
        ids = ((number, line[: line.index(b" ")]) for number, line in deliveries)
        held = ((message_id, number) for number, message_id in sorted(dict.fromkeys(ids)))
        return self._take_numbered([each for each in held if self.holds(*each)])

    def _take_numbered(self, late: list[tuple[bytes, int]]) -> list[Delivery]:
        by_id: dict[bytes, set[int]] = {}
        for message_id, number in late if self.repeated else ():
            by_id.setdefault(message_id, set()).add(number)
        for message_id in by_id.keys() & self.repeated.keys():
            self._put_first(message_id, by_id[message_id])
        return self.take_back(message_id for message_id, _ in late)

    def _put_first(self, message_id: bytes, numbers: Iterable[int]) -> None:
        """Make these the oldest deliveries with their id."""
        later, (oldest, line) = self.repeated[message_id], self.unacked[message_id]
        later[oldest] = line
        for number in (oldest, *sorted(numbers, reverse=True)):
            later.move_to_end(number, last=False)
        self.unacked[message_id] = later.popitem(last=False)

    def update(self, about: bytes) -> bytes:
        """The line about the queue's bindings, `replies.bound`."""
        flags = b" --manual-ack" if self.manual_ack else b""
        if self.prefetch:
            flags += b" --prefetch=%d" % self.prefetch
        if (backoff := self.defaults.told("backoff")) is not None:
            flags += b" --backoff=" + policy_text(BACKOFF, backoff)
        if (timeout_s := self.defaults.ack_timeout_s) is not None:
            flags += b" --ack-timeout=" + policy_text(ACK_TIMEOUT, timeout_s)
        if self.meta:
            flags += b" --meta"
        return replies.update(self.id, about, flags)


def consumers_of(queue: Queue) -> Iterable[Consumer]:
    """The consumers of a queue, which knows them as takers only."""
    return cast("Iterable[Consumer]", queue.consumers)


def _each(
    unacked: dict[bytes, Delivery], repeated: dict[bytes, OrderedDict[int, bytes]]
) -> Iterator[Delivery]:
    """Take the deliveries out one by one. Not generator expressions: compiled, those are lists."""
    for _, delivery in emptied(unacked):
        yield delivery
    for _, later in emptied(repeated):
        yield from emptied(later)
