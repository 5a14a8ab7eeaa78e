"""Handles a chunk: splits it into lines, runs their requests, and writes their replies.

The one rule: a chunk is handled in one call, which never waits. What the turn does not finish stays
in `Connection.works`, `lines` and `chunks`, and is done before later bytes of the connection. Each
chunk is split once, and each line taken from it once, whatever number of turns that takes.
"""

from functools import partial

from mqks.broker.broker import Broker
from mqks.broker.requests.gathered_publishes import GatheredPublishes
from mqks.broker.requests.gathered_settles import GatheredSettles
from mqks.broker.requests.single import PLACING, handle
from mqks.broker.requests.transactions import AT_ONCE, keep_plain
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.errors import LineTooLong, Unwritable
from mqks.limits import LINES_MAX, STEP_MESSAGES, STRANGER_LINES_MAX
from mqks.protocol.requests import Request
from mqks.users import STRANGER, Permissions

BEGIN = b" begin"
Ids = list[bytes]


def is_of_transaction(connection: Connection) -> bool:
    """Whether its next line is in a transaction, or begins one."""
    if connection.transaction is not None:
        return True
    line = connection.lines[connection.handled]
    return line[line.find(b" ") :] == BEGIN


class Intake:
    """Receives chunks from the server."""

    __slots__ = (
        *("_broker", "_once", "_permissions", "_publishes", "_refusals", "_settles", "_turns"),
        "publishes",
    )

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._once = broker.publishing.once
        self._refusals = broker.refusals
        self._turns = broker.turns
        self._publishes = GatheredPublishes(broker)
        self._settles = GatheredSettles(broker)
        self._permissions: Permissions | None = None
        """Those with which messages of earlier chunks were gathered."""
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
        if self._publishes.gathered:
            self._publishes.flush()

    def add(self, connection: Connection, data: bytes, *, waits: bool = False) -> None:
        """Handle the lines of one of several connections in a turn that has begun: if it is over,
        what has come in `waits` for the next one. Messages may stay gathered until `finish`, which
        must follow in the same turn: those of many connections are published in one step."""
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
            # Lines take more memory than their text: the rest is split when these are done.
            end = data.find(b"\n", connection.flow.piece_bytes) + 1
            if 0 < end < len(data):
                chunks.append(data[end:])
                data = data[:end]
        size = splitter.tail_bytes + len(data)
        lines = splitter.feed(data)
        connection.split_bytes = size - splitter.tail_bytes
        if splitter.has_tab:
            # Rare, and an error: the hot loop leaves a line without an id to `handle`.
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
        """Handle the lines of a chunk, or those that earlier turns have left.

        A client sends long runs of the same kind of line: publishes, or acks of one consumer. So
        each kind has a gatherer, which takes a whole run in its own plain loop, and returns the
        number of the first line that is not its own. Acks and rejects are done run by run.
        Publishes stay gathered from run to run, and even from connection to connection, because a
        thousand connections may send one each: they are published when they are full, before
        anything that must come after them, or at the end of the turn. What no gatherer takes is
        rare or wrong, and goes line by line through `handle`, which alone parses flags and
        refuses: a gatherer never writes an error, so that it needs no second way to do so.
        After each block of lines it is asked once whether the turn is over or the client must
        wait; the lines that are left are the first ones of its next turn.
        """
        broker, works, publishes = self._broker, connection.works, self._publishes
        if publishes.gathered and (
            connection.permissions is not self._permissions or broker.publishing.tracer is not None
        ):
            self.finish()
        lines, at = connection.lines, connection.handled
        room = min(broker.settings.output_buffer_bytes_max, broker.shared.outboxes.room)
        publishes.connection = broker.publishing.publisher = connection
        confirms, placed, others = list[bytes](), list[bytes](), list[bytes]()
        is_apart = False
        """All works are of the last line, which is confirmed by itself."""
        while at < len(lines):
            start, line, is_full, is_apart = at, lines[at], False, False
            verb = line.find(b" ") + 1
            if line.startswith(b"publish ", verb):
                end = min(len(lines), at + min(LINES_MAX, publishes.room))
                at = publishes.take(lines, at, end, confirms)
                self.publishes |= at > start
            if at == start:
                # Another kind of line: what is gathered comes before it.
                if publishes.groups:
                    publishes.flush()
                if line.startswith((b"ack ", b"reject "), verb):
                    end = min(len(lines), at + LINES_MAX)
                    ids = others if line.startswith(b"ack ", verb) else placed
                    at = self._settles.take(connection, lines, at, end, ids)
                    is_full = at - start >= STEP_MESSAGES
            if at == start:
                if not self._proceed(connection):
                    # The line comes after these works.
                    connection.overrun = True
                    break
                at += 1
                request = self._line(connection, line, room)
                is_apart = request is None
                if request is not None and request.confirm:
                    if request.action == b"publish":
                        confirms.append(request.id)
                    else:
                        (placed if request.action in PLACING else others).append(request.id)
                if connection.waits or connection.transaction is not None:
                    break
            elif at < len(lines) and (works or is_full or publishes.is_full):
                publishes.flush()
                connection.overrun = not self._proceed(connection) or self._outruns_journal
            if at < len(lines) and (connection.overrun or self._turns.over):
                connection.overrun = True
                break
        if publishes.gathered and (works or publishes.is_worth_a_step):
            publishes.flush()
        self._permissions = connection.permissions
        if at == len(lines) or connection.expelled:
            connection.lines, at = [], 0
        connection.handled = at
        if is_apart:
            connection.unconfirmed += len(confirms) + len(placed) + len(others)
            self._remember(connection, confirms, placed, others)
            self._end(connection, [], [], [])
        else:
            self._end(connection, confirms, placed, others)

    def _keep(self, connection: Connection) -> None:
        """Keep the lines of transactions, and do them at the lines that end them."""
        self.finish()
        broker = self._broker
        room = min(broker.settings.output_buffer_bytes_max, broker.shared.outboxes.room)
        while not connection.waits and is_of_transaction(connection):
            line, transaction = connection.lines[connection.handled], connection.transaction
            connection.handled += 1
            if transaction is None or not keep_plain(self._broker, transaction, line):
                request = self._line(connection, line, room)
                if request is None and line and transaction is not None:
                    transaction.fail()
                elif request is not None and request.confirm and request.action in AT_ONCE:
                    # At once: a later commit is a work, which is confirmed when it ends.
                    connection.unconfirmed += 1
                    self._remember(connection, [], [], [request.id])
            if connection.handled >= len(connection.lines):
                connection.lines, connection.handled = [], 0
                break
            if connection.transaction is None and self._outruns_journal:
                connection.overrun = True
        self._end(connection, [], [], [])

    @property
    def _outruns_journal(self) -> bool:
        return self._broker.pending.records > self._broker.settings.batch_records_max

    def _line(self, connection: Connection, line: bytes, room: int) -> Request | None:
        """Handle a single line; return its request if it is to be confirmed with the chunk."""
        # What comes before this line is published. If its ids waited for the end of the chunk, a
        # publish --once that takes several turns would wait for them, and they for it.
        if self._once.gathered:
            self._once.write(self._once.take_gathered())
        queued = self._broker.shared.counters.queued
        request = handle(self._broker, connection, line) if line else None
        connection.overrun = not connection.waits and (
            not self._proceed(connection)
            or self._turns.over
            or connection.outbox_bytes > max(0, room)
        )
        self.publishes |= self._broker.shared.counters.queued != queued
        return request

    def _end(self, connection: Connection, confirms: Ids, placed: Ids, others: Ids) -> None:
        """All lines are done or begun. Confirms wait until all are done."""
        works, once = connection.works, self._once
        once_ids = once.take_gathered() if once.gathered else []
        connection.unconfirmed += len(confirms) + len(placed) + len(others)
        if works and not self._proceed(connection):
            works.append(self._complete(connection, confirms, placed, others, once_ids))
            once.hold(once_ids)
            self._go_on(connection)
            return
        if once_ids:
            once.write(once_ids)
        self._remember(connection, confirms, placed, others)

    def _complete(
        self, connection: Connection, confirms: Ids, placed: Ids, others: Ids, once_ids: Ids
    ) -> Work[None]:
        """Run after everything that a chunk has published: an id that is durable before its message
        would block the message permanently."""
        self._once.release(once_ids)
        if self._broker.unwritable:
            failure = Unwritable(f"{self._broker.unwritable}: the message is not durable")
            for action, ids in ((b"publish", confirms), (b"reject", placed)):
                connection.unconfirmed -= len(ids)
                for request_id in ids:
                    self._refusals.tell(connection, request_id, action, failure)
            confirms, placed = [], []
        self._remember(connection, confirms, placed, others)
        yield GOES_ON

    def _remember(self, connection: Connection, confirms: Ids, placed: Ids, others: Ids) -> None:
        """Send these confirms with the next commit, which is after `finish`: those of messages, of
        other requests that need a place in the journal, and of what a full disk takes."""
        if confirms or placed or others:
            waiters = self._broker.pending.waiters
            waiters.confirmed += len(confirms)
            waiters.confirms.append((connection, confirms + placed, others))

    def _proceed(self, connection: Connection) -> bool:
        """Continue the works of its lines; return whether all are done."""
        works = connection.works
        while works:
            if not self._turns.run(works[0]):
                return False
            works.popleft()
        return True

    def _go_on(self, connection: Connection) -> None:
        connection.overrun = not connection.expelled
        self._turns.later(self._proceed_later(connection))

    def _proceed_later(self, connection: Connection) -> Work[None]:
        while connection.works:
            for waits in connection.works[0]:
                if (waiting := connection.awaits_resume) is not None:
                    # Work that waits is tried again and again, and this wait may be long.
                    connection.overrun = False
                    waiting[connection] = partial(self._go_on, connection)
                    return
                yield waits
            connection.works.popleft()
