"""A request `receive`: it takes ready messages of a queue once, for a lease.

The one rule: it holds nothing. What it takes is scheduled at once, and told after the commit that
says so; whoever has the lease, from whatever connection, acks it.
"""

from collections.abc import Sequence

from mqks.broker.features.death import fates
from mqks.broker.features.time.times import timed
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.log.pending import Entry
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.order import Rest, Taker
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import Unwritable
from mqks.protocol import replies


def take(queue: Queue, number: int, mark: Mark) -> bool:
    """Take a message out of those that are leased; return whether it was there."""
    is_leased = mark.keeps_place and queue.is_put_off(number)
    if is_leased:
        timed(queue).delays.remove(number)
    return is_leased


def give_back(
    queue: Queue,
    number: int,
    line: bytes,
    mark: Mark,
    event: Event,
    delay_us: int = 0,
    why: bytes = b"",
) -> None:
    """Return a message that was taken out of those that are leased."""
    # Its delivery is counted by what follows.
    queue.lane.marks[number] = mark._replace(
        retry=mark.retry - 1, due_us=0, keeps_place=False, id_crc=0
    )
    queue.give_back([(number, line)], event, delay_us, why=why)


class Receiver(Taker):
    """`leave` ends its wait."""

    __slots__ = (
        *("_entry", "_lease_us", "_limit", "_taken", "_taken_bytes"),
        *("connection", "queue", "timer"),
    )

    def __init__(
        self, request_id: bytes, connection: Connection, queue: Queue, limit: int, lease_us: int
    ) -> None:
        super().__init__(request_id, manual_ack=True, is_brief=True)
        self.connection = connection
        connection.receivers[self] = None
        connection.flow.receivers += 1
        self.queue = queue
        self.timer: int | None = None
        """The entry in the schedule that ends its wait."""
        self._limit = limit
        self._lease_us = lease_us
        self._taken: list[tuple[int, bytes, Mark]] = []
        self._taken_bytes = 0
        self._entry: Entry | None = None
        """What was pending when it took its first message: while it still is, it takes more, which
        is in the same commit."""

    @property
    def unacked_count(self) -> int:
        return 0

    def room(self) -> int:
        return 0 if self._has_enough or self.connection.rests else self._limit - len(self._taken)

    @property
    def _has_enough(self) -> bool:
        is_taken = self._entry is not None and self._entry is not self.queue.shared.pending.entry
        return is_taken or len(self._taken) >= self._limit

    def rest_if_full(self) -> None:
        if self._has_enough:
            self.rest(Rest.UNACKED)
        elif self.connection.rests:
            self.rest(Rest.SLOW)

    def _stop(self) -> None:
        self.queue.ring.pop(self, None)

    def _go_on(self) -> None:
        if not self.queue.deleted:
            self.queue.serve(self)
            self.queue.deliver()

    def take(
        self, numbers: Sequence[int], lines: Sequence[bytes], ids: Sequence[bytes] | None
    ) -> None:
        queue = self.queue
        size = sum(map(len, lines))
        self._taken_bytes += size
        self.connection.promise(size)
        marks = fates.lease(queue, numbers, lines, self._lease_us)
        queue.timed().set_alarms()
        self._taken += zip(numbers, lines, marks, strict=True)
        if self._entry is None:
            pending = queue.shared.pending
            self._entry = pending.entry
            pending.waiters.held.append((self.connection, self._written, True))

    def leave(self) -> None:
        """It takes no more: it has got messages, has waited long enough, or its client is gone."""
        if self.rests & Rest.ENDED:
            return
        self.rest(Rest.ENDED)
        self.queue.ring.pop(self, None)
        self.queue.order.consumer_gone(self)
        self.connection.flow.receivers -= 1
        self.connection.receivers.pop(self, None)
        if self.timer is not None:
            self.queue.shared.schedule.cancel(self.timer)
        if not (self._taken or self.connection.closed):
            self.connection.write(replies.ok(self.id, b"--end"))

    def wait(self, wait_s: float) -> None:
        """For so long at most, if there was nothing to take at once."""
        if not (self._taken or wait_s):
            self.leave()
        elif not self._taken:
            self.timer = self.queue.shared.schedule.after(wait_s, self._waited)

    def _waited(self) -> None:
        self.timer = None
        # What it has taken is told after the commit, and it leaves then.
        if not self._taken:
            self.leave()

    def _leased(self, number: int, mark: Mark) -> Mark | None:
        """The mark of a message now, unless its lease is over: the commit may have taken long."""
        now = self.queue.lane.marks.get(number)
        is_leased = now is not None and self.queue.is_put_off(number)
        return now if now is not None and is_leased and now.retry == mark.retry else None

    def _written(self, is_written: bool) -> None:
        self.leave()
        connection, queue = self.connection, self.queue
        connection.promise(-self._taken_bytes)
        if connection.closed:
            for number, line, mark in self._taken:
                if (now := self._leased(number, mark)) and take(queue, number, now):
                    give_back(queue, number, line, now, Event.UNDELIVERED)
            queue.shared.turns.later(queue.tidy())
            return
        if not is_written:
            connection.fail(self.id, b"receive", Unwritable("receive: the lease is not durable"))
            return
        epoch = queue.shared.facts.epoch_of(queue.id).encode()
        told = {  # Of what came back at once and was taken again, the last time.
            number: replies.shown(
                self.id,
                line,
                mark.retry - 1,
                b",seq=%d,time=%d,lease=%b.%d.%d"
                % (number, queue.arrived_us(number), epoch, number, mark.retry),
            )
            for number, line, mark in self._taken
            if self._lease_us <= 1 or self._leased(number, mark)  # Of no time: it is a look.
        }
        connection.write(b"".join([*told.values(), replies.ok(self.id, b"--end")]))
