"""The server: broker and journal wired to sockets.

The one rule: each connection with replies is flushed once a turn, with one joined write. After a
large chunk it is flushed at once, so that a consumer works while its publisher is read.
"""

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import anyio
from anyio.abc import ByteStream, TaskStatus

from mqks.broker.access import Login
from mqks.broker.broker import Broker
from mqks.broker.budget import Budget
from mqks.broker.connection import Connection, Slow
from mqks.broker.intake import Intake
from mqks.broker.queue import Queue
from mqks.broker.shared import Fetch
from mqks.errors import BadRequest, ConfigurationError, LimitExceeded, MqksError, Unwritable
from mqks.journal.journal import Journal
from mqks.limits import CHUNK_S, HTTP_CONNECTIONS_MAX
from mqks.server import http_port, inside, log, silence, tls
from mqks.server.client import LINGER_S, Client, Hold
from mqks.server.door import Door
from mqks.server.error_log import ErrorLog
from mqks.server.gate import Gate, Peer
from mqks.server.inherited import Inherited
from mqks.server.lag import Lag
from mqks.server.listeners import Listeners
from mqks.server.logins import Logins
from mqks.server.notify import Notify
from mqks.server.reads import Reads
from mqks.server.silence import Silence
from mqks.server.unsent import Unsent
from mqks.server.vanished import end_unanswering
from mqks.server.writer import Writer
from mqks.settings import DatabaseUrl, Settings, read_queue_tables
from mqks.users import STRANGER, Known, Users
from mqks.users_file import read as read_users

LARGE_CHUNK_BYTES = 32 * 1024
"""A chunk this large is flushed at once."""
TURN_BYTES = 1024 * 1024
"""Chunks of one turn that are handled together."""
FAIR_CHUNK_BYTES = 64 * 1024
"""After a chunk this large other connections get their turn."""
SENT_CONNECTIONS = 16
"""Connections flushed between two checks of the time."""
WAIT_S = 0.002
"""Interval at which work that waits for the journal is retried."""

Until = Callable[[Callable[[], None]], Awaitable[object]]
"""What to wait for. It gets a function that reloads the server."""


