"""What consumers give back, or ack, or go on holding: one message, all of them, or a choice.

The one rule: what is given back has its place in the queue again before anything is delivered.
Whatever a consumer holds, a step looks at some of it.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from mqks.broker.broker import Broker
from mqks.broker.requests.checks import check_durable
from mqks.broker.spine.base.places import one_at_a_time
from mqks.broker.spine.base.turns import GOES_ON, Work, ordered, slices
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen
from mqks.limits import STEP_BODIES, STEP_MESSAGES
from mqks.protocol.requests import ALL, Settle

T = TypeVar("T")
GiveUp = Callable[[Queue, Sequence[Delivery]], object]
"""What to do with deliveries that a consumer gives back."""


def reject_gathered(broker: Broker, consumer_id: bytes, message_ids: Sequence[bytes]) -> Work[None]:
    """A consumer rejects these; unknown ids are ignored."""
    consumer = broker.consumers.get(consumer_id)
    if consumer is None:
        return
    # A message that is named twice may have come back in between.
    is_plain = len({*message_ids}) == len(message_ids)
    for some in slices(message_ids, consumer.queue.returned_at_once if is_plain else 1):
        if deliveries := consumer.take_back(some):
            consumer.queue.give_back(deliveries, Event.REJECT)
        yield GOES_ON


def give_up(broker: Broker, settle: Settle, how: GiveUp) -> Work[None] | None:
    """A consumer gives back one or all of its messages."""
    consumer = broker.consumers.get(settle.consumer)
    if consumer is None:
        return None
    if settle.message == ALL:
        return _give_up_all(consumer, how)
    if deliveries := consumer.take_back([settle.message]):
        how(consumer.queue, deliveries)
    return None


def touch(
    broker: Broker, consumer_id: bytes, message_id: bytes, for_us: int | None = None
) -> Work[None] | None:
    """A consumer still works on one or all of its messages: restart their ack timeout, or set
    it to `for_us`."""
    consumer = broker.consumers.get(consumer_id)
    if consumer is None:
        return None
    if message_id != ALL:
        timeout_us = consumer.timeout_us if for_us is None else for_us
        if timeout_us is not None and message_id in consumer.unacked:
            delivery = message_id, consumer.unacked[message_id][0]
            consumer.awaited().add([delivery], timeout_us)
    elif for_us is not None:
        return _one_at_a_time(broker, consumer_id, _touch_each(consumer, for_us))
    elif consumer.deadlines is not None and consumer.timeout_us is not None:
        consumer.deadlines.touch_all(consumer.timeout_us)
    return None


def _touch_each(consumer: Consumer, for_us: int) -> Work[None]:
    """Set the ack timeout of all that it holds now, whether or not they have one."""
    for some in slices((yield from ordered(consumer.held())), STEP_MESSAGES):
        ids = ((line[: line.index(b" ")], number) for number, line, _ in some)
        if held := [delivery for delivery in ids if consumer.holds(*delivery)]:
            consumer.awaited().add(held, for_us)
        yield GOES_ON


def _one_at_a_time(broker: Broker, consumer_id: bytes, work: Work[T]) -> Work[T]:
    """Do a work that looks at all that a consumer holds."""
    # Each has a copy of all of it: a client must not make a hundred.
    return one_at_a_time(broker.work_places, consumer_id, work)


def ack(
    broker: Broker,
    consumer_id: bytes,
    message_ids: Sequence[bytes],
    *,
    together: bool = False,
    confirm: bool = False,
) -> None:
    """Settle these deliveries; unknown ids are ignored. `together`: see `Queue.settle`. With
    `confirm` it raises Unwritable if that will not be durable: what was moved while nothing can
    be written is still in its old place after a restart."""
    consumer = broker.consumers.get(consumer_id)
    if consumer is not None and (held := consumer.settle(message_ids)):
        queue, numbers = consumer.queue, [number for number, _, _ in held]
        queue.settle(numbers, together=together)
        if confirm:
            check_durable(broker, max(numbers) < queue.lane.taken_end)


def ack_all(broker: Broker, consumer_id: bytes, *, confirm: bool = False) -> Work[None]:
    """Settle all messages of a consumer. With `confirm` it raises as `ack`."""
    consumer = broker.consumers.get(consumer_id)
    if consumer is None or not consumer.unacked:
        return
    queue, deliveries = consumer.queue, consumer.let_go()
    is_durable = True
    while some := list(islice(deliveries, STEP_MESSAGES)):
        if not queue.deleted:
            is_durable = is_durable and max(some)[0] < queue.lane.taken_end
            queue.settle([number for number, _ in some])
        yield GOES_ON
    if confirm:
        check_durable(broker, is_durable)


def _give_up_all(consumer: Consumer, how: GiveUp) -> Work[None]:
    """Give back all messages in their order in the queue."""
    queue, deliveries = consumer.queue, list[Delivery]()
    queue.returning += 1
    held = consumer.let_go()
    while some := list(islice(held, STEP_BODIES)):
        deliveries += some
        yield GOES_ON
    for step in slices((yield from ordered(deliveries)), queue.returned_at_once):
        how(queue, step)
        yield GOES_ON
    queue.returning -= 1
    queue.deliver()


def give_up_some(broker: Broker, consumer_id: bytes, how: GiveUp, chosen: Chosen) -> Work[int]:
    """Give back those that are chosen of all that a consumer holds; return how many."""
    return _one_at_a_time(broker, consumer_id, _give_up_some(broker, consumer_id, how, chosen))


def _give_up_some(broker: Broker, consumer_id: bytes, how: GiveUp, chosen: Chosen) -> Work[int]:
    consumer, count = broker.consumers.get(consumer_id), 0
    if consumer is None:
        return 0
    queue = consumer.queue
    for some in slices((yield from ordered(consumer.held())), queue.returned_at_once):
        old = {*chosen.by_age(queue, [number for number, _, _ in some])}
        lines = ((number, line) for number, line, _ in some if number in old)
        bodies = yield from chosen.by_body(lines)
        if queue.deleted:
            break
        deliveries = consumer.take_these([*bodies.items()])
        count += len(deliveries)
        if deliveries:
            how(queue, deliveries)
        yield GOES_ON
    return count
