"""One request, from its line to what it does.

The one rule: only here an error becomes a reply, and what raises has changed nothing.
"""

from collections.abc import Generator
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.requests import permits
from mqks.broker.requests.actions import RUNS
from mqks.broker.requests.checks import Doing
from mqks.broker.requests.transactions import AT_ONCE
from mqks.broker.spine.base.turns import Work, finish
from mqks.broker.spine.clients.connection import Connection
from mqks.errors import BadRequest, Unwritable
from mqks.protocol.requests import ALL, Request, parse_request, shown

PLACING = frozenset(
    (
        *(b"publish", b"reject", b"release", b"promote", b"move", b"redrive", b"schedule"),
        *(b"unschedule", b"commit", b"rename"),
    )
)
"""Actions that give messages new places, or ticks, which is not possible on a full disk."""
READING = frozenset((b"peek", b"range", b"read"))
"""Actions that are confirmed after their answer: they fail when their queue is deleted before."""


def handle(broker: Broker, connection: Connection, line: bytes) -> Request | None:
    """Handle one request off the fast path; None if it failed, or has no plain confirm now.
    Only here and in `_perform` an error becomes a reply."""
    if b"\t" in line:
        failure = BadRequest("the request contains a tab; JSON writes it as \\t")
        broker.refusals.refuse(connection, line[1:], failure)
        return None
    try:
        request = parse_request(line)
        broker.metadata.check_names("id", [request.id])
        work = _begin(broker, connection, request)
    except BadRequest as failure:
        broker.refusals.refuse(connection, line, failure)
        return None
    if work is not None:
        connection.unconfirmed += request.confirm
        connection.works.append(_perform(broker, connection, request, line, work))
        return None
    # A login that is not verified yet, or was refused, is not confirmed now.
    is_later = connection.awaits_login or connection.expelled or request.action in READING
    return None if is_later else request


def _begin(broker: Broker, connection: Connection, request: Request) -> Doing:
    """Parse a request, check its permissions, and do it. Raises BadRequest."""
    may = connection.permissions
    if request.action not in RUNS:
        raise BadRequest(f"there is no action {shown(request.action)}; 'help' lists all")
    action, run = RUNS[request.action]
    if may is not None:
        permits.check_first(may, action)
    kept = None if request.action in AT_ONCE else connection.transaction
    if kept is not None and not action.is_kept:
        raise BadRequest(f"{action.name}: it is not possible between begin and commit")
    arguments = action.parse(request.rest, broker.bindings.events_max)
    if kept is not None:
        # A commit is one step, and nobody knows how many these will be.
        if getattr(arguments, "message", b"") == ALL:
            raise BadRequest(f"{action.name}: --all is not possible between begin and commit")
        size = len(request.id) + len(request.rest)
        kept.keep(request if action.is_audited else request._replace(rest=b""), arguments, size)
        return None
    if isinstance(arguments, Generator) or (may is not None and "bind" in action.needs.values()):
        return _begin_in_turns(broker, connection, request, arguments)
    if may is not None:
        finish(permits.check(broker, may, action, request, arguments))
    return run(broker, connection, request, arguments)


def _begin_in_turns(
    broker: Broker, connection: Connection, request: Request, arguments: Any
) -> Work[int | bytes | None]:
    """Check and do a request that may have many names."""
    may = connection.permissions
    action, run = RUNS[request.action]
    if isinstance(arguments, Generator):
        arguments = yield from arguments
    if may is not None:
        yield from permits.check(broker, may, action, request, arguments)
    work = run(broker, connection, request, arguments)
    return None if work is None else (yield from work)


def _perform(
    broker: Broker,
    connection: Connection,
    request: Request,
    line: bytes,
    work: Work[int | bytes | None],
) -> Work[None]:
    """Perform a request that may take several turns. It raises before it changes anything."""
    try:
        answer = yield from work
        # On a disk that became full meanwhile, its messages have their new places in memory.
        if request.confirm and broker.unwritable and request.action in PLACING:
            raise Unwritable(f"{broker.unwritable}: the request is not durable")
    except BadRequest as failure:
        connection.unconfirmed -= request.confirm
        broker.refusals.refuse(connection, line, failure)
        return
    if not request.confirm:
        return
    if answer is None:
        ids = [request.id]
        places = request.action in PLACING
        confirms = (connection, ids, []) if places else (connection, [], ids)
        broker.pending.waiters.confirms.append(confirms)
    else:
        text = answer if isinstance(answer, bytes) else b"%d" % answer
        broker.pending.waiters.counts.append((connection, request.id, text))
