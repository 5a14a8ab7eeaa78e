"""Starts the server, and runs it until a signal: journal, broker and sockets are made here.

The one rule: nothing here runs per message, so this module is never compiled.
"""

import asyncio
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

import anyio
from anyio.abc import TaskStatus

from mqks import __version__, log
from mqks.audit_log import audit_to
from mqks.broker.broker import Broker
from mqks.clock import now_us
from mqks.errors import ConfigurationError, MqksError
from mqks.journal.default_store import open_store
from mqks.journal.facts import JournalFacts
from mqks.journal.journal import Journal
from mqks.journal.recovery import Recovery
from mqks.journal.store import OpenStore
from mqks.limits import CHUNK_S, HTTP_CONNECTIONS_MAX
from mqks.loops import rarely_collect, uses_uvloop
from mqks.server.cron import next_tick
from mqks.server.error_log import ErrorIds, ErrorLog
from mqks.server.held import HeldWatch
from mqks.server.listeners import TLS_NAME, Inherited, take_sockets
from mqks.server.notices import LoggedNotices
from mqks.server.notify import Notify
from mqks.server.server import Server, Until, read_secrets
from mqks.server.standby import Standby, Stop
from mqks.settings import (
    SETTINGS,
    DatabaseUrl,
    Settings,
    check_certificate,
    check_reach,
)

OTHER_FILES = 128
"""Descriptors reserved for the journal and listeners; with those of the HTTP port at most half."""
OPEN_FILES_MIN = 64
"""Half of them are enough for an idle server with a port of every kind, which has up to 28 open."""

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


async def _signalled(reload: Callable[[], None]) -> None:
    """Wait for SIGTERM or SIGINT; SIGHUP reloads. Afterwards all three are ignored until the
    process ends."""
    loop, stop = asyncio.get_running_loop(), anyio.Event()

    def receive(number: int) -> None:
        if stop.is_set():
            return
        if number == signal.SIGHUP:
            reload()
        else:
            log.event("stopping", signal=signal.Signals(number).name)
            stop.set()

    for each in SIGNALS:
        # Not by the loop's own handlers: where those end, the next signal would end the process.
        signal.signal(each, lambda number, _: loop.call_soon_threadsafe(receive, number))
    try:
        await stop.wait()
    finally:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)


