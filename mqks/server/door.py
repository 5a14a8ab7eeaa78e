"""Accepting connections, with TLS and without.

The one rule: the gate is asked before anything else is done for a connection. So a connection
counts from the moment it takes a descriptor, including its TLS handshake, and a burst of new
connections takes no more descriptors than the gate allows. Event loops by default accept all
waiting connections at once.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from time import monotonic

from anyio.abc import TaskGroup

from mqks import log
from mqks.broker.broker import CALM_S
from mqks.clock import Patient
from mqks.errors import BadRequest
from mqks.server.client import ClientOwner, ServerClient
from mqks.server.clients import Clients
from mqks.server.error_log import ErrorLog
from mqks.server.gate import Gate, Peer, peer
from mqks.server.tls import Context, reason_of
from mqks.server.tls_client import TlsClient
from mqks.settings import Settings

ACCEPTED_SHARE = 16
"""A listener accepts this part of `connections_max` in one turn of the event loop, and at least
`ACCEPTED_MIN`: the connections closed for them close a few turns later."""
ACCEPTED_MIN = 8
PAUSE_S = 0.1
"""After a failed accept, usually for lack of descriptors."""


class Door:
    def __init__(
        self,
        context: Context | None,
        settings: Settings,
        gate: Gate,
        errors: ErrorLog,
        clients: Clients,
    ) -> None:
        self.context = context
        """A handshake uses the current one, so a new certificate needs no new listener."""
        self.closed: BadRequest | None = None
        """Why nobody is let in."""
        self._settings = settings
        self._gate = gate
        self._errors = errors
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[socket.socket, Callable[[], None]] = {}
        self._handshakes: dict[TlsClient, Patient] = {}
        """Handshakes that are not done, and when they have taken too long."""
        self._told_s = -CALM_S

    def open(self, listener: socket.socket, tasks: TaskGroup, *, with_tls: bool) -> None:
        """Start to accept. `close` closes the listener."""
        listener.setblocking(False)
        accepted_max = max(ACCEPTED_MIN, self._settings.connections_max // ACCEPTED_SHARE)
        let_in = partial(self.let_in, with_tls=with_tls)

        def accept() -> None:
            for _ in range(accepted_max):
                try:
                    sock, name = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    return
                except OSError as error:
                    self._pause(listener, error)
                    return
                sock.setblocking(False)
                who = peer(name)
                try:
                    if self.closed is not None:
                        raise self.closed
                    who = self._clients.let_in(who)
                except BadRequest as failure:
                    self.refuse(sock, who, failure, with_tls=with_tls)
                else:
                    tasks.start_soon(let_in, sock, who)

        self._listeners[listener] = accept
        self._loop.add_reader(listener, accept)

    def close(self) -> None:
        while self._listeners:
            listener, _ = self._listeners.popitem()
            self._loop.remove_reader(listener)
            listener.close()
        for client in self._handshakes:
            client.transport.abort()

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """Neither spin until a descriptor is free, nor wait for a client to leave."""
        self._gate.make_room()
        self._loop.remove_reader(listener)
        self._loop.call_later(PAUSE_S, self._go_on, listener)
        now_s = monotonic()
        if now_s >= self._told_s + CALM_S:
            self._told_s = now_s
            log.warning("connection_failed", reason="accept", error=error)

    def _go_on(self, listener: socket.socket) -> None:
        if accept := self._listeners.get(listener):
            self._loop.add_reader(listener, accept)

    def refuse(
        self, sock: socket.socket, who: Peer, failure: BadRequest, *, with_tls: bool
    ) -> None:
        with sock:
            if with_tls:
                # Only a handshake would let it read a reply, at the cost that refusing it saves.
                self._tell(who, failure)
                return
            try:
                sock.send(self._clients.refusal(who, failure))
            except OSError:
                return  # It has disconnected already.

    async def let_in(
        self, sock: socket.socket, who: Peer, *, with_tls: bool = False
    ) -> ServerClient:
        """A client that the gate has let in."""
        make: Callable[[ClientOwner, int, Peer], ServerClient] = ServerClient
        if with_tls and self.context:
            make = partial(TlsClient, self, self.context)
        client = make(self._clients, self._settings.output_buffer_bytes_max, who)
        try:
            await self._loop.connect_accepted_socket(lambda: client, sock)
        except OSError as error:
            if self._errors.allows():
                log.warning("connection_failed", reason="accept", error=error)
        finally:
            if not client.made:
                self._gate.leave(who)
        return client

    # -- handshakes

    def begin_handshake(self, client: TlsClient) -> None:
        if self._clients.stopping:  # Accepted while the listeners closed.
            client.transport.abort()
            return
        self._gate.add_stranger(client, client.transport.abort)
        seconds = self._settings.auth_timeout_s
        late = TimeoutError(f"the handshake took longer than {seconds:g} s (auth_timeout_s)")
        self._handshakes[client] = Patient(seconds, partial(self.fail_tls, client, late))

    def end_handshake(self, client: TlsClient) -> None:
        """It is done, or the connection has ended."""
        self._gate.remove_stranger(client)
        if timer := self._handshakes.pop(client, None):
            timer.cancel()

    def fail_tls(self, client: TlsClient, error: Exception) -> None:
        self._tell(client.peer, error)
        client.transport.close()

    def leave(self, client: TlsClient) -> None:
        """The connection has ended before its handshake was done."""
        self.end_handshake(client)
        self._gate.leave(client.peer)

    def _tell(self, who: Peer, failure: Exception) -> None:
        if self._errors.allows():
            reason = reason_of(failure, "malformed record")
            log.warning("tls_failed", connection=who.address, reason=reason)
