"""What a server has promised to its clients, judged where it reads and writes.

At its end of the connections all that is asked and told has one order, which no client knows; so
what is due is known exactly: who holds a message, what is settled, which message is before which.

The one rule: what is judged is what went over the connections; the server is asked for nothing.
What they leave open, as the place of a message that is sent again, is not judged.
"""

import re
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from tests.simulation.disk import SLOW_S
from tests.simulation.loop import Process, SimulatedLoop, Violation
from tests.simulation.network import Transport, Watch

TURN_S: Final = 0.05
"""What the server does in one turn, it may tell its clients in any order."""
CLOCK_S: Final = 0.001
LOOKS: Final = 50
"""At the time, in one turn."""
HANDLED_S: Final = 0.5
HANDLED_LOOKS: Final = 20_000
"""What was read is handled after so long, and so many looks at the time, whatever comes between."""
LATE_S: Final = 0.1
"""A server that looks so late at the time reads first what has come meanwhile."""
KEEP_ALIVE_S: Final = 15.0
"""A client gives up when it has asked, and has waited as much of its own time."""
ANSWER_S: Final = 600.0
"""When nothing fails, each request has its answer, and each message is delivered in this time."""
_DELIVERY: Final = re.compile(rb"\S+ ok (\S+) event=\S+?(?:,retry=(\d+)(?:,\S*)?)? ")
_FLAG: Final = re.compile(rb"--([a-z-]+)(?:=(\S*))? ?")


def _names(rest: bytes) -> list[bytes]:
    """The arguments that are no flags."""
    return [word for word in rest.split(b" ") if not word.startswith(b"--")]


@dataclass(slots=True, eq=False)
class Transaction:
    messages: list["Message"] = field(default_factory=list)
    acks: list[bytes] = field(default_factory=list)
    is_committed: bool = False
    """Its commit was read, and not refused."""


@dataclass(slots=True, eq=False)
class Message:
    id: bytes
    publisher: "Wire"
    life: int
    rank: tuple[bytes, bytes]
    """Priority and key: the order among those with the same ones is known."""
    due_s: float = 0.0
    """When it is due, if it was handled at once; 0 without a delay."""
    asked_s: float = 0.0
    handled_s: float = inf
    """Between these times it was."""
    due_wall_s: float = 0.0
    """When it is due by the wall clock, which counts after a restart."""
    sets: int = 0
    """How often the clock was set before it was published."""
    is_dated: bool = False
    index: int = 0
    is_certain: bool = True
    """It was sent once."""
    is_refused: bool = False
    transaction: Transaction | None = None
    places: dict[bytes, "Place"] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Consumer:
    queue: bytes
    is_manual: bool
    ack_timeout_s: float
    is_ended: bool = False
    newest: dict[object, float] = field(default_factory=dict)
    """What it got for the first time: the last number or time of each sequence."""


@dataclass(slots=True, eq=False)
class Place:
    """A message in a queue, from its first delivery on."""

    message: Message
    holder: Consumer | None = None
    delivered_s: float = 0.0
    timed_out: tuple[Consumer, float] | None = None
    """Who had it before, and until when it was to be acked."""
    retry: int = 0
    """It comes with at least this retry,"""
    sure: int = 0
    """also when the server was killed,"""
    life: int = 0
    """since this life."""
    settled: str = ""
    is_durable: bool = False
    """Whether that was certainly written."""


