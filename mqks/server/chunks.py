"""What clients have sent, and what they are sent, in each turn of the event loop.

The one rule: what has come in during a turn is handled together at its end, in its order; so what
many connections publish to the same queues is published in one step.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.errors import BadRequest
from mqks.limits import CHUNK_S
from mqks.rates import UserRate
from mqks.server.client import Hold, ReadBuffer, ServerClient
from mqks.server.fair_turn import FairTurn
from mqks.server.unhandled import Unhandled
from mqks.server.unsent import Unsent

LARGE_CHUNK_BYTES = 32 * 1024
"""A chunk this large is flushed at once."""
TURN_BYTES = 1024 * 1024
"""Chunks of one turn that are handled together."""
FAIR_CHUNK_BYTES = 64 * 1024
"""After a chunk this large other connections get their turn."""
SENT_CONNECTIONS = 16
"""Connections flushed between two checks of the time."""


class Chunks:
    """`flush` ends the turn of the event loop, `schedule_flush` does so when it is over. What comes
    before and after that in the life of a client is in `Clients`."""

    def __init__(
        self, broker: Broker, *, flush: Callable[[], None], schedule_flush: Callable[[], None]
    ) -> None:
        self._broker = broker
        self._settings = broker.settings
        self._flush = flush
        self._schedule_flush = schedule_flush
        self._loop = asyncio.get_running_loop()
        self._intake = Intake(broker)
        self.by_id: dict[int, ServerClient] = {}
        """By the number of the connection."""
        self.reading = ReadBuffer()
        self._unhandled = Unhandled(broker, self.reading, self.drop)
        self._unsent = Unsent(
            broker, self.by_id, self._unhandled, self.reading, self.drop, schedule_flush
        )
        self._chunks: list[tuple[ServerClient, bytes]] = []
        """What has come in since the last flush, and is not handled yet."""
        self._turn = FairTurn(broker.turns, lambda client: client.connection.party)
        self.turn_bytes = 0
        """What has come in since the last flush."""
        self.has_read = False
        """Something has come in since this was set."""
        self._published = Budget(self._settings.batch_bytes_max, broker.turns)
        self._awaited = Budget(self._settings.batch_bytes_max, broker.turns)
        """For what has come in since the last commit and waits for the next one: publishes, and
        all other. Clients wait for it."""
        self._working: dict[Connection, Callable[[], None]] = {}
        """Connections with unfinished work, and what to call when it is finished."""
        self.stopping = False
        """Nobody is read, and nothing is delivered."""

    def begin_reading(self) -> None:
        """Something is read that takes time before it can be handled."""
        if self._turn.begin_reading():
            self._schedule_flush()
        self.reading.late(self._turn.is_late)

    def receive(self, client: ServerClient, data: bytes, read_bytes: int, *, is_cut: bool) -> None:
        """Handle a chunk with all others of this turn; a large one, or very many, now. It was read
        as `read_bytes`; if that `is_cut`, for lack of room or time, more may have come."""
        self._chunks.append((client, data))
        self.turn_bytes += read_bytes
        self.has_read = True
        self._schedule_flush()
        if read_bytes >= LARGE_CHUNK_BYTES or self.turn_bytes >= TURN_BYTES:
            self._flush()
        if is_cut and not client.rests & Hold.TURN:
            # An event loop may read several pieces in a turn.
            client.rest(Hold.TURN)
            self._loop.call_soon(client.resume, Hold.TURN)

    @property
    def has_unhandled(self) -> bool:
        """Whether the lines of some client wait: for its turn, its works or a commit."""
        budgets = self._published.waiters or self._awaited.waiters
        works = any(each.awaits_resume is None for each in self._working)
        return bool(self._turn or works or budgets)

    def end_turn(self) -> None:
        """A turn of the event loop ends; `handle_chunks` begins the next one."""
        self._turn.end()
        self.reading.late(False)

    def wait_for_turn(self, client: ServerClient) -> None:
        """Go on with its lines in a later turn."""
        client.rest(Hold.TURN)
        self._turn.go_on_with(client)
        self._schedule_flush()

    def handle_chunks(self) -> None:
        """Handle what has come in, in its order. What many connections publish to the same queues
        is published in one step."""
        if not (self._chunks or self._turn):
            return
        chunks, self._chunks = self._chunks, []
        intake, pending = self._intake, self._broker.pending
        records, published_bytes = pending.records, 0
        publishers: list[tuple[ServerClient, int, bool]] = []
        for client, data, waits in self._turn.take(chunks):
            connection = client.connection
            if not data and connection.closed:
                intake.add(connection, data, waits=waits)
                self._loop.call_soon(self.finish, client)
                continue
            # It must not go on, though it has a turn: when it may, it asks for another one.
            if client.ended or (not data and client.rests & ~(Hold.TURN | Hold.ROOM)):
                self._loop.call_soon(client.resume, Hold.TURN)
                continue
            size = len(data) or sum(map(len, connection.chunks))  # What an earlier turn left.
            changes, unconfirmed = pending.changes, connection.unconfirmed
            if connection.rate is None:
                intake.add(connection, data, waits=waits)
            else:
                self._add_slowed(client, connection.rate, data, waits=waits)
            if client.stranger or connection.awaits_login or connection.expelled:
                self.check_auth(client)
            confirms = connection.unconfirmed > unconfirmed
            if intake.publishes:
                published_bytes += size
                publishers.append((client, size, confirms))
            elif confirms or pending.changes > changes:
                self._await(client, size)
            is_left = connection.lines or connection.chunks or connection.splitter.tail_bytes
            if is_left or connection.waiting_bytes or client.unhandled_bytes:
                self._unhandled.count(client)
            is_large = len(data) >= FAIR_CHUNK_BYTES or not data
            if connection.works or connection.overrun or is_large:
                self._go_on_later(client, waits=waits)
        intake.finish()
        self.reading.late(self._turn.is_late)
        if self._turn:
            self._schedule_flush()
        if pending.records > records and not pending.unwritable:
            self._published.take(published_bytes)
            if pending.records > self._settings.batch_records_max or self._published.room < 0:
                for client, _, _ in publishers:
                    self._wait_for_journal(client, self._published)
            return
        # Consumers have taken what was published, or no queue has got it, or it was refused.
        for client, size, confirms in publishers:
            if confirms:
                self._await(client, size)

    def _add_slowed(
        self, client: ServerClient, rate: UserRate, data: bytes, *, waits: bool
    ) -> None:
        """Its user has a rate: what it publishes is a step of its own, which is counted."""
        intake, counters = self._intake, self._broker.shared.counters
        intake.finish()
        before = counters.published
        intake.add(client.connection, data, waits=waits)
        intake.finish()
        count = counters.published - before
        if (wait_s := rate.take(self._broker.clock(), count, len(data))) > 0:
            client.rest(Hold.RATE)
            self._loop.call_later(wait_s, client.resume, Hold.RATE)

    def _go_on_later(self, client: ServerClient, *, waits: bool) -> None:
        """It is not read until its works are done, it had its turn, or others had theirs."""
        client.rest(Hold.TURN)
        connection = client.connection
        if connection.works:
            self._working[connection] = partial(client.resume, Hold.TURN)
        elif waits and connection.overrun:
            self._turn.put_off(client)
        elif connection.overrun:
            self._turn.go_on_with(client)
        else:
            self._loop.call_soon(client.resume, Hold.TURN)

    def _await(self, client: ServerClient, size: int) -> None:
        """What is confirmed, queues and bindings wait for the same commit. They have a bound of
        their own: an ack never waits because of publishers."""
        self._awaited.take(size)
        if self._awaited.room < 0:
            self._wait_for_journal(client, self._awaited)

    @staticmethod
    def _wait_for_journal(client: ServerClient, budget: Budget) -> None:
        """Pause reading until the next commit."""
        client.rest(Hold.JOURNAL)
        budget.wait(client, partial(client.resume, Hold.JOURNAL))

    def release(self) -> None:
        """A commit is done: paused publishers may continue."""
        for budget in (self._published, self._awaited):
            budget.set(0)

    def caught_up(self, client: ServerClient, why: int = 0) -> None:
        """A slow client has read its replies."""
        client.connection.outbox_bytes = 0
        client.connection.resume(Slow.OUTBOX | why)
        self._schedule_flush()

    def send(self) -> None:
        """Write the outboxes of this turn, each with one joined write."""
        flow = self._broker.flow
        touched, flow.touched = flow.touched, []
        end_s = time.monotonic() + CHUNK_S
        for number, connection in enumerate(touched):
            if number % SENT_CONNECTIONS == 0 and time.monotonic() > end_s:
                # There may be ten thousand: other tasks run before the rest.
                flow.touched = touched[number:] + flow.touched
                self._schedule_flush()
                break
            connection.touched = False
            outbox = connection.outbox
            data = outbox[0] if len(outbox) == 1 else b"".join(outbox)
            outbox.clear()
            client = self.by_id.get(connection.id)
            if client is None:
                continue
            client.send(data)
            connection.outbox_bytes = client.waiting_bytes if connection.rests else 0
            if connection.rests == Slow.OUTBOX:
                self._loop.call_soon(self.caught_up, client)
            if client.ended:
                self.close_if_done(client)
        self._unsent.check_if_due()

    def resume_worked(self) -> None:
        """Go on with the connections whose work has finished."""
        for connection in [each for each in self._working if not each.works]:
            self._working.pop(connection)()

    # -- by `Clients`

    def check_auth(self, client: ServerClient) -> None:
        """An unauthenticated client has sent something, or a login must be verified first."""
        raise NotImplementedError

    def finish(self, client: ServerClient) -> None:
        """Carry out what a client has sent that has disconnected."""
        raise NotImplementedError

    def close_if_done(self, client: ServerClient) -> None:
        """Close a client that sends no more, if nothing still brings it replies."""
        raise NotImplementedError

    def drop(self, client: ServerClient, failure: BadRequest) -> None:
        """Disconnect a client at once; its unread replies are lost."""
        raise NotImplementedError
