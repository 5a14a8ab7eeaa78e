"""Handles a chunk: splits it into lines, runs their requests, and writes their replies.

The one rule: a chunk is handled in one call, which never waits. What the turn does not finish stays
in `Connection.works`, `lines` and `chunks`, and is done before later bytes of the connection. Each
chunk is split once, and each line taken from it once, whatever number of turns that takes.
"""

from collections.abc import Generator
from operator import length_hint
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.requests import permits
from mqks.broker.requests.actions import RUNS
from mqks.broker.requests.checks import Doing
from mqks.broker.requests.transactions import AT_ONCE
from mqks.broker.spine.base.turns import GOES_ON, Work, finish
from mqks.broker.spine.clients.connection import Connection, Transaction
from mqks.broker.spine.routing.gathering import NO_GROUP
from mqks.errors import BadRequest, LineTooLong, Unwritable
from mqks.limits import GROUPS_COPIES_MAX, LINES_MAX, STEP_MESSAGES, STRANGER_LINES_MAX
from mqks.protocol.requests import (
    ALL,
    CONFIRM,
    ONCE,
    Publish,
    Request,
    Settle,
    parse_request,
    shown,
)
from mqks.users import STRANGER, Permissions

PLAIN = b"."
"""An argument that sorts before it may be empty, or a flag."""
BEGIN = b" begin"
WIDE = GROUPS_COPIES_MAX // LINES_MAX
"""Lines for more queues are handled in smaller blocks."""
PLACING = frozenset((b"publish", b"reject", b"release", b"promote", b"move", b"redrive"))
"""Actions that give messages new places, which is not possible on a full disk."""
GATHERED_ON_MAX = 256
"""Lines that stay gathered for the next chunk; more are worth a step of their own."""


def is_of_transaction(connection: Connection) -> bool:
    """Whether its next line is in a transaction, or begins one."""
    if connection.transaction is not None:
        return True
    line = connection.lines[connection.handled]
    return line[line.find(b" ") :] == BEGIN