class Judge:
    """Of one server, over all its lives."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.life = 0
        self.messages: dict[bytes, Message] = {}
        self.ends = defaultdict[bytes, list[float]](list)
        """When consumers of a queue ended: requests that end them were read then."""
        self.sure = dict[bytes, bytes]()
        """Messages that a later confirm covers, and their events."""
        self.has_room = True
        """Nothing is refused for want of it."""
        self.deliveries = 0
        self.ordered = set[bytes]()
        """Queues in order by key."""
        self.noticed: dict[tuple[bytes, int, int], float] = {}
        """When the first message of a queue came early, since the clock was set."""
        self.quiet_s = inf
        """When nothing fails any more."""
        self.transactions: list[Transaction] = []
        self.wires: list[Wire] = []
        self._consumers: dict[bytes, Consumer] = {}
        self._keys: dict[tuple[bytes, bytes], Place] = {}
        """Who was given a message of a key last."""
        self._index = 0
        self._unproved: deque[tuple[float, Callable[[], object]]] = deque()
        """When each request was certainly handled, and what is certain once it is written."""

    def __str__(self) -> str:
        return f"{len(self.messages)} messages and {self.deliveries} deliveries judged"

    @property
    def now_s(self) -> float:
        return self.loop.clock.monotonic_s

    @property
    def clock_s(self) -> float:
        """By so much a time may be wrong: the server rounds, and looks at it once in a turn."""
        return CLOCK_S + LOOKS * self.loop.clock.step_s

    def violate(self, what: str) -> None:
        self.loop.fail(Violation(what))

    def watch(self, port: int, transport: Transport) -> Watch:
        """What watches an end of a connection to the server at this port."""
        if transport.get_extra_info("sockname")[1] == port:
            return Wire(self)
        is_client = transport.get_extra_info("peername")[1] == port
        return ClientEnd(self, transport) if is_client else Watch()

    def begin_life(self) -> None:
        self.life += 1
        self._unproved.clear()
        for wire in self.wires:
            wire.ended()
        self.wires.clear()
        self._consumers.clear()
        self._keys.clear()

    def next_index(self) -> int:
        self._index += 1
        return self._index

    def when_written(self, effect: Callable[[], object]) -> None:
        handled_s = self.now_s + HANDLED_S + HANDLED_LOOKS * self.loop.clock.step_s
        self._unproved.append((handled_s, effect))

    def written(self, asked_s: float) -> None:
        """A publish was confirmed: what was handled before it came is written, too."""
        while self._unproved and self._unproved[0][0] <= asked_s:
            self._unproved.popleft()[1]()

    # -- consumers

    def consumes(self, name: bytes, consumer: Consumer) -> None:
        self.gone(name)
        self._consumers[name] = consumer

    def gone(self, name: bytes) -> None:
        consumer = self._consumers.pop(name, None)
        if consumer is not None:
            consumer.is_ended = True
            self.ends[consumer.queue].append(self.now_s)

    # -- deliveries

    def delivered(self, consumer: Consumer, id_: bytes, retry: int) -> None:
        self.deliveries += 1
        message, queue = self.messages.get(id_), consumer.queue
        what = f"{id_!r} (retry {retry}) from {queue!r}"
        if message is None:
            self.violate(f"{what}: nobody has published it")
            return
        if message.transaction and not message.transaction.is_committed and message.is_certain:
            self.violate(f"{what}: its transaction was not committed")
        place = message.places.get(queue)
        if place is None:
            place = message.places[queue] = Place(message, life=self.life)
            if retry == 0 and message.is_certain and not message.is_refused:
                self._comes_first(consumer, message, what)
        else:
            self._comes_again(consumer, place, retry, what)
        if place.holder and place.life == self.life and self._is_timed_out(place):
            place.timed_out = place.holder, self.deadline_s(place)
        place.retry, place.life = retry, self.life
        place.holder, place.delivered_s = consumer, self.now_s
        place.settled, place.is_durable = "", False
        if not consumer.is_manual:
            place.settled = "delivered without acks"
        key = message.rank[1]
        if key and queue in self.ordered:
            self._has_key(consumer, self._keys.get((queue, key)), what)
            self._keys[queue, key] = place

    def _comes_first(self, consumer: Consumer, message: Message, what: str) -> None:
        newest, rank, clock = consumer.newest, message.rank, self.loop.clock
        if not message.due_s:
            # All from an earlier life, then those of each connection in its order.
            by_connection = (message.publisher, *rank), message.index
            for sequence, number in (by_connection, (rank, message.life)):
                if number < newest.get(sequence, 0):
                    self.violate(f"{what}: a later one with its priority and key came before it")
                newest[sequence] = max(number, newest.get(sequence, 0))
            return
        is_set = message.is_dated and clock.sets > message.sets
        due_s = message.due_s
        if is_set or message.life < self.life:
            due_s = message.due_wall_s - clock.ahead_s
        late_s = due_s + message.handled_s - message.asked_s
        if message.is_dated:
            late_s = max(due_s, message.handled_s)
        if self.now_s > max(due_s, self.quiet_s) + ANSWER_S:
            self.violate(f"{what}: comes {self.now_s - due_s:.0f} s late")
        if message.life < self.life:
            return
        was_due = clock.sets > message.sets + 1 or self.now_s >= message.due_s - self.clock_s
        if is_set and was_due:
            return  # Nobody knows whether it was noticed that the clock was set.
        if self.now_s < due_s - self.clock_s:
            self.violate(f"{what}: comes {due_s - self.now_s:.3f} s early")
        if is_set:
            self.noticed.setdefault((consumer.queue, self.life, clock.sets), self.now_s)
        noticed_s = self.noticed.get((consumer.queue, self.life, clock.sets), 0.0)
        due = "due", noticed_s, *rank
        if late_s + self.clock_s < newest.get(due, -inf):
            self.violate(f"{what}: one that is due later came before it")
        # What is handled after its time joins at once, before what is still being read.
        if due_s > noticed_s and (message.handled_s <= due_s or not message.is_dated):
            newest[due] = max(due_s, newest.get(due, -inf))

    def _comes_again(self, consumer: Consumer, place: Place, retry: int, what: str) -> None:
        is_later = place.life < self.life
        if place.settled and (place.is_durable or not is_later):
            self.violate(f"{what}: it was {place.settled}")
        least, holder = place.sure if is_later else place.retry, place.holder
        ends = self.ends[consumer.queue]
        most = place.retry + len(ends) - bisect(ends, place.delivered_s - HANDLED_S) + is_later
        if holder is not None and not is_later:
            if self._is_timed_out(place):
                least, most = least + 1, most + 1
            elif holder is consumer:
                self.violate(f"{what}: its consumer has it")
            elif not holder.is_ended:
                self._soon(holder, f"{what}: another consumer has it")
            else:
                least += 1
        if not least <= retry <= max(most, least):
            self.violate(f"{what}: its retry is {least} to {max(most, least)}")

    def _is_timed_out(self, place: Place) -> bool:
        return self.now_s >= self.deadline_s(place)

    def deadline_s(self, place: Place) -> float:
        """Before it the message does not come back. It was given before that was written, and a
        commit may have come between."""
        assert place.holder is not None
        waited_s = self.clock_s + SLOW_S + HANDLED_LOOKS * self.loop.clock.step_s
        return place.delivered_s + place.holder.ack_timeout_s - waited_s

    def _has_key(self, consumer: Consumer, last: Place | None, what: str) -> None:
        if last is None or last.holder in (None, consumer) or self._is_timed_out(last):
            return
        if not last.holder.is_ended:
            self._soon(last.holder, f"{what}: another consumer has one of its key")

    def _soon(self, holder: Consumer, what: str) -> None:
        """Its end may be seen later in this turn."""
        life = self.life

        def look() -> None:
            if not holder.is_ended and life == self.life:
                self.violate(what)

        self.loop.happen(TURN_S, look)

    # -- at the end

    def judge_end(self) -> None:
        """Nothing fails any more, and all that was to come has come."""
        for each in self.transactions:
            came = sum(bool(message.places) for message in each.messages)
            if came not in (0, len(each.messages)):
                self.violate(f"of a transaction of {len(each.messages)} messages, {came} came")
        for wire in self.wires:
            for name, asked_s in wire.asked.items():
                if asked_s < self.now_s - ANSWER_S:
                    self.violate(f"{name!r} has no answer after {self.now_s - asked_s:.0f} s")


class Wire(Watch):
    """The server's end of a connection."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._read = self._wrote = b""
        self._arrived: deque[tuple[int, float]] = deque()
        """How many bytes had arrived, and when."""
        self._arrived_bytes = self._read_bytes = 0
        self._ids: set[bytes] = {b"-"}
        """Of all requests."""
        self._consumers: dict[bytes, Consumer] = {}
        """Also those that have ended."""
        self.asked: dict[bytes, float] = {}
        """Requests that want a confirm, and have no answer: when they came."""
        self._settling: dict[bytes, tuple[Callable[[], None], Callable[[], None]]] = {}
        """What a confirm makes certain, and what an error undoes."""
        self._transaction: Transaction | None = None
        judge.wires.append(self)

    # -- what the network tells

    def arrived(self, data: bytes) -> None:
        """Not read yet."""
        self._arrived_bytes += len(data)
        self._arrived.append((self._arrived_bytes, self._judge.now_s))

    def read(self, data: bytes) -> None:
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            self._read_bytes += len(line) + 1
            while self._arrived[0][0] < self._read_bytes:
                self._arrived.popleft()
            self._asks(line)

    def wrote(self, data: bytes) -> None:
        *lines, self._wrote = (self._wrote + data).split(b"\n")
        for line in lines:
            self._tells(line)

    def ended(self) -> None:
        self.asked.clear()
        for name, consumer in self._consumers.items():
            if not consumer.is_ended:
                self._judge.gone(name)

    # -- what they mean

    def _asks(self, line: bytes) -> None:
        judge = self._judge
        id_, action, rest = (*line.split(b" ", 2), b"", b"")[:3]
        self._ids.add(id_)
        if action == b"publish":
            self._publishes(id_, rest, judge.next_index())
            return
        flags, words = rest.split(b" "), _names(rest)
        if b"--confirm" in flags:
            self.asked[id_] = judge.now_s
        if action == b"consume":
            options = dict(_FLAG.findall(rest))
            timeout_s = float(options.get(b"ack-timeout", b"inf"))
            consumer = Consumer(words[0], b"manual-ack" in options, timeout_s)
            self._consumers[id_] = consumer
            judge.consumes(id_, consumer)
        elif action == b"delete_consumer":
            judge.gone(words[0])
        elif action == b"set_queue" and b"--ordered=key" in flags:
            judge.ordered.add(words[0])
        elif action in (b"ack", b"reject", b"release"):
            if self._transaction is not None:
                self._transaction.acks.append(line)
            else:
                self._settles(id_, action, words)
        elif action == b"begin":
            self._transaction = Transaction()
            judge.transactions.append(self._transaction)
        elif action in (b"commit", b"rollback"):
            self._ends_transaction(id_, is_committed=action == b"commit")

    def _publishes(self, id_: bytes, rest: bytes, index: int) -> None:
        judge, clock, end = self._judge, self._judge.loop.clock, 0
        flags = dict[bytes, bytes]()
        while (found := _FLAG.match(rest, end)) is not None:
            flags[found[1]], end = found[2] or b"", found.end()
        if b"confirm" in flags:
            self.asked[id_] = judge.now_s
        known = judge.messages.get(id_)
        if known is not None:
            known.is_certain = False
            return
        rank = flags.get(b"priority", b"0"), flags.get(b"key", b"")
        message = Message(id_, self, judge.life, rank, sets=clock.sets, index=index)
        message.asked_s = clock.monotonic_s
        if b"delay" in flags:
            message.due_s = clock.monotonic_s + float(flags[b"delay"])
        elif b"at" in flags:
            message.due_s, message.is_dated = float(flags[b"at"]) - clock.ahead_s, True
        if message.due_s < clock.monotonic_s + TURN_S:
            # It has no delay, if that is so when it is handled.
            message.is_certain = message.due_s < clock.monotonic_s - judge.clock_s
            message.due_s = 0.0
        message.due_wall_s = message.due_s + clock.ahead_s
        judge.messages[id_] = message
        if self._transaction is not None:
            message.transaction = self._transaction
            self._transaction.messages.append(message)
        elif judge.has_room:
            event = rest[end:].split(b" ", 1)[0]
            judge.when_written(lambda: message.is_refused or judge.sure.setdefault(id_, event))

    def _settles(self, id_: bytes, action: bytes, words: list[bytes]) -> None:
        consumer = self._consumers.get(words[0])
        if consumer is None or consumer.is_ended:
            return
        message = self._judge.messages.get(words[1])
        if message is not None and (place := message.places.get(consumer.queue)):
            self._settle(consumer, place, action, id_)

    def _settle(self, consumer: Consumer, place: Place, action: bytes, id_: bytes) -> None:
        judge, retry, arrived_s = self._judge, place.retry, self._arrived[0][1]
        if place.timed_out and place.timed_out[0] is consumer is not place.holder:
            if arrived_s < place.timed_out[1] - LATE_S:
                judge.violate(f"{id_!r} came in time, and its message was delivered again")
            place.timed_out = None
        if place.holder is not consumer or place.settled:
            return
        if arrived_s >= judge.deadline_s(place):
            return  # It may come too late.
        place.holder = None
        if action == b"ack":
            place.settled = "acked"
        elif action == b"reject":
            place.retry += 1

        def written() -> None:
            if action == b"ack" and place.settled:
                place.is_durable = True
            elif action == b"reject" and place.retry > retry:
                place.sure = max(place.sure, retry + 1)

        def undo() -> None:
            place.settled, place.retry = "", min(place.retry, retry)
            place.holder = place.holder or consumer

        judge.when_written(written)
        self._settling[id_] = written, undo

    def _ends_transaction(self, id_: bytes, *, is_committed: bool) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
        transaction.is_committed = is_committed
        if not is_committed:
            return
        for line in transaction.acks:
            _, action, rest = line.split(b" ", 2)
            self._settles(id_, action, _names(rest))
        for each in transaction.messages:
            each.index = self._judge.next_index()

        def undo() -> None:
            transaction.is_committed = False
            for each in transaction.messages:
                each.is_certain = False

        self._settling[id_] = lambda: None, undo

    def _tells(self, line: bytes) -> None:
        judge = self._judge
        id_, word, *rest = line.split(b" ", 2)
        if id_ not in self._ids:
            judge.violate(f"{line[:200]!r}: nobody has asked for it")
        consumer = self._consumers.get(id_)
        if consumer is not None and (found := _DELIVERY.match(line + b" ")):
            if not consumer.is_ended:
                judge.delivered(consumer, found[1], int(found[2] or 0))
            return
        asked = None if rest[0].startswith(b"--") else self.asked.pop(id_, None)
        message, settling = judge.messages.get(id_), self._settling.pop(id_, None)
        if settling is not None and (word == b"error" or asked is not None):
            settling[word == b"error"]()
        if message is None or message.publisher is not self:
            return
        if word == b"error":
            message.is_refused = True
        elif asked is not None and message.is_certain:
            message.handled_s = judge.now_s
            judge.written(asked)


