"""The server: broker and journal wired to sockets, its tasks, and its end.

The one rule: what has been received before the end is written, and its replies are sent.
"""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus

from mqks import log
from mqks.audit import Actor
from mqks.broker.broker import Broker
from mqks.errors import (
    BadRequest,
    Draining,
    LimitExceeded,
    MqksError,
    Unwritable,
)
from mqks.journal.journal import Journal
from mqks.journal.paging import Paging
from mqks.limits import HTTP_CONNECTIONS_MAX
from mqks.server import lag, silence, tls
from mqks.server.clients import Clients
from mqks.server.door import Door
from mqks.server.error_log import ErrorLog
from mqks.server.gate import Gate, Peer
from mqks.server.history import History
from mqks.server.listeners import Inherited, Listeners
from mqks.server.logins import Logins
from mqks.server.notify import Notify
from mqks.server.reads import Reads
from mqks.server.reloads import NAMES_TOLD, Reloads, Reread
from mqks.server.turn import WAIT_S, Turn
from mqks.server.vanished import end_unanswering
from mqks.server.writer import Writer
from mqks.settings import DatabaseUrl, Settings, read_queue_tables
from mqks.users import Users
from mqks.users_file import read as read_users
from mqks.web import http_port
from mqks.web.gateway import gateways
from mqks.web.openings import Opening

Until = Callable[[Callable[[], None]], Awaitable[object]]
"""What to wait for. It gets a function that reloads the server."""


