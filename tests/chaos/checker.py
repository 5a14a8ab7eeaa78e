"""What clients of shared queues may and must see, from what they sent and what came back.

It does no IO. Everything that happens gets a stamp: a request is carried out at some time between
its stamp and that of the first line that proves it. The one rule: what no order of those times can
explain is a violation, and what one of them can explain is none.

A *copy* is a message in a queue. What is not certain of it (whether it was put in, whether it is
gone, its number, its retry) is kept as what is possible, until a line tells, or until the next life
of the server begins: then `restarted` compares everything there is, and all is certain again.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

FOREVER = 1 << 62


class Violation(AssertionError):
    """A promise that does not hold."""


def payload(name: bytes, attempt: int = 0) -> bytes:
    """The data of a message, known from its id and, when it was sent again, from the attempt."""
    size = zlib.crc32(name)
    if name.startswith(b"big"):
        size = 900_000 + size % 100_000
    elif name.startswith(b"tiny"):
        size %= 9
    elif size % 50 == 0:
        size = size % 9000
    else:
        size %= 250
    return b"%s/%d %s" % (name, attempt, b"x" * size)


@dataclass(slots=True, eq=False)
class Link:
    """A connection. What is read from it now was sent after all that was done at `synced`."""

    name: bytes
    sent: int = 0
    synced: int = 0
    waiting: deque[Request] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Request:
    link: Link
    index: int
    sent: int
    event: bytes | None = None
    """Of a publish."""
    name: bytes = b""
    effect: Callable[[], None] | None = None
    """Called when it is known to be carried out."""
    done: int = FOREVER
    """It was certainly carried out before this."""
    durable: int = FOREVER
    """It was certainly durable before this."""
    doubtful: bool = False
    """An error said that it is not durable, not that it was not carried out."""

    def __str__(self) -> str:
        done = "" if self.done == FOREVER else self.done
        return f"{self.name!r} ({self.link.name!r} {self.index}, from {self.sent} to {done})"

    @property
    def confirmed(self) -> bool:
        return self.durable < FOREVER

    def before(self, other: Request) -> bool:
        """Whether it was certainly carried out first."""
        return self.done < other.sent or (self.link is other.link and self.index < other.index)


@dataclass(slots=True, eq=False)
class Consumer:
    name: bytes
    link: Link
    queue: Queue
    manual: bool
    request: Request
    held: dict[bytes, Copy] = field(default_factory=dict)
    ending: bool = False
    broken: bool = False
    """Its connection broke, or another one asked for its end: nobody knows what came first."""
    last: dict[Link, int] = field(default_factory=dict)
    newest: int = 0
    settling: list[Request] = field(default_factory=list)
    """Requests that settle all it holds, not known to be carried out."""
    rejecting: dict[Request, list[Copy]] = field(default_factory=dict)
    """The same for rejects."""


@dataclass(slots=True, eq=False)
class Copy:
    name: bytes
    event: bytes
    publish: Request
    certain: bool
    """It was put into the queue, if it was published."""
    floor: int
    """Its number is at least this."""
    place: Request
    """What put it where it is."""
    attempts: list[int]
    """One of these was published."""
    number: int | None = None
    old_number: int | None = None
    """The one it had before it was rejected."""
    low: int = 0
    high: int = 0
    """With which retry it may come next."""
    fresh: int = 0
    """With this retry it comes for the first time from its place; -1: nobody knows."""
    sure_low: int = 0
    """As `low`, before that was certainly durable."""
    changed: int = 0
    """When `low` was certainly so; FOREVER while it is not."""
    durable: bool = False
    """A reader has seen it."""
    again: list[Request] = field(default_factory=list)
    """Later attempts to publish it once."""
    delivered: bool = False
    may_be_gone: bool = False
    gone: Request | None = None
    holder: Consumer | None = None

    def retries(self, low: int, high: int, changed: int, proved: int) -> None:
        if self.changed < proved:
            self.sure_low = self.low
        self.low, self.high, self.changed = low, high, changed

    def forget_number(self) -> None:
        """It gets a new one, and has the old one until then."""
        if self.number is not None:
            self.old_number, self.number = self.number, None


Shape = frozenset[bytes] | None
"""The events a queue is bound to; None for no queue."""


@dataclass(slots=True)
class Row:
    """A message as a reader sees it; `retry` None where it is not told."""

    number: int
    name: bytes
    event: bytes
    retry: int | None
    data: bytes


@dataclass(slots=True)
class Found:
    """A queue as it is right after a start."""

    epoch: bytes
    next: int
    events: frozenset[bytes]
    rows: list[Row]


@dataclass(slots=True, eq=False)
class Queue:
    name: bytes
    shapes: list[tuple[Shape, Request]]
    """The one that is certain, then those that may have come."""
    copies: dict[bytes, Copy] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)
    hiding: int = 0
    """Consumers that end, and may have been given what nobody has read yet."""
    ghosts: int = 0
    """Those of which that can't be known any more."""
    auto_ghosts: int = 0
    busy: int = 0
    """Until this stamp there was a consumer."""
    removing: list[Request] = field(default_factory=list)
    """Purges and trims that may be carried out."""
    settling: list[Request] = field(default_factory=list)
    """The same for ack and reject of all that a consumer holds, read or not."""
    deleting: list[Request] = field(default_factory=list)
    epoch: bytes = b""
    next: int = 1
    """A reader was told this, or knows it from a number."""

    def possible(self, is_sure: Callable[[Request], bool]) -> list[Shape]:
        """The last one whose request is sure, and those after it."""
        told: list[Shape] = []
        for shape, request in reversed(self.shapes):
            told.append(shape)
            if is_sure(request):
                break
        return told

    def known(self, name: bytes, event: bytes, data: bytes, what: str) -> Copy:
        """It must be there, as it was published."""
        copy = self.copies.get(name)
        if copy is None:
            raise Violation(f"{what} was never there, or is settled since an earlier life")
        if event != copy.event or all(data != payload(name, each) for each in copy.attempts):
            raise Violation(f"{what} was not published so")
        return copy

    @property
    def waiting(self) -> int:
        """How many messages it has, about."""
        return sum(each.gone is None for each in self.copies.values())

    @property
    def unread(self) -> int:
        """How often a message may have been given back before anybody read that it was given."""
        return self.hiding + self.ghosts + len(self.settling)

    @property
    def loose(self) -> bool:
        """Whether anybody may take from it without an ack."""
        return self.auto_ghosts > 0 or any(not each.manual for each in self.consumers)


