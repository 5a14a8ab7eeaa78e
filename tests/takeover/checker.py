"""What must hold in a history of brokers that take over from each other.

A history is a list of events in the order in which they were seen. What was sent is added before it
is sent, and what has come after it has come: so an event that precedes another one in the list did
so in truth. The one rule: nothing here depends on time.

A message has the id `PUBLISHER.NUMBER`. Each is copied to two queues: one whose consumers ack, and
a log, which is read and keeps all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

SHOWN_MAX: Final = 20
"""Faults that are described; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Served:
    """The process `life` of a broker listens: its claim, of this epoch, is durable."""

    life: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """It does not run any more, until it is continued."""

    life: int


@dataclass(frozen=True, slots=True)
class Continued:
    life: int


@dataclass(frozen=True, slots=True)
class Alone:
    """No standby runs, so nothing that is sent now can be durable."""


@dataclass(frozen=True, slots=True)
class Accompanied:
    """A standby is about to be started, or to become the primary."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection of a client to a broker."""

    link: int
    life: int


@dataclass(frozen=True, slots=True)
class Ended:
    link: int


@dataclass(frozen=True, slots=True)
class Sent:
    """`action` is publish, ack or reject."""

    link: int
    request: bytes
    action: str
    message: bytes


@dataclass(frozen=True, slots=True)
class Confirmed:
    link: int
    request: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """An error instead of a confirm."""

    link: int
    request: bytes