class Server:
    """Listens on the `inherited` sockets if there are any, otherwise on the addresses of the
    settings; with TLS if there is a `context`."""

    def __init__(
        self,
        broker: Broker,
        journal: Journal,
        notify: Notify,
        errors: ErrorLog,
        context: tls.Context | None = None,
        inherited: Sequence[Inherited] = (),
        http_connections_max: int = HTTP_CONNECTIONS_MAX,
        http_logged: str = "",
    ) -> None:
        self._settings = settings = broker.settings
        self._tables = settings.queue_tables
        self._http_logged = http_logged
        self._http_connections_max = http_connections_max
        self._broker = broker
        self._journal = journal
        self._notify = notify
        self._errors = errors
        self._loop = asyncio.get_running_loop()
        self._turn = turn = Turn(broker)
        self._gate = Gate(settings, broker.limits_reached)
        broker.connection_count = lambda: self._gate.connections
        self._clients = turn.clients = Clients(
            broker, self._gate, flush=turn.flush, schedule_flush=turn.schedule_flush
        )
        self._history = History(broker)
        self._reads = turn.reads = Reads(broker, journal, turn.flush)
        self._paging = turn.paging = Paging(broker, journal, turn.flush)
        self._logins = turn.logins = Logins(broker, self._clients.verified)
        self._reloads = Reloads(notify, self._reread, self._use, turn.flush)
        broker.want_reload = self._reloads.want_for
        self._door = Door(context, settings, self._gate, errors, self._clients)
        self._listeners = Listeners(settings, inherited, self._door)
        self._gateways = gateways(settings, self._let_in, lambda: broker.access.users.signing)
        self._failed: asyncio.Future[Exception] = self._loop.create_future()
        self._loop.set_exception_handler(self._internal_error)
        self._writer = turn.writer = Writer(
            broker, journal, release=self._clients.release, flush=turn.flush
        )

    async def open_inside(self, name: str, trusted: bool) -> socket.socket:
        """A connection from inside this process; a `trusted` one may do everything.

        Raises OSError.
        """
        # Both ends are descriptors of this process.
        who = Peer(name, trusted, b"", files=2, shared=True)
        try:
            self._gate.enter(who)
        except LimitExceeded as failure:
            raise ConnectionRefusedError(str(failure)) from None
        mine, other = socket.socketpair()
        mine.setblocking(False)
        other.setblocking(False)
        client = await self._door.let_in(mine, who)
        if trusted and client.made:
            self._clients.trust(client, None)
        return other

    async def _let_in(self, sock: socket.socket, opening: Opening) -> None:
        """A connection that a gateway opens."""
        who = Peer(opening.name, opening.trusted, b"", shared=True)
        user = self._broker.access.users.get(opening.user)
        sock.setblocking(False)
        try:
            # The gateway may not know it yet.
            if opening.user and user is None:
                raise BadRequest("the user was removed")
            if self._broker.shared.draining:
                raise Draining
            self._gate.enter(who)
        except BadRequest as failure:
            self._door.refuse(sock, who, failure, with_tls=False)
            return
        client = await self._door.let_in(sock, who)
        if opening.trusted and client.made:
            self._clients.trust(client, user)
            if opening.line_bytes_max:
                client.connection.splitter.line_bytes_max = opening.line_bytes_max

    async def _forsake(self, why: str) -> None:
        """Close all clients and let nobody in, until `why` is empty."""
        self._door.closed = failure = Unwritable(why) if why else None
        if failure is not None:
            await self._clients.refuse_all(failure)

    # -- tasks

    def _internal_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """An exception in a call by the event loop. A system error concerns one connection; after
        any other the state of the broker is unknown, and the server ends."""
        failure = context.get("exception")
        if not isinstance(failure, Exception) or isinstance(failure, OSError):
            if self._errors.allows():
                log.warning("connection_failed", reason=context.get("message"), error=failure)
            return
        log.error("internal_error", reason=context.get("message"), exception=failure)
        if not self._failed.done():
            self._failed.set_result(failure)

    async def _watch(self) -> None:
        failure = await self._failed
        raise MqksError("the server ended because of the internal error above") from failure

    def why_not_ready(self) -> str:
        """Why publishes would not be confirmed now; empty if they would."""
        if self._clients.stopping:
            return "stopping"
        shared = self._broker.shared
        reasons = [
            self._broker.unwritable,
            self._journal.store.waits,
            silence.WHY * self._broker.withholds,
            "draining" * shared.draining,
            "read-only" * shared.read_only,
        ]
        return "; ".join(filter(None, reasons)) or "journal stalls" * self._writer.stalls

    async def _answer_http(self, sock: socket.socket) -> None:
        monitoring = await http_port.load("mqks.server.monitoring")
        await monitoring.serve(
            sock,
            self._broker,
            self._journal,
            self._history,
            self.why_not_ready,
            self.open_inside,
            lambda: self._door.context,
            self._http_connections_max,
        )

    def _reread(self) -> Reread:
        settings = self._settings
        users, context = read_secrets(settings, with_tls=self._door.context is not None)
        restart = [] if settings.changed is None else settings.changed()
        return Reread(users, context, read_queue_tables(settings), restart)

    def _use(self, found: Reread, actor: Actor) -> dict[str, Any]:
        """Users, certificates and queue defaults apply from now on; return what changed."""
        broker, door = self._broker, self._door
        serials = [context and context.serial for context in (door.context, found.context)]
        door.context = found.context
        differing = broker.access.users.differing(found.users)
        if differing:
            what = " ".join(differing).encode()
            broker.audit.note(actor, "reload_users", what, len(differing))
        queue_defaults, self._tables = found.tables != self._tables, found.tables
        broker.policies.reload(found.tables)
        self._clients.set_users(found.users)
        for gateway in self._gateways:
            gateway.tell_users()
        log.event("reloaded", users=len(found.users), queue_tables=len(found.tables))
        return {
            "users_changed": len(differing),
            "users": differing[:NAMES_TOLD],
            "certificate": serials[0] != serials[1],
            "queue_defaults": queue_defaults,
            "restart": found.restart,
        }

    async def run(
        self,
        until: Until,
        *,
        task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen until `until` returns, then stop accepting, write what is pending, flush.

        The task status is started with the TCP port, 0 without one.
        """
        stop = anyio.Event()

        async def wait() -> None:
            await until(self._reloads.want)
            stop.set()

        try:
            async with anyio.create_task_group() as tasks:
                # Before clients can connect: a signal must find its handler.
                tasks.start_soon(wait)
                await anyio.lowlevel.checkpoint()
                # Publishes are refused from the first one on, not from the first look of `watch`.
                self._writer.check_free_space()
                self._listeners.open(tasks)
                tasks.start_soon(self._paging.run)
                self._reads.start(tasks)
                tasks.start_soon(self._logins.run)
                tasks.start_soon(self._reloads.run)
                tasks.start_soon(self._writer.run)
                tasks.start_soon(self._writer.watch)
                tasks.start_soon(self._watch)
                tasks.start_soon(lag.warn, self._broker)
                tasks.start_soon(end_unanswering, self._clients.by_id, self._turn.schedule_flush)
                if isinstance(self._settings.db, DatabaseUrl):
                    store, flush = self._journal.store, self._turn.schedule_flush
                    tasks.start_soon(silence.watch, self._broker, store, self._forsake, flush)
                self._turn.schedule_flush()
                tasks.start_soon(self._notify.feed_watchdog, self._writer.progress)
                listeners, settings = self._listeners, self._settings
                self._journal.store.announce(listeners.url, listeners.far_url)
                for address in listeners.shown:
                    log.event("listening", address=address)
                if settings.has_http:
                    if settings.page != "off":
                        tasks.start_soon(self._history.run)
                    serve_http = partial(http_port.serve, logged=self._http_logged)
                    place = settings.http_host, settings.http_port
                    await tasks.start(serve_http, *place, self._answer_http)
                for gateway in self._gateways:
                    await tasks.start(gateway.serve)
                self._notify.tell("READY=1", f"STATUS=listening on {', '.join(listeners.shown)}")
                task_status.started(listeners.port)
                await stop.wait()
                self._notify.tell("STOPPING=1", "STATUS=writing what was received")
                await self._drain()
                tasks.cancel_scope.cancel()
        finally:
            # Also after a failure: a Unix socket that nobody serves is deleted.
            self._listeners.close()
        log.event("stopped")

    async def _drain(self) -> None:
        self._clients.stop()
        self._paging.stopping = True
        self._listeners.close()
        with anyio.move_on_after(self._settings.drain_timeout_s) as draining:
            await self._finish_all()
            self._writer.stop()
            # On a full disk the rest stays pending, and is not waited for.
            while (
                self._writer.busy
                or self._broker.answers.are_due
                or (self._broker.pending and not self._writer.disk_full)
            ):
                await anyio.sleep(0.005)
            self._turn.flush()
            while self._clients.are_unsent:
                await anyio.sleep(0.005)
        self._writer.stop()
        self._writer.check()
        # Some commit still waits, perhaps for another machine: closing must not wait as well.
        if draining.cancelled_caught:
            self._journal.store.abandon()
        self._clients.close()

    async def _finish_all(self) -> None:
        """Finish requests that were interrupted to give others their turn."""
        broker = self._broker
        while not self._writer.disk_full:
            if not (await self._clients.handle_overrun() or len(broker.turns)):
                break
            self._turn.flush()
            await anyio.sleep(WAIT_S)


def read_secrets(settings: Settings, *, with_tls: bool) -> tuple[Users, tls.Context | None]:
    """Read users and certificate. Raises ConfigurationError."""
    users = read_users(settings.users) if settings.users else []
    context = tls.make_context(settings) if with_tls else None
    return Users(users, secrets.token_bytes(32)), context
