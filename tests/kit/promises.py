"""What clients were promised, from what passed between them and the server, and what of it holds.

It knows the requests that tests/power_cut.py sends, and no others; their ids are used once only,
but for messages that are published once. A queue has the name of the event it is bound to, `audit`
gets what `orders` gets, besides. What was published to `jobs` is in that queue, waits there for a
time, or is in `dead`, its dead-letter queue.

The one rule: a promise is made when the server sends it, and may be outdated when a request comes.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from urllib.parse import parse_qsl

from tests.kit.line_client import LineClient

ONCE_IDS = 50
"""The server's window."""
_ROUTES = {b"orders": [b"orders", b"audit"]}
_PAGE = 1000
_PEEKED = re.compile(
    rb"(\S+) event=([^, ]+)(?:,retry=(\d+))?(?:,meta=[^, ]*)?"
    rb",seq=(\d+),time=\d+(?:,due=([\d.]+))? (.*)",
    re.DOTALL,
)
JOBS, DEAD = b"jobs", b"dead"
WEB = b"web"
"""What is sent and received by SQS, in the Query protocol, under ids that the server chooses: its
messages are known by their bodies here."""
_LEASED = re.compile(rb"<ReceiptHandle>(.*?)</ReceiptHandle>.*?<Body>(.*?)</Body>")
RAW, MADE = b"raw", b"made"
"""What transactions ack, and what they publish instead."""
LATE = b"late "
"""The data of a job that is due in an hour begins with it."""
LATE_S = 3600
LOOKS_MAX = 2000
_RANGE = re.compile(rb"epoch=(\S+) first=(\d+) next=(\d+)(?: paused=yes)?")

Shape = tuple[frozenset[bytes], bool, float | None]
"""Of a queue's name: what is bound to it, whether it exists, the delay of its delete rule."""
GONE: Shape = (frozenset(), False, None)


def peeked(line: bytes) -> tuple[int, bytes, bytes]:
    """Number, id and data of a message, from a line of an answer to `peek`."""
    found = _PEEKED.fullmatch(line)
    assert found, line
    return int(found[4]), found[1], found[6]


class Place(IntEnum):
    """Of a job."""

    SCHEDULED = 0
    WAITING = 1
    DEAD = 2


@dataclass(slots=True)
class Queue:
    epoch: bytes
    next: int
    messages: list[tuple[int, bytes, bytes]]
    """Number, id, data."""


@dataclass(slots=True)
class Found:
    """What a server tells that was started on what a power cut has left."""

    queues: dict[bytes, Queue]
    shapes: dict[bytes, Shape]
    again: set[bytes]
    """Ids that could be published once, now."""


