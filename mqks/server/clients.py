"""All connected clients: what they send, whether they may stay, and how they end.

The one rule: what has come in during a turn of the event loop is handled together at its end, in
its order; so what many connections publish to the same queues is published in one step.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import anyio

from mqks import log
from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.clients.access import Login
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.clock import Patient
from mqks.errors import BadRequest, Draining, LimitExceeded, Unwritable
from mqks.limits import CHUNK_S
from mqks.rates import UserRate
from mqks.server.client import LINGER_S, ServerClient
from mqks.server.fair_turn import FairTurn
from mqks.server.gate import Gate, Peer
from mqks.server.reading import Hold, ReadBuffer
from mqks.server.unhandled import Unhandled
from mqks.server.unsent import Unsent
from mqks.users import STRANGER, Known, Users

LARGE_CHUNK_BYTES = 32 * 1024
"""A chunk this large is flushed at once."""
TURN_BYTES = 1024 * 1024
"""Chunks of one turn that are handled together."""
FAIR_CHUNK_BYTES = 64 * 1024
"""After a chunk this large other connections get their turn."""
SENT_CONNECTIONS = 16
"""Connections flushed between two checks of the time."""


class Clients:
    """`flush` ends the turn of the event loop, `schedule_flush` does so when it is over."""

    def __init__(
        self,
        broker: Broker,
        gate: Gate,
        *,
        flush: Callable[[], None],
        schedule_flush: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._settings = broker.settings
        self._gate = gate
        self._flush = flush
        self._schedule_flush = schedule_flush
        self._loop = asyncio.get_running_loop()
        self._intake = Intake(broker)
        self.by_id: dict[int, ServerClient] = {}
        """By the number of the connection."""
        self.reading = ReadBuffer()
        self._unhandled = Unhandled(broker, self.reading, self._drop)
        self._unsent = Unsent(
            broker, self.by_id, self._unhandled, self.reading, self._drop, schedule_flush
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

    def add(self, client: ServerClient) -> None:
        peer = client.peer
        client.connection = connection = self._broker.connect(
            peer.address, local=peer.local, source=peer.source, guest=peer.guest
        )
        self.by_id[connection.id] = client
        client.set_high_water(self._unsent.high_water_bytes)
        connection.can_wait = not peer.shared
        if connection.permissions is STRANGER:
            client.stranger = True
            self._gate.add_stranger(client, partial(self._crowded_out, client))
            self._await_auth(client)
        log.event("connected", logging.DEBUG, connection=peer.address)

    def let_in(self, peer: Peer) -> Peer:
        """Ask the gate. While the server drains, only operators of this machine come in, as nobody
        else could end that. Raises Draining and LimitExceeded."""
        is_draining = self._broker.shared.draining
        if is_draining and not peer.local:
            raise Draining
        self._gate.enter(peer)
        return peer._replace(guest=True) if is_draining else peer

    def refusal(self, peer: Peer, failure: BadRequest) -> bytes:
        """The reply to a client that is refused or disconnected."""
        told = isinstance(failure, Unwritable | Draining)
        reply = self._broker.refusals.reply(peer.address, str(failure), told=told)
        self._schedule_flush()
        return reply

    def remove(self, client: ServerClient) -> None:
        # What it has sent before it left.
        self.handle_chunks()
        connection = client.connection
        self.by_id.pop(connection.id, None)
        for budget in (self._published, self._awaited):
            budget.leave(client)
        self._forget_stranger(client)
        log.event("disconnected", logging.DEBUG, **log.who(*connection.who))
        if not (self.stopping or client.ended):
            self._tell_tail(connection)
        connection.closed = True
        self._turn.leave(client)
        self._finish(client)

    def _finish(self, client: ServerClient) -> None:
        """A client has disconnected: its earlier requests are still carried out, in turns, and
        nothing more is delivered to it. Until then it counts at the gate."""
        connection = client.connection
        self._unhandled.count(client)
        if not self.stopping:
            connection.rest(Slow.END)
            self._schedule_flush()
            if connection.works:
                self._working[connection] = partial(self._finish, client)
                return
            if connection.overrun:
                self._turn.go_on_with(client)
                return
            self._broker.disconnect(connection)
        self._unhandled.leave(client)
        self._gate.leave(client.peer)

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
                self._loop.call_soon(self._finish, client)
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
                self._check_auth(client)
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

    # -- strangers

    def _await_auth(self, client: ServerClient) -> None:
        seconds = self._settings.auth_timeout_s
        client.auth_timer = Patient(seconds, partial(self._auth_timeout, client))

    def refuse_tls(self, client: ServerClient) -> None:
        """Close at once: a client waits for its handshake as long as for anything."""
        reason = "this port does not speak TLS: connect with mqks://, or to tls_port"
        self._expel(client, reason)

    def _auth_timeout(self, client: ServerClient) -> None:
        if client.connection.waits:
            # Its password is being verified, or waits for that.
            self._await_auth(client)
            return
        seconds = self._settings.auth_timeout_s
        reason = f"the connection did not authenticate within {seconds:g} s (auth_timeout_s)"
        self._expel(client, reason)

    def trust(self, client: ServerClient, user: Known | None) -> None:
        """It may do everything, or what this user may."""
        self._forget_stranger(client)
        client.connection.permissions = None
        if user is not None:
            self._broker.access.authenticate(client.connection, user, is_limited=False)

    def _check_auth(self, client: ServerClient) -> None:
        """An unauthenticated client has sent something, or a login must be verified first."""
        connection = client.connection
        if connection.expelled:
            self._expelled(client)
        elif connection.awaits_login:
            client.rest(Hold.AUTH)
            # It waits for the server now, and is not closed for a newer connection.
            self._gate.remove_stranger(client)
        elif connection.permissions is not STRANGER:
            self._forget_stranger(client)

    @staticmethod
    def _set_piece(client: ServerClient) -> None:
        """Before its next bytes are read: what was read is handled at once."""
        rate = client.connection.rate
        client.piece_bytes = 0 if rate is None else rate.piece_bytes

    def _forget_stranger(self, client: ServerClient) -> None:
        client.stranger = False
        self._set_piece(client)
        self._gate.remove_stranger(client)
        if client.auth_timer is not None:
            client.auth_timer.cancel()

    def verified(self, login: Login, user: Known | None) -> None:
        client = self.by_id.get(login.connection.id)
        if client is None or client.ended or self.stopping:
            return
        # It may be closed for others again, until it turns out to be known.
        if client.stranger:
            self._gate.add_stranger(client, partial(self._crowded_out, client))
        self._broker.access.verified(login, user)
        if client.connection.expelled:
            self._expelled(client)
        client.resume(Hold.AUTH)

    def set_users(self, users: Users) -> None:
        """Apply permissions to open connections too; close those of removed users."""
        self._broker.set_users(users)
        for client in list(self.by_id.values()):
            name = client.connection.user
            if name is None or client.ended:
                continue
            user = users.get(name)
            if user is None:
                self._expel(client, "the user was removed")
            else:
                client.connection.rate = user.rate
                self._set_piece(client)
                client.resume(Hold.RATE)
                self._broker.access.grant(client.connection, user.permissions)
        self._schedule_flush()

    def _expel(self, client: ServerClient, reason: str) -> None:
        self._broker.refusals.expel(client.connection, reason)
        self._expelled(client)

    def _expelled(self, client: ServerClient) -> None:
        client.lingers = True
        self._end(client)

    def _crowded_out(self, client: ServerClient) -> None:
        """Close an unauthenticated client to admit a newer one."""
        reason = "closed to admit a newer connection, because it had not authenticated"
        self._drop(client, LimitExceeded("unauthenticated_max", reason))

    def _drop(self, client: ServerClient, failure: BadRequest) -> None:
        """Disconnect a client at once; its unread replies are lost."""
        if not client.ended:
            client.ended = True
            client.send(self.refusal(client.peer, failure))
        client.transport.abort()

    def end_of_stream(self, client: ServerClient) -> None:
        """The client sends no more: its consumers end, its replies are still sent."""
        self._tell_tail(client.connection)
        self._end(client)

    def _end(self, client: ServerClient) -> None:
        client.ended = True
        if client.auth_timer is not None:
            client.auth_timer.cancel()
        if not self.stopping:
            self._broker.end(client.connection)
        self._schedule_flush()
        self._loop.call_soon(self._close_if_done, client)

    def _close_if_done(self, client: ServerClient) -> None:
        connection = client.connection
        # All that still brings it replies; `send` comes back here after each.
        if (
            connection.unconfirmed
            or connection.receivers
            or connection.promised_bytes
            or (connection.reads and not connection.expelled)
            or connection.outbox
            or client.transport.is_closing()
        ):
            return
        client.close()

    @staticmethod
    def _tell_tail(connection: Connection) -> None:
        if connection.splitter.tail_bytes and connection.permissions is not STRANGER:
            log.warning(
                "line_dropped",
                **log.who(*connection.who),
                reason="the client closed the connection before the end of the line",
                line_bytes=connection.splitter.tail_bytes,
            )

    def caught_up(self, client: ServerClient, why: int = 0) -> None:
        """A slow client has read its replies."""
        client.connection.outbox_bytes = 0
        client.connection.resume(Slow.OUTBOX | why)
        self._schedule_flush()

    async def refuse_all(self, failure: Unwritable) -> None:
        """Close all clients."""
        for client in list(self.by_id.values()):
            # Who does not read would not learn why, and be waited for.
            if client.ended or client.paused:
                self._drop(client, failure)
            else:
                client.ended = True
                client.send(self.refusal(client.peer, failure))
                client.hang_up()
                self._loop.call_later(LINGER_S, client.transport.abort)
            await anyio.lowlevel.checkpoint()

    # -- the end of a turn

    def close_expelled(self) -> None:
        """Close the connections that others have expelled."""
        expelled, self._broker.expelled = self._broker.expelled, []
        for connection in expelled:
            client = self.by_id.get(connection.id)
            if client is not None and not client.ended:
                self._expelled(client)

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
                self._close_if_done(client)
        self._unsent.check_if_due()

    def resume_worked(self) -> None:
        """Go on with the connections whose work has finished."""
        for connection in [each for each in self._working if not each.works]:
            self._working.pop(connection)()

    # -- the end of the server

    def stop(self) -> None:
        self.handle_chunks()
        self.stopping = True
        for client in self.by_id.values():
            client.rest(Hold.STOP)
            # Nothing is delivered that the journal could not record.
            client.connection.rest(Slow.END)

    async def handle_overrun(self) -> bool:
        """Handle one more turn of what each connection has sent before the stop; False if there
        was nothing."""
        left = [each for each in self._broker.connections.values() if each.overrun]
        for connection in left:
            self._intake.receive(connection, b"")
            await anyio.lowlevel.checkpoint()
        return bool(left)

    @property
    def are_unsent(self) -> bool:
        """Whether replies wait to be sent."""
        return bool(self._broker.flow.touched) or any(
            client.transport.get_write_buffer_size() for client in self.by_id.values()
        )

    def close(self) -> None:
        for client in list(self.by_id.values()):
            client.hang_up()
