"""`open_batch`, `close_batch`, `batch`: batches, and how many of their messages are done.

The one rule: what a batch counts comes from its queues; what consumers hold of it is counted when
somebody asks.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.features.time.times import timed
from mqks.broker.requests.checks import check_not_read_only
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.message.mark import NO_MARK
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import BadRequest, Unwritable
from mqks.limits import STEP_NAMES
from mqks.protocol import replies
from mqks.protocol.requests import Batching, Request, shown


def open_batch(broker: Broker, connection: Connection, request: Request, wanted: Batching) -> None:
    _check_changeable(broker)
    check_not_read_only(broker)
    broker.metadata.check_names("batch", [wanted.name])
    if wanted.event is not None:
        broker.metadata.check_names("event", [wanted.event])
    broker.batches.open(wanted)


def close_batch(
    broker: Broker, connection: Connection, request: Request, wanted: Batching
) -> Work[int]:
    _check_changeable(broker)
    if not wanted.discard:
        check_not_read_only(broker)  # What follows it may be published at once.
    yield from ()
    return broker.batches.close(wanted.name, discard=wanted.discard)


def _check_changeable(broker: Broker) -> None:
    if broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: batches can't be changed")


def tell(broker: Broker, connection: Connection, request: Request, wanted: Batching) -> Work[None]:
    place = yield from broker.lists.take()
    try:
        row = yield from told(broker, wanted.name)
    finally:
        broker.lists.leave(place)
    connection.write(replies.ok(request.id, json.dumps(row).encode()))


def told(broker: Broker, name: bytes) -> Work[dict[str, Any]]:
    """What a batch counts. Raises BadRequest if there is none."""
    running = Counter[int]()
    yield from count_running(broker, running)
    batch = broker.batches.found(name)
    if batch is None:
        raise BadRequest(f"batch: there is no batch {shown(name)}")
    return broker.batches.told(batch, running[batch.row.number])


def count_running(broker: Broker, running: Counter[int]) -> Work[None]:
    """Count the messages that consumers hold, leased ones included, by the number of their
    batch."""
    for some in slices([*broker.queues.values()], STEP_NAMES):
        for queue in some:
            if queue.lane.members:
                yield from _add_held(queue, running)
        yield GOES_ON


def _add_held(queue: Queue, running: Counter[int]) -> Work[None]:
    marks = queue.lane.marks
    leased = () if queue.times is None else [*timed(queue).delays.placed]
    for holder in (None, *queue.consumers):
        numbers: Iterable[int] = leased if holder is None else ()
        if isinstance(holder, Consumer):
            unacked = (number for number, _, _ in holder.unacked.values())
            numbers = chain(unacked, *holder.repeated.values())
        for some in slices([*numbers], STEP_NAMES):
            running.update(batch for n in some if (batch := marks.get(n, NO_MARK).batch))
            yield GOES_ON
