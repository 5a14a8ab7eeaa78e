"""The server: broker and journal wired to sockets.

The one rule: each connection with replies is flushed once a turn, with one joined write. After a
large chunk it is flushed at once, so that a consumer works while its publisher is read.
"""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
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
from mqks.limits import HTTP_CONNECTIONS_MAX
from mqks.server import http_port, silence, tls
from mqks.server.clients import LARGE_CHUNK_BYTES, Clients
from mqks.server.door import Door
from mqks.server.error_log import ErrorLog
from mqks.server.gate import Gate, Peer
from mqks.server.gateway import STOP_S, Gateway
from mqks.server.history import History
from mqks.server.lag import Lag
from mqks.server.listeners import Inherited, Listeners
from mqks.server.logins import Logins
from mqks.server.notify import Notify
from mqks.server.paging import Paging
from mqks.server.reads import Reads
from mqks.server.reloads import NAMES_TOLD, Reloads, Reread
from mqks.server.silence import Silence
from mqks.server.vanished import end_unanswering
from mqks.server.writer import Writer
from mqks.settings import DatabaseUrl, Settings, read_queue_tables
from mqks.users import Users
from mqks.users_file import read as read_users
from mqks.web.openings import Opening

LATE_S = 0.05
LATE_TURNS = 10
LATE_TURN_S = 0.005
LATE_MAX_S = 2.0
"""A timer that is so late waits until nothing was read in so many turns; at most for as long as it
is late, and not longer than this. The turns need time: what does not fit into a socket's buffer
comes when that was read, by the system's leave."""
WAIT_S = 0.002
"""Interval at which work that waits for the journal is retried."""

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
        self._flush_scheduled = False
        self._work_scheduled = False
        self._timer: asyncio.Handle | None = None
        self._timer_at_s = self._due_from_s = inf
        self._gate = Gate(settings, broker.limits_reached)
        broker.connection_count = lambda: self._gate.connections
        self._clients = Clients(
            broker, self._gate, flush=self._flush, schedule_flush=self._schedule_flush
        )
        self._history = History(broker)
        self._reads = Reads(broker, journal, self._flush)
        self._paging = Paging(broker, journal, self._flush)
        self._logins = Logins(broker, self._clients.verified)
        self._reloads = Reloads(notify, self._reread, self._use, self._flush)
        broker.want_reload = self._reloads.want_for
        self._door = Door(context, settings, self._gate, errors, self._clients)
        self._listeners = Listeners(settings, inherited, self._door)
        ports = (
            ("api", settings.api_host, settings.api_port),
            ("sqs", settings.sqs_host, settings.sqs_port),
        )
        self._gateways = [
            Gateway(kind, (host, port), settings, self._let_in, lambda: broker.access.users.signing)
            for kind, host, port in ports
            if port is not None
        ]
        self._failed: asyncio.Future[Exception] = self._loop.create_future()
        self._loop.set_exception_handler(self._internal_error)
        self._writer = Writer(broker, journal, release=self._clients.release, flush=self._flush)

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

    # -- the end of a turn

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._flush_scheduled = False
        self._flush()
        self._clients.end_turn()

    def _flush(self) -> None:
        """Send the replies of this turn, and schedule the remaining work."""
        broker, clients, began_s = self._broker, self._clients, self._loop.time()
        clients.handle_chunks()
        self._writer.wake(alone=clients.turn_bytes < LARGE_CHUNK_BYTES)
        clients.turn_bytes = 0
        if broker.expelled:
            clients.close_expelled()
        clients.send()
        self._reads.wake()
        self._logins.wake()
        self._paging.wake()
        if broker.has_work and not self._work_scheduled:
            self._work_scheduled = True
            # Not now: a step takes time, and who has sent something comes in between.
            self._loop.call_soon(self._go_on)
        due_s = broker.schedule.next_s()
        # A timer that comes too early finds nothing, and another one is set then.
        if due_s is not None and due_s < self._timer_at_s:
            if self._timer:
                self._timer.cancel()
            self._timer_at_s, self._timer = due_s, self._loop.call_at(due_s, self._expire)
            # Some are due before they are set: looks ahead, and what an earlier turn has left. But
            # from when replies are sent on, clients may do what is in time.
            self._due_from_s = max(due_s, began_s)

    def _go_on(self) -> None:
        """Continue the work of earlier turns."""
        self._work_scheduled = False
        waits = self._broker.go_on()
        self._clients.resume_worked()
        if waits and self._broker.has_work:
            # Leave the processor to the commit that it waits for.
            self._work_scheduled = True
            self._loop.call_later(WAIT_S, self._go_on)
        self._flush()

    def _expire(self) -> None:
        """Do what is due. If the timer is late, what was sent in time may not have been read yet:
        it is read first."""
        now_s = self._loop.time()
        late_s = now_s - self._due_from_s
        if late_s > LATE_S:
            self._due_from_s, self._timer_at_s = inf, -inf
            self._catch_up(LATE_TURNS, now_s + min(late_s, LATE_MAX_S))
            return
        self._clients.handle_chunks()
        self._timer, self._timer_at_s = None, inf
        self._broker.schedule.run_due(self._broker.turns)
        self._flush()

    def _catch_up(self, turns: int, until_s: float) -> None:
        """Let some turns pass in which nothing is read."""
        clients = self._clients
        if (clients.has_read or clients.has_unhandled) and self._loop.time() < until_s:
            turns = LATE_TURNS
        clients.has_read = False
        again = partial(self._catch_up, turns - 1, until_s) if turns else self._expire
        self._timer = self._loop.call_later(LATE_TURN_S, again)

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
        forsaken = silence.WHY if self._broker.withholds else ""
        draining = "draining" if self._broker.shared.draining else ""
        read_only = "read-only" if self._broker.shared.read_only else ""
        reasons = [
            self._broker.unwritable,
            self._journal.store.waits,
            forsaken,
            draining,
            read_only,
        ]
        if told := "; ".join(filter(None, reasons)):
            return told
        return "journal stalls" if self._writer.stalls else ""

    async def _answer_http(self, sock: socket.socket) -> None:
        monitoring = await http_port.monitoring()
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
                tasks.start_soon(Lag(self._broker).run)
                tasks.start_soon(end_unanswering, self._clients.by_id, self._schedule_flush)
                if isinstance(self._settings.db, DatabaseUrl):
                    watch = Silence(self._broker, self._journal.store, self._forsake)
                    tasks.start_soon(watch.run, self._schedule_flush)
                self._schedule_flush()
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
                    scheme = f"{gateway.kind}:http"
                    serve_gateway = partial(http_port.serve, scheme=scheme, taken_s=STOP_S)
                    await tasks.start(serve_gateway, *gateway.place, gateway.answer)
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
            self._flush()
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
            self._flush()
            await anyio.sleep(WAIT_S)


def read_secrets(settings: Settings, *, with_tls: bool) -> tuple[Users, tls.Context | None]:
    """Read users and certificate. Raises ConfigurationError."""
    users = read_users(settings.users) if settings.users else []
    context = tls.make_context(settings) if with_tls else None
    return Users(users, secrets.token_bytes(32)), context