def look(client: LineClient, once_ids: list[bytes]) -> Found:
    """Ask a server. `once_ids` are those that were ever published once."""

    def rows(what: bytes) -> list[dict[str, object]]:
        answer = client.ask(b"look stats --limit=10000 " + what)
        return list(json.loads(answer.removeprefix(b"look ok ")))

    def messages(queue: bytes, flag: bytes = b"") -> list[tuple[int, bytes, bytes]]:
        after = 0
        told: list[tuple[int, bytes, bytes]] = []
        while True:
            line = b"look peek %s --after=%d --limit=%d%s\n" % (queue, after, _PAGE, flag)
            client.send(line)
            count = len(told)
            while (line := client.line().removeprefix(b"look ok ")) != b"--end":
                told.append(peeked(line))
            if len(told) == count:
                return told
            after = told[-1][0]

    def living() -> int:
        answer = client.ask(b"look stats journal").removeprefix(b"look ok ")
        return int(json.loads(answer)["messages"])

    def jobs(others: int) -> list[tuple[int, bytes, bytes]]:
        """All of them, each with its place as its number, when all that is due has been done. On
        its way from disk to its new place a message is nowhere, but alive."""
        before: list[tuple[int, bytes, bytes]] | None = None
        for _ in range(LOOKS_MAX):
            places = (
                (Place.SCHEDULED, messages(JOBS, b" --scheduled")),
                (Place.WAITING, messages(JOBS)),
                (Place.DEAD, messages(DEAD)),
            )
            told = [(int(place), *each[1:]) for place, found in places for each in found]
            is_late = all(data.startswith(LATE) or place for place, _, data in told)
            if is_late and told == before and living() == len(told) + others:
                break
            before = told
        return told

    bound: dict[bytes, set[bytes]] = defaultdict(set)
    for row in rows(b"bindings"):
        bound[str(row["queue"]).encode()].add(str(row["event"]).encode())
    rules = {}
    for row in rows(b"queues"):
        rule = row["rule"]
        rules[str(row["name"]).encode()] = rule["delay_s"] if isinstance(rule, dict) else None
    queues = {}
    for name in rules:
        found = _RANGE.fullmatch(client.ask(b"look range " + name).removeprefix(b"look ok "))
        assert found
        queues[name] = Queue(found[1], int(found[3]), messages(name))
        if name == WEB:
            places = (
                (Place.WAITING, messages(name)),
                (Place.SCHEDULED, messages(name, b" --scheduled")),
            )
            queues[name].messages = [
                (int(place), data, data) for place, some in places for _, _, data in some
            ]
    if JOBS in queues:
        queues.pop(DEAD, None)
        others = sum(len(queue.messages) for name, queue in queues.items() if name != JOBS)
        queues[JOBS].messages = jobs(others)
    shapes = {
        name: (frozenset(bound[name]), name in rules, rules.get(name)) for name in rules | bound
    }
    again: set[bytes] = set()
    if b"once" in queues:
        there = [name for _, name, _ in queues[b"once"].messages]
        # The latest first: what is published anew pushes the oldest out of the window.
        order = list(dict.fromkeys([*reversed(there), *once_ids]))
        lines = [b"%s publish --confirm --once once again\n" % name for name in order]
        client.send(b"".join(lines))
        confirms = {client.line() for _ in order}
        assert confirms == {name + b" ok " for name in order}
        again = {name for _, name, data in messages(b"once") if data == b"again"}
    return Found(queues, shapes, again)


@dataclass(slots=True, eq=False)
class _Message:
    data: bytes
    publisher: bytes
    rank: int
    """Among those of its publisher in its queue."""
    moved: bool = False
    dead: bool = False
    """That was confirmed, and no redrive came later."""
    safe: bool = False
    """It was confirmed."""
    leaving: bool = False
    """It may be gone: it was acked, or trimmed, or its queue deleted."""
    gone: bool = False
    """That was confirmed."""
    leased: bool = False
    """For longer than the test takes."""


class _Lines:
    """Lines of one connection, in both directions."""

    def __init__(self) -> None:
        self._tails = {"G": b"", "S": b""}
        self.form: dict[bytes, bytes] = {}
        """The last request to the port of SQS, and what of its answer was sent."""
        self.answer = b""

    def feed(self, kind: str, data: bytes) -> list[bytes]:
        *lines, self._tails[kind] = (self._tails[kind] + data).split(b"\n")
        return lines