class Server:
    """Listens on the `inherited` sockets if there are any, otherwise on the addresses of the
    settings; with TLS if there is a `context`."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        journal: Journal,
        notify: Notify,
        errors: ErrorLog,
        context: ssl.SSLContext | None = None,
        inherited: Sequence[Inherited] = (),
        http_connections_max: int = HTTP_CONNECTIONS_MAX,
        http_logged: str = "",
    ) -> None:
        self.settings = settings
        self._http_logged = http_logged
        self._http_connections_max = http_connections_max
        self._broker = broker
        self._intake = Intake(broker)
        self._journal = journal
        self._notify = notify
        self._errors = errors
        self._clients: dict[int, Client] = {}
        self._loop = asyncio.get_running_loop()
        self._flush_scheduled = False
        self._work_scheduled = False
        self._working: dict[Connection, Callable[[], None]] = {}
        """Connections with unfinished work, and what to call when it is finished."""
        self._published = Budget(settings.batch_bytes_max, broker.turns)
        self._awaited = Budget(settings.batch_bytes_max, broker.turns)
        """For what has come in since the last commit and waits for the next one: publishes, and
        all other. Clients wait for it."""
        self._chunks: list[tuple[Client, bytes]] = []
        """What has come in since the last flush, and is not handled yet."""
        self._turn_bytes = 0
        """The bytes of it."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = inf
        self._reads = Reads(broker, journal, self._flush)
        self._logins = Logins(broker, self._verified)
        broker.access.source_of = self._source_of
        self.unsent = Unsent(broker, self._clients, self._drop, self._schedule_flush)
        self._gate = Gate(settings, broker.limits_reached)
        broker.connection_count = lambda: self._gate.connections
        self._door = Door(
            context, settings, self._gate, errors, partial(Client, self), self._refusal
        )
        self._listeners = Listeners(settings, inherited, self._door)
        self._pages: deque[Queue] = deque()
        self._fetches: deque[Fetch] = deque()
        self._page_wanted = anyio.Event()
        self.stopping = False
        """It no longer reads, delivers or accepts connections."""
        self._failure: Exception | None = None
        self._failed = anyio.Event()
        self._loop.set_exception_handler(self._internal_error)
        self._writer = Writer(broker, journal, release=self._release_publishers, flush=self._flush)

    # -- clients

    def add_client(self, client: Client) -> Connection:
        peer = client.peer
        connection = self._broker.connect(peer.address, local=peer.local)
        self._clients[connection.id] = client
        if connection.permissions is STRANGER:
            client.stranger = True
            self._gate.add_stranger(client, partial(self._crowded_out, client))
            self._await_auth(client)
        log.event("connected", logging.DEBUG, connection=peer.address)
        return connection

    async def open_inside(self, name: str, trusted: bool) -> ByteStream:
        """A connection from inside this process; a `trusted` one may do everything.

        Raises LimitExceeded.
        """
        who = Peer(name, trusted, b"")
        self._gate.enter(who)
        sock, stream = await inside.pair()
        client = await self._door.let_in(sock, who)
        if trusted and client.made:
            self._forget_stranger(client)
            client.connection.permissions = None
        return stream

    def _refusal(self, peer: Peer, failure: BadRequest) -> bytes:
        """The reply to a client that is refused or disconnected."""
        told = isinstance(failure, Unwritable)
        reply = self._broker.refusals.reply(
            peer.address, b"-", b"", str(failure), stranger=True, told=told
        )
        self._schedule_flush()
        return reply

    def remove_client(self, client: Client) -> None:
        self.handle_chunks()
        connection = client.connection
        self._clients.pop(connection.id, None)
        for budget in (self._published, self._awaited):
            budget.leave(client)
        self._gate.leave(client.peer)
        self._forget_stranger(client)
        log.event(
            "disconnected",
            logging.DEBUG,
            connection=connection.address,
            client=log.client(connection.name),
        )
        if not (self.stopping or client.ended):
            self._tell_tail(connection)
        connection.closed = True
        self._finish(connection)

    def _finish(self, connection: Connection) -> None:
        """A client has disconnected: its earlier requests are still carried out, in turns, and
        nothing more is delivered to it."""
        if self.stopping:
            return
        connection.rest(Slow.END)
        if connection.works:
            self._working[connection] = partial(self._finish, connection)
        elif connection.overrun:
            self._intake.receive(connection, b"")
            self._loop.call_soon(self._finish, connection)
        else:
            self._broker.disconnect(connection)
        self._schedule_flush()

    def receive(self, client: Client, data: bytes) -> None:
        """Handle a chunk with all others of this turn; a large one, or very many, now."""
        self._chunks.append((client, data))
        self._turn_bytes += len(data)
        if len(data) >= LARGE_CHUNK_BYTES or self._turn_bytes >= TURN_BYTES:
            self._flush()
        else:
            self._schedule_flush()

    def handle_chunks(self) -> None:
        """Handle what has come in, in its order. What many connections publish to the same queues
        is published in one step."""
        if not self._chunks:
            return
        chunks, self._chunks = self._chunks, []
        intake, pending = self._intake, self._broker.pending
        records, published_bytes = pending.records, 0
        publishers: list[tuple[Client, int, bool]] = []
        for client, data in chunks:
            if client.ended:
                continue
            connection, size = client.connection, len(data)
            changes, unconfirmed = pending.changes, connection.unconfirmed
            intake.add(connection, data)
            if client.stranger or connection.awaits_login or connection.expelled:
                self._look_at_auth(client)
            confirms = connection.unconfirmed > unconfirmed
            if intake.publishes:
                published_bytes += size
                publishers.append((client, size, confirms))
            elif confirms or pending.changes > changes:
                self._await(client, size)
            if connection.works:
                client.rest(Hold.TURN)
                self._working[connection] = partial(client.resume, Hold.TURN)
            elif size >= FAIR_CHUNK_BYTES or connection.overrun:
                client.rest(Hold.TURN)
                self._loop.call_soon(client.resume, Hold.TURN)
        intake.finish()
        if pending.records > records:
            self._published.take(published_bytes)
            if pending.records > self.settings.batch_records_max or self._published.room < 0:
                for client, _, _ in publishers:
                    self._wait_for_journal(client, self._published)
            return
        # Consumers have taken what was published, or no queue has got it.
        for client, size, confirms in publishers:
            if confirms:
                self._await(client, size)

    def _await(self, client: Client, size: int) -> None:
        """What is confirmed, queues and bindings wait for the same commit. They have a bound of
        their own: an ack never waits because of publishers."""
        self._awaited.take(size)
        if self._awaited.room < 0:
            self._wait_for_journal(client, self._awaited)

    @staticmethod
    def _wait_for_journal(client: Client, budget: Budget) -> None:
        """Pause reading until the next commit."""
        client.rest(Hold.JOURNAL)
        budget.wait(client, partial(client.resume, Hold.JOURNAL))

    # -- strangers

    def _await_auth(self, client: Client) -> None:
        client.auth_timer = self._loop.call_later(
            self.settings.auth_timeout_s, self._auth_timeout, client
        )

    def refuse_tls(self, client: Client) -> None:
        """Close at once: a client waits for its handshake as long as for anything."""
        reason = "this port does not speak TLS: connect with mqks://, or to tls_port"
        self._broker.refusals.expel(client.connection, reason)
        self._expelled(client)

    def _auth_timeout(self, client: Client) -> None:
        if client.connection.waits:
            # Its password is being verified, or waits for that.
            self._await_auth(client)
            return
        seconds = self.settings.auth_timeout_s
        reason = f"the connection did not authenticate within {seconds:g} s (auth_timeout_s)"
        self._broker.refusals.expel(client.connection, reason)
        self._expelled(client)

    def _look_at_auth(self, client: Client) -> None:
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

    def _forget_stranger(self, client: Client) -> None:
        client.stranger = False
        self._gate.remove_stranger(client)
        if client.auth_timer is not None:
            client.auth_timer.cancel()

    def _source_of(self, connection: Connection) -> bytes:
        client = self._clients.get(connection.id)
        return b"" if client is None else client.peer.source

    def _verified(self, login: Login, user: Known | None) -> None:
        client = self._clients.get(login.connection.id)
        if client is None or client.ended or self.stopping:
            return
        if client.stranger:
            self._gate.add_stranger(client, partial(self._crowded_out, client))
        self._broker.access.verified(login, user)
        if client.connection.expelled:
            self._expelled(client)
        client.resume(Hold.AUTH)

    def _expelled(self, client: Client) -> None:
        client.lingers = True
        self._end(client)

    def _close_expelled(self) -> None:
        """Close the connections that others have expelled."""
        expelled, self._broker.shared.expelled = self._broker.shared.expelled, []
        for connection in expelled:
            client = self._clients.get(connection.id)
            if client is not None and not client.ended:
                self._expelled(client)

    def _crowded_out(self, client: Client) -> None:
        """Close an unauthenticated client to admit a newer one."""
        reason = "closed to admit a newer connection, because it had not authenticated"
        self._drop(client, LimitExceeded("unauthenticated_max", reason))

    def _drop(self, client: Client, failure: BadRequest) -> None:
        """Disconnect a client at once; its unread replies are lost."""
        if not client.ended:
            client.ended = True
            client.transport.write(self._refusal(client.peer, failure))
        client.transport.abort()

    def end_of_stream(self, client: Client) -> None:
        """The client sends no more: its consumers end, its replies are still sent."""
        self._tell_tail(client.connection)
        self._end(client)

    def _end(self, client: Client) -> None:
        client.ended = True
        if client.auth_timer is not None:
            client.auth_timer.cancel()
        if not self.stopping:
            self._broker.end(client.connection)
        self._schedule_flush()
        self._loop.call_soon(self._close_if_done, client)

    def _close_if_done(self, client: Client) -> None:
        connection = client.connection
        if (
            connection.unconfirmed
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
                connection=connection.address,
                client=log.client(connection.name),
                reason="the client closed the connection before the end of the line",
                line_bytes=connection.splitter.tail_bytes,
            )

    def caught_up(self, client: Client, why: int = 0) -> None:
        """A slow client has read its replies."""
        client.connection.outbox_bytes = 0
        client.connection.resume(Slow.OUTBOX | why)
        self._schedule_flush()

    # -- the end of a turn

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the replies of this turn, and schedule the remaining work."""
        self._flush_scheduled = False
        broker = self._broker
        self.handle_chunks()
        self._writer.wake(alone=self._turn_bytes < LARGE_CHUNK_BYTES)
        self._turn_bytes = 0
        shared = broker.shared
        if shared.expelled:
            self._close_expelled()
        touched, shared.touched = shared.touched, []
        end_s = time.monotonic() + CHUNK_S
        for number, connection in enumerate(touched):
            if number % SENT_CONNECTIONS == 0 and time.monotonic() > end_s:
                # There may be ten thousand: other tasks run before the rest.
                shared.touched = touched[number:] + shared.touched
                self._schedule_flush()
                break
            connection.touched = False
            outbox = connection.outbox
            data = outbox[0] if len(outbox) == 1 else b"".join(outbox)
            outbox.clear()
            client = self._clients.get(connection.id)
            if client is None:
                continue
            client.send(data)
            connection.outbox_bytes = client.waiting_bytes if connection.rests else 0
            if connection.rests == Slow.OUTBOX:
                self._loop.call_soon(self.caught_up, client)
            if client.ended:
                self._close_if_done(client)
        if shared.outboxes.used > self.unsent.look_due_bytes:
            self.unsent.look()
        self._reads.wake()
        self._logins.wake()
        if shared.page_requests:
            self._pages += shared.page_requests
            shared.page_requests = []
            self._page_wanted.set()
        if shared.fetches:
            self._fetches += shared.fetches
            shared.fetches = []
            self._page_wanted.set()
        if broker.has_work and not self._work_scheduled:
            self._work_scheduled = True
            self._loop.call_soon(self._go_on)
        due_s = broker.schedule.next_s()
        # A timer that comes too early finds nothing, and another one is set then.
        if due_s is not None and due_s < self._timer_at_s:
            if self._timer:
                self._timer.cancel()
            self._timer_at_s, self._timer = due_s, self._loop.call_at(due_s, self._expire)

    def _go_on(self) -> None:
        """Continue the work of earlier turns."""
        self._work_scheduled = False
        waits = self._broker.go_on()
        for connection in [each for each in self._working if not each.works]:
            self._working.pop(connection)()
        if waits and self._broker.has_work:
            # Leave the processor to the commit that it waits for.
            self._work_scheduled = True
            self._loop.call_later(WAIT_S, self._go_on)
        self._flush()

    def _expire(self) -> None:
        self._timer, self._timer_at_s = None, inf
        self._broker.expire()
        self._flush()

    def _release_publishers(self) -> None:
        """A commit is done: paused publishers may continue."""
        for budget in (self._published, self._awaited):
            budget.set(0)

    async def forsake(self, why: str) -> None:
        """Close all clients and let nobody in, until `why` is empty."""
        self._door.closed = failure = Unwritable(why) if why else None
        if failure is not None:
            for client in list(self._clients.values()):
                if client.ended or client.paused:
                    self._drop(client, failure)
                else:
                    client.ended = True
                    client.transport.write(self._refusal(client.peer, failure))
                    client.transport.close()
                    self._loop.call_later(LINGER_S, client.transport.abort)
                await anyio.lowlevel.checkpoint()

    # -- tasks

    async def _page(self) -> None:
        """Read waiting messages from disk, ahead of their consumers."""
        while True:
            await self._page_wanted.wait()
            self._page_wanted = anyio.Event()
            while self._pages or self._fetches:
                if self._pages:
                    await self._bring_page(self._pages.popleft())
                if self._fetches:
                    await self._bring(self._fetches.popleft())

    async def _bring_page(self, queue: Queue) -> None:
        first = queue.lane.page_first
        runs = [] if first is None else await self._journal.log.read(queue.id, first)
        if not self.stopping:
            queue.page_in(first, runs)
            self._flush()

    async def _bring(self, fetch: Fetch) -> None:
        queue = fetch.queue
        lines = await self._journal.log.fetch(queue.id, fetch.numbers)
        if not (self.stopping or queue.deleted):
            self._broker.turns.begin()
            fetch.then(lines)
            self._flush()

    def _internal_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """An exception in a call by the event loop. A system error concerns one connection; after
        any other the state of the broker is unknown, and the server ends."""
        failure = context.get("exception")
        if str(context.get("message")).startswith(tls.HANDSHAKE_FAILED):
            return
        if not isinstance(failure, Exception) or isinstance(failure, OSError):
            if self._errors.allows():
                log.warning("connection_failed", reason=context.get("message"), error=failure)
            return
        log.error("internal_error", reason=context.get("message"), exception=failure)
        self._failure = failure
        self._failed.set()

    async def _watch(self) -> None:
        await self._failed.wait()
        raise MqksError("the server ended because of the internal error above") from self._failure

    def why_not_ready(self) -> str:
        """Why publishes would not be confirmed now; empty if they would."""
        if self.stopping:
            return "stopping"
        if self._broker.unwritable:
            return self._broker.unwritable
        if waits := self._journal.store.waits:
            return waits
        if self._broker.shared.withholds:
            return silence.WHY
        return "journal stalls" if self._writer.stalls else ""

    async def _answer_http(self, http: Any, sock: socket.socket) -> None:
        await http.serve(
            sock,
            self.settings,
            self._broker,
            self._journal,
            self.why_not_ready,
            self.open_inside,
            lambda: self._broker.access.users.shown,
            self._http_connections_max,
        )

    def reload(self) -> None:
        """Reload users, certificates and queue defaults. If one of the files is invalid, nothing
        changes."""
        with self._notify.reloading():
            try:
                users, context = read_secrets(
                    self.settings, with_tls=self._door.context is not None
                )
                tables = read_queue_tables(self.settings)
            except ConfigurationError as failure:
                log.error("reload_failed", reason=failure)
                return
            self._door.context = context
            self._broker.policies.reload(tables)
            self._set_users(users)
            log.event("reloaded", users=len(users), queue_tables=len(tables))

    def _set_users(self, users: Users) -> None:
        """Apply permissions to open connections too; close those of removed users."""
        self._broker.access.users = users
        for client in list(self._clients.values()):
            name = client.connection.user
            if name is None or client.ended:
                continue
            user = users.get(name)
            if user is None:
                self._broker.refusals.expel(client.connection, "the user was removed")
                self._expelled(client)
            else:
                self._broker.access.grant(client.connection, user.permissions)
        self._schedule_flush()

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
            await until(self.reload)
            stop.set()

        try:
            async with anyio.create_task_group() as tasks:
                # Before clients can connect: a signal must find its handler.
                tasks.start_soon(wait)
                await anyio.lowlevel.checkpoint()
                self._writer.check_free_space()
                self._listeners.open(tasks)
                tasks.start_soon(self._page)
                self._reads.start(tasks)
                tasks.start_soon(self._logins.run)
                tasks.start_soon(self._writer.run)
                tasks.start_soon(self._writer.watch)
                tasks.start_soon(self._watch)
                tasks.start_soon(Lag(self._broker).run)
                tasks.start_soon(end_unanswering, self._clients)
                if isinstance(self.settings.db, DatabaseUrl):
                    watch = Silence(self._broker, self._journal.store, self.forsake)
                    tasks.start_soon(watch.run, self._schedule_flush)
                self._schedule_flush()
                tasks.start_soon(self._notify.feed_watchdog, self._writer.progress)
                listeners = self._listeners
                self._journal.store.announce(listeners.url, listeners.far_url)
                for address in self._listeners.shown:
                    log.event("listening", address=address)
                if self.settings.has_http:
                    serve_http = partial(http_port.serve, logged=self._http_logged)
                    await tasks.start(serve_http, self.settings, self._answer_http)
                self._notify.tell(
                    "READY=1", f"STATUS=listening on {', '.join(self._listeners.shown)}"
                )
                task_status.started(self._listeners.port)
                await stop.wait()
                self._notify.tell("STOPPING=1", "STATUS=writing what was received")
                await self._drain()
                tasks.cancel_scope.cancel()
        finally:
            self._listeners.close()
        log.event("stopped")

    async def _drain(self) -> None:
        self.handle_chunks()
        self.stopping = True
        self._listeners.close()
        for client in self._clients.values():
            client.rest(Hold.STOP)
            # Nothing is delivered that the journal could not record.
            client.connection.rest(Slow.END)
        with anyio.move_on_after(self.settings.drain_timeout_s) as draining:
            await self._finish_all()
            self._writer.stop()
            # On a full disk the rest stays pending, and is not waited for.
            while self._writer.busy or (self._broker.pending and not self._writer.disk_full):
                await anyio.sleep(0.005)
            self._flush()
            while self._broker.shared.touched or any(
                client.transport.get_write_buffer_size() for client in self._clients.values()
            ):
                await anyio.sleep(0.005)
        self._writer.stop()
        self._writer.check()
        if draining.cancelled_caught:
            self._journal.store.abandon()
        for client in list(self._clients.values()):
            client.transport.close()

    async def _finish_all(self) -> None:
        """Finish requests that were interrupted to give others their turn."""
        broker = self._broker
        while not self._writer.disk_full:
            left = [each for each in broker.connections.values() if each.overrun]
            if not (left or len(broker.turns)):
                break
            for connection in left:
                self._intake.receive(connection, b"")
                await anyio.lowlevel.checkpoint()
            self._flush()
            await anyio.sleep(WAIT_S)


def read_secrets(settings: Settings, *, with_tls: bool) -> tuple[Users, ssl.SSLContext | None]:
    """Read users and certificate. Raises ConfigurationError."""
    users = read_users(settings.users) if settings.users else []
    context = tls.make_context(settings) if with_tls else None
    return Users(users, secrets.token_bytes(32)), context
