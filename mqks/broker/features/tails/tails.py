"""`tail`: messages for those who watch them, as they are published or join a queue.

The one rule: nobody waits for a tail. What it cannot take now is dropped and counted; while there
is none, a group of messages costs one look at an empty tuple.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.schedule import Schedule
from mqks.broker.spine.base.turns import GOES_ON, Turns, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import LimitExceeded
from mqks.limits import STEP_MESSAGES, TAIL_BACKLOG_BYTES, TAIL_BACKLOG_MESSAGES
from mqks.protocol import replies
from mqks.protocol.masks import name_masks
from mqks.settings import Settings
from mqks.users import Permissions

DROPPED_S: Final = 1.0
"""So long after messages were dropped a tail is told at the latest, if it can take that."""

COMPARED: Final = 64
"""An event that is compared with a mask counts for so many messages."""
EVENTS_KEPT: Final = 4096
"""Of so many events a tail knows whether it shows them."""


class MessageTail:
    """`queue`: its messages alone; None for all that are published."""

    __slots__ = ("connection", "dropped", "ended", "events", "id", "known", "masks", "queue")

    def __init__(
        self,
        tail_id: bytes,
        connection: Connection,
        queue: bytes | None,
        events: Iterable[bytes],
        masks: Iterable[bytes],
    ) -> None:
        self.id = tail_id
        self.connection = connection
        self.queue = queue
        self.events = frozenset(events)
        self.masks = {mask: name_masks([mask]) for mask in masks}
        self.known: dict[bytes, bool] = {}
        self.dropped = 0
        """Messages that were not shown and that it has not been told of."""
        self.ended = False

    def is_allowed(self, permissions: Permissions) -> bool:
        """Whether a user may see what it shows: as if a queue was read, or bound like this."""
        if self.queue is not None:
            return permissions.may_read(self.queue)
        return (
            permissions.consumes
            and all(map(permissions.may_bind, self.events))
            and all(map(permissions.may_bind_mask, self.masks))
        )

    def choose(self, lines: Sequence[bytes]) -> Work[Sequence[bytes]]:
        """Those of the messages that it shows."""
        if not (self.events or self.masks):
            return lines
        found, weight, known = [], 0, self.known
        for line in lines:
            event = line.split(b" ", 2)[1].removeprefix(b"event=")
            is_shown = known.get(event)
            if is_shown is None:
                is_shown = event in self.events
                for matches in () if is_shown else self.masks.values():
                    weight += COMPARED
                    if weight >= STEP_MESSAGES:
                        weight = 0
                        yield GOES_ON
                    if matches(event):
                        is_shown = True
                        break
                if len(known) >= EVENTS_KEPT:
                    known.clear()
                known[event] = is_shown
            if is_shown:
                found.append(line)
        return found


class Tails:
    """`outboxes` is what all connections may be sent."""

    def __init__(
        self, settings: Settings, turns: Turns, schedule: Schedule, outboxes: Budget
    ) -> None:
        self._settings = settings
        self._turns = turns
        self._schedule = schedule
        self._outboxes = outboxes
        self._every: dict[MessageTail, None] = {}
        self._by_connection: dict[Connection, dict[bytes, MessageTail]] = {}
        self.of_events: tuple[MessageTail, ...] = ()
        """Those of all that is published."""
        self._of_queues: dict[bytes, tuple[MessageTail, ...]] = {}
        self._backlog: deque[tuple[tuple[MessageTail, ...], list[bytes]]] = deque()
        """Messages that are still to be shown, and to whom."""
        self._backlog_messages = self._backlog_bytes = 0
        self._is_working = False
        self.is_telling = False
        """Whether the schedule has to tell tails of messages that were dropped."""

    def __len__(self) -> int:
        return len(self._every)

    def shower(self, name: bytes) -> Callable[[list[bytes]], None] | None:
        """What shows messages to those of the queue of this name, if there are any."""
        those = self._of_queues.get(name)
        return None if those is None else partial(self.show, those)

    # -- they come and go

    def of(self, connection: Connection) -> dict[bytes, MessageTail]:
        """Those of a connection, by id."""
        return self._by_connection.get(connection, {})

    def check_room(self, connection: Connection, tail_id: bytes) -> None:
        """Raise if there may not be one more that does not replace another one."""
        theirs = self.of(connection)
        if tail_id in theirs:
            return
        if len(theirs) >= self._settings.tails_per_connection_max:
            reason = f"this connection has {len(theirs)} tails"
            raise LimitExceeded("tails_per_connection_max", reason)
        if len(self._every) >= self._settings.tails_max:
            raise LimitExceeded("tails_max", f"there are {len(self._every)} tails already")

    def add(self, tail: MessageTail, queue: Queue | None) -> None:
        """`queue` is the one that it is of."""
        self._by_connection.setdefault(tail.connection, {})[tail.id] = tail
        self._every[tail] = None
        self._index(tail.queue, queue)

    def end(self, tails: Iterable[MessageTail], *queues: Queue | None) -> None:
        """`queues` are those of the broker that they may be of."""
        for tail in [*tails]:
            tail.ended = True
            del self._every[tail]
            theirs = self._by_connection[tail.connection]
            del theirs[tail.id]
            if not theirs:
                del self._by_connection[tail.connection]
            found = (queue for queue in queues if queue is not None and queue.name == tail.queue)
            self._index(tail.queue, next(found, None))

    def _index(self, name: bytes | None, queue: Queue | None) -> None:
        those = tuple(tail for tail in self._every if tail.queue == name)
        if name is None:
            self.of_events = those
            return
        self._of_queues.pop(name, None)
        if those:
            self._of_queues[name] = those
        if queue is not None:
            queue.show = self.shower(name)

    # -- they are shown messages

    def show(self, tails: tuple[MessageTail, ...], lines: list[bytes]) -> None:
        """These messages have come: begin to show them, and go on in later turns."""
        size = sum(map(len, lines))
        # Something of any size is taken when nothing waits, or it would never be shown.
        if self._backlog and (
            self._backlog_messages + len(lines) > TAIL_BACKLOG_MESSAGES
            or self._backlog_bytes + size > TAIL_BACKLOG_BYTES
        ):
            for tail in tails:
                self._drop(tail, len(lines))
            return
        self._backlog.append((tails, lines))
        self._backlog_messages += len(lines)
        self._backlog_bytes += size
        if not self._is_working:
            self._is_working = True
            self._turns.add(self._work())

    def _work(self) -> Work[None]:
        while self._backlog:
            tails, lines = self._backlog[0]
            for some in slices(lines, STEP_MESSAGES):
                for tail in tails:
                    if not tail.ended:
                        self._write(tail, (yield from tail.choose(some)))
                        yield GOES_ON
            self._backlog.popleft()
            self._backlog_messages -= len(lines)
            self._backlog_bytes -= sum(map(len, lines))
        self._is_working = False

    def _room(self, tail: MessageTail) -> int:
        """How many bytes more it may be told."""
        connection = tail.connection
        if connection.rests or self._outboxes.room <= 0:
            return 0
        return self._settings.tail_buffer_bytes_max - connection.outbox_bytes

    def _write(self, tail: MessageTail, lines: Sequence[bytes]) -> None:
        if tail.ended or not lines:
            return
        told, room, prefix = list[bytes](), self._room(tail), tail.id + b" ok "
        for line in lines:
            if room <= 0:
                break
            told.append(prefix + replies.with_meta(line, 0) + b"\n")
            room -= len(told[-1])
        if told:
            self._tell_dropped(tail)
            tail.connection.write(b"".join(told))
        if len(told) < len(lines):
            self._drop(tail, len(lines) - len(told))

    def _drop(self, tail: MessageTail, count: int) -> None:
        tail.dropped += count
        if not self.is_telling:
            self.is_telling = True
            self._schedule.after(DROPPED_S, self._tell_all)

    def _tell_dropped(self, tail: MessageTail) -> None:
        if tail.dropped:
            tail.connection.write(replies.ok(tail.id, b"--dropped %d" % tail.dropped))
            tail.dropped = 0

    def _tell_all(self) -> None:
        """Who has been shown nothing since messages were dropped."""
        self.is_telling = False
        for tail in self._every:
            if self._room(tail) > 0:
                self._tell_dropped(tail)
            elif tail.dropped:  # It cannot take that now: look again later.
                self._drop(tail, 0)