@dataclass(frozen=True, slots=True)
class Delivered:
    link: int
    message: bytes
    data: bytes
    retry: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A message of the log, as a reader got it."""

    reader: int
    epoch: bytes
    number: int
    message: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Drained:
    """Nobody publishes any more, the queue is empty, and the log was read to its end."""


Event = (
    Served
    | Stopped
    | Continued
    | Alone
    | Accompanied
    | Opened
    | Ended
    | Sent
    | Confirmed
    | Refused
    | Delivered
    | Row
    | Drained
)


def payload(message: bytes) -> bytes:
    """The data of a message."""
    return message * (1 + crc32(message) % 40)


def publisher_and_number(message: bytes) -> tuple[bytes, int]:
    publisher, _, number = message.rpartition(b".")
    return publisher, int(number)


def faults(history: Sequence[Event]) -> list[str]:
    """What does not hold in it, a line each."""
    epochs = {event.life: event.epoch for event in history if isinstance(event, Served)}
    checker = _Checker(epochs, _perhaps_refused(history))
    checker.take(history)
    surplus = len(checker.found) - SHOWN_MAX
    return checker.found[:SHOWN_MAX] + ([f"{surplus} more"] if surplus > 0 else [])


def _perhaps_refused(history: Sequence[Event]) -> set[bytes]:
    """Messages that were not confirmed when they were sent to a broker which has refused some."""
    lives = {event.link: event.life for event in history if isinstance(event, Opened)}
    refusing = {lives[event.link] for event in history if isinstance(event, Refused)}
    confirmed = {(event.link, event.request) for event in history if isinstance(event, Confirmed)}
    return {
        event.message
        for event in history
        if isinstance(event, Sent)
        and lives[event.link] in refusing
        and (event.link, event.request) not in confirmed
    }


@dataclass(slots=True)
class _Request:
    """`newest` is the highest epoch that served, and `alone` the period without a standby, when the
    broker could have got the request; none before."""

    sent: Sent
    newest: int | None = None
    alone: int = 0


@dataclass(slots=True)
class _Checker:
    epochs: dict[int, int]
    """Of lives. That of a life which lost its claim at once is not known."""
    refused: set[bytes]
    """Messages that, published again, may follow later ones."""
    found: list[str] = field(default_factory=list)
    _newest: int = 0
    _alone: int = 0
    """Number of the period without a standby; 0 outside of them."""
    _periods: int = 0
    _stopped: dict[int, list[_Request]] = field(default_factory=dict)
    """What each life that is stopped could not get yet."""
    _lives: dict[int, int] = field(default_factory=dict)
    """Of links."""
    _ended: set[int] = field(default_factory=set)
    _requests: dict[tuple[int, bytes], _Request] = field(default_factory=dict)
    _published: set[bytes] = field(default_factory=set)
    _durable: set[bytes] = field(default_factory=set)
    """Messages that were confirmed."""
    _deliveries: dict[bytes, list[int]] = field(default_factory=dict)
    """Links that got a message."""
    _rejected: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    _acked: set[bytes] = field(default_factory=set)
    """Messages whose ack was sent."""
    _gone: dict[bytes, int] = field(default_factory=dict)
    """Epochs in which the ack of a message was confirmed."""
    _first: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """The last number of a publisher that was delivered for the first time, by link."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """The last number that each reader has seen."""
    _read: dict[int, set[bytes]] = field(default_factory=dict)
    _last_read: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _log: dict[int, bytes] = field(default_factory=dict)
    _log_epochs: set[bytes] = field(default_factory=set)

    def take(self, history: Iterable[Event]) -> None:
        for event in history:
            match event:
                case Served():
                    self._newest = max(self._newest, event.epoch)
                case Stopped():
                    self._stopped[event.life] = []
                case Continued():
                    for request in self._stopped.pop(event.life):
                        self._arrives(request)
                case Alone():
                    self._periods += 1
                    self._alone = self._periods
                case Accompanied():
                    self._alone = 0
                case Opened():
                    self._lives[event.link] = event.life
                case Ended():
                    self._ended.add(event.link)
                case Sent():
                    self._sent(event)
                case Confirmed():
                    self._confirmed(event)
                case Refused():
                    self._requests.pop((event.link, event.request))
                case Delivered():
                    self._delivered(event)
                case Row():
                    self._row(event)
                case Drained():
                    self._drained()

    def _fault(self, message: bytes, what: str) -> None:
        self.found.append(f"{message.decode()}: {what}")

    # -- requests

    def _sent(self, sent: Sent) -> None:
        request = self._requests[sent.link, sent.request] = _Request(sent)
        waiting = self._stopped.get(self._lives[sent.link])
        if waiting is None:
            self._arrives(request)
        else:
            waiting.append(request)
        if sent.action == "publish":
            self._published.add(sent.message)
        elif sent.action == "ack":
            self._acked.add(sent.message)
        else:
            self._rejected[sent.link, sent.message] += 1

    def _arrives(self, request: _Request) -> None:
        request.newest, request.alone = self._newest, self._alone

    def _confirmed(self, confirmed: Confirmed) -> None:
        request = self._requests.pop((confirmed.link, confirmed.request))
        sent, life = request.sent, self._lives[confirmed.link]
        epoch = self.epochs.get(life)
        what = f"its {sent.action} was confirmed by broker {life}"
        if request.newest is None:
            self._fault(sent.message, f"{what}, which was stopped")
        elif epoch is not None and epoch < request.newest:
            newer = f"which got it when epoch {request.newest} served"
            self._fault(sent.message, f"{what} of epoch {epoch}, {newer}")
        if request.alone and request.alone == self._alone:
            self._fault(sent.message, f"{what} without a standby")
        if sent.action == "publish":
            self._durable.add(sent.message)
        elif sent.action == "ack" and epoch is not None:
            self._gone[sent.message] = epoch

    # -- the queue

    def _delivered(self, delivery: Delivered) -> None:
        link, message = delivery.link, delivery.message
        self._is_known(message, delivery.data)
        life = self._lives[link]
        before = self._deliveries.setdefault(message, [])
        same = [other for other in before if self._lives[other] == life]
        for other in set(same):
            if other not in self._ended and same.count(other) > self._rejected[other, message]:
                self._fault(message, f"broker {life} has delivered it twice")
        if same and not delivery.retry:
            self._fault(message, f"broker {life} has delivered it again without retry")
        before.append(link)
        gone, epoch = self._gone.get(message), self.epochs.get(life)
        if gone is not None and epoch is not None and epoch >= gone:
            self._fault(message, f"delivered in epoch {epoch}, and its ack confirmed in {gone}")
        if not delivery.retry:
            self._in_order(self._first, link, message, "delivered")

    def _is_known(self, message: bytes, data: bytes) -> None:
        if message not in self._published:
            self._fault(message, "nobody has published it")
        elif data != payload(message):
            self._fault(message, f"it has the data {data[:99]!r}")

    def _in_order(
        self, last: dict[tuple[int, bytes], int], who: int, message: bytes, what: str
    ) -> None:
        if message in self.refused:
            return
        publisher, number = publisher_and_number(message)
        before = last.get((who, publisher), -1)
        if number <= before:
            self._fault(message, f"{what} after {before}")
        last[who, publisher] = max(number, before)

    # -- the log

    def _row(self, row: Row) -> None:
        message = row.message
        self._is_known(message, row.data)
        self._log_epochs.add(row.epoch)
        if len(self._log_epochs) > 1:
            self._fault(message, f"the log has the epochs {sorted(self._log_epochs)}")
        if row.number <= self._numbers.get(row.reader, 0):
            self._fault(message, f"number {row.number} after {self._numbers[row.reader]}")
        self._numbers[row.reader] = row.number
        if (other := self._log.setdefault(row.number, message)) != message:
            self._fault(message, f"it has number {row.number}, as {other.decode()} had")
        read = self._read.setdefault(row.reader, set())
        if message in read:
            self._fault(message, "the log has it twice")
        else:
            self._in_order(self._last_read, row.reader, message, "read")
        read.add(message)

    # -- the end

    def _drained(self) -> None:
        logged: set[bytes] = set().union(*self._read.values())
        for message in sorted(self._durable):
            if message not in self._acked:
                self._fault(message, "it was confirmed, and is lost from the queue")
            if message not in logged:
                self._fault(message, "it was confirmed, and is lost from the log")
