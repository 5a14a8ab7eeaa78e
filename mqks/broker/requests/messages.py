"""Requests about messages: to publish them, now or by a schedule, ack, reject, release and touch
them.

The one rule: a request that raises has changed nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial

from mqks.broker.broker import Broker
from mqks.broker.requests import jobs, permits, returning
from mqks.broker.requests.checks import Doing, check_not_read_only, check_writable, existing
from mqks.broker.requests.patience import patiently
from mqks.broker.spine.base.turns import WAITS, Work, finish
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen
from mqks.broker.spine.routing import singles
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.singles import Single
from mqks.errors import PublishesWait, Unwritable
from mqks.protocol.requests import ACTIONS, ALL, Publish, Request, Scheduling, Settle


def publish(broker: Broker, connection: Connection, request: Request, wanted: Publish) -> Doing:
    broker.metadata.check_names("event", [wanted.event])
    queues = None
    if wanted.to is None and not (wanted.keep_us or wanted.unique):
        queues = broker.bindings.routes.route(wanted.event)
    # Its line may be one of these works, which is confirmed when that ends.
    is_later = connection.works or (wanted.once_s and broker.publishing.once.unfinished)
    if queues is not None and not is_later:
        message = singles.single(broker.publishing, request.id, wanted)
        try:
            check_publish(broker, connection, message, wanted, queues)
            singles.publish(broker.publishing, connection, message, queues)
            return None
        except PublishesWait:
            pass
    later = partial(_publish_later, broker, connection, request, wanted)
    return patiently(broker, connection, len(wanted.data), later)


def _publish_later(
    broker: Broker, connection: Connection, request: Request, wanted: Publish
) -> Work[int | bytes | None]:
    """Publish a message when routing takes several turns, after unfinished `--once` publishes, to
    one queue, whatever its event is bound to, at the end of a pause, or if it is unique or its
    result is kept. No other work runs between the check and the reservation in its queues."""
    message = singles.single(broker.publishing, request.id, wanted)
    if wanted.to is None:
        queues = yield from singles.find(broker.publishing, message)
    else:
        queues = {existing(broker, "publish", wanted.to): None}
    yield from singles.read_keys(broker.publishing, message, queues)
    while message.once_s and broker.publishing.once.unfinished:
        yield WAITS
    if wanted.to is not None:  # It may have been deleted meanwhile.
        queues = {existing(broker, "publish", wanted.to): None}
    if connection.permissions is not None:  # They may be others than when it came.
        action = ACTIONS[request.action]
        finish(permits.check(broker, connection.permissions, action, request, wanted))
    check_publish(broker, connection, message, wanted, queues)
    if wanted.keep_us:
        jobs.publish(broker, connection, message, wanted, queues)
    elif wanted.to is None:
        yield from singles.publish_later(broker.publishing, connection, message, queues)
    else:
        singles.publish_to(broker.publishing, connection, message, queues)
    return None if message.claim is None else message.claim.told


def check_publish(
    broker: Broker,
    connection: Connection,
    message: Single,
    wanted: Publish,
    queues: Queues,
    results_before: int = 0,
) -> None:
    """Raise if it must not be published to these queues."""
    publishing = broker.publishing
    is_known = bool(wanted.once_s) and publishing.once.knows(connection, message.id)
    singles.check(publishing, message, queues, mandatory=wanted.mandatory, is_known=is_known)
    if wanted.keep_us and not is_known:
        broker.results.check(wanted, queues, results_before)


def schedule(broker: Broker, connection: Connection, request: Request, wanted: Scheduling) -> Doing:
    _check_schedulable(broker)
    check_not_read_only(broker)
    if wanted.publish is not None:
        broker.metadata.check_names("schedule", [wanted.name])
        broker.metadata.check_names("event", [wanted.publish.event])
        broker.schedules.put(wanted)
    elif not wanted.run:
        broker.schedules.pause(wanted.name, paused=wanted.pause)
    return broker.schedules.run(wanted.name) if wanted.run else None


def unschedule(
    broker: Broker, connection: Connection, request: Request, wanted: Scheduling
) -> None:
    _check_schedulable(broker)
    broker.schedules.remove(wanted.name)


def _check_schedulable(broker: Broker) -> None:
    # Also without a confirm: nobody would hear later that a schedule was not durable.
    if broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: schedules can't be changed")


def _note_if_of_others(
    broker: Broker, connection: Connection, request: Request, wanted: Settle
) -> None:
    """A consumer's own connection acks and rejects all the time; that another one does is rare."""
    consumer = broker.consumers.get(wanted.consumer)
    if consumer is not None and consumer.connection is not connection:
        broker.audit.note(connection, request.action.decode(), request.rest)


def ack(broker: Broker, connection: Connection, request: Request, wanted: Settle) -> Doing:
    if wanted.message == ALL:
        _note_if_of_others(broker, connection, request, wanted)
        return returning.ack_all(broker, wanted.consumer, confirm=request.confirm)
    if wanted.result is not None:
        return jobs.ack(broker, request, wanted)
    returning.ack(broker, wanted.consumer, [wanted.message], confirm=request.confirm)
    return None


def reject(broker: Broker, connection: Connection, request: Request, wanted: Settle) -> Doing:
    check_writable(broker, request)
    _note_if_of_others(broker, connection, request, wanted)
    defaults = DEFAULT
    if wanted.retries is not None or wanted.backoff is not None:
        defaults = Policy(retries=wanted.retries, backoff=wanted.backoff)
    event = Event.KILL if wanted.dead else Event.REJECT
    how = partial(
        Queue.give_back, event=event, delay_us=wanted.delay_us, defaults=defaults, why=wanted.why
    )
    consumer = broker.consumers.get(wanted.consumer)
    if wanted.pause_us and consumer is not None:
        # First: it must not get them again.
        consumer.pause(wanted.pause_us)
    if wanted.selection is not None:
        chosen = Chosen(wanted.selection, broker.schedule.wall_us())
        return returning.give_up_some(broker, wanted.consumer, how, chosen)
    if wanted.fate:
        return _reject_and_tell(broker, wanted, how)
    return returning.give_up(broker, wanted, how)


def _reject_and_tell(
    broker: Broker, wanted: Settle, how: Callable[[Queue, Sequence[Delivery]], Event | None]
) -> Work[bytes]:
    fates: list[bytes] = []

    def rejected(queue: Queue, deliveries: Sequence[Delivery]) -> None:
        if reason := how(queue, deliveries):
            target = queue.rules.dead_letters
            fates.append(b" ".join([b"dead", reason.encode(), *([target] if target else [])]))

    returning.give_up(broker, wanted, rejected)
    yield from ()
    return b"".join(fates)


def release(broker: Broker, connection: Connection, request: Request, wanted: Settle) -> Doing:
    check_writable(broker, request)
    return returning.give_up(
        broker, wanted, partial(Queue.give_back, event=Event.RELEASE, delay_us=wanted.delay_us)
    )


def touch(broker: Broker, connection: Connection, request: Request, wanted: Settle) -> Doing:
    if wanted.for_us != 0:
        return returning.touch(broker, wanted.consumer, wanted.message, wanted.for_us)
    check_writable(broker, request)
    return returning.give_up(broker, wanted, partial(Queue.give_back, event=Event.END))