async def serve(
    settings: Settings,
    until: Until = _signalled,
    environ: MutableMapping[str, str] | None = None,
    *,
    open_files: int = sys.maxsize,
    open_store: OpenStore = open_store,
    sockets: Sequence[Inherited] = (),
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `until` returns; the task status is started with the TCP port.

    `environ` may name the notification socket and the listening sockets of a service manager; a
    server inside another program has none. `open_files` is the number of descriptors that the
    process may open. It limits the connections, so that refused clients get an error, and the
    journal always has a descriptor. With `sockets` it listens on nothing else.
    """
    http_connections_max = min(HTTP_CONNECTIONS_MAX, open_files // 8)
    others = OTHER_FILES + settings.has_http * http_connections_max
    files = open_files - min(others, open_files // 2)
    connections_max = max(1, min(settings.connections_max, files))
    wanted, default = settings.connections_max, SETTINGS["connections_max"].default
    # Few servers need the default, so a little less of it is not worth a warning.
    are_few = connections_max < (default // 2 if wanted == default else wanted)
    name = settings.broker_name or socket.gethostname()
    settings = replace(settings, connections_max=connections_max, broker_name=name)
    log.event("starting", version=__version__, db=str(settings.db), broker=name)
    for each in settings.overridden:
        log.event("overridden", setting=each.setting, used=each.used, ignored=each.ignored)
    environ = {} if environ is None else environ
    notify, inherited = Notify(environ), [*(sockets or take_sockets(environ))]
    for listening, name in inherited:
        if name == TLS_NAME:
            check_certificate(settings, f"LISTEN_FDS: {name}")
        if listening.family != socket.AF_UNIX:
            check_reach(settings, listening.getsockname()[0], f"LISTEN_FDS: {name}")
    names = [name for _, name in inherited]
    with_tls = TLS_NAME in names if inherited else settings.tls_port > 0
    users, context = read_secrets(settings, with_tls=with_tls)
    notify.tell("STATUS=reading the journal")
    journal: Journal | None = None
    # First a WAL of any size is recovered, and SQLite reports no steps of that.
    starting = asyncio.create_task(
        notify.wait_for_start(lambda: journal.next_segment if journal else None)
    )
    try:
        journal = Journal(await open_store(settings, _report))
        if journal.store.torn:
            log.warning("wal_torn", what=journal.store.torn)
        errors, error_ids = ErrorLog(), ErrorIds()
        broker = Broker(
            settings,
            # Not the loop's: uvloop's stands still within a turn, and rules would be met too soon.
            clock=time.monotonic,
            now_us=now_us,
            new_error_id=error_ids,
            on_error=errors,
            facts=JournalFacts(journal),
            notices=LoggedNotices(errors),
            next_tick=next_tick,
        )
        broker.turns.chunk_s, broker.turns.clock = CHUNK_S, time.monotonic
        broker.set_users(users)
        recovery = Recovery(journal, broker, _report)
        load = partial(recovery.run, salvage=settings.salvage, wait=settings.standby)
        http_logged = ""
        if isinstance(settings.db, DatabaseUrl):
            until = stop = Stop(until)
            standby = Standby(settings, journal, notify, http_connections_max)
            if not await standby.load(load, stop):
                return
            http_logged = standby.http_address
        else:
            await load()
        starting.cancel()
        if journal.store.made:
            log.event("created", db=str(settings.db))
        if journal.store.upgraded:
            old, new = journal.store.upgraded
            log.event("upgraded", **{"from": old, "to": new})
        if broker.last_errors:
            error_ids.follow(broker.last_errors[-1].id)
        log.event(
            "recovered",
            queues=len(broker.queues),
            ready=sum(queue.ready for queue in broker.queues.values()),
        )
        if long := broker.long_names():
            log.event("long_names", names=long, name_bytes_max=settings.name_bytes_max)
        if are_few:
            enough = wanted + OTHER_FILES + settings.has_http * HTTP_CONNECTIONS_MAX
            todo = f"allow {enough} open files (ulimit -n, or LimitNOFILE= of systemd)"
            log.warning(
                "few_open_files", open_files=open_files, connections_max=connections_max, todo=todo
            )
        broker.start_timers()
        if not await journal.store.hold_reserves():
            log.warning("no_ballast", reason="the disk has no space for the ballast file")
        rarely_collect()  # Recovered objects stay.
        server = Server(
            broker,
            journal,
            notify,
            errors,
            context,
            inherited,
            http_connections_max,
            http_logged,
        )
        with HeldWatch(broker, settings.loop_held_s):
            await server.run(until, task_status=task_status)
    finally:
        starting.cancel()
        with anyio.CancelScope(shield=True):
            if journal:
                await journal.store.close()


def _report(line: str) -> None:
    log.error("journal_damaged", what=line)


def _raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def run(settings: Settings) -> int:
    """Serve until a signal; return the exit code. Raises MqksError with its exit code."""
    log.configure(settings.log_format, settings.log_level, settings.broker_name)
    open_files = _raise_open_files_limit()
    if open_files < OPEN_FILES_MIN:
        raise ConfigurationError(
            f"{open_files} open files are allowed, and the server needs at least {OPEN_FILES_MIN}: "
            "raise the hard limit (ulimit -Hn, or LimitNOFILE= of systemd)"
        )
    # Nobody handles it yet, and it must never end the server.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # On the watchdog's SIGABRT print the stack of each thread.
    faulthandler.enable()
    failure: BaseException | None = None
    try:
        with audit_to(settings.audit, log.formatter(settings.log_format, settings.broker_name)):
            anyio.run(
                partial(serve, settings, environ=os.environ, open_files=open_files),
                backend="asyncio",
                backend_options={"use_uvloop": uses_uvloop(settings)},
            )
    except* MqksError as failures:
        failure = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
    # Raised in the block above it would come out as a group on Python before 3.11.4.
    if failure is not None:
        raise failure
    return 0
