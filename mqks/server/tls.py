"""TLS: the context, and a listener that knows its peers before they shake hands.

The one rule: a handshake takes the context of its moment, so that a new certificate needs no new
listener and no connection is dropped for it.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from mqks.errors import ConfigurationError, LimitExceeded
from mqks.server import log
from mqks.server.client import LINGER_S, Client
from mqks.server.error_log import ErrorLog
from mqks.server.gate import Gate, Peer, peer
from mqks.settings import Settings

HANDSHAKE_FAILED = "SSL handshake failed"
"""How event loops begin to tell of what `TlsListener` tells of, too."""
PAUSE_S = 0.1
"""After a failed accept, mostly for want of descriptors."""


def make_context(settings: Settings) -> ssl.SSLContext:
    """Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    assert settings.tls_cert is not None
    try:
        # An empty password: OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ValueError) as error:
        files = f"{settings.tls_cert}, {settings.tls_key}"
        raise ConfigurationError(f"tls_cert, tls_key: {files}: {_reason(error)}") from None
    if settings.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (OSError, ValueError) as error:
            place = f"tls_client_ca: {settings.tls_client_ca}"
            raise ConfigurationError(f"{place}: {_reason(error)}") from None
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def listen(settings: Settings, backlog: int) -> list[socket.socket]:
    """Raises OSError."""
    found = socket.getaddrinfo(
        settings.tls_host, settings.tls_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners = []
    for family, _, _, _, address in dict.fromkeys(found):
        listeners.append(socket.create_server(address, family=family, backlog=backlog))
    return listeners


class TlsListener:
    """`make_client` gets a peer that `gate` has let in."""

    def __init__(
        self,
        context: ssl.SSLContext,
        settings: Settings,
        gate: Gate,
        errors: ErrorLog,
        make_client: Callable[[Peer], Client],
    ) -> None:
        self.context = context
        self._settings = settings
        self._gate = gate
        self._errors = errors
        self._make_client = make_client
        self._scope = anyio.CancelScope()

    def close(self) -> None:
        self._scope.cancel()

    async def run(self, listeners: list[socket.socket]) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    for listener in listeners:
                        tasks.start_soon(self._accept, listener, tasks)
        finally:
            for listener in listeners:
                listener.close()

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                sock, name = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("connection_failed", reason="accept", error=error)
                await anyio.sleep(PAUSE_S)
                continue
            who = peer(name)
            try:
                self._gate.enter(who)
            except LimitExceeded as failure:
                sock.close()
                self._tell(who, failure)
            else:
                tasks.start_soon(self._shake_hands, sock, who)

    async def _shake_hands(self, sock: socket.socket, who: Peer) -> None:
        client = self._make_client(who)
        with anyio.CancelScope() as scope:
            self._gate.add_stranger(scope, scope.cancel)
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: client,
                    sock,
                    ssl=self.context,
                    ssl_handshake_timeout=self._settings.auth_timeout_s,
                    ssl_shutdown_timeout=LINGER_S,
                )
            except (OSError, ValueError) as error:
                # ValueError: names in the peer's certificate that are no text.
                self._tell(who, error)
            finally:
                self._gate.remove_stranger(scope)
                if not client.made:
                    self._gate.leave(who)

    def _tell(self, who: Peer, failure: Exception) -> None:
        if self._errors.allows():
            log.warning("tls_failed", connection=who.address, reason=_reason(failure))