class Checker:
    """`exact` says that the disk has room: an error is then an error, and commits come in order.
    `limited` says that queues may be full: a publish may be refused while a later one is not, and
    the reply that would say so may be lost with its connection."""

    def __init__(self) -> None:
        self.now = 1
        self.proved = 0
        """What was done before this is durable."""
        self.exact = True
        self.limited = False
        self.queues: dict[bytes, Queue] = {}
        self.claims: dict[bytes, Consumer] = {}
        """Ids → the last consumer, which may be ending."""
        self.claiming: set[bytes] = set()
        """Of those no confirm has come for."""
        self.links: list[Link] = []
        self.once: set[bytes] = set()
        """Ids that may have been published once."""
        counted = "published", "confirmed", "delivered", "redelivered", "acked", "rejected"
        self.counts = dict.fromkeys(counted, 0)
        self.start = Request(Link(b"start"), 0, 0, done=0, durable=0)

    # -- requests

    def connect(self, name: bytes) -> Link:
        link = Link(name)
        self.links.append(link)
        return link

    def send(self, link: Link, effect: Callable[[], None] | None = None) -> Request:
        self.now += 1
        link.sent += 1
        request = Request(link, link.sent, self.now, effect=effect)
        link.waiting.append(request)
        return request

    def carried(self, request: Request) -> None:
        """A line has come that proves it; those before it on its connection were, too."""
        if request.done < FOREVER:
            return
        self.now += 1
        waiting = request.link.waiting
        while waiting and waiting[0].index <= request.index:
            each = waiting.popleft()
            if each.done == FOREVER:
                each.done = self.now
                if each.effect is not None:
                    each.effect()

    def answered(self, request: Request) -> None:
        """A reply has come over its connection, but for its confirm."""
        self.carried(request)
        request.link.synced = max(request.link.synced, request.sent)

    def confirmed(self, request: Request) -> None:
        if request.confirmed:
            raise Violation(f"{request.name!r} is confirmed twice")
        self.answered(request)
        request.durable = self.now
        if self.exact:
            self.proved = max(self.proved, request.sent)
        if request.event is not None:
            self.counts["confirmed"] += 1

    def refused(self, request: Request, *, maybe: bool = False) -> None:
        """An error has come. `maybe`: it tells only that it is not durable."""
        if request.confirmed:
            raise Violation(f"{request.name!r} is confirmed, and an error")
        if maybe:
            request.doubtful = True
            self.answered(request)
            return
        request.effect = None
        self.answered(request)
        if request.event is not None:
            for queue in self.queues.values():
                copy = queue.copies.get(request.name)
                if copy is not None and copy.publish is request:
                    if copy.delivered or copy.durable:
                        raise Violation(f"{request.name!r} is refused, and was seen")
                    del queue.copies[request.name]

    # -- publishing

    def publish(self, link: Link, name: bytes, event: bytes, *, once: int | None = None) -> Request:
        """`once` is the number of the attempt to publish it once."""
        request = self.send(link)
        request.event, request.name = event, name
        self.counts["published"] += 1
        is_new = once is None or name not in self.once
        for queue in self.queues.values():
            shapes = queue.possible(lambda each: each.done < FOREVER or each.link is link)
            bound = [shape is not None and event in shape for shape in shapes]
            if any(bound):
                self._put(queue, request, all(bound) and is_new, once or 0)
        if once is not None:
            self.once.add(name)
        return request

    def _put(self, queue: Queue, request: Request, certain: bool, attempt: int) -> None:
        assert request.event is not None
        copy = queue.copies.get(request.name)
        if copy is None:
            queue.copies[request.name] = Copy(
                request.name, request.event, request, certain, queue.next, request, [attempt]
            )
            return
        is_later = copy.publish.before(request) and not copy.publish.doubtful
        if copy.number is None and copy.gone is None and not is_later:
            # Nobody knows which attempt was the one.
            copy.attempts.append(attempt)
            copy.again.append(request)
            copy.fresh = -1

    # -- shapes

    def reshape(self, link: Link, queue: Queue, shape: Shape) -> Request:
        """A queue gets other subscriptions, is made or deleted; all of that comes from one
        connection at a time."""
        request = self.send(link)
        for other in self.links:
            for each in other.waiting:
                if each.event is None or other is link:
                    continue
                copy = queue.copies.get(each.name)
                if copy is not None and copy.publish is each:
                    copy.certain &= shape is not None and each.event in shape
                elif copy is None and shape is not None and each.event in shape:
                    self._put(queue, each, False, 0)
        if shape is None:
            self._delete(queue, request)
        queue.shapes.append((shape, request))
        return request

    def _delete(self, queue: Queue, request: Request) -> None:
        queue.deleting.append(request)
        for consumer in queue.consumers:
            consumer.held.clear()
        went = [each for each in queue.copies.values() if each.gone is None]
        for copy in went:
            copy.may_be_gone, copy.holder, copy.floor = True, None, 1
        # The numbers of one made anew begin again.
        queue.next = 1

        def effect() -> None:
            for copy in went:
                if copy.gone is None and copy.publish.before(request):
                    copy.gone = request
                    if copy.holder is not None:
                        copy.holder.held.pop(copy.name, None)
                        copy.holder = None

        request.effect = effect

    # -- consumers

    def consume(self, link: Link, name: bytes, queue: Queue, *, manual: bool) -> Consumer:
        request = self.send(link)
        request.name = name
        old = self.claims.get(name)
        consumer = Consumer(name, link, queue, manual, request)
        if old is not None and not old.ending:
            self.ends(old, link)
        elif old is not None:
            # It may come before what its connection sent last.
            old.broken |= old.link is not link
        self.claims[name] = consumer
        queue.consumers.append(consumer)
        return consumer

    def ends(self, consumer: Consumer, by: Link | None = None) -> None:
        """It was asked to end by a request of this connection; None: its connection broke."""
        self.now += 1
        consumer.ending = True
        consumer.broken = by is not consumer.link
        consumer.queue.hiding += 1
        for copy in consumer.held.values():
            copy.holder = None
            copy.retries(copy.low + 1, copy.low + 1, FOREVER, self.proved)
        consumer.held.clear()
        for request, copies in consumer.rejecting.items():
            if consumer.broken or request.link is not consumer.link:
                for copy in copies:
                    copy.fresh = -1

    def ended(self, consumer: Consumer, *, seen: bool) -> None:
        """`seen`: everything it was ever given has been read, and it is certainly gone."""
        self.now += 1
        queue = consumer.queue
        if consumer not in queue.consumers:
            return
        queue.hiding -= 1
        queue.consumers.remove(consumer)
        queue.busy = self.now
        if not seen:
            queue.ghosts += 1
            queue.auto_ghosts += not consumer.manual

    def delivered(
        self, consumer: Consumer, name: bytes, event: bytes, retry: int, data: bytes
    ) -> Copy:
        self.now += 1
        queue, link = consumer.queue, consumer.link
        what = f"{name!r} (retry {retry}) for {consumer.name!r} from {queue.name!r}"
        copy = queue.known(name, event, data, what)
        copy.delivered = True
        self.carried(copy.publish)
        self._check_order(consumer, copy, retry, what)
        self.counts["delivered"] += 1
        self.counts["redelivered"] += retry > 0
        # What it lost again before anybody read this line.
        stale, gone = consumer.ending, copy.gone
        is_others = copy.holder is not None or gone is not None or retry < copy.low
        if (stale or consumer.settling) and is_others:
            return copy
        if gone is not None and (gone.done < link.synced or gone.link is link):
            raise Violation(f"{what}: it is settled")
        if copy.holder is not None:
            raise Violation(f"{what}: {copy.holder.name!r} has it")
        if not copy.low <= retry <= copy.high + queue.unread:
            raise Violation(f"{what}: its retry is {copy.low} to {copy.high}")
        copy.certain = True
        if not consumer.manual:
            copy.gone = Request(link, link.sent, self.now, done=self.now)
        elif consumer.settling or consumer.broken:
            copy.retries(retry, retry + 1, self.now, self.proved)
            copy.may_be_gone |= bool(consumer.settling)
            if any(each in consumer.rejecting for each in consumer.settling):
                copy.fresh = -1
                copy.forget_number()
        elif stale:
            copy.retries(retry + 1, retry + 1, FOREVER, self.proved)
        else:
            copy.retries(retry, retry, self.now, self.proved)
            copy.holder, consumer.held[name] = consumer, copy
        return copy

    def _check_order(self, consumer: Consumer, copy: Copy, retry: int, what: str) -> None:
        """What was never delivered from its place comes in the order of the queue."""
        place = copy.place
        if retry != copy.fresh or consumer.ending:
            return
        if not (self.exact or place is copy.publish or place.confirmed):
            return  # A reject may be refused on a full disk, and its message come back otherwise.
        if place.done < consumer.newest:
            raise Violation(f"{what}: something was delivered before it that was put in after it")
        if place.index < consumer.last.get(place.link, 0):
            raise Violation(f"{what}: a later one of {place.link.name!r} was delivered before it")
        consumer.last[place.link] = place.index
        consumer.newest = max(consumer.newest, place.sent)

    # -- settling

    def ack(self, link: Link, consumer: Consumer, name: bytes | None) -> Request:
        """All that it holds with None, over its own connection."""
        request = self.send(link)
        copies = self._settled(consumer, request, name)
        for copy in copies:
            copy.may_be_gone = True
            copy.high = copy.low + 1

        def effect() -> None:
            self.counts["acked"] += len(copies)
            self._has_settled(consumer, request)
            for copy in copies:
                if copy.gone is None and self._is_sure(request, consumer):
                    copy.gone = request

        request.effect = effect
        return request

    def reject(self, link: Link, consumer: Consumer, name: bytes | None) -> Request:
        request = self.send(link)
        copies = self._settled(consumer, request, name)
        for copy in copies:
            copy.retries(copy.low + 1, copy.low + 1, FOREVER, self.proved)
            copy.place, copy.fresh = request, copy.low
            copy.forget_number()
            copy.floor = consumer.queue.next
        consumer.rejecting[request] = copies

        def effect() -> None:
            self.counts["rejected"] += len(copies)
            self._has_settled(consumer, request)
            del consumer.rejecting[request]
            for copy in copies:
                if request.doubtful:
                    # The consumer may have it still, and ack it with all it has.
                    copy.fresh, copy.may_be_gone = -1, True
                if copy.place is request and copy.changed == FOREVER:
                    copy.changed = self.now

        request.effect = effect
        return request

    @staticmethod
    def _has_settled(consumer: Consumer, request: Request) -> None:
        if request in consumer.settling:
            consumer.settling.remove(request)
            consumer.queue.settling.remove(request)

    @staticmethod
    def _is_sure(request: Request, consumer: Consumer) -> bool:
        """Whether it was done, and the consumer was still there."""
        if request.doubtful:
            return False
        return not consumer.ending or (request.link is consumer.link and not consumer.broken)

    @staticmethod
    def _settled(consumer: Consumer, request: Request, name: bytes | None) -> list[Copy]:
        """What it settles: with None all that it holds, read or not."""
        names = list(consumer.held) if name is None else [name]
        if name is None:
            consumer.settling.append(request)
            consumer.queue.settling.append(request)
        copies = [consumer.held.pop(each) for each in names if each in consumer.held]
        for copy in copies:
            copy.holder = None
        return copies

    # -- purge and trim

    def remove(self, link: Link, queue: Queue, end: int = FOREVER) -> Request:
        """A purge, or a trim of what has numbers below `end`."""
        request = self.send(link)
        queue.removing.append(request)
        request.effect = lambda: self._removed(queue, request, end, None)
        return request

    def removed(self, queue: Queue, request: Request, end: int, count: int) -> None:
        """Its confirm tells how many."""
        request.effect = None
        self.confirmed(request)
        self._removed(queue, request, end, count)

    def _removed(self, queue: Queue, request: Request, end: int, count: int | None) -> None:
        queue.removing.remove(request)
        # What another removal has dropped is not known before that is answered.
        others = queue.removing or queue.consumers or queue.hiding or queue.ghosts
        is_quiet = queue.busy < request.sent and not others
        sure, possible = list[Copy](), list[Copy]()
        for copy in queue.copies.values():
            gone = copy.gone
            is_over = gone is not None and gone.before(request)
            is_held = copy.holder is not None and copy.changed < request.sent
            if is_over or is_held or max(copy.floor, copy.number or 0) >= end:
                continue
            possible.append(copy)
            if (
                is_quiet
                and copy.certain
                and not copy.may_be_gone
                and gone is None
                and (end == FOREVER or copy.number is not None)
                and copy.publish.before(request)
                # Its refusal may be under way, also when what came behind it has been seen.
                and (copy.durable or (copy.publish.confirmed and not copy.publish.doubtful))
            ):
                sure.append(copy)
        if count is not None and not len(sure) <= count <= len(possible):
            raise Violation(
                f"{count} messages were dropped from {queue.name!r}, and there were "
                f"{len(sure)} to {len(possible)}"
            )
        for copy in possible if count == len(possible) else sure:
            copy.gone = copy.gone or request
        if count != len(sure):
            for copy in possible:
                copy.may_be_gone = True

    # -- reading

    def seen(self, queue: Queue, request: Request, rows: Iterable[Row]) -> None:
        """A reader was told of these, in this order."""
        self.now += 1
        last = 0
        for row in rows:
            what = f"number {row.number} of {queue.name!r}: {row.name!r}"
            if row.number <= last:
                raise Violation(f"{what} comes after number {last}")
            last = row.number
            copy = queue.known(row.name, row.event, row.data, what)
            self._check_number(copy, row, what)
            gone = copy.gone
            # Readers see what is durable only: an ack that is not yet may be unknown to them.
            if gone is not None and gone.durable < request.sent:
                raise Violation(f"{what} is settled")
            copy.certain = copy.durable = True
            self.carried(copy.publish)
            if copy.number is None and copy.old_number != row.number:
                copy.number, copy.old_number = row.number, None
            queue.next = max(queue.next, row.number + 1)

    @staticmethod
    def _check_number(copy: Copy, row: Row, what: str) -> None:
        if copy.number is not None and row.number != copy.number:
            raise Violation(f"{what} had the number {copy.number}")
        if copy.number is None and row.number != copy.old_number and row.number < copy.floor:
            raise Violation(f"{what} has a number that was there before it, below {copy.floor}")

    def seen_all(
        self, queue: Queue, first: Request, start: int, end: int, names: set[bytes]
    ) -> None:
        """A reader has gone from number `start` to the end, which was at `end`; `first` was its
        first request."""
        self.now += 1
        queue.next = max(queue.next, end)
        if queue.removing or queue.deleting or queue.loose:
            return
        for copy in queue.copies.values():
            if copy.name in names or copy.may_be_gone or copy.gone is not None:
                continue
            number = copy.number
            if number is None and copy.place is copy.publish:
                if start <= copy.floor and copy.publish.durable < first.sent and copy.certain:
                    raise Violation(f"{copy.name!r} is not in {queue.name!r}")
                # Unless its number lies below the start.
                if start <= copy.floor:
                    copy.floor = end
            elif number is not None and start <= number < end:
                raise Violation(f"number {number} of {queue.name!r} is gone: {copy.name!r}")

    def told_range(self, queue: Queue, epoch: bytes, first: int, end: int, least: int) -> None:
        """`least` is what `queue.next` was when it was asked."""
        self._check_epoch(queue, epoch)
        if queue.deleting:
            return
        if end < least:
            raise Violation(f"{queue.name!r} ends at {end}, and was at {least}")
        if first > end:
            raise Violation(f"{queue.name!r} begins at {first}, and ends at {end}")
        queue.next = max(queue.next, end)

    @staticmethod
    def _check_epoch(queue: Queue, epoch: bytes) -> None:
        if queue.epoch and queue.epoch != epoch and not queue.deleting:
            raise Violation(f"{queue.name!r} has the epoch {epoch!r}, and had {queue.epoch!r}")

    # -- a new life

    def _is_durable(self, request: Request, *, stopped: bool) -> bool:
        if request.doubtful:
            return False
        return request.confirmed or request.done < (FOREVER if stopped else self.proved)

    def restarted(self, found: dict[bytes, Found], *, stopped: bool) -> None:
        """All that there is when a server has been started again; `stopped`: the one before was
        stopped cleanly, and nothing that it had received may be missing."""
        self.now += 1
        link = Link(b"start")
        for queue in self.queues.values():
            self._compare(queue, found.get(queue.name), stopped=stopped)
        self.once = {name for name in self.once if not self._is_absent(name, found)}
        for queue in self.queues.values():
            self._begin_again(queue, found.get(queue.name), link)
        self.claims.clear()
        self.claiming.clear()
        self.links.clear()
        self.proved = self.now
        self.now += 1

    def _is_absent(self, name: bytes, found: dict[bytes, Found]) -> bool:
        """Whether an id was certainly not published once: it would still be there."""
        for queue in self.queues.values():
            copy = queue.copies.get(name)
            if copy is not None and copy.certain and not self._may_be_gone(queue, copy):
                there = found.get(queue.name)
                return there is not None and all(row.name != name for row in there.rows)
        return False

    def _may_be_gone(self, queue: Queue, copy: Copy) -> bool:
        may_be = copy.gone or copy.may_be_gone or queue.removing or queue.settling
        return bool(may_be or queue.loose)

    def _compare(self, queue: Queue, found: Found | None, *, stopped: bool) -> None:
        shapes = queue.possible(partial(self._is_durable, stopped=stopped))
        shape = None if found is None else found.events
        if shape not in shapes:
            raise Violation(f"{queue.name!r} is bound to {shape}, and may be to {shapes}")
        if found is not None:
            self._compare_epoch(queue, found, stopped=stopped)
        there = Counter(row.name for row in found.rows) if found else Counter[bytes]()
        if twice := [name for name, count in there.items() if count > 1]:
            raise Violation(f"{queue.name!r} has messages twice: {twice}")
        newest: dict[Link, int] = {}
        before: dict[Link, Request] = {}
        latest, last = 0, self.start
        for row in found.rows if found else ():
            copy = self._compare_row(queue, row, stopped=stopped)
            place = copy.place
            moved = queue.settling and row.retry
            has_place = place is copy.publish or self._is_durable(place, stopped=stopped)
            if copy.fresh < 0 or moved or not has_place:
                continue  # It was rejected, and may have its old place.
            if place.done < latest or place.index < newest.get(place.link, 0):
                raise Violation(
                    f"{row.name!r}, put in by {place}, has lost its place in {queue.name!r}: "
                    f"before it is what was put in by {before.get(place.link) or last}"
                )
            newest[place.link], before[place.link] = place.index, place
            if place.sent > latest:
                latest, last = place.sent, place
        for copy in queue.copies.values():
            if copy.name in there or not copy.certain or self._may_be_gone(queue, copy):
                continue
            publish, sent = copy.publish, (copy.publish, *copy.again)
            is_sure = any(each.confirmed and not each.doubtful for each in sent)
            if not self.limited:
                is_sure |= any(self._is_durable(each, stopped=stopped) for each in sent)
                # What came later on the same connection is in the same commit or in a later one.
                is_sure |= self.exact and publish.index < newest.get(publish.link, 0)
            if copy.durable or is_sure:
                raise Violation(f"{copy.name!r} is lost from {queue.name!r}")

    def _compare_epoch(self, queue: Queue, found: Found, *, stopped: bool) -> None:
        sure = any(self._is_durable(each, stopped=stopped) for each in queue.deleting)
        is_same = found.epoch == queue.epoch
        if not queue.epoch:
            return
        if (sure and is_same) or not (queue.deleting or is_same):
            raise Violation(f"{queue.name!r} has the epoch {found.epoch!r}, had {queue.epoch!r}")
        if is_same and found.next < queue.next and not queue.deleting:
            raise Violation(f"{queue.name!r} ends at {found.next}, and was at {queue.next}")

    def _compare_row(self, queue: Queue, row: Row, *, stopped: bool) -> Copy:
        what = f"number {row.number} of {queue.name!r}: {row.name!r}"
        copy = queue.known(row.name, row.event, row.data, what)
        gone = copy.gone
        if gone is not None and self._is_durable(gone, stopped=stopped):
            raise Violation(f"{what} is back")
        assert row.retry is not None
        if queue.settling and row.retry:
            copy.forget_number()  # It may have been rejected before anybody has read it.
        self._check_number(copy, row, what)
        place = copy.place
        if (
            place is not copy.publish
            and copy.fresh >= 0
            and row.number == copy.old_number
            and self._is_durable(place, stopped=stopped)
        ):
            raise Violation(f"{what} was rejected, and has its old place")
        proved = FOREVER if stopped else self.proved
        low, high = copy.low if copy.changed < proved else copy.sure_low, copy.high
        if copy.holder is not None:
            low, high = low + (copy.changed < proved), high + 1
        elif queue.consumers:
            high += 1
        if not low <= row.retry <= high + queue.unread:
            raise Violation(f"{what} has retry {row.retry}, and {low} to {high} are due")
        return copy

    def _begin_again(self, queue: Queue, found: Found | None, link: Link) -> None:
        shape = None if found is None else found.events
        start = Request(link, 0, self.now, done=self.now, durable=self.now)
        queue.shapes = [(shape, start)]
        queue.consumers, queue.removing, queue.settling, queue.deleting = [], [], [], []
        queue.hiding = queue.ghosts = queue.auto_ghosts = queue.busy = 0
        if found is None:
            queue.copies, queue.epoch, queue.next = {}, b"", 1
            return
        queue.epoch, queue.next = found.epoch, found.next
        copies = {}
        for row in found.rows:
            old = queue.copies[row.name]
            assert row.retry is not None
            place = Request(link, row.number, self.now, done=self.now, durable=self.now)
            attempts = [each for each in old.attempts if payload(row.name, each) == row.data]
            known = row.name, row.event, place, True, row.number, place, attempts, row.number
            retry = row.retry
            copies[row.name] = Copy(*known, low=retry, high=retry, sure_low=retry, changed=self.now)
        queue.copies = copies