class Intake:
    """Receives chunks from the server."""

    __slots__ = (
        "_broker",
        "_gathered",
        "_permissions",
        "_publishing",
        "_refusals",
        "_turns",
        "publishes",
    )

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._publishing = broker.publishing
        self._refusals = broker.refusals
        self._turns = broker.turns
        self._gathered = 0
        """Lines of earlier chunks whose messages are gathered, and not published yet."""
        self._permissions: Permissions | None = None
        """Those with which they were gathered."""
        self.publishes = False
        """Whether there were messages in the last chunk. Acks after it publish what is gathered,
        but are no publishers for that."""

    def receive(self, connection: Connection, data: bytes) -> None:
        """Handle every line that this chunk completes. Afterwards `connection.expelled` is true if
        the connection must be closed, and `connection.overrun` if this must be called again, even
        without new bytes."""
        self._turns.begin()
        self.add(connection, data)
        self.finish()

    def finish(self) -> None:
        """Publish what is gathered."""
        if self._gathered:
            self._gathered = 0
            self._publishing.gathering.flush()

    def add(self, connection: Connection, data: bytes, *, waits: bool = False) -> None:
        """The same for one of several connections in a turn that has begun: if it is over, what has
        come in `waits` for the next one. Messages may stay gathered until `finish`, which must
        follow in the same turn: those of many connections are published in one step."""
        self.publishes = False
        if data and not connection.expelled:
            connection.chunks.append(data)
        if connection.works or connection.awaits_login:
            return
        if waits:
            connection.overrun = True
            return
        connection.overrun, connection.eval_steps = False, None
        while not connection.waits:
            if connection.lines and is_of_transaction(connection):
                self._keep(connection)
            elif connection.lines:
                self._handle(connection)
            elif connection.splitter.too_long is not None:
                self._refuse_too_long(connection)
            elif (
                connection.permissions is STRANGER
                and connection.stranger_lines >= STRANGER_LINES_MAX
            ):
                reason = f"{STRANGER_LINES_MAX} lines without authentication"
                self._refusals.expel(connection, reason)
            elif connection.chunks:
                connection.lines = self._split(connection)
            else:
                break

    @staticmethod
    def _split(connection: Connection) -> list[bytes]:
        """Split what has come in, or a piece of it: of a stranger one line, as the next one may
        follow a login."""
        splitter, chunks = connection.splitter, connection.chunks
        data = b"".join(chunks)
        chunks.clear()
        if connection.permissions is STRANGER:
            line, newline, later = data.partition(b"\n")
            data = line + newline
            if later:
                chunks.append(later)
            connection.stranger_lines += len(newline)
        elif len(data) > connection.flow.piece_bytes:
            end = data.find(b"\n", connection.flow.piece_bytes) + 1
            if 0 < end < len(data):
                chunks.append(data[end:])
                data = data[:end]
        size = splitter.tail_bytes + len(data)
        lines = splitter.feed(data)
        connection.split_bytes = size - splitter.tail_bytes
        if splitter.has_tab:
            # Rare, and an error: the hot loop leaves a line without an id to `_request`.
            lines = [b" " + line if b"\t" in line else line for line in lines]
        return lines

    def _refuse_too_long(self, connection: Connection) -> None:
        splitter = connection.splitter
        reason = f"the line is longer than {splitter.line_bytes_max} bytes (line_bytes_max)"
        # A line without an id is reported as empty, not with its first megabyte.
        line = splitter.too_long or b""
        self._refusals.refuse(
            connection, line if b" " in line else b"", LineTooLong("line_bytes_max", reason)
        )

    def _handle(self, connection: Connection) -> None:
        """One plain loop over the lines of a chunk, or over those that earlier turns have left. It
        gathers publishes, or acks to one consumer, or rejects, until another kind of line follows,
        and then does them in one step.

            gathered            event   consumer   verb
            publishes           set     None
            acks or rejects     None    set        b"ack" or b"reject"
            nothing             None    None

        Lines that are rare or wrong are left to `_request`.

        A publish takes 260 ns here, an ack 270 ns: `python -m benchmarks.budget`.
        """
        broker, turns, works = self._broker, self._turns, connection.works
        publishing, gathering = self._publishing, self._publishing.gathering
        if self._gathered and connection.permissions is not self._permissions:
            self.finish()
        lines, start = connection.lines, connection.handled
        publishing.works, publishing.lines = works, len(lines) - start
        groups, name_bytes_max = gathering.groups, broker.metadata.name_bytes_max
        room = min(broker.settings.output_buffer_bytes_max, broker.shared.outboxes.room)
        confirms: list[bytes] = []
        others: list[bytes] = []
        event, middle, ids, bodies = NO_GROUP
        verb, settled = b"ack", list[bytes]()
        consumer: bytes | None = None
        end, gathered = start + LINES_MAX, self._gathered
        while True:
            end = min(end, len(lines))
            is_last, block = False, iter(lines[start:end] if end - start < len(lines) else lines)
            for line in block:
                try:
                    request_id, action, argument, rest = line.split(b" ", 3)
                except ValueError:
                    action = b""
                if action == b"publish":
                    if argument == event and 0 < len(request_id) <= name_bytes_max:
                        ids.append(request_id)
                        bodies.append(request_id + middle + rest)
                        continue
                    once, self.publishes = False, True
                    confirm = argument == CONFIRM
                    if confirm:
                        argument, _, rest = rest.partition(b" ")
                    if argument != event:
                        once = argument == ONCE
                        if once:
                            argument, _, rest = rest.partition(b" ")
                        group = groups.get(argument)
                        if group is None:
                            if settled:
                                self._flush(verb, consumer, settled)
                                consumer, settled = None, []
                            may = connection.permissions
                            if argument[:2] == b"--":
                                group, rest = publishing.flagged_group(may, argument, rest)
                            else:
                                group = publishing.group(may, argument)
                            is_last = gathering.width > WIDE or bool(works) or turns.over
                        event, middle, ids, bodies = group
                    if (
                        event is not None
                        and 0 < len(request_id) <= name_bytes_max
                        and not (once and publishing.once_unfinished)
                    ):
                        if confirm:
                            confirms.append(request_id)
                        if not once or publishing.is_new(connection, request_id, event):
                            ids.append(request_id)
                            bodies.append(request_id + middle + rest)
                        if is_last:
                            break
                        continue
                elif (
                    action == verb
                    and argument == consumer
                    and rest >= PLAIN
                    and b" " not in rest
                    and 0 < len(request_id) <= name_bytes_max
                ):
                    settled.append(rest)
                    continue
                elif action == b"ack" or action == b"reject":
                    confirm = argument == CONFIRM
                    if confirm:
                        argument, _, rest = rest.partition(b" ")
                    if argument != consumer or action != verb:
                        self._flush(verb, consumer, settled)
                        event, settled, verb = None, [], action
                        consumer = (
                            argument if self._may_gather(connection, verb, argument) else None
                        )
                        is_last = turns.over
                    if (
                        consumer is not None
                        and rest >= PLAIN
                        and b" " not in rest
                        and 0 < len(request_id) <= name_bytes_max
                        and not (confirm and self._broker.unwritable)
                    ):
                        settled.append(rest)
                        if confirm:
                            others.append(request_id)
                        if is_last:
                            break
                        continue
                # Another kind of line: what is gathered comes before it.
                self._flush(verb, consumer, settled)
                event, consumer, settled = None, None, []
                if not self._proceed(connection):
                    # The line comes after these works.
                    connection.overrun, end = True, end - 1
                    break
                request = self._line(connection, line, room)
                if request is not None and request.confirm:
                    (confirms if request.action == b"publish" else others).append(request.id)
                if connection.waits or connection.transaction is not None:
                    break
            # After many lines, or one for many queues, check how much has been gathered.
            end -= length_hint(block)  # Lines that the loop has not taken.
            gathered += end - start
            start = end
            if start == len(lines) or connection.waits or connection.transaction is not None:
                break
            if (
                works
                or gathered * gathering.width >= gathering.copies_max
                or len(settled) >= STEP_MESSAGES
            ):
                self._flush(verb, consumer, settled)
                event, consumer, settled, gathered = None, None, [], 0
                connection.overrun = not self._proceed(connection) or self._outruns_journal
            if connection.overrun or turns.over:
                connection.overrun = True
                break
            end = start + max(1, min(LINES_MAX, gathering.copies_max // gathering.width - gathered))
        if (
            event is None
            or works
            or gathered > GATHERED_ON_MAX
            or gathering.width > WIDE
            or gathering.leads_to(broker.shared.capacities.tight)
        ):
            self._flush(verb, consumer, settled)
        else:
            self._gathered, self._permissions = gathered, connection.permissions
        if start == len(lines) or connection.expelled:
            connection.lines, start = [], 0
        connection.handled = start
        self._end(connection, confirms, others)

    def _keep(self, connection: Connection) -> None:
        """Keep the lines of transactions, and do them at the lines that end them."""
        self.finish()
        broker = self._broker
        room = min(broker.settings.output_buffer_bytes_max, broker.shared.outboxes.room)
        while not connection.waits and is_of_transaction(connection):
            line, transaction = connection.lines[connection.handled], connection.transaction
            connection.handled += 1
            if transaction is None or not self._keep_plain(transaction, line):
                request = self._line(connection, line, room)
                if request is None and line and transaction is not None:
                    transaction.fail()
                elif request is not None and request.confirm and request.action in AT_ONCE:
                    # At once: a later commit may be a work, which is confirmed when it ends.
                    connection.unconfirmed += 1
                    self._remember(connection, [], [request.id], [])
            if connection.handled >= len(connection.lines):
                connection.lines, connection.handled = [], 0
                break
            if connection.transaction is None and self._outruns_journal:
                connection.overrun = True
        self._end(connection, [], [])

    def _keep_plain(self, transaction: Transaction, line: bytes) -> bool:
        """Keep a line if it is a publish or an ack without flags; return whether it was. This takes
        2 µs, any other line 10."""
        try:
            request_id, action, argument, rest = line.split(b" ", 3)
        except ValueError:
            return False
        is_short = 0 < len(request_id) <= self._broker.metadata.name_bytes_max
        if transaction.failed or not is_short or not argument or argument[:2] == b"--":
            return False
        wanted: Publish | Settle
        if action == b"publish":
            wanted = Publish(argument, rest)
        elif action == b"ack" and rest >= PLAIN and b" " not in rest:
            wanted = Settle(argument, rest)
        else:
            return False
        try:
            transaction.keep(Request(request_id, action, False, b""), wanted, len(line))
        except BadRequest:
            return False  # The same again, with its reply.
        return True

    def _may_gather(self, connection: Connection, verb: bytes, consumer_id: bytes) -> bool:
        """Whether acks or rejects of this consumer may be gathered."""
        return (
            not connection.works
            and consumer_id != b""
            and consumer_id[:2] != b"--"
            and not (verb == b"reject" and self._broker.unwritable)
            and self._broker.access.may_ack(connection, consumer_id)
        )

    @property
    def _outruns_journal(self) -> bool:
        return self._broker.pending.records > self._broker.settings.batch_records_max

    def _line(self, connection: Connection, line: bytes, room: int) -> Request | None:
        """Handle a single line; return its request if it is to be confirmed with the chunk."""
        # What comes before this line is published. If its ids waited for the end of the chunk, a
        # publish --once that takes several turns would wait for them, and they for it.
        publishing = self._publishing
        if publishing.once_ids:
            publishing.last_once(publishing.once_ids)
            publishing.once_ids = []
        queued = self._broker.shared.counters.queued
        request = self._request(connection, line) if line else None
        self.publishes |= self._broker.shared.counters.queued != queued
        connection.overrun = not connection.waits and (
            not self._proceed(connection)
            or self._turns.over
            or connection.outbox_bytes > max(0, room)
        )
        return request

    def _end(self, connection: Connection, confirms: list[bytes], others: list[bytes]) -> None:
        """All lines are done or begun. Confirms wait until all are done."""
        publishing, works = self._publishing, connection.works
        connection.unconfirmed += len(confirms) + len(others)
        once_ids, publishing.once_ids = publishing.once_ids, []
        if works and not self._proceed(connection):
            works.append(self._complete(connection, confirms, others, once_ids))
            publishing.once_unfinished += once_ids != []
            self._turns.add(self._proceed_later(connection))
            connection.overrun = not connection.expelled
        elif confirms or others or once_ids:
            self._remember(connection, confirms, others, once_ids)

    def _complete(
        self,
        connection: Connection,
        confirms: list[bytes],
        others: list[bytes],
        once_ids: list[bytes],
    ) -> Work[None]:
        """Run after everything that a chunk has published: an id that is durable before its message
        would block the message permanently."""
        self._publishing.once_unfinished -= once_ids != []
        if self._broker.unwritable:
            for message_id in confirms:
                connection.unconfirmed -= 1
                failure = Unwritable(f"{self._broker.unwritable}: the message is not durable")
                self._refusals.tell(connection, message_id, b"publish", failure)
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
        """Send these confirms with the next commit, which is after `finish`; `confirms` are those
        of messages."""
        if once_ids:
            self._publishing.last_once(once_ids)
        if confirms or others:
            waiters = self._broker.pending.waiters
            waiters.confirmed += len(confirms)
            waiters.confirms.append((connection, confirms + others))

    def _proceed(self, connection: Connection) -> bool:
        """Continue the works of its lines; return whether all are done."""
        works = connection.works
        while works:
            if not self._turns.run(works[0]):
                return False
            works.popleft()
        return True

    def _proceed_later(self, connection: Connection) -> Work[None]:
        while connection.works:
            yield from connection.works[0]
            connection.works.popleft()

    def _flush(self, verb: bytes, consumer: bytes | None, settled: list[bytes]) -> None:
        """Do what was gathered: acks, rejects or publishes."""
        self._gathered = 0
        if consumer is None or not settled:
            self._publishing.gathering.flush()
        elif verb == b"ack":
            self._broker.ack(consumer, settled)
        else:
            work, works = self._broker.reject_gathered(consumer, settled), self._publishing.works
            if works or not self._turns.run(work):
                works.append(work)

    def _request(self, connection: Connection, line: bytes) -> Request | None:
        """Handle one request off the fast path; None if it failed, or has no plain confirm now.
        Only here and in `_perform` an error becomes a reply."""
        if b"\t" in line:
            failure = BadRequest("the request contains a tab; JSON writes it as \\t")
            self._refusals.refuse(connection, line[1:], failure)
            return None
        try:
            request = parse_request(line)
            self._broker.metadata.check_names("id", [request.id])
            work = self._begin(connection, request)
        except BadRequest as failure:
            self._refusals.refuse(connection, line, failure)
            return None
        if work is not None:
            connection.unconfirmed += request.confirm
            connection.works.append(self._perform(connection, request, line, work))
            return None
        # A login that is not verified yet, or was refused, is not confirmed now.
        return None if connection.awaits_login or connection.expelled else request

    def _begin(self, connection: Connection, request: Request) -> Doing:
        """Parse a request, check its permissions, and do it. Raises BadRequest."""
        broker, may = self._broker, connection.permissions
        if request.action not in RUNS:
            raise BadRequest(f"there is no action {shown(request.action)}; 'help' lists all")
        action, run = RUNS[request.action]
        if may is not None:
            permits.check_first(may, action)
        kept = None if request.action in AT_ONCE else connection.transaction
        if kept is not None and not action.is_kept:
            raise BadRequest(f"{action.name}: it is not possible between begin and commit")
        wanted = action.parse(request.rest, broker.bindings.events_max)
        if kept is not None:
            if getattr(wanted, "message", b"") == ALL:
                raise BadRequest(f"{action.name}: --all is not possible between begin and commit")
            size = len(request.id) + len(request.rest)
            kept.keep(request._replace(rest=b""), wanted, size)
            return None
        if isinstance(wanted, Generator) or (may is not None and "bind" in action.needs.values()):
            return self._begin_in_turns(connection, request, wanted)
        if may is not None:
            finish(permits.check(broker, may, action, request, wanted))
        return run(broker, connection, request, wanted)

    def _begin_in_turns(
        self, connection: Connection, request: Request, wanted: Any
    ) -> Work[int | bytes | None]:
        """The same for a request that may have many names."""
        broker, may = self._broker, connection.permissions
        action, run = RUNS[request.action]
        if isinstance(wanted, Generator):
            wanted = yield from wanted
        if may is not None:
            yield from permits.check(broker, may, action, request, wanted)
        work = run(broker, connection, request, wanted)
        return None if work is None else (yield from work)

    def _perform(
        self, connection: Connection, request: Request, line: bytes, work: Work[int | bytes | None]
    ) -> Work[None]:
        """Perform a request that may take several turns. It raises before it changes anything."""
        broker = self._broker
        try:
            told = yield from work
            if request.confirm and broker.unwritable and request.action in PLACING:
                raise Unwritable(f"{broker.unwritable}: the request is not durable")
        except BadRequest as failure:
            connection.unconfirmed -= request.confirm
            self._refusals.refuse(connection, line, failure)
            return
        if not request.confirm:
            return
        if told is None:
            broker.pending.waiters.confirms.append((connection, [request.id]))
        else:
            text = told if isinstance(told, bytes) else b"%d" % told
            broker.pending.waiters.counts.append((connection, request.id, text))
