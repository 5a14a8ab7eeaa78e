"""The broker: queues, bindings and consumers, driven by lines, telling what must last.

The one rule: a call here takes a whole chunk, never waits, and leaves its replies in outboxes and
its changes in the pending batch. A reply that promises durability is not written before
`committed` says so.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from math import inf
from operator import length_hint
from typing import TYPE_CHECKING, get_args

from mqks.broker import permits
from mqks.broker.bindings import NOWHERE, Bindings
from mqks.broker.connection import Connection
from mqks.broker.consumer import UNLIMITED, Consumer, Delivery
from mqks.broker.facts import Facts
from mqks.broker.gathering import Gathering
from mqks.broker.metadata import Metadata, consumer_bytes, queue_bytes
from mqks.broker.once import OnceWindow
from mqks.broker.pending import Batch, ErrorRecord, Pending, QueueState, Waiters
from mqks.broker.policy import Policy
from mqks.broker.queue import Queue
from mqks.broker.reads import Read
from mqks.broker.turns import GOES_ON, WAITS, Turns, Work, finish, slices
from mqks.errors import (
    BadRequest,
    Expelled,
    Limit,
    LimitExceeded,
    LineTooLong,
    NotAllowed,
    Unwritable,
)
from mqks.limits import (
    AUTH_FAILURES_MAX,
    COPIES_MAX,
    ERRORS_TOLD_MAX,
    LANES_COPIES_MAX,
    LANES_QUEUES,
    LINES_MAX,
    LOGINS_WAITING_MAX,
    READS_WAITING_MAX,
    REASON_CHARACTERS_MAX,
    ROUTE_QUEUES,
    STEP_BODIES,
    STEP_COPIES,
    STEP_MESSAGES,
    STEP_NAMES,
    STRANGER_ERRORS_MAX,
    STRANGER_LINES_MAX,
)
from mqks.protocol import replies
from mqks.protocol.requests import (
    CONFIRM,
    ONCE,
    DeleteRule,
    Request,
    parse_request,
    request_id_of,
    shown,
)
from mqks.settings import Settings
from mqks.users import STRANGER, Known, Permissions, Users

if TYPE_CHECKING:
    from mqks.broker.actions import Action
    from mqks.broker.login import Login


NOTHING = b"\n"
"""A name that no line can hold."""
HYPHEN, NEWLINE = b"-\n"
CALM_S = 60.0
"""What happens again and again is told again when it has not happened for so long."""


class Broker:
    """`clock` gives seconds that only grow, `now_us` microseconds since 1970, `new_error_id` a text
    and a time in microseconds; `actions` is the table of what a client can ask for; `on_error`
    tells of a request that failed, and answers whether it did: of many at once it may leave some
    out."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float],
        now_us: Callable[[], int],
        new_error_id: Callable[[], tuple[str, int]],
        on_error: Callable[[ErrorRecord], bool],
    ) -> None:
        from mqks.broker.actions import ACTIONS

        self.actions: dict[bytes, Action] = ACTIONS
        self.settings = settings
        self.clock = clock
        self.new_error_id = new_error_id
        self.on_error = on_error
        self.connections: dict[int, Connection] = {}
        self.connection_count: Callable[[], int] = lambda: len(self.connections)
        """The server counts those, too, who still shake hands."""
        self.queues: dict[bytes, Queue] = {}
        self.metadata = Metadata(settings)
        self.pending = Pending(settings.errors_kept_max, now_us)
        self.bindings = Bindings(
            settings.bindings_per_queue_max, self.metadata, self.queues, self.pending
        )
        self._gathering = Gathering(self.bindings, self._publish)
        self.consumers: dict[bytes, Consumer] = {}
        self.orphans: dict[bytes, Queue] = {}
        """Deleted queues that still have consumers, by name."""
        self.published = self.queued = self.unroutable = self.confirmed = 0
        self.delivered = self.redelivered = self.consumed = self.rejected = 0
        self.purged = self.errors = 0
        self.loop_held = self.loop_late = 0
        """How often the server's event loop stood still: see `server/held.py`."""
        self.limits_reached: dict[Limit, int] = dict.fromkeys(get_args(Limit), 0)
        """Counters since the start; `docs/protocol.md` tells them under stats."""
        self.last_errors: deque[ErrorRecord] = deque(
            maxlen=min(settings.errors_kept_max, ERRORS_TOLD_MAX)
        )
        """As `stats` tells them, also before they are written."""
        self.once = OnceWindow(settings.once_ids_max)
        self.memory_bytes = 0
        """Waiting messages in memory, about."""
        self.unacked_bytes = 0
        """What consumers hold, about."""
        self.held_back: dict[Consumer, None] = {}
        """Consumers that wait until less is unacked, in the order they came to that."""
        self._held_back_s = -inf
        self.on_unacked_full: Callable[[], None] = lambda: None
        """Called when one is held back, after a while without any."""
        self.unsent_bytes = 0
        """Replies that were not taken, at most: the server looks now and then what was."""
        self.postponed: dict[Queue, None] = {}
        """Queues that wait for room for what they would deliver."""
        self.queue_messages_max = settings.queue_messages_max or UNLIMITED
        self.full_queues: dict[Queue, None] = {}
        """Queues with as many waiting messages as they may have."""
        self.on_queue_full: Callable[[Queue], None] = lambda queue: None
        """Called when a queue is full, and when it is no longer."""
        self.on_queue_nearly_full: Callable[[Queue], None] = lambda queue: None
        """Called when a queue begins to come near that."""
        self.facts = Facts()
        self.started_s = clock()
        self.unwritable = ""
        """Why nothing can be written that lasts; publishes are refused while this tells one."""

        self.turns = Turns(clock)
        self.due: dict[Queue, None] = {}
        """Queues that could deliver, and the turn was over."""
        self._works: deque[Work[None]] = deque()
        """Those of the connection whose chunk is in hand."""
        self._once_ids: list[bytes] = []
        """Of the chunk in hand."""
        self._once_unfinished = 0
        """Works after which ids last that are known already: who publishes one of them again must
        not be confirmed before the first."""
        self._told: tuple[Queue, bytes] | None = None
        """What the last queue whose consumers were told an update is bound to."""
        self.touched: list[Connection] = []
        """Connections with something in their outbox: the server's to flush."""
        self.users = Users([], b"")
        self.logins: deque[Login] = deque()
        """Passwords to be verified: the server's to do, one after the other."""
        self.readers: list[Connection] = []
        """Connections that want to see something of the journal: the server's to serve."""
        self.page_requests: list[Queue] = []
        """Queues that want their next page from disk: the server's to fetch."""
        self.next_queue_id = 1
        self._connection_ids = count(1)
        self._deadlines: list[tuple[float, int, Queue]] = []
        self._deadline_ids = count()

    @property
    def memory_is_short(self) -> bool:
        """Whether waiting messages take their half of the budget: the other half is left to what
        is on its way, and to the allocator."""
        return self.memory_bytes > self.settings.memory_bytes // 2

    def long_names(self) -> int:
        """How many queues and events there are whose names would be refused today."""
        names = {*self.queues, *self.bindings.by_name}
        events = chain.from_iterable(self.bindings.by_name.values())
        return sum(map(self.metadata.is_long, chain(names, events)))

    # -- connections

    def connect(self, address: str, *, local: bool) -> Connection:
        """A client has come. How many may, the server's gate knows."""
        settings = self.settings
        connection = Connection(
            next(self._connection_ids),
            address,
            local,
            settings.line_bytes_max,
            stranger=settings.needs_auth(local=local),
        )
        self.connections[connection.id] = connection
        return connection

    def end(self, connection: Connection) -> None:
        """A client sends no more: its consumers end, what they held goes back."""
        self.end_consumers(list(connection.consumers.values()))

    def disconnect(self, connection: Connection) -> None:
        """A client has gone; its works are done."""
        connection.closed = True
        self.end(connection)
        self.connections.pop(connection.id, None)

    def unblock(self, connection: Connection) -> None:
        """A slow client has caught up: its consumers may take again."""
        connection.blocked = False
        if connection.reads:
            self.readers.append(connection)
        if connection.consumers:
            self.turns.add(self._wake_all(list(connection.consumers.values())))

    def _wake_all(self, consumers: list[Consumer]) -> Work[None]:
        for consumer in consumers:
            if consumer.update_due and not (consumer.deleted or consumer.connection.blocked):
                yield from self._tell(consumer.queue, [consumer])
        for consumer in consumers:
            if not consumer.deleted:
                self.wake(consumer)
                yield GOES_ON

    def write(self, connection: Connection, data: bytes) -> None:
        """Put bytes into a connection's outbox; over the high-water mark its consumers rest."""
        if not connection.touched:
            connection.touched = True
            self.touched.append(connection)
        connection.outbox.append(data)
        size = len(data)
        connection.outbox_bytes += size
        self.unsent_bytes += size
        if (
            connection.outbox_bytes > self.settings.outbox_high_water_bytes
            or self.unsent_bytes > self.settings.outboxes_bytes_max // 2
        ):
            connection.blocked = True

    @property
    def outboxes_room(self) -> int:
        """How many bytes more may be unsent over all connections."""
        return self.settings.outboxes_bytes_max - self.unsent_bytes

    def postpone(self, queue: Queue) -> bool:
        """Whether this queue must wait: until all that comes back to it is there, until there is
        room for what it would deliver, or for the next turn."""
        if queue.returning:
            return True
        if self.outboxes_room <= 0:
            self.postponed[queue] = None
            return True
        if self.turns.over:
            self.due[queue] = None
            return True
        return False

    def deliver_postponed(self) -> None:
        """In the order in which they came, as far as there is room."""
        while self.postponed and self.outboxes_room > 0:
            queue = next(iter(self.postponed))
            del self.postponed[queue]
            self.due[queue] = None

    # -- what goes on in later turns

    @property
    def has_work(self) -> bool:
        """Whether `go_on` has something to do."""
        return bool(self.due or self.turns) or self._can_deliver_held_back

    def go_on(self) -> bool:
        """One turn for what earlier ones have left; return whether all that is left waits, be it
        for the journal."""
        self.turns.begin()
        while self.due:
            queue = next(iter(self.due))
            del self.due[queue]
            if queue.returning or queue.deleted or self.outboxes_room <= 0:
                queue.deliver()
                continue
            if queue.can_deliver:  # However short the turn: something is done.
                queue.deliver_some()
            queue.deliver()
            if self.turns.over:
                return False
        waits = self.turns.go_on()
        self.deliver_held_back()
        return waits and not self.due

    @property
    def unacked_room(self) -> int:
        """How many bytes more may be unacked over all consumers."""
        return self.settings.unacked_bytes_max - self.unacked_bytes

    def hold_back(self, consumer: Consumer) -> None:
        """A consumer can take nothing now: remember it, if there may be no room for it."""
        if consumer.manual_ack and self.unacked_room <= 0:
            self.held_back[consumer] = None
            last_s, self._held_back_s = self._held_back_s, self.clock()
            if self._held_back_s > last_s + CALM_S:
                self.limits_reached["unacked_bytes_max"] += 1
                self.on_unacked_full()

    def deliver_held_back(self) -> None:
        """Less is unacked: consumers go on in the order in which they were held back."""
        while self._can_deliver_held_back:
            consumer = next(iter(self.held_back))
            del self.held_back[consumer]
            self.wake(consumer)
            if self.turns.over:
                break

    @property
    def _can_deliver_held_back(self) -> bool:
        return bool(self.held_back) and self.unacked_room > 0

    # -- the way of a chunk

    def receive(self, connection: Connection, data: bytes) -> None:
        """Handle every line that this chunk completes. Afterwards `connection.expelled` tells
        whether it must be closed, and `connection.overrun` whether this is to be called again, be
        it with nothing more."""
        self.turns.begin()
        if connection.works:
            assert connection.kept is not None
            connection.kept.append(data)
            return
        if connection.overrun:
            data = b"".join([*(connection.kept or ()), data])
            connection.kept, connection.overrun = None, False
        start = 0
        while connection.permissions is STRANGER and connection.kept is None and start < len(data):
            # Line by line: the next one may be meant for a user.
            end = data.find(b"\n", start) + 1 or len(data)
            self._receive(connection, data[start:end])
            start = end
            connection.stranger_lines += data[end - 1] == NEWLINE
            if connection.stranger_lines >= STRANGER_LINES_MAX and connection.kept is None:
                self.expel(connection, f"{STRANGER_LINES_MAX} lines before authentication")
        if connection.kept is not None:
            connection.kept.append(data[start:])
        elif start < len(data) or connection.splitter.too_long is not None:
            self._receive(connection, data[start:] if start else data)
        if connection.expelled:
            connection.kept = []

    def _receive(self, connection: Connection, data: bytes) -> None:
        splitter = connection.splitter
        connection.eval_budget = None
        lines = splitter.feed(data)
        if splitter.has_tab:
            # Rare, and an error for the lines that have one: not the hot loop's business.
            remaining = iter(lines)
            for line in remaining:
                if b"\t" in line:
                    self._refuse(connection, line, BadRequest("a tab is not allowed in a request"))
                    if connection.kept is None and self.turns.over:
                        self._break_off(connection, remaining)
                else:
                    self._handle(connection, iter([line]))
                if connection.kept is not None:
                    self._keep(connection, remaining)
        else:
            self._handle(connection, iter(lines))
        if connection.kept is not None:
            connection.kept.append(splitter.take_tail())
        elif splitter.too_long is not None:
            reason = f"a line may have {splitter.line_bytes_max} bytes at most"
            # A line without an id is told as such, not by its first megabyte.
            line = splitter.too_long if b" " in splitter.too_long else b""
            self._refuse(connection, line, LineTooLong("line_bytes_max", reason))

    def _break_off(self, connection: Connection, lines: Iterator[bytes]) -> None:
        """Others have their turn before the rest."""
        connection.kept, connection.overrun = [], True
        self._keep(connection, lines)

    @staticmethod
    def _keep(connection: Connection, lines: Iterator[bytes]) -> None:
        """Keep these lines as they came, one carriage return aside that is dropped again."""
        assert connection.kept is not None
        connection.kept += [line + b"\r\n" for line in lines]

    def _handle(self, connection: Connection, lines: Iterator[bytes]) -> None:
        """One plain loop over the lines of a chunk. Publishes, or acks to one consumer, gather
        until something else comes, and are then done in one go.

        `event` is NOTHING while acks gather, `acker` while publishes do. What the user may not do
        does not gather: `_request` finds the words for it.
        """
        now, chunk_end_s, works = self.turns.clock, self.turns.end_s, connection.works
        self._works, wide_from = works, COPIES_MAX // LINES_MAX
        outbox_bytes_max = max(0, min(self.settings.outbox_bytes_max, self.outboxes_room))
        name_bytes_max = self.metadata.name_bytes_max
        gathering = self._gathering
        event = acker = NOTHING
        middle = b""
        ids: list[bytes] = []
        bodies: list[bytes] = []
        acked: list[bytes] = []
        confirms: list[bytes] = []
        others: list[bytes] = []
        gathered, gathered_max = 0, LINES_MAX
        while length_hint(lines):
            is_wide = False
            for line in islice(lines, gathered_max):
                try:
                    request_id, action, argument, rest = line.split(b" ", 3)
                except ValueError:
                    action = b""
                if action == b"publish":
                    if argument == event and len(request_id) <= name_bytes_max and request_id:
                        ids.append(request_id)
                        bodies.append(request_id + middle + rest)
                        continue
                    confirm = argument == CONFIRM
                    if confirm:
                        argument, _, rest = rest.partition(b" ")
                    once = argument == ONCE
                    if once:
                        argument, _, rest = rest.partition(b" ")
                    if (
                        argument != event
                        and 0 < len(argument) <= name_bytes_max
                        and argument[:2] != b"--"
                        and not self.unwritable
                        and not self.full_queues
                        and (
                            (permissions := connection.permissions) is None
                            or permissions.may_publish(argument)
                        )
                    ):
                        if acked:
                            self.ack(acker, acked)
                            acker, acked = NOTHING, []
                        _, ids, bodies = gathering.lane(argument)
                        event, middle = argument, b" event=" + argument + b" "
                        if now() > chunk_end_s:
                            self._break_off(connection, lines)
                        is_wide = gathering.width > wide_from or bool(works)
                    if (
                        argument == event
                        and len(request_id) <= name_bytes_max
                        and request_id
                        and not (once and self._once_unfinished)
                    ):
                        if confirm:
                            confirms.append(request_id)
                        if not once or self._is_new(connection, request_id):
                            ids.append(request_id)
                            bodies.append(request_id + middle + rest)
                        if is_wide:
                            break
                        continue
                elif action == b"ack":
                    if (
                        argument == acker
                        and len(request_id) <= name_bytes_max
                        and request_id
                        and rest
                        and rest[0] != HYPHEN
                        and b" " not in rest
                    ):
                        acked.append(rest)
                        continue
                    confirm = argument == CONFIRM
                    if confirm:
                        argument, _, rest = rest.partition(b" ")
                    plain = (
                        len(request_id) <= name_bytes_max
                        and request_id
                        and rest
                        and rest[0] != HYPHEN
                        and b" " not in rest
                    )
                    if plain and (
                        argument == acker
                        or (
                            argument
                            and argument[:2] != b"--"
                            and (
                                connection.permissions is None
                                or self._may_ack(connection, argument)
                            )
                        )
                    ):
                        if argument != acker:
                            self._flush(acker, acked)
                            event, acker, acked = NOTHING, argument, []
                            if works and not self._proceed(connection):
                                acker = NOTHING
                                self._break_off(connection, chain([line], lines))
                                break
                            if now() > chunk_end_s:
                                self._break_off(connection, lines)
                        acked.append(rest)
                        if confirm:
                            others.append(request_id)
                        continue
                self._flush(acker, acked)
                event, acker, acked = NOTHING, NOTHING, []
                if works and not self._proceed(connection):
                    self._break_off(connection, chain([line], lines))
                    break
                if line:
                    request = self._request(connection, line)
                    if request is not None and request.confirm:
                        (confirms if request.action == b"publish" else others).append(request.id)
                    if connection.kept is not None:
                        self._keep(connection, lines)
                    elif (
                        (works and not self._proceed(connection))
                        or now() > chunk_end_s
                        or connection.outbox_bytes > outbox_bytes_max
                    ):
                        self._break_off(connection, lines)
            if not length_hint(lines):
                break
            # Many lines, or one for many queues: it is time to look at what it comes to.
            gathered += 1 if is_wide else gathered_max
            copies_max = LANES_COPIES_MAX if gathering.width <= LANES_QUEUES else COPIES_MAX
            if gathered * gathering.width >= copies_max or len(acked) >= STEP_MESSAGES or works:
                self._flush(acker, acked)
                event, acker, acked, gathered = NOTHING, NOTHING, [], 0
                done = not works or self._proceed(connection)
                if not done or self.pending.records > self.settings.batch_records_max:
                    self._break_off(connection, lines)
            if now() > chunk_end_s and connection.kept is None:
                self._break_off(connection, lines)
            gathered_max = max(1, min(LINES_MAX, COPIES_MAX // gathering.width - gathered))
        self._flush(acker, acked)
        if confirms or others:
            connection.unconfirmed += len(confirms) + len(others)
        once_ids, self._once_ids = self._once_ids, []
        if works and not self._proceed(connection):
            works.append(self._complete(connection, confirms, others, once_ids))
            self._once_unfinished += once_ids != []
            self.turns.add(self._proceed_later(connection))
            if connection.kept is None:
                self._break_off(connection, lines)
        elif confirms or others or once_ids:
            self._remember(connection, confirms, others, once_ids)

    def _complete(
        self,
        connection: Connection,
        confirms: list[bytes],
        others: list[bytes],
        once_ids: list[bytes],
    ) -> Work[None]:
        """After all that a chunk has published: ids that are remembered before their messages
        would keep them out for good."""
        self._once_unfinished -= once_ids != []
        if self.unwritable:
            for message_id in confirms:
                connection.unconfirmed -= 1
                reason = f"{self.unwritable}: it is not durable yet"
                self._error(connection, message_id, b"publish", reason)
            confirms = []
        self._remember(connection, confirms, others, once_ids)
        yield GOES_ON

    def _remember(
        self,
        connection: Connection,
        confirms: list[bytes],
        others: list[bytes],
        once_ids: list[bytes],
    ) -> None:
        """What the next commit makes true: `confirms` are those of messages."""
        self.pending.entry.once += once_ids
        self.pending.records += len(once_ids)
        if confirms or others:
            self.pending.waiters.confirmed += len(confirms)
            self.pending.waiters.confirms.append((connection, confirms + others))

    def _proceed(self, connection: Connection) -> bool:
        """Go on with what its lines have begun; return whether that is done."""
        works = connection.works
        while works:
            if not self.turns.run(works[0]):
                return False
            works.popleft()
        return True

    def _proceed_later(self, connection: Connection) -> Work[None]:
        while connection.works:
            yield from connection.works[0]
            connection.works.popleft()

    def _flush(self, acker: bytes, acked: list[bytes]) -> None:
        """Do what has gathered: it is either the one or the other."""
        if acked:
            self.ack(acker, acked)
        else:
            self._gathering.flush()

    def _request(self, connection: Connection, line: bytes) -> Request | None:
        """One request off the fast path; None is one that failed, or has no plain confirm now. The
        one place where an error becomes a reply."""
        try:
            request = parse_request(line)
            self.metadata.check_names("id", [request.id])
            action = self.actions.get(request.action)
            if action is None:
                raise BadRequest(f"there is no action {shown(request.action)}")
            if connection.permissions is not None:
                permits.check(action.needs, self, connection.permissions, request)
            work = action.run(self, connection, request)
        except BadRequest as failure:
            self._refuse(connection, line, failure)
            return None
        if work is not None:
            connection.unconfirmed += request.confirm
            connection.works.append(self._perform(connection, request, line, work))
            return None
        # What must be verified first, or was refused, is not confirmed now.
        return None if connection.awaits_login else request

    def _perform(
        self, connection: Connection, request: Request, line: bytes, work: Work[int | None]
    ) -> Work[None]:
        """A request that may take more than a turn. It raises before it changes anything."""
        try:
            amount = yield from work
            if request.confirm and self.unwritable and request.action in (b"publish", b"reject"):
                raise Unwritable(f"{self.unwritable}: it is not durable yet")
        except BadRequest as failure:
            connection.unconfirmed -= request.confirm
            self._refuse(connection, line, failure)
            return
        if not request.confirm:
            return
        if amount is None:
            self.pending.waiters.confirms.append((connection, [request.id]))
        else:
            self.pending.waiters.counts.append((connection, request.id, amount))

    def _refuse(self, connection: Connection, line: bytes, failure: BadRequest) -> None:
        """Reply with an error id; the details go to the log and into the database."""
        if isinstance(failure, LimitExceeded):
            self.limits_reached[failure.limit] += 1
        request_id = request_id_of(line)
        action = line.partition(b" ")[2].partition(b" ")[0]
        self._fail(connection, request_id, action, failure)

    def _fail(
        self, connection: Connection, request_id: bytes, action: bytes, failure: BadRequest
    ) -> None:
        self._error(connection, request_id, action, str(failure))
        if connection.permissions is STRANGER:
            connection.stranger_errors += 1
            if connection.stranger_errors >= STRANGER_ERRORS_MAX:
                failure = Expelled(f"{STRANGER_ERRORS_MAX} errors before authentication")
        if isinstance(failure, Expelled):
            # Not the exception itself: with its traceback it would keep what was sent.
            connection.kept, connection.overrun, connection.expelled = [], False, True

    def expel(self, connection: Connection, reason: str) -> None:
        """Have a connection closed for what no single request has done."""
        self._fail(connection, b"-", b"", Expelled(reason))

    def _error(self, connection: Connection, request_id: bytes, action: bytes, reason: str) -> None:
        reply = self.error_reply(
            connection.address,
            request_id,
            action,
            reason,
            stranger=connection.permissions is STRANGER,
            user=connection.user,
        )
        if not connection.closed:
            self.write(connection, reply)

    def error_reply(
        self,
        address: str,
        request_id: bytes,
        action: bytes,
        reason: str,
        *,
        stranger: bool,
        user: str | None = None,
    ) -> bytes:
        """Record an error under a new id and return the reply that tells it. Strangers fill the
        database no faster than the log."""
        self.errors += 1
        error_id, time_us = self.new_error_id()
        record = ErrorRecord(
            error_id,
            time_us,
            address,
            request_id[:256],
            action[:64],
            reason[:REASON_CHARACTERS_MAX],
            user,
        )
        told = self.on_error(record)
        if told or not stranger:
            self.last_errors.append(record)
            self.pending.add_error(record)
        return replies.error(request_id, error_id)

    # -- users

    def authenticate(self, connection: Connection, user: Known | None) -> None:
        """Give a connection the rights of a user; None is nobody whose credentials are right."""
        if user is None:
            connection.auth_failures += 1
            if connection.auth_failures >= AUTH_FAILURES_MAX:
                raise Expelled("wrong credentials, too often")
            raise NotAllowed("wrong credentials")
        connection.user = user.name
        connection.splitter.line_bytes_max = self.settings.line_bytes_max
        self.grant(connection, user.permissions)

    def grant(self, connection: Connection, permissions: Permissions) -> None:
        """From now on these count; consumers that they do not allow end."""
        connection.permissions = permissions
        consumers = connection.consumers.values()
        lost = [each for each in consumers if not permissions.may_consume(each.queue.name)]
        if lost:
            self.end_consumers(lost)

    def verify(self, login: "Login") -> None:
        """Have the server verify a password; the connection's next lines wait for the outcome."""
        if len(self.logins) < LOGINS_WAITING_MAX:
            self.logins.append(login)
            login.connection.kept = []
        else:
            # Not the password is wrong, so it is the connection that is refused: try later.
            self.limits_reached["logins_waiting_max"] += 1
            self.expel(login.connection, f"{LOGINS_WAITING_MAX} passwords wait already")

    def verified(self, login: "Login", user: Known | None) -> bytes:
        """The outcome; returns what has been kept meanwhile and is to be received now, unless the
        connection is `expelled`."""
        connection, request = login.connection, login.request
        kept = b"".join(connection.kept or ())
        connection.kept = None
        try:
            self.authenticate(connection, user)
        except BadRequest as failure:
            self._fail(connection, request.id, request.action, failure)
        else:
            if request.confirm:
                connection.unconfirmed += 1
                self.pending.waiters.confirms.append((connection, [request.id]))
        return kept

    def _may_ack(self, connection: Connection, consumer_id: bytes) -> bool:
        """Whether its user may settle this consumer's messages; what is not there does no harm."""
        consumer = self.consumers.get(consumer_id)
        permissions = connection.permissions
        assert permissions is not None
        return permissions is not STRANGER and (
            consumer is None or permissions.may_consume(consumer.queue.name)
        )

    # -- messages

    def _publish(self, event: bytes, ids: list[bytes], bodies: list[bytes]) -> None:
        """Route messages of one event; each queue bound to it gets all of them, in later turns
        when there are very many, and then before all that the connection publishes next."""
        self.published += len(ids)
        queues = self.bindings.routes.get(event, NOWHERE)
        if not queues:
            self.unroutable += len(ids)
        self.queued += len(ids) * len(queues)
        if self._works or len(queues) >= LANES_QUEUES:
            self._works.append(self._route(list(queues), ids, bodies))
            return
        for queue in queues:
            queue.publish(ids, bodies)

    def _route(self, queues: list[Queue], ids: list[bytes], bodies: list[bytes]) -> Work[None]:
        for some in slices(queues, max(1, min(ROUTE_QUEUES, STEP_COPIES // len(ids)))):
            for queue in some:
                queue.publish(ids, bodies)
            yield self.pending.records > self.settings.batch_records_max + COPIES_MAX

    def publish(
        self, connection: Connection, event: bytes, message_id: bytes, body: bytes, *, once: bool
    ) -> Work[None] | None:
        """Publish a message; `once`: unless its user has published one of this id so before."""
        if once and self._once_unfinished:
            return self._publish_later(connection, event, message_id, body)
        if not once or self._is_new(connection, message_id):
            self._publish(event, [message_id], [body])
        return None

    def _publish_later(
        self, connection: Connection, event: bytes, message_id: bytes, body: bytes
    ) -> Work[None]:
        while self._once_unfinished:
            yield WAITS
        once_id = connection.once_id(message_id)
        if self.once.add(once_id):
            self.published += 1
            queues = self.bindings.routes.get(event, NOWHERE)
            self.unroutable += not queues
            self.queued += len(queues)
            self._once_unfinished += 1
            yield from self._route(list(queues), [message_id], [body])
            self._once_unfinished -= 1
            self.pending.entry.once.append(once_id)
            self.pending.records += 1

    def check_room(self, event: bytes, *, is_known: bool) -> None:
        """Raise what forbids publishing to an event now; what is known goes to no queue again."""
        if self.unwritable:
            raise Unwritable(f"{self.unwritable}: nothing can be published until that has changed")
        if is_known or not self.full_queues:
            return
        for queue in self.bindings.routes.get(event, NOWHERE):
            if queue.full:
                raise LimitExceeded(
                    "queue_messages_max",
                    # Whoever publishes is told the reason, but not whose queue it is.
                    f"{self.queue_messages_max} messages wait in a queue bound to {shown(event)}",
                )

    def check_route(self, event: bytes) -> None:
        """Raise if a message of this event would go nowhere."""
        if all(queue.deleted for queue in self.bindings.routes.get(event, NOWHERE)):
            raise BadRequest(f"publish: no queue is bound to {shown(event)}")

    def queue_filled(self, queue: Queue) -> None:
        self.full_queues[queue] = None
        self.on_queue_full(queue)

    def queue_has_room(self, queue: Queue) -> None:
        self.full_queues.pop(queue, None)
        self.on_queue_full(queue)

    def is_known(self, connection: Connection, message_id: bytes) -> bool:
        """Whether this message would not be published once more."""
        return connection.once_id(message_id) in self.once

    def _is_new(self, connection: Connection, message_id: bytes) -> bool:
        """Remember an id that may be published once; return whether it was not known."""
        once_id = connection.once_id(message_id)
        if not self.once.add(once_id):
            return False
        self._once_ids.append(once_id)
        return True

    def trim(self, name: bytes, end: int | None) -> Work[int | None]:
        """Drop the waiting messages of a queue, or those with numbers below `end`; return how
        many."""
        queue = self.queues.get(name)
        if queue is None:
            return 0
        count = yield from queue.trim(queue.next_seq if end is None else end)
        self.purged += count
        return count

    def read(self, connection: Connection, read: Read) -> None:
        """Have the server answer this, in its turn."""
        if len(connection.reads) >= READS_WAITING_MAX:
            raise LimitExceeded(
                "reads_waiting_max",
                f"{READS_WAITING_MAX} reads of this connection are waiting already",
            )
        connection.reads.append(read)
        if len(connection.reads) == 1 and not connection.blocked:
            self.readers.append(connection)

    def is_there(self, read: Read) -> bool:
        """Whether the queue that is to be read is still the one of its name."""
        queue = self.queues.get(read.queue)
        return queue is not None and queue.id == read.queue_id

    def read_failed(self, connection: Connection, read: Read) -> None:
        """The queue was deleted before the answer could be told."""
        reason = f"{read.form}: queue {shown(read.queue)} was deleted meanwhile"
        self._error(connection, read.request_id, read.form.encode(), reason)

    def ack(self, consumer_id: bytes, message_ids: Sequence[bytes]) -> None:
        """Settle these deliveries; what is not there is no error."""
        self._settle(consumer_id, message_ids, Queue.settle)

    def reject(self, consumer_id: bytes, message_ids: Sequence[bytes]) -> None:
        """Put these deliveries back to the tail; what is not there is no error."""
        self._settle(consumer_id, message_ids, Queue.requeue)

    def _settle(
        self,
        consumer_id: bytes,
        message_ids: Sequence[bytes],
        how: Callable[[Queue, list[Delivery]], None],
    ) -> None:
        consumer = self.consumers.get(consumer_id)
        if consumer is None:
            return
        deliveries = consumer.settle(message_ids)
        if deliveries:
            how(consumer.queue, deliveries)
            self._has_settled(consumer)

    def _has_settled(self, consumer: Consumer) -> None:
        self.deliver_held_back()
        if not (consumer.in_ring or consumer.deleted):
            self.wake(consumer)

    def ack_all(self, consumer_id: bytes) -> Work[None]:
        """Settle all that a consumer holds."""
        consumer = self.consumers.get(consumer_id)
        if consumer is None or not consumer.unacked:
            return
        queue, deliveries = consumer.queue, consumer.let_go()
        while some := list(islice(deliveries, STEP_MESSAGES)):
            if not queue.deleted:
                queue.settle(some)
            yield GOES_ON
        self._has_settled(consumer)

    def reject_all(self, consumer_id: bytes) -> Work[None]:
        """Put all that a consumer holds back to the tail, in the order that it has in the queue."""
        consumer = self.consumers.get(consumer_id)
        if consumer is None or not consumer.unacked:
            return
        queue, held, deliveries = consumer.queue, consumer.let_go(), list[Delivery]()
        while some := list(islice(held, STEP_BODIES)):
            deliveries += some
            yield GOES_ON
        deliveries.sort(reverse=True)
        while deliveries:
            some = [deliveries.pop() for _ in range(min(len(deliveries), STEP_MESSAGES))]
            if not queue.deleted:
                queue.requeue(some)
            yield GOES_ON
        self._has_settled(consumer)

    # -- queues and consumers

    def make_queue(self, name: bytes) -> Work[Queue]:
        """Return the queue of this name, made now if there was none.

        Consumers of an earlier queue of that name are served again.
        """
        queue = self.queues.get(name)
        if queue is not None:
            return queue
        queue = self._new_queue(self.next_queue_id, name)
        self._changed(queue)
        orphaned = self._adopt(name)
        if orphaned is not None:
            for consumer in orphaned.consumers:
                consumer.queue = queue
                queue.attach(consumer)
        yield from self.bindings.queue_made(queue)
        return (yield from self.make_queue(name)) if queue.deleted else queue

    def _adopt(self, name: bytes) -> Queue | None:
        """Take a deleted queue out of those that still have consumers."""
        orphan = self.orphans.pop(name, None)
        if orphan is not None:
            self.metadata.bytes -= queue_bytes(name)
        return orphan

    def check_queue(self, name: bytes) -> None:
        """Raise if this queue would have to be made, and must not be."""
        if name in self.queues:
            return
        self.metadata.check_names("queue", [name])
        if len(self.queues) >= self.settings.queues_max:
            raise LimitExceeded(
                "queues_max", f"there are {self.settings.queues_max} queues already"
            )
        self.metadata.check_room(queue_bytes(name))

    def check_consumer(self, consumer_id: bytes) -> None:
        """Raise if there is no room for a consumer that does not replace another one."""
        if consumer_id not in self.consumers:
            self.metadata.check_room(consumer_bytes(consumer_id), for_consumer=True)

    def _new_queue(self, queue_id: int, name: bytes) -> Queue:
        self.next_queue_id = max(self.next_queue_id, queue_id + 1)
        queue = self.queues[name] = Queue(self, queue_id, name)
        self.metadata.bytes += queue_bytes(name)
        return queue

    def _changed(self, queue: Queue) -> None:
        self.pending.entry.queues[queue.id] = QueueState(queue.name, queue.policy)

    def set_rule(self, queue: Queue, rule: DeleteRule | None) -> bool:
        """Return whether that changed the rule."""
        if queue.policy.delete_when_unused == rule:
            return False
        queue.policy = replace(queue.policy, delete_when_unused=rule)
        self._changed(queue)
        self._outdate(queue)
        return True

    def tell_update(self, name: bytes, but: Consumer | None = None) -> Work[None]:
        """Tell the consumers of a queue what it is bound to now."""
        queue = self.queues.get(name) or self.orphans.get(name)
        if queue is None:
            return
        self._outdate(queue)
        yield from self._tell(queue, [each for each in queue.consumers if each is not but])

    def _outdate(self, queue: Queue) -> None:
        """What its consumers were told has changed."""
        queue.updates += 1
        if self._told is not None and self._told[0] is queue:
            self._told = None

    def _tell(self, queue: Queue, consumers: list[Consumer]) -> Work[None]:
        """A slow client is told the newest state when it has caught up, not each one before. The
        list is made once: it may have 100,000 events, for 10,000 consumers."""
        for consumer in consumers:
            if consumer.deleted or consumer.queue is not queue:
                continue
            consumer.update_due = consumer.connection.blocked
            if not consumer.update_due:
                while self._told is None or self._told[0] is not queue:
                    yield from self._list_events(queue)
                self.write(consumer.connection, consumer.update(self._told[1]))
            yield GOES_ON

    def _list_events(self, queue: Queue) -> Work[None]:
        updates, rule = queue.updates, queue.policy.delete_when_unused
        runs = []
        for some in slices(list(self.bindings.by_name.get(queue.name, ())), STEP_NAMES):
            runs.append(sorted(some))
            yield GOES_ON
        events = runs.pop() if len(runs) == 1 else []
        merged = heapq.merge(*runs)
        while some := list(islice(merged, STEP_NAMES)):
            events += some
            yield GOES_ON
        if queue.updates == updates:
            self._told = queue, replies.bound(queue.name, events, rule)

    def add_consumer(self, consumer: Consumer) -> Work[None]:
        """Attach a consumer; one that had its id before ends, and loses nothing."""
        self.metadata.bytes += consumer_bytes(consumer.id)
        earlier = self.consumers.get(consumer.id)
        self.consumers[consumer.id] = consumer
        consumer.connection.consumers[consumer.id] = consumer
        consumer.queue.attach(consumer)
        if earlier is not None:
            yield from self.delete_consumers([earlier])

    def wake(self, consumer: Consumer) -> None:
        """A consumer may have room again."""
        queue = consumer.queue
        if queue.deleted:
            return
        if consumer.room() > 0:
            queue.wake(consumer)
            queue.deliver()
        else:
            self.hold_back(consumer)

    def end_consumers(self, consumers: list[Consumer]) -> None:
        """They get nothing any more from now on; what they held goes back in turns."""
        for consumer in consumers:
            consumer.deleted = True
        if consumers:
            self.turns.add(self.delete_consumers(consumers))

    def delete_consumers(self, consumers: list[Consumer]) -> Work[None]:
        """End consumers. What all of them held goes back to its place before any of it is given
        to others."""
        returned: list[tuple[Queue, Iterator[Delivery]]] = []
        for number, consumer in enumerate(consumers, 1):
            if number % STEP_MESSAGES == 0:
                yield GOES_ON
            if consumer not in consumer.queue.consumers:
                continue
            consumer.deleted = True
            self.metadata.bytes -= consumer_bytes(consumer.id)
            if self.consumers.get(consumer.id) is consumer:
                del self.consumers[consumer.id]
            if consumer.connection.consumers.get(consumer.id) is consumer:
                del consumer.connection.consumers[consumer.id]
            self.held_back.pop(consumer, None)
            consumer.queue.detach(consumer)
            consumer.queue.returning += 1
            returned.append((consumer.queue, consumer.let_go()))
        yield GOES_ON
        for queue, deliveries in returned:
            while some := list(islice(deliveries, STEP_MESSAGES)):
                if not queue.deleted:
                    queue.give_back(some)
                yield GOES_ON
            queue.returning -= 1
        for queue in dict.fromkeys(queue for queue, _ in returned):
            if queue.consumers:
                queue.deliver()
            elif self.orphans.get(queue.name) is queue:
                self._adopt(queue.name)
            elif not queue.deleted:
                yield from self.unused(queue)
            yield GOES_ON
        self.deliver_held_back()

    def unused(self, queue: Queue) -> Work[None]:
        """A queue has no consumer (any more): its delete rule applies."""
        rule = queue.policy.delete_when_unused
        if rule is None:
            return
        if rule.delay_s is None:
            yield from self.delete_queue(queue.name)
            return
        queue.deadline = self.clock() + rule.delay_s
        heapq.heappush(self._deadlines, (queue.deadline, next(self._deadline_ids), queue))
        if len(self._deadlines) > 2 * len(self.queues) + 64:
            self._deadlines = [
                (queue.deadline, next(self._deadline_ids), queue)
                for queue in self.queues.values()
                if queue.deadline is not None
            ]
            heapq.heapify(self._deadlines)

    def delete_queue(self, name: bytes) -> Work[None]:
        """Delete messages, bindings and rule; consumers stay with the name."""
        queue = self.queues.pop(name, None)
        if queue is not None:
            self.turns.add(queue.delete())
            self.pending.entry.queues[queue.id] = None
            if queue.consumers:
                self.orphans[name] = queue
            else:
                self.metadata.bytes -= queue_bytes(name)
        yield from self.bindings.remove_all(name, queue)
        if queue is not None and queue.consumers:
            self._outdate(queue)
            self.deliver_held_back()

    # -- time

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next, on the clock given."""
        deadlines = self._deadlines
        while deadlines and (
            deadlines[0][2].deleted or deadlines[0][2].deadline != deadlines[0][0]
        ):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def expire(self) -> None:
        """Delete the queues whose delay has passed."""
        now = self.clock()
        self.turns.begin()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self.turns.add(self.delete_queue(heapq.heappop(self._deadlines)[2].name))
            if self.turns.over:
                break

    # -- what must last

    def committed(self, batch: Batch) -> None:
        """This batch is on disk: let its confirms go."""
        self.turns.begin()
        waiters = batch.waiters
        self.confirmed += waiters.confirmed
        for connection, ids in waiters.confirms:
            connection.unconfirmed -= len(ids)
            if not connection.closed:
                self.write(connection, replies.confirms(ids))
        for connection, request_id, amount in waiters.counts:
            connection.unconfirmed -= 1
            if not connection.closed:
                self.write(connection, replies.ok(request_id, b"%d" % amount))
        for consumer in waiters.held:
            consumer.held = False
            if not consumer.deleted:
                self.wake(consumer)
        if self.memory_is_short and batch.taken:
            self.turns.add(self._spill(batch))

    def _spill(self, batch: Batch) -> Work[None]:
        for change, (queue, _) in zip(batch.entry.changes, batch.taken, strict=True):
            if not queue.deleted:
                yield from queue.spill(change.next_seq)
                yield GOES_ON

    def failed(self, batch: Batch, failure: BadRequest) -> None:
        """This batch could not be written: who waits for it gets errors instead, and consumers
        that waited for their confirm end."""
        waiters, batch.waiters = batch.waiters, Waiters()
        counted = [(connection, [request_id]) for connection, request_id, _ in waiters.counts]
        for connection, ids in waiters.confirms + counted:
            connection.unconfirmed -= len(ids)
            for request_id in ids:
                self._error(connection, request_id, b"", str(failure))
        for consumer in waiters.held:
            if not consumer.deleted:
                self.end_consumers([consumer])

    # -- recovery

    def restore_queue(self, queue_id: int, name: bytes, policy: Policy) -> Queue:
        """A queue that the journal knows; bindings are restored before."""
        queue = self._new_queue(queue_id, name)
        finish(self.bindings.queue_made(queue))
        queue.policy = policy
        return queue

    def restore_bindings(self, name: bytes, events: list[bytes]) -> None:
        self.bindings.restore(name, events)

    def start_timers(self) -> None:
        """After recovery every delay starts anew. A rule without delay waits until a consumer has
        come and gone: a boot deletes nothing that merely waits for its consumers."""
        for queue in list(self.queues.values()):
            rule = queue.policy.delete_when_unused
            if rule is not None and rule.delay_s is not None:
                finish(self.unused(queue))
