"""The table of actions: what each request means.

The one rule: a request that raises has changed nothing.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mqks.broker.base.turns import GOES_ON, WAITS, Work, slices
from mqks.broker.broker import Broker
from mqks.broker.clients import permits
from mqks.broker.clients.connection import Connection, Slow
from mqks.broker.clients.consumer import Consumer, Rest
from mqks.broker.clients.tails import Tail
from mqks.broker.evaluate import expression
from mqks.broker.evaluate.state import State
from mqks.broker.message.policy import DEFAULT, Policy
from mqks.broker.message.states import Event
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
    PEEK_ROWS_DEFAULT,
    READ_ROWS_DEFAULT,
    READ_ROWS_MAX,
    SEQ_MAX,
    STATS_ROWS_MAX,
    STEP_NAMES,
)
from mqks.protocol import replies
from mqks.protocol.masks import MASK
from mqks.protocol.requests import (
    ALL,
    META,
    SCHEDULED,
    Consume,
    Publish,
    Rebind,
    Request,
    Selection,
    Settle,
    parse_auth,
    parse_consume,
    parse_delete_queue,
    parse_eval,
    parse_move,
    parse_name,
    parse_number,
    parse_peek,
    parse_publish,
    parse_purge,
    parse_rebind,
    parse_redrive,
    parse_reject,
    parse_release,
    parse_scheduled,
    parse_set_queue,
    parse_settle,
    parse_subscribe,
    parse_tail,
    parse_touch,
    parse_words,
    shown,
)

Doing = Work[int | None] | Work[bytes] | Work[None] | None
"""Work for later turns, or None; a number or text that it returns is put into the confirm."""


class Action(NamedTuple):
    run: Callable[[Broker, Connection, Request], Doing]
    needs: permits.Needs
    usage: str


def publish(broker: Broker, connection: Connection, request: Request) -> Work[None] | None:
    wanted = parse_publish(request.rest)
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
    queue = _existing(broker, "publish", [name])
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


def subscribe(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    wanted = yield from parse_subscribe(request.rest, broker.bindings.events_max)
    broker.check_queue(wanted.queue)
    changed = yield from broker.bindings.rebind(wanted)
    yield from broker.make_queue(wanted.queue)
    if changed:
        yield from broker.tell_update(wanted.queue)
    events = (*(wanted.replace or ()), *wanted.add)
    yield from _warn_of_stars(broker, connection, request, wanted.queue, events)


def consume(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    wanted = yield from parse_consume(request.rest, broker.bindings.events_max)
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
        rebound = yield from broker.bindings.rebind(
            Rebind(
                wanted.queue,
                replace=wanted.events or None,
                add=wanted.add,
                add_masks=wanted.add_masks,
            )
        )
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
    yield from _warn_of_stars(
        broker, connection, request, wanted.queue, (*wanted.events, *wanted.add)
    )


def _check_existing(broker: Broker, wanted: Consume) -> None:
    if wanted.existing and wanted.queue not in broker.queues:
        raise BadRequest(
            f"consume: there is no queue {shown(wanted.queue)}, and --existing creates none "
            "(to create it: mqks consume --create, in Python create=True)"
        )


def rebind(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    wanted = yield from parse_rebind(request.rest, broker.bindings.events_max)
    if (yield from broker.bindings.rebind(wanted)):
        yield from broker.tell_update(wanted.queue)
    events = (*(wanted.replace or ()), *wanted.add)
    yield from _warn_of_stars(broker, connection, request, wanted.queue, events)


def _warn_of_stars(
    broker: Broker, connection: Connection, request: Request, queue: bytes, events: Sequence[bytes]
) -> Work[None]:
    """An event with a star is an event of that name; whoever binds it may have meant a mask."""
    for some in slices(events, STEP_NAMES) if b"*" in request.rest else ():
        if event := next((event for event in some if b"*" in event), None):
            broker.on_literal_mask(connection, queue, event)
            return
        yield GOES_ON


def ack(broker: Broker, connection: Connection, request: Request) -> Work[None] | None:
    consumer_id, message_id = parse_settle("ack", request.rest)
    if message_id == ALL:
        return broker.ack_all(consumer_id, confirm=request.confirm)
    if request.confirm:
        broker.ack_surely(consumer_id, message_id)
    else:
        broker.ack(consumer_id, [message_id])
    return None


def reject(
    broker: Broker, connection: Connection, request: Request
) -> Work[int | None] | Work[bytes] | Work[None] | None:
    wanted = parse_reject(request.rest)
    _check_writable(broker, request)
    defaults = DEFAULT
    if wanted.retries is not None or wanted.backoff is not None:
        defaults = Policy(retries=wanted.retries, backoff=wanted.backoff)
    event = Event.KILL if wanted.dead else Event.REJECT
    how = partial(Queue.give_back, event=event, delay_us=wanted.delay_us, defaults=defaults)
    if wanted.selection is not None:
        chosen = Chosen(wanted.selection, broker.schedule.wall_us())
        return broker.give_up_some(wanted.consumer, how, chosen)
    if wanted.fate:
        return _reject_and_tell(broker, wanted, how)
    return broker.give_up(wanted, how)


def _reject_and_tell(
    broker: Broker, wanted: Settle, how: Callable[[Queue, Sequence[Delivery]], Event | None]
) -> Work[bytes]:
    fates: list[bytes] = []

    def rejected(queue: Queue, deliveries: Sequence[Delivery]) -> None:
        if reason := how(queue, deliveries):
            target = queue.rules.dead_letters
            fates.append(b" ".join([b"dead", reason.encode(), *([target] if target else [])]))

    broker.give_up(wanted, rejected)
    yield from ()
    return b"".join(fates)


def release(broker: Broker, connection: Connection, request: Request) -> Work[None] | None:
    wanted = parse_release(request.rest)
    _check_writable(broker, request)
    return broker.give_up(
        wanted, partial(Queue.give_back, event=Event.RELEASE, delay_us=wanted.delay_us)
    )


def _check_writable(broker: Broker, request: Request) -> None:
    if request.confirm and broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: the new place of the message would not be durable")


def touch(broker: Broker, connection: Connection, request: Request) -> None:
    broker.touch(*parse_touch(request.rest))


def cancel(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    name, message_id = parse_scheduled("cancel", request.rest)
    cancelled = scheduled.cancel(broker, name, None if message_id == ALL else message_id)
    return broker.dropped(name, cancelled, confirm=request.confirm)


def promote(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    name, message_id = parse_scheduled("promote", request.rest)
    _check_writable(broker, request)
    return scheduled.promote(broker, name, None if message_id == ALL else message_id)


def move(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    wanted = parse_move(request.rest)
    _check_writable(broker, request)
    return redrives.move(broker, _existing(broker, "move", [wanted.source]), wanted)


def redrive(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    wanted = parse_redrive(request.rest)
    _check_writable(broker, request)
    source = _existing(broker, "redrive", [wanted.source])
    return redrives.redrive(broker, source, wanted, connection.permissions)


def delete_consumer(broker: Broker, connection: Connection, request: Request) -> Work[None] | None:
    consumer = broker.consumers.get(parse_name("delete_consumer", request.rest))
    return None if consumer is None else broker.delete_consumers([consumer])


def delete_queue(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    name, rule = parse_delete_queue(request.rest)
    if rule is None:
        yield from broker.delete_queue(name)
        return
    queue = broker.queues.get(name)
    if queue is None:
        return
    broker.set_rule(queue, rule)
    if not queue.consumers:
        yield from broker.unused(queue)


def set_queue(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    return broker.policies.set(parse_set_queue(request.rest))


def purge(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    name, selection, limit, is_scheduled = parse_purge(request.rest)
    work: Work[int | None]
    if selection or limit:
        work = _purge_some(broker, name, selection or Selection(), limit or SEQ_MAX)
    else:
        work = _purge_all(broker, name, is_scheduled=is_scheduled)
    return broker.dropped(name, work, confirm=request.confirm)


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


def trim(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    words, _, texts = parse_words("trim", request.rest, 2, text={b"--epoch"})
    if len(words) != 2:
        raise BadRequest(
            f"trim: needs a queue and a sequence number; arguments found: {len(words)}"
        )
    name, number = words[0], parse_number("trim", words[1], 0, SEQ_MAX)
    queue, epoch = broker.queues.get(name), texts.get(b"--epoch")
    if queue is not None and epoch is not None:
        _check_epoch(broker, "trim", queue, epoch)
    return broker.dropped(name, broker.trim(name, number), confirm=request.confirm)


def _check_epoch(broker: Broker, action: str, queue: Queue, epoch: bytes) -> None:
    if epoch != broker.shared.facts.epoch_of(queue.id).encode():
        raise BadRequest(f"{action}: the queue was created again: its epoch is not {shown(epoch)}")


def peek(broker: Broker, connection: Connection, request: Request) -> None:
    wanted, numbers, selection = parse_peek(request.rest)
    queue = broker.queues.get(wanted)
    first = numbers.get(b"--after", 0) + 1
    limit = numbers.get(b"--limit", PEEK_ROWS_DEFAULT)
    # A queue that does not exist has number 0, and no messages; its name is not stored.
    name, queue_id = (b"", 0) if queue is None else (queue.name, queue.id)
    form = "scheduled" if SCHEDULED in numbers else "peek"
    chosen = None if selection is None else Chosen(selection, broker.schedule.wall_us())
    read = Read(request.id, form, name, queue_id, first, limit=limit, chosen=chosen)
    broker.read(connection, read)


def tail(broker: Broker, connection: Connection, request: Request) -> None:
    wanted = parse_tail(request.rest)
    queue = None if wanted.queue is None else _existing(broker, "tail", [wanted.queue])
    broker.tails.check_room(connection, request.id)
    broker.metadata.check_names("event", wanted.events)
    if request.id in connection.tails:
        broker.end_tails([connection.tails[request.id]])
    broker.tails.add(Tail(request.id, connection, *wanted), queue)


def read(broker: Broker, connection: Connection, request: Request) -> None:
    names, numbers, texts = parse_words(
        "read",
        request.rest,
        1,
        {b"--from": (0, SEQ_MAX), b"--to": (0, SEQ_MAX), b"--limit": (1, READ_ROWS_MAX)},
        text={b"--epoch"},
        switches=(META,),
    )
    queue = _existing(broker, "read", names)
    if b"--from" not in numbers:
        raise BadRequest("read: --from is missing, as in: read orders --from=1")
    limit = numbers.get(b"--limit", READ_ROWS_DEFAULT)
    end = numbers.get(b"--to")
    first, has_meta = numbers[b"--from"], META in numbers
    if (epoch := texts.get(b"--epoch")) is not None:
        _check_epoch(broker, "read", queue, epoch)
        _check_history(broker, connection, queue, first)
    wanted = Read(request.id, "read", queue.name, queue.id, first, end, limit, has_meta=has_meta)
    broker.read(connection, wanted)


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


def range_(broker: Broker, connection: Connection, request: Request) -> None:
    names, numbers, _ = parse_words("range", request.rest, 1, {b"--at": (0, SEQ_MAX)})
    queue = _existing(broker, "range", names)
    wanted = Read(request.id, "range", queue.name, queue.id, at_us=numbers.get(b"--at"))
    broker.read(connection, wanted)


def _needed(action: str, names: list[bytes]) -> bytes:
    if not names:
        raise BadRequest(f"{action}: the queue is missing")
    return names[0]


def _existing(broker: Broker, action: str, names: list[bytes]) -> Queue:
    name = _needed(action, names)
    queue = broker.queues.get(name)
    if queue is None:
        raise BadRequest(f"{action}: there is no queue {shown(name)}")
    return queue


def tell_stats(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    words, numbers, texts = parse_words(
        "stats",
        request.rest,
        2,
        {b"--limit": (1, STATS_ROWS_MAX)},
        {b"--after", b"--then", b"--mask"},
    )
    if connection.closed:
        return
    mask = texts.get(b"--mask")
    then = texts.get(b"--then", b"") if mask is None else MASK + mask
    after = texts.get(b"--after", b""), then
    limit = numbers.get(b"--limit")
    told = yield from stats.ask(broker, connection, words, after, limit)
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


def help_(broker: Broker, connection: Connection, request: Request) -> None:
    words, _, _ = parse_words("help", request.rest, 1)
    if not words:
        connection.write(replies.ok(request.id, b" ".join(ACTIONS)))
        return
    action = ACTIONS.get(words[0])
    if action is None:
        raise BadRequest(f"help: there is no action {shown(words[0])}; 'help' lists all")
    usage = f"{words[0].decode()} [--confirm] {action.usage}".rstrip()
    connection.write(replies.ok(request.id, usage.encode()))


def close_connection(broker: Broker, connection: Connection, request: Request) -> Work[int | None]:
    yield from ()  # It has no more turns than this.
    words, _, _ = parse_words("close_connection", request.rest, 1)
    if not words:
        raise BadRequest("close_connection: the number of the connection is missing")
    other = broker.connections.get(parse_number("close_connection", words[0], 0, SEQ_MAX))
    if other is None or other.expelled:
        return 0
    by = connection.address if connection.user is None else f"user {connection.user}"
    broker.refusals.expel(other, f"closed by {by} (close_connection)")
    broker.shared.expelled.append(other)
    return 1


def set_name(broker: Broker, connection: Connection, request: Request) -> None:
    name = parse_name("set_name", request.rest)
    broker.metadata.check_names("name", [name])
    connection.name = name.decode("utf-8", "surrogateescape")


def auth(broker: Broker, connection: Connection, request: Request) -> None:
    access = broker.access
    name, secret = parse_auth(request.rest)
    if name is None:
        access.authenticate(connection, access.users.by_token(secret))
    else:
        access.log_in(connection, request, name, secret)


def ping(broker: Broker, connection: Connection, request: Request) -> None:
    connection.write(replies.ok(request.id, request.rest))


def evaluate(broker: Broker, connection: Connection, request: Request) -> Work[None]:
    settings = broker.settings
    if settings.eval == "off" or (settings.eval == "loopback" and not connection.local):
        raise BadRequest(f"_eval is not allowed: the setting eval is {settings.eval}")
    source = parse_eval(request.rest)
    if connection.eval_steps is None:
        connection.eval_steps = expression.Allowance(
            expression.LIMITS.steps_max,
            "the expression takes too many steps",
        )
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
    work = expression.evaluating(source, names, budget=connection.eval_steps)
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


SELECTION = "[--event={mask}] [--id={msg_id}] [--older={seconds}] [--limit={n}]"
ACTIONS = {
    b"publish": Action(
        publish,
        permits.publish,
        "[--once] [--mandatory] [--delay={seconds}|--at={time}] [--ttl={seconds}] "
        "[--meta={key}={value}[&...]] [--to={queue}] {event} {data}",
    ),
    b"subscribe": Action(
        subscribe,
        permits.subscribe,
        "{queue} [{event} ...] [--add {event} ...] [--add-mask {mask} ...]",
    ),
    b"consume": Action(
        consume,
        permits.consume,
        "{queue} [{event} ...] [--add {event} ...] [--add-mask {mask} ...] "
        "[--delete-queue-when-unused[={seconds}]] [--manual-ack] [--prefetch={n}] "
        "[--backoff={first}[,{max}]] [--meta] [--existing] [--keep]",
    ),
    b"rebind": Action(
        rebind,
        permits.rebind,
        "{queue} [{event} ...] [--remove {event} ...] [--remove-mask {mask} ...] "
        "[--add {event} ...] [--add-mask {mask} ...]",
    ),
    b"ack": Action(ack, permits.consumer, "{consumer_id} {msg_id}|--all"),
    b"reject": Action(
        reject,
        permits.consumer,
        "{consumer_id} {msg_id}|--all "
        "[--dead | [--retries={n}] [--delay={seconds} | --backoff={first}[,{max}]]] "
        "[--event={mask}] [--id={msg_id}] [--older={seconds}] [--fate]",
    ),
    b"release": Action(
        release, permits.consumer, "{consumer_id} {msg_id}|--all [--delay={seconds}]"
    ),
    b"touch": Action(touch, permits.consumer, "{consumer_id} {msg_id}|--all"),
    b"cancel": Action(cancel, permits.queue, "{queue} {msg_id}|--all"),
    b"promote": Action(promote, permits.queue, "{queue} {msg_id}|--all"),
    b"move": Action(move, permits.move, "{queue} {queue} " + SELECTION),
    b"redrive": Action(redrive, permits.move, "{queue} [--to={queue}] " + SELECTION),
    b"delete_consumer": Action(delete_consumer, permits.consumer, "{consumer_id}"),
    b"delete_queue": Action(delete_queue, permits.admin, "{queue} [--when-unused[={seconds}]]"),
    b"set_queue": Action(
        set_queue,
        permits.set_queue,
        "{queue} [--retries={n}] [--losses={n}] [--backoff={first}[,{max}]] "
        "[--dead-letters={queue}] [--ttl={seconds}] [--messages-max={n}] [--bytes-max={n}] "
        "[--overflow=reject|drop] [--single-consumer=yes|no] [--ack-timeout={seconds}] [--reset]",
    ),
    b"purge": Action(purge, permits.admin, "{queue} [--scheduled] " + SELECTION),
    b"peek": Action(peek, permits.read, "{queue} [--scheduled] [--after={seq}] " + SELECTION),
    b"tail": Action(tail, permits.tail, "[--queue={queue}] [{event}|{mask} ...]"),
    b"range": Action(range_, permits.read, "{queue} [--at={microseconds}]"),
    b"read": Action(
        read,
        permits.read,
        "{queue} --from={seq} [--to={seq}] [--limit={n}] [--epoch={epoch}] [--meta]",
    ),
    b"trim": Action(trim, permits.queue, "{queue} {seq} [--epoch={epoch}]"),
    b"stats": Action(
        tell_stats,
        permits.stats,
        "[{what} [{name}]] [--after={key} [--then={key}|--mask={mask}]] [--limit={n}]",
    ),
    b"help": Action(help_, permits.nothing, "[{action}]"),
    b"auth": Action(auth, permits.nothing, "{token} | {user} {password}"),
    b"set_name": Action(set_name, permits.nothing, "{name}"),
    b"close_connection": Action(close_connection, permits.admin, "{number}"),
    b"ping": Action(ping, permits.nothing, "{data}"),
    b"_eval": Action(evaluate, permits.eval_, "[--worker=0] {expression}"),
}
