"""The table of actions: what each request means.

The one rule: a request that raises has changed nothing.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from mqks.broker.base.turns import GOES_ON, WAITS, Work, slices
from mqks.broker.broker import Broker
from mqks.broker.clients.connection import Connection, Slow
from mqks.broker.clients.consumer import Consumer, Rest
from mqks.broker.clients.tails import Tail
from mqks.broker.evaluate import expression
from mqks.broker.evaluate.state import State
from mqks.broker.message.policy import DEFAULT, Policy
from mqks.broker.queue import redrives, scheduled
from mqks.broker.queue.lane import Delivery
from mqks.broker.queue.purges import purge_some
from mqks.broker.queue.queue import Queue
from mqks.broker.queue.reads import Read
from mqks.broker.queue.selection import Chosen
from mqks.broker.requests import stats
from mqks.broker.routing.masks import Queues
from mqks.broker.routing.publishing import Single
from mqks.errors import BadRequest, LimitExceeded, Unwritable
from mqks.limits import (
    SEQ_MAX,
    STEP_NAMES,
)
from mqks.protocol import replies
from mqks.protocol.requests import (
    ACTIONS,
    ALL,
    Action,
    Answer,
    Consume,
    DeleteQueue,
    Log,
    Move,
    Peek,
    Publish,
    Purge,
    Range,
    Rebind,
    Request,
    Scheduled,
    Selection,
    SetQueue,
    Stats,
    Trim,
    WantedTail,
    shown,
)

Doing = Work[int | bytes | None] | None
"""Work for later turns, or None; a number or text that it returns is put into the confirm."""
Run = Callable[[Broker, Connection, Request, Any], Doing]
"""Does what a request wants. Raises BadRequest."""


def publish(broker: Broker, connection: Connection, request: Request, wanted: Publish) -> Doing:
    broker.metadata.check_names("event", [wanted.event])
    message = broker.publishing.single(request.id, wanted)
    if wanted.to is not None:
        return _publish_to(broker, connection, message, wanted, wanted.to)
    queues = broker.bindings.route(wanted.event)
    if queues is None or (message.once and broker.publishing.once_unfinished):
        return _publish_later(broker, connection, message, wanted)
    _check_publish(broker, connection, message, wanted, queues)
    broker.publishing.publish(connection, message, queues)
    return None


def _publish_to(
    broker: Broker, connection: Connection, message: Single, wanted: Publish, name: bytes
) -> Work[None]:
    """To one queue, whatever its event is bound to."""
    while message.once and broker.publishing.once_unfinished:
        yield WAITS
    queue = _existing(broker, "publish", name)
    only: Queues = {queue: None}
    _check_publish(broker, connection, message, wanted, only)
    broker.publishing.publish_to(connection, message, only, queue)


def _publish_later(
    broker: Broker, connection: Connection, message: Single, wanted: Publish
) -> Work[None]:
    """Publish a message when routing takes several turns, or after unfinished `--once` publishes.
    No other work runs between the check and the reservation in its queues."""
    queues = yield from broker.publishing.find(message)
    _check_publish(broker, connection, message, wanted, queues)
    yield from broker.publishing.publish_later(connection, message, queues)


def _check_publish(
    broker: Broker, connection: Connection, message: Single, wanted: Publish, queues: Queues
) -> None:
    """Raise if it must not be published to these queues."""
    publishing = broker.publishing
    is_known = wanted.once and publishing.is_known(connection, message.id)
    publishing.check_room(message, queues, is_known=is_known)
    if wanted.mandatory and not is_known:
        publishing.check_route(wanted.event, queues)


def subscribe(
    broker: Broker, connection: Connection, request: Request, wanted: Rebind
) -> Work[None]:
    broker.check_queue(wanted.queue)
    changed = yield from broker.bindings.rebind(wanted)
    yield from broker.make_queue(wanted.queue)
    if changed:
        yield from broker.tell_update(wanted.queue)
    yield from _warn_of_stars(broker, connection, request, wanted)


def consume(
    broker: Broker, connection: Connection, request: Request, wanted: Consume
) -> Work[None]:
    count = len(connection.consumers) - (request.id in connection.consumers)
    limit = broker.settings.consumers_per_connection_max
    if count >= limit:
        raise LimitExceeded(
            "consumers_per_connection_max",
            f"the limit of {limit} consumers is reached (consumers_per_connection_max)",
        )
    broker.check_consumer(request.id)
    is_kept = wanted.keep and wanted.queue in broker.queues
    _check_existing(broker, wanted)
    broker.check_queue(wanted.queue)
    rebound = False
    if not is_kept:
        rebound = yield from broker.bindings.rebind(wanted)
        # It may be deleted meanwhile; then its bindings are, too, these among them.
        _check_existing(broker, wanted)
    queue = yield from broker.make_queue(wanted.queue)
    ruled = not is_kept and broker.set_rule(queue, wanted.rule)
    consumer = Consumer(
        request.id,
        connection,
        queue,
        wanted.manual_ack,
        broker.settings.prefetch_max,
        prefetch=wanted.prefetch,
        meta=wanted.meta,
        defaults=Policy(backoff=wanted.backoff) if wanted.backoff else DEFAULT,
    )
    if request.confirm:
        consumer.rest(Rest.CONFIRM)
    yield from broker.add_consumer(consumer)
    if rebound or ruled:
        adds = wanted.add or wanted.add_masks
        yield from broker.tell_update(wanted.queue, but=None if adds else consumer)
    if request.confirm:
        broker.pending.waiters.held.append(consumer)
    consumer.queue.deliver()
    yield from _warn_of_stars(broker, connection, request, wanted)


def _check_existing(broker: Broker, wanted: Consume) -> None:
    if wanted.existing and wanted.queue not in broker.queues:
        raise BadRequest(
            f"consume: there is no queue {shown(wanted.queue)}, and --existing creates none "
            "(to create it: mqks consume --create, in Python create=True)"
        )


def rebind(broker: Broker, connection: Connection, request: Request, wanted: Rebind) -> Work[None]:
    if (yield from broker.bindings.rebind(wanted)):
        yield from broker.tell_update(wanted.queue)
    yield from _warn_of_stars(broker, connection, request, wanted)


def _warn_of_stars(
    broker: Broker, connection: Connection, request: Request, wanted: Rebind
) -> Work[None]:
    """An event with a star is an event of that name; whoever binds it may have meant a mask."""
    events = (*(wanted.replace or ()), *wanted.add)
    for some in slices(events, STEP_NAMES) if b"*" in request.rest else ():
        if event := next((event for event in some if b"*" in event), None):
            broker.on_literal_mask(connection, wanted.queue, event)
            return
        yield GOES_ON


def ack(broker: Broker, connection: Connection, request: Request, wanted: Answer) -> Doing:
    if wanted.message == ALL:
        return broker.ack_all(wanted.consumer, confirm=request.confirm)
    if request.confirm:
        broker.ack_surely(wanted.consumer, wanted.message)
    else:
        broker.ack(wanted.consumer, [wanted.message])
    return None


def reject(broker: Broker, connection: Connection, request: Request, wanted: Answer) -> Doing:
    _check_writable(broker, request)
    if wanted == Answer(wanted.consumer, wanted.message):
        return broker.give_up(wanted, Queue.reject)
    defaults = Policy(retries=wanted.retries, backoff=wanted.backoff)
    how = partial(Queue.reject, delay_us=wanted.delay_us, dead=wanted.dead, defaults=defaults)
    if wanted.selection is not None:
        chosen = Chosen(wanted.selection, broker.schedule.wall_us())
        return broker.give_up_some(wanted.consumer, how, chosen)
    if wanted.fate:
        return _reject_and_tell(broker, wanted, how)
    return broker.give_up(wanted, how)


def _reject_and_tell(
    broker: Broker, wanted: Answer, how: Callable[[Queue, Sequence[Delivery]], str | None]
) -> Work[bytes]:
    fates: list[bytes] = []

    def rejected(queue: Queue, deliveries: Sequence[Delivery]) -> None:
        if reason := how(queue, deliveries):
            target = broker.shared.dead_letter_queue(queue)
            fates.append(b" ".join([b"dead", reason.encode(), *([target.name] if target else [])]))

    broker.give_up(wanted, rejected)
    yield from ()
    return b"".join(fates)


def release(broker: Broker, connection: Connection, request: Request, wanted: Answer) -> Doing:
    _check_writable(broker, request)
    return broker.give_up(wanted, partial(Queue.release, delay_us=wanted.delay_us))


def _check_writable(broker: Broker, request: Request) -> None:
    if request.confirm and broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: the new place of the message would not be durable")


def touch(broker: Broker, connection: Connection, request: Request, wanted: Answer) -> None:
    broker.touch(wanted.consumer, wanted.message)


def cancel(broker: Broker, connection: Connection, request: Request, wanted: Scheduled) -> Doing:
    message_id = None if wanted.message == ALL else wanted.message
    cancelled = scheduled.cancel(broker, wanted.queue, message_id)
    return broker.dropped(wanted.queue, cancelled, confirm=request.confirm)


def promote(broker: Broker, connection: Connection, request: Request, wanted: Scheduled) -> Doing:
    _check_writable(broker, request)
    message_id = None if wanted.message == ALL else wanted.message
    return scheduled.promote(broker, wanted.queue, message_id)


def move(broker: Broker, connection: Connection, request: Request, wanted: Move) -> Doing:
    _check_writable(broker, request)
    return redrives.move(broker, _existing(broker, "move", wanted.source), wanted)


def redrive(broker: Broker, connection: Connection, request: Request, wanted: Move) -> Doing:
    _check_writable(broker, request)
    source = _existing(broker, "redrive", wanted.source)
    return redrives.redrive(broker, source, wanted, connection.permissions)


def delete_consumer(
    broker: Broker, connection: Connection, request: Request, wanted: Answer
) -> Doing:
    consumer = broker.consumers.get(wanted.consumer)
    return None if consumer is None else broker.delete_consumers([consumer])


def delete_queue(
    broker: Broker, connection: Connection, request: Request, wanted: DeleteQueue
) -> Work[None]:
    if wanted.rule is None:
        yield from broker.delete_queue(wanted.queue)
        return
    queue = broker.queues.get(wanted.queue)
    if queue is None:
        return
    broker.set_rule(queue, wanted.rule)
    if not queue.consumers:
        yield from broker.unused(queue)


def set_queue(broker: Broker, connection: Connection, request: Request, wanted: SetQueue) -> Doing:
    return broker.policies.set(wanted)


def purge(broker: Broker, connection: Connection, request: Request, wanted: Purge) -> Doing:
    work: Work[int | None]
    if wanted.selection or wanted.limit:
        some = wanted.selection or Selection()
        work = _purge_some(broker, wanted.queue, some, wanted.limit or SEQ_MAX)
    else:
        work = _purge_all(broker, wanted.queue, is_scheduled=wanted.scheduled)
    return broker.dropped(wanted.queue, work, confirm=request.confirm)


def _purge_all(broker: Broker, name: bytes, *, is_scheduled: bool) -> Work[int | None]:
    count = yield from broker.trim(name, None)
    if is_scheduled:
        count = (count or 0) + (yield from scheduled.cancel(broker, name, None))
    return count


def _purge_some(broker: Broker, name: bytes, selection: Selection, limit: int) -> Work[int]:
    queue = broker.queues.get(name)
    if queue is None:
        return 0
    count = yield from purge_some(queue, Chosen(selection, broker.schedule.wall_us()), limit)
    broker.purged += count
    return count


def trim(broker: Broker, connection: Connection, request: Request, wanted: Trim) -> Doing:
    queue = broker.queues.get(wanted.queue)
    if queue is not None:
        _check_epoch(broker, "trim", queue, wanted.epoch)
    trimmed = broker.trim(wanted.queue, wanted.seq)
    return broker.dropped(wanted.queue, trimmed, confirm=request.confirm)


def _check_epoch(broker: Broker, action: str, queue: Queue, epoch: bytes | None) -> None:
    if epoch is not None and epoch != broker.shared.facts.epoch_of(queue.id).encode():
        raise BadRequest(f"{action}: the queue was created again: its epoch is not {shown(epoch)}")


def peek(broker: Broker, connection: Connection, request: Request, wanted: Peek) -> None:
    queue = broker.queues.get(wanted.queue)
    # A queue that does not exist has number 0, and no messages; its name is not stored.
    name, queue_id = (b"", 0) if queue is None else (queue.name, queue.id)
    form = "scheduled" if wanted.scheduled else "peek"
    some = wanted.selection
    chosen = None if some is None else Chosen(some, broker.schedule.wall_us())
    first, limit = wanted.after + 1, wanted.limit
    broker.read(
        connection, Read(request.id, form, name, queue_id, first, limit=limit, chosen=chosen)
    )


def tail(broker: Broker, connection: Connection, request: Request, wanted: WantedTail) -> None:
    queue = None if wanted.queue is None else _existing(broker, "tail", wanted.queue)
    broker.tails.check_room(connection, request.id)
    broker.metadata.check_names("event", wanted.events)
    if request.id in connection.tails:
        broker.end_tails([connection.tails[request.id]])
    broker.tails.add(Tail(request.id, connection, *wanted), queue)


def read(broker: Broker, connection: Connection, request: Request, wanted: Log) -> None:
    _, first, end, limit, epoch, has_meta = wanted
    queue = _existing(broker, "read", wanted.queue)
    _check_epoch(broker, "read", queue, epoch)
    if epoch is not None:
        _check_history(broker, connection, queue, first)
    page = Read(request.id, "read", queue.name, queue.id, first, end, limit, has_meta=has_meta)
    broker.read(connection, page)


def _check_history(broker: Broker, connection: Connection, queue: Queue, first: int) -> None:
    """Clients read only what is durable. So none with this epoch has read beyond the end, unless
    the database went back since."""
    if first > queue.lane.next_seq:
        broker.reverts_seen += 1
        broker.on_revert(connection, queue, first)
        raise BadRequest(
            f"read: the queue ends at {queue.lane.next_seq}, and was read up to {first} under the "
            "same epoch: the database went back to an earlier state. Stop the server and run mqks "
            "new-epoch"
        )


def range_(broker: Broker, connection: Connection, request: Request, wanted: Range) -> None:
    queue = _existing(broker, "range", wanted.queue)
    broker.read(connection, Read(request.id, "range", queue.name, queue.id, at_us=wanted.at_us))


def _existing(broker: Broker, action: str, name: bytes) -> Queue:
    queue = broker.queues.get(name)
    if queue is None:
        raise BadRequest(f"{action}: there is no queue {shown(name)}")
    return queue


def tell_stats(
    broker: Broker, connection: Connection, request: Request, wanted: Stats
) -> Work[None]:
    if connection.closed:
        return
    told = yield from stats.ask(broker, connection, wanted)
    result = yield from (_object(told) if isinstance(told, dict) else _array(told))
    if not connection.closed:
        connection.write(replies.ok(request.id, result.encode()))


def _object(row: stats.Row) -> Work[str]:
    """A row as JSON; a list in it may be long."""
    members = []
    for name, value in row.items():
        told = _array(slices(value, STEP_NAMES)) if isinstance(value, list) else None
        text = json.dumps(value) if told is None else (yield from told)
        members.append(f'"{name}": {text}')
    return f"{{{', '.join(members)}}}"


def _array(pieces: Iterable[Sequence[Any]]) -> Work[str]:
    """A list as JSON, piece by piece."""
    texts = []
    for piece in pieces:
        if piece:
            texts.append(json.dumps(piece)[1:-1])
        yield GOES_ON
    return f"[{', '.join(texts)}]"


def help_(broker: Broker, connection: Connection, request: Request, name: bytes | None) -> None:
    if name is not None and name not in ACTIONS:
        raise BadRequest(f"help: there is no action {shown(name)}; 'help' lists all")
    told = b" ".join(ACTIONS) if name is None else ACTIONS[name].help.encode()
    connection.write(replies.ok(request.id, told))


def close_connection(
    broker: Broker, connection: Connection, request: Request, number: int
) -> Work[int | None]:
    yield from ()  # It has no more turns than this.
    other = broker.connections.get(number)
    if other is None or other.expelled:
        return 0
    by = connection.address if connection.user is None else f"user {connection.user}"
    broker.refusals.expel(other, f"closed by {by} (close_connection)")
    broker.shared.expelled.append(other)
    return 1


def set_name(broker: Broker, connection: Connection, request: Request, name: bytes) -> None:
    broker.metadata.check_names("name", [name])
    connection.name = name.decode("utf-8", "surrogateescape")


def auth(
    broker: Broker, connection: Connection, request: Request, words: tuple[bytes, ...]
) -> None:
    access = broker.access
    *names, secret = words
    if names:
        access.log_in(connection, request, names[0], secret)
    else:
        access.authenticate(connection, access.users.by_token(secret))


def ping(broker: Broker, connection: Connection, request: Request, data: bytes) -> None:
    connection.write(replies.ok(request.id, data))


def evaluate(broker: Broker, connection: Connection, request: Request, source: str) -> Work[None]:
    settings = broker.settings
    if settings.eval == "off" or (settings.eval == "loopback" and not connection.local):
        raise BadRequest(f"_eval is not allowed: the setting eval is {settings.eval}")
    if connection.eval_steps is None:
        connection.eval_steps = expression.Allowance()
    names = {
        "state": State(broker, connection.eval_steps.spend),
        "request": {
            "id": request.id.decode("utf-8", "surrogateescape"),
            "action": "_eval",
            "client": connection.id,
        },
        "WORKERS": 1,
        "config": {**settings.public(), "workers": [f"{settings.host}:{settings.port}"]},
    }
    work = expression.evaluate(source, names, connection.eval_steps)
    place = yield from broker.evaluations.take()
    try:
        while not connection.closed:  # Stop evaluating when nobody waits for the result.
            if connection.rests & Slow.END:
                raise BadRequest("_eval: the server is stopping")
            try:
                next(work)
            except StopIteration as end:
                connection.write(replies.ok(request.id, expression.render(end.value)))
                return
            yield GOES_ON
    finally:
        broker.evaluations.leave(place)


_RUNS: dict[bytes, Run] = {
    b"publish": publish,
    b"subscribe": subscribe,
    b"consume": consume,
    b"rebind": rebind,
    b"ack": ack,
    b"reject": reject,
    b"release": release,
    b"touch": touch,
    b"cancel": cancel,
    b"promote": promote,
    b"move": move,
    b"redrive": redrive,
    b"delete_consumer": delete_consumer,
    b"delete_queue": delete_queue,
    b"set_queue": set_queue,
    b"purge": purge,
    b"peek": peek,
    b"tail": tail,
    b"range": range_,
    b"read": read,
    b"trim": trim,
    b"stats": tell_stats,
    b"help": help_,
    b"auth": auth,
    b"set_name": set_name,
    b"close_connection": close_connection,
    b"ping": ping,
    b"_eval": evaluate,
}
RUNS: dict[bytes, tuple[Action, Run]] = {
    name: (action, _RUNS[name]) for name, action in ACTIONS.items()
}
