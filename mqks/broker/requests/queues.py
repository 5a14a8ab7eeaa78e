"""Requests about a queue and its waiting messages.

The one rule: a request that raises has changed nothing.
"""

from mqks.broker.broker import Broker
from mqks.broker.features.admission import pauses
from mqks.broker.features.death.moves import purge_some
from mqks.broker.requests.checks import (
    Doing,
    Effect,
    Effects,
    check_epoch,
    check_not_read_only,
    dropped,
    existing,
)
from mqks.broker.requests.scheduled import cancel_all
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.readers import passed
from mqks.broker.spine.queue.selection import Chosen
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import DeleteQueue, Pausing, Purge, Request, Selection, SetQueue, Trim


def set_queue(
    broker: Broker, connection: Connection, request: Request, wanted: SetQueue
) -> Effects:
    check_not_read_only(broker)
    return Effect.of(0, (yield from broker.set_queue(wanted, connection.user)))


def delete_queue(
    broker: Broker, connection: Connection, request: Request, wanted: DeleteQueue
) -> Effects:
    queue = broker.queues.get(wanted.queue)
    if wanted.rule is None:
        count = 0 if queue is None else queue.ready + queue.unacked + queue.scheduled
        # It may have bindings without being there.
        is_bound = broker.bindings.count(wanted.queue) > 0
        yield from broker.delete_queue(wanted.queue)
        return Effect.of(count, queue is not None, is_bound)
    if queue is None:
        return Effect.of(0)
    changed = broker.set_rule(queue, wanted.rule)
    if not queue.consumers:
        yield from broker.unused(queue)
    return Effect.of(0, changed)


def pause(broker: Broker, connection: Connection, request: Request, wanted: Pausing) -> Effects:
    yield from ()
    return Effect.of(0, pauses.pause(existing(broker, "pause", wanted.queue), wanted))


def resume(broker: Broker, connection: Connection, request: Request, wanted: Pausing) -> Effects:
    yield from ()
    return Effect.of(0, pauses.resume(existing(broker, "resume", wanted.queue)))


def purge(broker: Broker, connection: Connection, request: Request, wanted: Purge) -> Doing:
    work: Work[int]
    if wanted.selection or wanted.limit:
        some = wanted.selection or Selection()
        work = _purge_some(broker, wanted.queue, some, wanted.limit or SEQ_MAX)
    else:
        work = _purge_all(broker, wanted.queue, is_scheduled=wanted.scheduled)
    return dropped(broker, wanted.queue, work, confirm=request.confirm)


def _purge_all(broker: Broker, name: bytes, *, is_scheduled: bool) -> Work[int]:
    count = yield from drop(broker, name, None)
    queue = broker.queues.get(name)
    if is_scheduled and queue is not None:
        count += yield from cancel_all(queue)
    return count


def drop(broker: Broker, name: bytes, end: int | None) -> Work[int]:
    """Drop the ready messages of a queue with numbers below `end`, or all that are there now;
    return how many."""
    queue, count = broker.queues.get(name), 0
    if queue is None:
        return 0
    lane, is_purge = queue.lane, end is None
    end = lane.next_seq if end is None else end
    while not queue.deleted and (some := lane.trim_some(end, dead=is_purge)):
        count += len(some)
        for tracer in queue.tracers:
            tracer.left(queue, "purged" if is_purge else "trimmed", some)
        yield GOES_ON
    queue.deliver()  # What is in memory may wait for a page of which nothing is left.
    broker.purged += count
    return count


def _purge_some(broker: Broker, name: bytes, selection: Selection, limit: int) -> Work[int]:
    queue = broker.queues.get(name)
    if queue is None:
        return 0
    count = yield from purge_some(queue, Chosen(selection, broker.schedule.wall_us()), limit)
    broker.purged += count
    return count


def trim(broker: Broker, connection: Connection, request: Request, wanted: Trim) -> Doing:
    queue, end = broker.queues.get(wanted.queue), wanted.seq
    if queue is not None:
        check_epoch(broker, "trim", queue, wanted.epoch)
        end = passed(queue, wanted.reader, end, broker.clock())
    trimmed = drop(broker, wanted.queue, end)
    return dropped(broker, wanted.queue, trimmed, confirm=request.confirm)
