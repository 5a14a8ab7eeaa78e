"""One consumer: its unacked deliveries, and why it rests.

The one rule: with manual ack, every delivery is in `unacked`, and counted, until it is acked or
returned.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Final, cast

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.turns import emptied
from mqks.broker.spine.clients.outbox import Outbox
from mqks.broker.spine.message.mark import NO_MARK
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.order import UNLIMITED, Rest, Taker
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import AckTimers
from mqks.protocol import replies

UNACKED_OVERHEAD_BYTES: Final = 288
"""Memory of a delivery besides the length of its message: four objects and a dict entry (measured),
and a second copy of its id. Adding the lengths of ids would cost 3 % of an ack, and none is longer
than `name_bytes_max`."""


Held = tuple[int, bytes, int]
"""A delivery that is held: number, message, and when it was made, in microseconds since 1970."""


class Consumer(Taker):
    __slots__ = (
        *(
            "ack_timeout_us",
            "budget",
            "cancellable",
            "connection",
            "deadlines",
            "defaults",
            "meta",
            "prefetch",
        ),
        *("pause_entry", "prefetch_max", "prefix", "queue", "repeated", "separator", "unacked"),
        *("out_of_order", "unacked_bytes", "unacked_max", "update_due", "wall_us"),
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
        cancellable: bool = False,
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
        self.pause_entry: int | None = None
        """Of the end of its pause in the schedule."""
        self.meta = meta
        """Its deliveries have attributes."""
        self.cancellable = cancellable
        """It is told which of its messages are to be cancelled."""
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
        self.unacked: dict[bytes, Held] = {}
        """Message id → its oldest unsettled delivery."""
        self.repeated: dict[bytes, OrderedDict[int, Held]] = {}
        """Message id → later deliveries under the same id, by number."""
        self.unacked_bytes = 0
        self.out_of_order = False
        """An earlier delivery may be behind later ones in `unacked`."""
        self.wall_us = queue.shared.schedule.wall_us

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

    # What many consumers share, a connection or the budget, is looked at when it is their turn:
    # whoever changes it need not know them. Only at the end of such a reason they are called.

    def rest_if_full(self) -> None:
        if self.connection.rests:
            self.rest(Rest.SLOW)
        elif self.manual_ack and self.unacked:
            if self.unacked_count >= self.unacked_max:
                self.rest(Rest.UNACKED)
            elif self.budget.is_short:
                self.rest(Rest.ALL_UNACKED)
                self.budget.wait(self, partial(self.resume, Rest.ALL_UNACKED))

    def set_prefetch(self, prefetch: int) -> None:
        """Hold at most so many unacked messages from now on; those that it has stay."""
        self.prefetch = prefetch
        self.unacked_max = min(prefetch or self.prefetch_max, self.prefetch_max)
        if self.unacked_count < self.unacked_max:
            self.resume(Rest.UNACKED)
        else:
            self.rest(Rest.UNACKED)

    def pause(self, pause_us: int) -> None:
        """Get nothing for this time from now on."""
        self.end_pause()
        self.rest(Rest.PAUSED)
        schedule = self.queue.shared.schedule
        self.pause_entry = schedule.after(pause_us / 1e6, self._go_on_after_pause)

    def _go_on_after_pause(self) -> None:
        self.pause_entry = None
        self.resume(Rest.PAUSED)

    def end_pause(self) -> None:
        """It needs no end any more."""
        if self.pause_entry is not None:
            self.queue.shared.schedule.cancel(self.pause_entry)
            self.pause_entry = None

    # -- unacked deliveries

    def take(
        self, numbers: Sequence[int], lines: Sequence[bytes], ids: Sequence[bytes] | None
    ) -> None:
        texts = lines
        lane = self.queue.lane
        if self.meta:
            texts = self._with_meta(numbers, lines)
        elif lane.has_attributes:
            texts = replies.all_plain(lines)
        if lane.marks and not lane.marks.keys().isdisjoint(numbers):
            texts = self._with_retries(numbers, lines, texts)
        if self.manual_ack:
            if ids is None:
                ids = [line[: line.index(b" ")] for line in lines]
            held = zip(numbers, lines, repeat(self.wall_us()), strict=False)
            taken = dict(zip(ids, held, strict=True))
            # Ids are most often different from each other, and from those that it holds: then no
            # message is looked at. Python iterates over the shorter one of two views, but over all
            # of a dict.
            if len(taken) == len(ids) and taken.keys().isdisjoint(self.unacked.keys()):
                self.unacked.update(taken)
            else:
                held = zip(numbers, lines, repeat(self.wall_us()), strict=False)
                for message_id, one in zip(ids, held, strict=True):
                    if message_id in self.unacked:
                        self.repeated.setdefault(message_id, OrderedDict())[one[0]] = one
                    else:
                        self.unacked[message_id] = one
            size = sum(map(len, lines)) + UNACKED_OVERHEAD_BYTES * len(lines)
            timeout_us = self.timeout_us
            if timeout_us is not None or self.deadlines is not None:
                self.awaited().add([*zip(ids, numbers, strict=True)], timeout_us)
            self.unacked_bytes += size
            self.budget.used += size
        self.connection.write(self.prefix + self.separator.join(texts) + b"\n")

    def _with_retries(
        self, numbers: Sequence[int], lines: Sequence[bytes], texts: Sequence[bytes]
    ) -> list[bytes]:
        """Tell the retry of messages that have one, and mark them as delivered again."""
        lane, texts = self.queue.lane, [*texts]
        for place, number in enumerate(numbers):
            mark = lane.marks.get(number)
            if mark is None:
                continue
            if mark.retry:
                if not self.meta:
                    texts[place] = replies.with_retry(lines[place], mark.retry)
                self.queue.shared.counters.redelivered += 1
            # One that was never delivered is marked where it is out of order (`Lane.picked`).
            if self.manual_ack and mark.version:
                lane.mark(number, mark.delivered())
        return texts

    def _with_meta(self, numbers: Sequence[int], lines: Sequence[bytes]) -> list[bytes]:
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

    def awaited(self) -> AckTimers:
        if self.deadlines is None:
            shared = self.queue.shared
            self.deadlines = shared.features.ack_timers(shared.schedule, shared.turns, self)
        return self.deadlines

    def settle(self, message_ids: Iterable[bytes]) -> list[Held]:
        """Take the oldest delivery of each id from the unacked; unknown ids are ignored."""
        pop, repeated = self.unacked.pop, self.repeated
        deliveries = [
            delivery
            for message_id in message_ids
            if (delivery := pop(message_id, None)) is not None
            and (not repeated or self._promote(message_id))
        ]
        if self.unacked:
            size = sum([len(line) for _, line, _ in deliveries])
            size += UNACKED_OVERHEAD_BYTES * len(deliveries)
        else:  # The sum is known.
            size, self.out_of_order = self.unacked_bytes, False
        self._give_back(size)
        return deliveries

    def take_back(self, message_ids: Iterable[bytes]) -> list[Delivery]:
        """Take messages that return to the queue, which delivers nothing before that:
        otherwise later messages would take their place at the consumer."""
        self.queue.returning += 1
        held = self.settle(message_ids)
        self.queue.returning -= 1
        return [(number, line) for number, line, _ in held]

    def _give_back(self, size: int) -> None:
        self.unacked_bytes -= size
        self.budget.give_back(size)
        if (throttle := self.queue.throttle) is not None:
            throttle.freed()
        if self.rests & Rest.UNACKED and self.unacked_count < self.unacked_max:
            self.resume(Rest.UNACKED)
        # Without any it may hold one, however full the budget is: see `room`.
        if self.rests & Rest.ALL_UNACKED and not self.unacked:
            self.budget.leave(self)
            self.resume(Rest.ALL_UNACKED)

    def _promote(self, message_id: bytes) -> bool:
        """Make the next delivery with a settled id its oldest. Always returns True."""
        if later := self.repeated.get(message_id):
            self.out_of_order = True
            self.unacked[message_id] = later.popitem(last=False)[1]
            if not later:
                del self.repeated[message_id]
        return True

    def let_go(self) -> Iterator[Delivery]:
        unacked, repeated = self.unacked, self.repeated
        # They are nobody's from now on: what comes meanwhile for one of these ids finds nothing.
        self.unacked, self.repeated, self.out_of_order = {}, {}, False
        if self.deadlines is not None:
            self.deadlines.clear()
        self._give_back(self.unacked_bytes)
        return _each(unacked, repeated)

    # -- ack timeout

    def held_since_us(self, message_id: bytes, number: int) -> int | None:
        """When this delivery was made, in microseconds since 1970; None if it is settled."""
        held = self.unacked.get(message_id)
        if held is not None and held[0] != number:
            later = self.repeated.get(message_id)
            held = None if later is None else later.get(number)
        return None if held is None else held[2]

    def oldest_us(self) -> int | None:
        """When the oldest of its unacked deliveries was made, in microseconds since 1970."""
        held = self.unacked.values()
        some = held if self.out_of_order else islice(held, 1)
        return min((since_us for _, _, since_us in some), default=None)

    def holds(self, message_id: bytes, number: int) -> bool:
        """Whether this delivery is unacked."""
        return self.held_since_us(message_id, number) is not None

    def too_late(self, late: list[tuple[bytes, int]]) -> None:
        """Return these to the queue, as if the consumer were lost."""
        self.queue.give_back(self._take_numbered(late), Event.LOSS, defaults=self.defaults)

    def held(self) -> Iterator[Held]:
        """All unacked deliveries, in no order."""
        later = map(OrderedDict.values, self.repeated.values())
        return chain(self.unacked.values(), chain.from_iterable(later))

    def take_these(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Take back those of the deliveries that are still unacked."""
        ids = ((number, line[: line.index(b" ")]) for number, line in deliveries)
        held = ((message_id, number) for number, message_id in sorted(dict.fromkeys(ids)))
        return self._take_numbered([delivery for delivery in held if self.holds(*delivery)])

    def _take_numbered(self, late: list[tuple[bytes, int]]) -> list[Delivery]:
        by_id: dict[bytes, set[int]] = {}
        for message_id, number in late if self.repeated else ():
            by_id.setdefault(message_id, set()).add(number)
        for message_id in by_id.keys() & self.repeated.keys():
            self._put_first(message_id, by_id[message_id])
        return self.take_back(message_id for message_id, _ in late)

    def _put_first(self, message_id: bytes, numbers: Iterable[int]) -> None:
        """Make these the oldest deliveries with their id."""
        later, oldest = self.repeated[message_id], self.unacked[message_id]
        later[oldest[0]] = oldest
        for number in (oldest[0], *sorted(numbers, reverse=True)):
            later.move_to_end(number, last=False)
        self.unacked[message_id] = later.popitem(last=False)[1]


def consumers_of(queue: Queue) -> Iterable[Consumer]:
    """The consumers of a queue, which knows them as takers only."""
    return cast("Iterable[Consumer]", queue.consumers)


def _each(
    unacked: dict[bytes, Held], repeated: dict[bytes, OrderedDict[int, Held]]
) -> Iterator[Delivery]:
    """Take the deliveries out one by one. Not generator expressions: compiled, those are lists."""
    for _, (number, line, _) in emptied(unacked):
        yield number, line
    for _, later in emptied(repeated):
        for _, (number, line, _) in emptied(later):
            yield number, line
