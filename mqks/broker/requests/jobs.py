"""`progress`, `cancel_job`, `result`, and what `publish --keep-result` and `ack --result` add.

The one rule: a cancel has one answer. What waits is removed; of what a consumer holds, the consumer
decides; what is on its way between the two is waited for.
"""

from mqks.broker.broker import Broker
from mqks.broker.features.death.moves import purge_some
from mqks.broker.features.jobs.results import Result
from mqks.broker.features.time.times import timed
from mqks.broker.requests import returning
from mqks.broker.requests.checks import NOTHING, dropped
from mqks.broker.requests.returning import touch
from mqks.broker.requests.scheduled import cancel_some, cancelled
from mqks.broker.spine.base.turns import WAITS, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import consumers_of
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen
from mqks.broker.spine.routing import singles
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.singles import Single
from mqks.errors import Unwritable
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import (
    CancelJob,
    Publish,
    Request,
    Selection,
    Settle,
    WantedProgress,
    WantedResult,
)

CANCELLED, TOLD, HELD = b"cancelled", b"told", b"held"


def publish(
    broker: Broker, connection: Connection, message: Single, wanted: Publish, queues: Queues
) -> None:
    """Publish a message, which was checked, and keep its result."""
    publishing = broker.publishing
    if not (message.once_s and publishing.once.knows(connection, message.id)):
        queue = next(queue for queue in queues if not queue.deleted)
        is_due = message.terms is None or not message.terms.due_us
        broker.results.watch(message.id, wanted, queue, is_due=is_due)
    singles.publish_to(publishing, connection, message, queues)


def ack(broker: Broker, request: Request, wanted: Settle) -> Work[bytes | None]:
    check_result(broker, wanted)
    is_kept = give_result(broker, wanted)
    returning.ack(broker, wanted.consumer, [wanted.message], confirm=request.confirm)
    yield from ()
    return b"" if is_kept else None  # With a text, its confirm waits for room on the disk.


def check_result(broker: Broker, wanted: Settle, others: int = 0) -> int:
    """The length of the result that is kept with this ack, besides so many bytes. Raise if that is
    not possible."""
    if wanted.result is None or _watched(broker, wanted) is None:
        return 0
    if broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: the result is not durable")
    broker.results.check_data(wanted.result, others)
    return len(wanted.result)


def give_result(broker: Broker, wanted: Settle) -> bool:
    """Keep the result of a message that is acked now; return whether somebody wants it."""
    found = None if wanted.result is None else _watched(broker, wanted)
    if found is not None and wanted.result is not None:
        broker.results.give(found, wanted.result)
    return found is not None


def _watched(broker: Broker, wanted: Settle) -> Result | None:
    consumer = broker.consumers.get(wanted.consumer)
    held = None if consumer is None else consumer.unacked.get(wanted.message)
    if consumer is None or held is None:
        return None
    return broker.results.watched(consumer.queue, held[0])


def progress(
    broker: Broker, connection: Connection, request: Request, wanted: WantedProgress
) -> Work[None] | None:
    consumer = broker.consumers.get(wanted.consumer)
    if consumer is not None:
        broker.progress.tell(consumer, wanted.message, wanted.percent, wanted.text)
    return touch(broker, wanted.consumer, wanted.message)


def result(broker: Broker, connection: Connection, request: Request, wanted: WantedResult) -> None:
    broker.results.ask(request.id, connection, wanted.message, wanted.wait_us)


def cancel_job(
    broker: Broker, connection: Connection, request: Request, wanted: CancelJob
) -> Work[bytes]:
    return dropped(broker, wanted.queue, _cancel(broker, wanted), confirm=request.confirm)


def _cancel(broker: Broker, wanted: CancelJob) -> Work[bytes]:
    """What has become of it."""
    queue = broker.queues.get(wanted.queue)
    while queue is not None and queue.returning and not queue.deleted:
        yield WAITS
    if queue is None or queue.deleted:
        return NOTHING
    found = broker.results.rows.get(wanted.message)
    if found is not None and found.place is queue:
        if _take_out(queue, found.number):
            found.cancel = wanted.why
            cancelled(queue, [found.number])
            yield from queue.tidy()
            return CANCELLED
        return _tell(queue, wanted, found) or NOTHING
    if told := _tell(queue, wanted):
        return told
    count = yield from cancel_some(queue, wanted.message)
    count += yield from purge_some(queue, _chosen(broker, wanted), SEQ_MAX)
    # It may have been delivered before its turn came.
    return (CANCELLED if count else _tell(queue, wanted)) or NOTHING


def _take_out(queue: Queue, number: int) -> bool:
    """Take out a message that waits; return whether it was there."""
    if queue.lane.is_ready(number):
        queue.lane.take_out(number)
    elif queue.is_put_off(number):
        timed(queue).delays.remove(number)
    else:
        return False
    return True


def _chosen(broker: Broker, wanted: CancelJob) -> Chosen:
    return Chosen(Selection(message_id=wanted.message), broker.schedule.wall_us())


def _tell(queue: Queue, wanted: CancelJob, found: Result | None = None) -> bytes:
    """Tell the consumers that hold it, if they want to know and read; empty if none holds it."""
    answer = b""
    for consumer in consumers_of(queue):
        if wanted.message not in consumer.unacked:
            continue
        if not consumer.cancellable or consumer.connection.rests:
            answer = answer or HELD
            continue
        reason = b" " + wanted.why if wanted.why else b""
        told = b"%b ok --cancel %b%b\n" % (consumer.id, wanted.message, reason)
        consumer.connection.write(told)
        answer = TOLD
        if found is not None:
            found.cancel = wanted.why
    return answer
