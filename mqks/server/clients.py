"""All connected clients: how they come, whether they may stay, and how they end.

The one rule: who leaves has left what it sent, and that is carried out.
"""

import logging
from collections.abc import Callable
from functools import partial

import anyio

from mqks import log
from mqks.broker.broker import Broker
from mqks.broker.spine.clients.access import Login
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.clock import Patient
from mqks.errors import BadRequest, Draining, LimitExceeded, Unwritable
from mqks.server.chunks import Chunks
from mqks.server.client import LINGER_S, Hold, ServerClient
from mqks.server.gate import Gate, Peer
from mqks.users import STRANGER, Known, Users


class Clients(Chunks):
    def __init__(
        self,
        broker: Broker,
        gate: Gate,
        *,
        flush: Callable[[], None],
        schedule_flush: Callable[[], None],
    ) -> None:
        super().__init__(broker, flush=flush, schedule_flush=schedule_flush)
        self._gate = gate

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
        self.finish(client)

    def finish(self, client: ServerClient) -> None:
        """A client has disconnected: its earlier requests are still carried out, in turns, and
        nothing more is delivered to it. Until then it counts at the gate."""
        connection = client.connection
        self._unhandled.count(client)
        if not self.stopping:
            connection.rest(Slow.END)
            self._schedule_flush()
            if connection.works:
                self._working[connection] = partial(self.finish, client)
                return
            if connection.overrun:
                self._turn.go_on_with(client)
                return
            self._broker.disconnect(connection)
        self._unhandled.leave(client)
        self._gate.leave(client.peer)

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

    def check_auth(self, client: ServerClient) -> None:
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
        self.drop(client, LimitExceeded("unauthenticated_max", reason))

    def drop(self, client: ServerClient, failure: BadRequest) -> None:
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
        self._loop.call_soon(self.close_if_done, client)

    def close_if_done(self, client: ServerClient) -> None:
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

    async def refuse_all(self, failure: Unwritable) -> None:
        """Close all clients."""
        for client in list(self.by_id.values()):
            # Who does not read would not learn why, and be waited for.
            if client.ended or client.paused:
                self.drop(client, failure)
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