class ClientEnd(Watch):
    """A client's end of a connection: it leaves only when it has waited long enough."""

    def __init__(self, judge: Judge, transport: Transport) -> None:
        self._judge, self._transport = judge, transport
        self._process: Process | None = transport.process
        self._heard_s = self._own_s

    @property
    def _own_s(self) -> float:
        stopped_s = 0.0 if self._process is None else self._process.stopped_s(self._judge.now_s)
        return self._judge.now_s - stopped_s

    def read(self, data: bytes) -> None:
        self._heard_s = self._own_s

    def ended(self) -> None:
        self._process = None

    def leaves(self) -> None:
        process, other = self._process, self._transport.other
        if process is None or process.dead or process.leaves or other is None:
            return
        server = other.process
        if other.is_closing() or server is None or server.dead:
            return
        waited_s, runs_s = self._own_s - self._heard_s, process.runs_for_s(self._judge.now_s)
        if process.last_stop_s > 2.5 * KEEP_ALIVE_S:
            waited_s = min(waited_s, runs_s)  # It asks anew.
        if waited_s < KEEP_ALIVE_S:
            self._judge.violate(f"{process.name} leaves, and has waited for {waited_s:.3f} s")
        if server.runs_for_s(self._judge.now_s) > 3 * KEEP_ALIVE_S:
            self._judge.violate(f"{process.name} leaves a server that was never away")
