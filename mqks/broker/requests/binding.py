"""Requests that attach consumers and bind queues.

The one rule: a request that raises has changed nothing.
"""

from mqks.broker.broker import Broker
from mqks.broker.requests.checks import Doing, Effect, Effects, name_of
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.queue.order import Rest
from mqks.errors import BadRequest, LimitExceeded
from mqks.limits import STEP_NAMES
from mqks.protocol.requests import Consume, Rebind, Request, SetPrefetch, Settle, shown


def subscribe(broker: Broker, connection: Connection, request: Request, wanted: Rebind) -> Effects:
    user = connection.user
    broker.check_queue(user, wanted.queue)
    is_new = wanted.queue not in broker.queues
    with broker.made.making(user, wanted.queue):
        changed = yield from broker.bindings.rebind(wanted)
        yield from broker.make_queue(wanted.queue, user)
    if changed:
        yield from broker.tell_update(wanted.queue)
    yield from _warn_of_stars(broker, connection, request, wanted)
    return Effect.of(changed, is_new)


def consume(broker: Broker, connection: Connection, request: Request, wanted: Consume) -> Effects:
    count = len(connection.consumers) - (request.id in connection.consumers)
    limit = broker.settings.consumers_per_connection_max
    if count >= limit:
        reason = f"the limit of {limit} consumers is reached (consumers_per_connection_max)"
        raise LimitExceeded("consumers_per_connection_max", reason)
    broker.check_consumer(request.id)
    is_new = wanted.queue not in broker.queues
    is_kept = wanted.keep and not is_new
    _check_existing(broker, wanted)
    broker.check_queue(connection.user, wanted.queue)
    rebound = 0
    with broker.made.making(connection.user, wanted.queue):
        if not is_kept:
            rebound = yield from broker.bindings.rebind(wanted)
            # It may be deleted meanwhile; then its bindings are, too, these among them.
            _check_existing(broker, wanted)
        queue = yield from broker.make_queue(wanted.queue, connection.user)
    ruled = not is_kept and broker.set_rule(queue, wanted.rule)
    consumer = Consumer(
        request.id,
        connection,
        queue,
        wanted.manual_ack,
        broker.settings.prefetch_max,
        prefetch=wanted.prefetch,
        meta=wanted.meta,
        cancellable=wanted.cancellable,
        defaults=_defaults(wanted),
    )
    if request.confirm:
        consumer.rest(Rest.CONFIRM)
    yield from broker.add_consumer(consumer)
    if rebound or ruled:
        adds = wanted.add or wanted.add_masks
        yield from broker.tell_update(wanted.queue, but=None if adds else consumer)
    if request.confirm:
        broker.hold(consumer)
    consumer.queue.deliver()
    yield from _warn_of_stars(broker, connection, request, wanted)
    return Effect.of(rebound, ruled, is_new)


def _defaults(wanted: Consume) -> Policy:
    if wanted.backoff is None and wanted.ack_timeout_s is None:
        return DEFAULT
    return Policy(backoff=wanted.backoff, ack_timeout_s=wanted.ack_timeout_s)


def set_prefetch(
    broker: Broker, connection: Connection, request: Request, wanted: SetPrefetch
) -> Doing:
    consumer = broker.consumers.get(wanted.consumer)
    if consumer is None:
        return None
    if not consumer.manual_ack:
        raise BadRequest(f"set_prefetch: {shown(consumer.id)} has no manual ack")
    if consumer.prefetch == wanted.prefetch:
        return None
    consumer.set_prefetch(wanted.prefetch)
    return broker.tell(consumer.queue, [consumer])


def _check_existing(broker: Broker, wanted: Consume) -> None:
    if wanted.existing and wanted.queue not in broker.queues:
        raise BadRequest(
            f"consume: there is no queue {shown(wanted.queue)}, and this consume creates none "
            "(to create it: mqks consume --create, in Python create=True, on the wire without "
            "--existing)"
        )


def rebind(broker: Broker, connection: Connection, request: Request, wanted: Rebind) -> Effects:
    changed = yield from broker.bindings.rebind(wanted)
    if changed:
        yield from broker.tell_update(wanted.queue)
    yield from _warn_of_stars(broker, connection, request, wanted)
    return Effect.of(changed)


def _warn_of_stars(
    broker: Broker, connection: Connection, request: Request, wanted: Rebind
) -> Work[None]:
    """An event with a star is an event of that name; whoever binds it may have meant a mask."""
    events = (*(wanted.replace or ()), *wanted.add)
    for some in slices(events, STEP_NAMES) if b"*" in request.rest else ():
        if event := next((event for event in some if b"*" in event), None):
            broker.notices.literal_mask(connection.who, wanted.queue, event)
            return
        yield GOES_ON


def delete_consumer(
    broker: Broker, connection: Connection, request: Request, wanted: Settle
) -> Effects:
    consumer = broker.consumers.get(wanted.consumer)
    if consumer is None:
        return Effect.of(0)
    # Clients end their own ones all the time.
    is_own = consumer.connection is connection
    if wanted.tell and not (is_own or consumer.deleted):
        broker.tell_end(consumer, f"{name_of(connection)} has ended it (delete_consumer)")
    yield from broker.delete_consumers([consumer])
    return Effect.of(0, not is_own)
