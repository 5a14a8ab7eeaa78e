"""Several requests in one commit: `begin`, `commit` and `rollback`.

The one rule: what came since `begin` is checked first, all of it, and changes nothing; then all of
it is done in one step, and written in one piece.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any, cast

from mqks.broker.broker import Broker
from mqks.broker.features.admission import unique
from mqks.broker.requests import batching, jobs, permits, redrives, returning
from mqks.broker.requests.audited import note
from mqks.broker.requests.checks import check_not_read_only, existing
from mqks.broker.requests.gathered_settles import PLAIN
from mqks.broker.requests.messages import check_publish, reject, release
from mqks.broker.requests.patience import may_wait, patiently
from mqks.broker.requests.plans import Plan, check_copies
from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work, finish
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.transaction import Transaction
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.terms import NewMessages, PublishTerms
from mqks.broker.spine.routing import singles
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.singles import Single
from mqks.errors import BadRequest, NotAllowed, PublishesWait, Unwritable
from mqks.limits import TRANSACTION_COPIES_MAX
from mqks.protocol.requests import ACTIONS, Batching, Move, Publish, Request, Settle, Trim, shown
from mqks.users import STRANGER

Kept = Sequence[tuple[Request, Any]]
Routed = dict[bytes, Queues]
AT_ONCE = frozenset((b"begin", b"commit", b"rollback", b"ping"))
"""Actions that are not kept until `commit`."""


def begin(broker: Broker, connection: Connection, request: Request, wanted: None) -> None:
    if connection.permissions is STRANGER:
        raise NotAllowed("the connection is not authenticated; send auth first")
    if connection.transaction is not None:
        raise BadRequest("begin: there is a begin already, without a commit or rollback after it")
    connection.transaction = Transaction(connection.flow)


def _ended(connection: Connection, action: str) -> Transaction:
    transaction, connection.transaction = connection.transaction, None
    if transaction is None:
        raise BadRequest(f"{action}: there is no begin before it")
    return transaction


def rollback(broker: Broker, connection: Connection, request: Request, wanted: None) -> None:
    _ended(connection, "rollback").end()


def commit(broker: Broker, connection: Connection, request: Request, wanted: None) -> Work[None]:
    transaction = _ended(connection, "commit")
    if transaction.failed:
        raise BadRequest("commit: nothing was done, because a request since begin was refused")
    return _commit(broker, connection, transaction)


def _commit(broker: Broker, connection: Connection, transaction: Transaction) -> Work[None]:
    kept = transaction.kept
    try:
        for at, (request, wanted) in enumerate(kept):
            if isinstance(wanted, Generator):  # Long data are checked in turns.
                try:
                    kept[at] = request, (yield from wanted)
                except BadRequest as failure:
                    raise _refused(broker, connection, request, failure) from None
        # The kept requests have a limit of their own.
        yield from patiently(broker, connection, 0, partial(_attempt, broker, connection, kept))
    finally:
        transaction.end()


def _attempt(broker: Broker, connection: Connection, kept: list[tuple[Request, Any]]) -> Work[None]:
    published = [wanted for _, wanted in kept if isinstance(wanted, Publish)]
    routes: Routed = {}
    copies = 0
    for event in dict.fromkeys(wanted.event for wanted in published if wanted.to is None):
        # More routes than copies are possible are not kept: each may be of very many queues.
        if copies <= TRANSACTION_COPIES_MAX:
            routes[event] = yield from broker.bindings.routes.find(event)
            copies += len(routes[event])
            yield GOES_ON
    plan = yield from _plan(broker, connection, kept, copies)
    yield from unique.read(_queues_with_keys(broker, kept, routes))
    while broker.publishing.once.unfinished and any(wanted.once_s for wanted in published):
        yield WAITS
    _do(broker, connection, kept, routes, plan)


def _queues_with_keys(broker: Broker, kept: Kept, routes: Routed) -> Iterable[Queue]:
    """Where unique messages may join."""
    found: Queues = {}
    for _, wanted in kept:
        if not (isinstance(wanted, Move) or (isinstance(wanted, Publish) and wanted.unique)):
            continue
        if wanted.to is not None:
            only = broker.queues.get(wanted.to)
            found |= {} if only is None else {only: None}
        elif isinstance(wanted, Move):  # Dead letters return to any of them.
            return broker.queues.values()
        else:
            found |= routes.get(wanted.event, {})
    return found


def _do(broker: Broker, connection: Connection, kept: Kept, routes: Routed, plan: Plan) -> None:
    """All of it, in this turn."""
    names = {wanted.name for _, wanted in kept if isinstance(wanted, Batching)}
    closed = dict[int, int]()
    with broker.batches.undone_if_refused(names):
        messages = _check(broker, connection, kept, routes, plan, closed)
    publishing, waiters = broker.publishing, broker.pending.waiters
    publishing.publisher = connection
    # Moves and trims are the first: consumers may take what is ready when others make room.
    taken, stay = plan.do()
    queues: Queues = {}
    alike: tuple[Queues, int] | None = None
    step: list[Single] = []
    """Messages for the same `queues` with terms of the same kind, which are one step."""
    for number, ((request, wanted), message) in enumerate(zip(kept, messages, strict=True)):
        told: int | bytes | None = None
        if isinstance(wanted, Move | Trim):
            told = redrives.told(taken[number], stay[number])
            if taken[number]:
                note(broker, connection, request, wanted, taken[number])
        elif isinstance(wanted, Batching):
            told = closed.get(number)
            if told != 0:
                note(broker, connection, request, wanted, told)
        # Those with an id of `--once`, a claim, or of which the result is kept, go singly.
        keeps = isinstance(wanted, Publish) and wanted.keep_us
        is_single = message is None or message[0].once_s or keeps or message[0].claim is not None
        gathered = None if is_single else message
        key = None if gathered is None else (gathered[1], _kind(gathered[0].terms))
        if step and key != alike:
            _give(broker, queues, step)
            step = []
        if gathered is not None:
            alike, queues = key, gathered[1]
            step.append(gathered[0])
        elif message is not None and isinstance(wanted, Publish) and wanted.keep_us:
            jobs.publish(broker, connection, message[0], wanted, message[1])
        elif message is not None:
            singles.publish_to(publishing, connection, *message)
            told = None if message[0].claim is None else message[0].claim.told
        elif isinstance(wanted, Settle):
            told = _settle(broker, connection, request, wanted)
        if request.confirm:
            connection.unconfirmed += 1
            waiters.confirmed += message is not None
            if told is None:
                waiters.confirms.append((connection, [request.id], []))
            else:
                text = told if isinstance(told, bytes) else b"%d" % told
                waiters.counts.append((connection, request.id, text))
    if step:
        _give(broker, queues, step)
    # All of it is in one piece of the batch, and nothing of it is written before the rest.
    broker.pending.in_one_piece |= bool(kept)


def _kind(terms: PublishTerms | None) -> int:
    """Messages whose terms are of one kind are published together."""
    # As `terms.put` distinguishes them.
    if terms is None:
        return 0
    return (3 if terms.due_us else 2 if terms.expires_us else 1) + 3 * terms.batch


def _give(broker: Broker, queues: Queues, step: list[Single]) -> None:
    ids, bodies = [each.id for each in step], [each.body for each in step]
    terms = [each.terms for each in step if each.terms is not None]
    differ = any(each != terms[0] for each in terms)
    new = NewMessages(ids, bodies, step[0].terms, terms if differ else ())
    broker.publishing.put(queues, new)


def _check(
    broker: Broker,
    connection: Connection,
    kept: Kept,
    routes: Routed,
    plan: Plan,
    closed: dict[int, int],
) -> list[tuple[Single, Queues] | None]:
    """For each of these requests the message that it publishes, and the queues for it. Raises if
    one of them is not possible, together with those before it; its id gets an error, too.

    Batches are opened and closed here: messages join them. `closed` gets how many each has closed.
    """
    if broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: commits are refused until the journal is writable")
    copies, results, result_bytes = plan.copies, 0, 0
    found: list[tuple[Single, Queues] | None] = []
    settled: Counter[tuple[bytes, bytes]] = Counter()
    new: set[bytes] = set()
    publishing = broker.publishing
    now = singles.now_of(publishing)
    # A queue may have been deleted since its messages were routed.
    alive = {
        event: {queue: None for queue in queues if not queue.deleted}
        for event, queues in routes.items()
    }
    try:
        for request, wanted in kept:
            if connection.permissions is not None:
                action = ACTIONS[request.action]
                finish(permits.check(broker, connection.permissions, action, request, wanted))
            found.append(None)
            if isinstance(wanted, Publish):
                queues = _queues(broker, wanted, alive)
                copies += len(queues)
                check_copies(copies)
                message = singles.single(publishing, request.id, wanted, now)
                check_publish(broker, connection, message, wanted, queues, results)
                results += wanted.keep_us > 0
                # What follows in this transaction finds so much less room.
                publishing.reserve(queues, len(message.body))
                found[-1] = message, queues
            elif isinstance(wanted, Move):
                check_not_read_only(broker)
                if wanted.source not in plan.targets:
                    existing(broker, request.action.decode(), wanted.source)
                if wanted.to is not None and wanted.to not in new:
                    broker.check_queue(connection.user, wanted.to, besides=len(new))
                    if wanted.to not in broker.queues:
                        new.add(wanted.to)
            elif isinstance(wanted, Settle):
                settled[wanted.consumer, wanted.message] += 1
                _check_held(broker, request, wanted, settled)
                result_bytes += jobs.check_result(broker, wanted, result_bytes)
            elif isinstance(wanted, Batching) and request.action == b"open_batch":
                batching.open_batch(broker, connection, request, wanted)
            elif isinstance(wanted, Batching):
                closing = batching.close_batch(broker, connection, request, wanted)
                closed[len(found) - 1] = finish(closing)
    except BadRequest as failure:
        if isinstance(failure, PublishesWait) and may_wait(broker, connection):
            raise
        raise _refused(broker, connection, request, failure) from None
    finally:
        for each in found:
            if each is not None:
                publishing.reserve(each[1], len(each[0].body), -1)
    return found


def _plan(
    broker: Broker, connection: Connection, kept: list[tuple[Request, Any]], copies: int
) -> Work[Plan]:
    """What moves and trims take: what is ready before the step that does it all."""
    plan, may = Plan(broker, connection.user), connection.permissions
    try:
        for step, (request, wanted) in enumerate(kept):
            if isinstance(wanted, Move):
                if wanted.source not in plan.targets:
                    existing(broker, request.action.decode(), wanted.source)
                if may is not None:
                    yield from permits.check(broker, may, ACTIONS[request.action], request, wanted)
                aim = redrives.aim_of(request, wanted, may)
                yield from plan.move(step, wanted, aim, copies)
            elif isinstance(wanted, Trim):
                plan.trim(step, wanted, copies)
    except BadRequest as failure:
        raise _refused(broker, connection, request, failure) from None
    return plan


def _refused(
    broker: Broker, connection: Connection, request: Request, failure: BadRequest
) -> BadRequest:
    """The error of `commit`, after that of one of its requests."""
    broker.refusals.refuse(connection, request.id + b" " + request.action, failure)
    return BadRequest(f"commit: nothing was done, because of {shown(request.id)}: {failure}")


def _queues(broker: Broker, wanted: Publish, routes: Routed) -> Queues:
    broker.metadata.check_names("event", [wanted.event])
    if wanted.to is not None:
        return {existing(broker, "publish", wanted.to): None}
    if wanted.event not in routes:  # There were too many copies without it.
        check_copies(TRANSACTION_COPIES_MAX + 1)
    return routes[wanted.event]


def _check_held(
    broker: Broker, request: Request, wanted: Settle, settled: Counter[tuple[bytes, bytes]]
) -> None:
    """Otherwise what follows from a message would be published twice: somebody else has it."""
    consumer = broker.consumers.get(wanted.consumer)
    held = 0
    if consumer is not None and wanted.message in consumer.unacked:
        held = 1 + len(consumer.repeated.get(wanted.message, ()))
    if settled[wanted.consumer, wanted.message] > held:
        raise BadRequest(
            f"{request.action.decode()}: the consumer {shown(wanted.consumer)} does not hold "
            f"{shown(wanted.message)}"
        )


def _settle(
    broker: Broker, connection: Connection, request: Request, wanted: Settle
) -> bytes | None:
    """Do what was checked; return what its confirm tells."""
    if request.action == b"ack":
        jobs.give_result(broker, wanted)
        returning.ack(broker, wanted.consumer, [wanted.message], together=True)
        return None
    work = (reject if request.action == b"reject" else release)(broker, connection, request, wanted)
    return None if work is None else cast("bytes | None", finish(work))


def keep_plain(broker: Broker, transaction: Transaction, line: bytes) -> bool:
    """Keep a line if it is a publish or an ack without flags; return whether it was. This takes
    2 µs, any other line 10."""
    try:
        request_id, action, argument, rest = line.split(b" ", 3)
    except ValueError:
        return False
    is_short = 0 < len(request_id) <= broker.metadata.name_bytes_max
    if transaction.failed or not is_short or not argument or argument[:2] == b"--":
        return False
    wanted: Publish | Settle
    if action == b"publish":
        wanted = Publish(argument, rest)
    elif action == b"ack" and rest >= PLAIN and b" " not in rest:
        wanted = Settle(argument, rest)
    else:
        return False
    try:
        transaction.keep(Request(request_id, action, False, b""), wanted, len(line))
    except BadRequest:
        return False  # The same again, with its reply.
    return True
