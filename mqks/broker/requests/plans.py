"""What the moves and trims of a transaction take.

The one rule: each of them sees what those before it have left, and what they have brought.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby, islice
from typing import NamedTuple

from mqks.broker.broker import Broker
from mqks.broker.features.admission.unique import may_join
from mqks.broker.features.death.moves import Ready, move_out
from mqks.broker.requests import redrives
from mqks.broker.requests.checks import check_epoch
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen
from mqks.broker.spine.queue.shared import Place
from mqks.errors import BadRequest, LimitExceeded
from mqks.limits import SEQ_MAX, TRANSACTION_BYTES_MAX, TRANSACTION_COPIES_MAX
from mqks.protocol.requests import Move, Trim


class Taken(NamedTuple):
    """A message of the queue `source`, and what becomes of it: it joins the queue `to`, or is
    dropped. `steps`: the requests that take it, one after the other."""

    source: Queue
    number: int
    line: bytes
    to: bytes | None = None
    steps: tuple[int, ...] = ()


class Plan:
    """It changes nothing before `do`, which creates queues for a `user`. Each step is a number,
    greater than those before it."""

    def __init__(self, broker: Broker, user: str | None) -> None:
        self._broker = broker
        self._user = user
        self._taken: dict[tuple[Queue, int], Taken] = {}
        """In the order of the last step of each."""
        self.targets: dict[bytes, None] = {}
        """Queues that are created if they do not exist."""
        self.copies = self.bytes = 0
        """Messages and their length, as often as they are taken."""

    def move(self, step: int, wanted: Move, aim: redrives.Aim, copies: int) -> Work[None]:
        """Take what a move takes. Besides, there are so many `copies` of other messages. Raises
        LimitExceeded."""
        broker, some = self._broker, list[Taken]()
        source, brought = broker.queues.get(wanted.source), self._brought(wanted.source)
        chosen = redrives.chosen_by(broker, wanted)
        if source is not None:
            limit = min(wanted.limit or SEQ_MAX, self._room(copies) + 1)
            some = yield from self._ready(source, chosen, aim, limit)
        lines = dict(enumerate(each.line for each in brought))
        if brought and chosen is not None:
            is_old = chosen.is_old(broker.schedule.wall_us())
            lines = (yield from chosen.by_body(lines.items())) if is_old else {}
        some += [brought[place] for place in lines if aim(lines[place]) is not None]
        taken = list[Taken]()
        for each in some[: wanted.limit]:
            if (aimed := aim(each.line)) is not None:
                taken.append(each._replace(to=aimed[0], line=aimed[1]))
        self._take(step, taken, copies)
        if wanted.to is not None:
            self.targets[wanted.to] = None

    def trim(self, step: int, wanted: Trim, copies: int) -> None:
        """Take what a trim drops. Raises BadRequest."""
        queue, some, end = self._broker.queues.get(wanted.queue), list[Taken](), 1
        if queue is not None:
            check_epoch(self._broker, "trim", queue, wanted.epoch)
            if queue.rules.readers:
                raise BadRequest("trim: a queue with readers is not trimmed in a transaction")
            known, end = self._numbers(queue), queue.lane.next_seq
            most = self._room(copies) + 1 + len(known)
            numbers = queue.lane.blocks.after(0, wanted.seq, most)
            some += [Taken(queue, number, b"") for number in numbers if number not in known]
        brought = enumerate(self._brought(wanted.queue), end)
        some += [each._replace(to=None) for number, each in brought if number < wanted.seq]
        self._take(step, some, copies)

    def _ready(
        self, source: Queue, chosen: Chosen | None, aim: redrives.Aim, limit: int
    ) -> Work[list[Taken]]:
        """What is ready, and not taken by an earlier step, until it is too much for a commit."""
        known, some, size = self._numbers(source), list[Taken](), self.bytes
        ready = Ready(source, source.lane.next_seq, chosen)
        while len(some) < limit and size <= TRANSACTION_BYTES_MAX:
            lines = yield from ready.next()
            if lines is None:
                break
            fitting = (n for n, line in lines.items() if n not in known and aim(line) is not None)
            for number in islice(fitting, limit - len(some)):
                some.append(Taken(source, number, lines[number]))
                size += len(lines[number])
            yield GOES_ON
        return some

    def _numbers(self, source: Queue) -> set[int]:
        """Of its messages that are taken."""
        return {number for queue, number in self._taken if queue is source}

    def _brought(self, name: bytes) -> list[Taken]:
        """What will be in this queue besides, in the order in which it joins."""
        return [each for each in self._taken.values() if each.to == name]

    def _room(self, copies: int) -> int:
        return max(0, TRANSACTION_COPIES_MAX - copies - self.copies)

    def _take(self, step: int, some: Iterable[Taken], copies: int) -> None:
        for each in some:
            key = each.source, each.number
            # Behind all others: a later step that takes it joins it there.
            self._taken.pop(key, None)
            self._taken[key] = each._replace(steps=(*each.steps, step))
            self.copies += 1
            self.bytes += len(each.line)
        check_copies(copies + self.copies)
        if self.bytes > TRANSACTION_BYTES_MAX:
            reason = f"more than {TRANSACTION_BYTES_MAX} bytes of messages are moved since begin"
            raise LimitExceeded("transaction_max", reason)

    def do(self) -> tuple[Counter[int], Counter[int]]:
        """Do it, at once; return how many messages each step has taken, and how many it would have
        if others did not hold their keys. What is no longer ready is left alone, and what would
        need a queue that the user must not make."""
        broker, user = self._broker, self._user
        counts, stay = Counter[int](), Counter[int]()
        touched: dict[Place, None] = {broker.queue_for(name, user): None for name in self.targets}
        for (_, source), some in groupby(
            self._taken.values(), lambda each: (each.steps[-1], each.source)
        ):
            gone: dict[Place, list[Delivery]] = {}
            dropped: list[int] = []
            for each in some:
                is_there = not source.deleted and source.lane.is_ready(each.number)
                if not (is_there and broker.made.allows(user, each.to)):
                    continue
                target = None if each.to is None else broker.queue_for(each.to, user)
                if target not in (None, source) and not may_join(target, each.line):
                    stay.update(each.steps)
                    continue
                source.lane.take_out(each.number)
                counts.update(each.steps)
                if target is None:
                    dropped.append(each.number)
                else:
                    gone.setdefault(target, []).append((each.number, each.line))
            source.lane.leave_together(dropped)
            for tracer in source.tracers:
                tracer.left(source, "trimmed", dropped)
            broker.purged += len(dropped)
            move_out(source, gone)
            touched |= dict.fromkeys((*gone, source))
        # Only now: consumers would take what a later step moves.
        for queue in touched:
            queue.deliver()
        return counts, stay


def check_copies(copies: int) -> None:
    if copies > TRANSACTION_COPIES_MAX:
        raise LimitExceeded(
            "transaction_max",
            f"more than {TRANSACTION_COPIES_MAX} copies of messages, one per queue, are published, "
            "moved or trimmed since begin",
        )