@dataclass(slots=True)
class Promises:
    lies: list[str] = field(default_factory=list)
    """What is wrong whatever the disk holds, as an error reply."""
    once_ids: list[bytes] = field(default_factory=list)
    confirms: int = 0
    transactions: int = 0
    """Confirmed ones."""
    sqs: int = 0
    """Answers."""
    _handles: dict[bytes, _Message] = field(default_factory=dict)
    _connections: dict[int, _Lines] = field(default_factory=dict)
    _messages: dict[bytes, dict[bytes, _Message]] = field(default_factory=lambda: defaultdict(dict))
    _ranks: dict[tuple[bytes, bytes], int] = field(default_factory=lambda: defaultdict(int))
    _consumers: dict[bytes, bytes] = field(default_factory=dict)
    _given: dict[bytes, list[_Message]] = field(default_factory=lambda: defaultdict(list))
    _asked: dict[bytes, Callable[[bytes], None]] = field(default_factory=dict)
    _steps: dict[bytes, tuple[bytes, list[bytes]]] = field(default_factory=dict)
    """Transaction → the message that it acks, and those that it publishes."""
    _redrives: int = 0
    """How many are not done."""
    _shapes: dict[bytes, list[Shape]] = field(default_factory=lambda: defaultdict(lambda: [GONE]))
    _floors: dict[bytes, int] = field(default_factory=lambda: defaultdict(int))
    _epochs: dict[bytes, bytes] = field(default_factory=dict)
    _nexts: dict[bytes, int] = field(default_factory=dict)
    _numbers: dict[bytes, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """Queue → number → message, as clients were told."""

    def begins(self) -> None:
        """A server. A gateway of the one before may still answer what that had confirmed."""
        self._redrives = 0
        self._consumers.clear()
        self._given.clear()
        self._asked.clear()

    def connected(self, connection: int) -> None:
        self._connections[connection] = _Lines()

    def passed(self, connection: int, kind: str, data: bytes) -> None:
        """The server got or sent this."""
        lines = self._connections[connection]
        if data.startswith(b"POST / "):  # Small requests come in one piece.
            lines.form, lines.answer = dict(parse_qsl(data.partition(b"\r\n\r\n")[2])), b""
            self._asked_by_sqs(lines.form)
        elif lines.form:
            lines.answer += data
            if b" 200 " in lines.answer[:20] and lines.answer.endswith(b"Response>"):
                self._told_by_sqs(lines.form, lines.answer)
        else:
            self._passed(connection, kind, data)

    def _asked_by_sqs(self, form: dict[bytes, bytes]) -> None:
        if form[b"Action"] == b"SendMessage":
            body = form[b"MessageBody"]
            self._messages[WEB][body] = _Message(body, b"", 0, moved=True)
        elif form[b"Action"] == b"DeleteMessage":
            self._handles[form[b"ReceiptHandle"]].leaving = True

    def _told_by_sqs(self, form: dict[bytes, bytes], answer: bytes) -> None:
        self.sqs += 1
        if form[b"Action"] == b"SendMessage":
            self._messages[WEB][form[b"MessageBody"]].safe = True
        elif form[b"Action"] == b"DeleteMessage":
            self._handles[form[b"ReceiptHandle"]].gone = True
        for handle, body in _LEASED.findall(answer):
            self._handles[handle] = self._messages[WEB][body]
            self._handles[handle].leased = True

    def _passed(self, connection: int, kind: str, data: bytes) -> None:
        for line in self._connections[connection].feed(kind, data):
            if kind == "G":
                self._got(*line.split(b" ", 2))
            else:
                self._sent(*line.split(b" ", 2))

    # -- requests

    def _got(self, name: bytes, action: bytes, rest: bytes = b"") -> None:
        confirm = rest.startswith(b"--confirm ")
        rest = rest.removeprefix(b"--confirm ")
        done = getattr(self, "_" + action.decode())(name, rest)
        if confirm:
            self._asked[name] = done or (lambda text: None)

    def _publish(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        once = rest.startswith(b"--once ")
        while rest.startswith(b"--"):
            rest = rest.split(b" ", 1)[1]
        event, data = rest.split(b" ", 1)
        if once and name not in self.once_ids:
            self.once_ids.append(name)
        publisher = name.partition(b"-")[0]
        if event == MADE:
            self._steps[publisher][1].append(name)
        messages = []
        for queue in _ROUTES.get(event, [event]):
            message = self._messages[queue].get(name)
            if message is None:
                self._ranks[queue, publisher] += 1
                message = _Message(data, publisher, self._ranks[queue, publisher])
                self._messages[queue][name] = message
            # Whoever takes it without an ack may have it at once.
            message.leaving |= queue == b"auto"
            message.moved |= queue == JOBS
            messages.append(message)

        def done(text: bytes) -> None:
            for message in messages:
                message.safe = True

        return done

    def _leave(self, messages: list[_Message]) -> Callable[[bytes], None]:
        for message in messages:
            message.leaving = True

        def done(text: bytes) -> None:
            for message in messages:
                message.gone = True

        return done

    def _ack(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        consumer, message = rest.split(b" ")
        queue = self._consumers[consumer]
        if name in self._steps:
            self._steps[name] = message, self._steps[name][1]
            self._messages[queue][message].leaving = True
            return lambda text: None
        if message != b"--all":
            return self._leave([self._messages[queue][message]])
        # It may hold what has not been sent yet, but certainly what was.
        self._leave(list(self._messages[queue].values()))
        return self._leave(self._given.pop(consumer, []))

    def _begin(self, name: bytes, rest: bytes) -> None:
        """Its requests have its name: an ack, and publishes to `made`."""
        self._steps[name] = b"", []

    def _commit(self, name: bytes, rest: bytes) -> None:
        message, made = self._steps[name]

        def done(text: bytes) -> None:
            self.transactions += 1
            self._messages[RAW][message].gone = True
            for each in made:
                self._messages[MADE][each].safe = True

        self._asked[name] = done

    def _rollback(self, name: bytes, rest: bytes) -> None:
        pass

    def _reject(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        consumer, message, *flags = rest.split(b" ")
        held = self._messages[self._consumers[consumer]][message]
        held.moved = True
        if held in self._given[consumer]:
            self._given[consumer].remove(held)

        def done(text: bytes) -> None:
            held.dead = b"--dead" in flags and not self._redrives

        return done

    def _release(self, name: bytes, rest: bytes) -> None:
        self._reject(name, rest)

    def _redrive(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        self._redrives += 1
        for message in self._messages[JOBS].values():
            message.dead = False

        def done(text: bytes) -> None:
            self._redrives -= 1

        return done

    def _set_queue(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        """Always the same; it makes the queue."""
        queue = rest.split(b" ")[0]
        events, _, rule = self._shapes[queue][-1]
        return self._shaped(queue, (events, True, rule))

    def _trim(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        queue, end = rest.split(b" ")
        return self._leave(
            [
                self._messages[queue][message]
                for number, message in self._numbers[queue].items()
                if number < int(end)
            ]
        )

    def _consume(self, name: bytes, rest: bytes) -> Callable[[bytes], None] | None:
        queue, *words = rest.split(b" ")
        self._consumers[name] = queue
        delay = [word.partition(b"=")[2] for word in words if word.startswith(b"--delete")]
        if not delay and queue not in self._shapes:
            return None
        rule = float(delay[0]) if delay else None
        return self._shaped(queue, (self._shapes[queue][-1][0], True, rule))

    def _delete_consumer(self, name: bytes, rest: bytes) -> None:
        self._given.pop(rest, None)

    def _subscribe(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        queue, *events = rest.split(b" ")
        return self._shaped(queue, (frozenset(events), True, self._shapes[queue][-1][2]))

    def _rebind(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        queue, flag, event = rest.split(b" ")
        events, exists, rule = self._shapes[queue][-1]
        events = events | {event} if flag == b"--add" else events - {event}
        return self._shaped(queue, (events, exists, rule))

    def _delete_queue(self, name: bytes, rest: bytes) -> Callable[[bytes], None]:
        messages = self._leave([m for m in self._messages[rest].values() if not m.gone])
        shaped = self._shaped(rest, GONE)
        self._epochs.pop(rest, None)
        self._numbers.pop(rest, None)

        def done(text: bytes) -> None:
            messages(text)
            shaped(text)

        return done

    def _shaped(self, queue: bytes, shape: Shape) -> Callable[[bytes], None]:
        shapes = self._shapes[queue]
        shapes.append(shape)
        number = len(shapes) - 1

        def done(text: bytes) -> None:
            self._floors[queue] = number

        return done

    def _range(self, name: bytes, queue: bytes) -> None:
        def told(text: bytes) -> None:
            found = _RANGE.fullmatch(text)
            assert found, text
            self._epochs[queue] = found[1]
            self._nexts[queue] = int(found[3])

        self._asked[name] = told

    def _peek(self, name: bytes, rest: bytes) -> None:
        queue = rest.split(b" ")[0]

        def told(text: bytes) -> None:
            if text != b"--end":
                self._asked[name] = told
                number, message, _ = peeked(text)
                self._numbers[queue][number] = message

        self._asked[name] = told

    # -- replies

    def _sent(self, name: bytes, word: bytes, text: bytes) -> None:
        if word != b"ok":
            self.lies.append(f"an error for {name!r}")
        elif (told := self._asked.pop(name, None)) is not None:
            self.confirms += not text.startswith(b"epoch=") and b"event=" not in text
            told(text)
        elif name in self._consumers and not text.startswith(b"--"):
            message = self._messages[self._consumers[name]][text.split(b" ")[0]]
            self._given[name].append(message)

    # -- what holds

    def broken(self, found: Found) -> list[str]:
        """Every promise that does not hold."""
        told = list(self.lies)
        for name, queue in found.queues.items():
            told += (f"queue {name.decode()}: {what}" for what in self._broken(name, queue))
        for name, messages in self._messages.items():
            if name not in found.queues and any(
                m.safe and not m.leaving for m in messages.values()
            ):
                told.append(f"queue {name.decode()} is lost with its messages")
        for name, shapes in self._shapes.items():
            now = found.shapes.get(name, GONE)
            if now not in shapes[self._floors[name] :]:
                told.append(f"queue {name.decode()} is {now}, and not {shapes[self._floors[name]]}")
        return told + self._broken_once(found) + self._broken_steps(found)

    def _broken(self, name: bytes, queue: Queue) -> list[str]:
        told = []
        known = self._messages[name]
        if self._epochs.get(name, queue.epoch) != queue.epoch:
            told.append(f"its epoch is {queue.epoch!r}, and was {self._epochs[name]!r}")
        elif self._epochs.get(name) and queue.next < self._nexts[name]:
            told.append(f"its next number is {queue.next}, and was {self._nexts[name]}")
        there: dict[bytes, int] = {}
        last: dict[bytes, int] = defaultdict(int)
        for number, message_id, data in queue.messages:
            message = known.get(message_id)
            if message is None or message.data != data:
                told.append(f"{message_id!r} was never published so")
                continue
            if message_id in there:
                told.append(f"{message_id!r} is there twice")
            there[message_id] = number
            if message.gone:
                told.append(f"{message_id!r} is back")
            if name == JOBS and data.startswith(LATE) and number != Place.SCHEDULED:
                told.append(f"{message_id!r} is early")
            if message.leased and number != Place.SCHEDULED:
                told.append(f"{message_id!r} is not leased")
            if message.dead and number != Place.DEAD:
                told.append(f"{message_id!r} is alive again")
            if number in self._numbers[name] and self._numbers[name][number] != message_id:
                told.append(f"number {number} was {self._numbers[name][number]!r}")
            if message.moved:
                continue
            if message.rank <= last[message.publisher]:
                told.append(f"{message_id!r} has lost its place")
            last[message.publisher] = message.rank
        for message_id, message in known.items():
            # What came later on the same connection is in the same commit or in a later one.
            expected = message.safe or message.rank < last[message.publisher]
            if expected and not message.leaving and message_id not in there:
                told.append(f"{message_id!r} is lost")
        return told

    def _broken_steps(self, found: Found) -> list[str]:
        """All of a transaction is there, or nothing."""
        there = {
            message_id
            for queue in (RAW, MADE)
            if queue in found.queues
            for _, message_id, _ in found.queues[queue].messages
        }
        told = []
        whole: Counter[bytes] = Counter()
        for message, made in self._steps.values():
            count = len(there.intersection(made))
            if 0 < count < len(made):
                told.append(f"of the transaction of {message!r} a part is there")
            whole[message] += count > 0
        for message, count in whole.items():
            is_there = message in there
            lost = self._messages[RAW][message].safe and not (is_there or count)
            if lost or count + is_there > 1:
                told.append(
                    f"{message!r} is there: {is_there}, what follows from it: {count} times"
                )
        return told

    def _broken_once(self, found: Found) -> list[str]:
        if b"once" not in found.queues:
            return []
        there = [message_id for _, message_id, _ in found.queues[b"once"].messages]
        refused = set(there[-ONCE_IDS:])
        return [
            f"{name!r} is forgotten" if name in refused else f"{name!r} counts as published"
            for name in self.once_ids
            if (name in found.again) == (name in refused)
        ]
