"""`receive` and `lease`: messages that belong to nobody while they are worked on.

The one rule: a lease is named by its queue, and by the number and the deliveries of its message. It
is valid until the message is delivered again, or leaves.
"""

from collections.abc import Callable

from mqks.broker.broker import Broker
from mqks.broker.features.death import fates
from mqks.broker.features.death.moves import some_bodies
from mqks.broker.features.time.receiver import Receiver, give_back, take
from mqks.broker.features.time.times import timed
from mqks.broker.requests.checks import Doing, check_writable, dropped, existing
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import BadRequest, LimitExceeded
from mqks.limits import LEASE_S, RECEIVES_WAITING_MAX, SEQ_MAX
from mqks.protocol.requests import Lease, Receive, Request

ENDED = "lease: it has ended"
"""The SQS API knows the reason."""
READ_WAIT_S = 1.0
"""So long a receive waits at least while messages are read from disk."""


def receive(broker: Broker, connection: Connection, request: Request, wanted: Receive) -> None:
    queue = existing(broker, "receive", wanted.queue)
    if queue.rules.single_consumer:
        raise BadRequest("receive: the queue has a single consumer")
    if broker.flow.receivers >= RECEIVES_WAITING_MAX:
        reason = f"the limit of {RECEIVES_WAITING_MAX} waiting receives is reached"
        raise LimitExceeded("receives_waiting_max", reason)
    lease_us = wanted.lease_us
    if lease_us is None:
        timeout_us = queue.ack_timeout_us
        lease_us = round(LEASE_S * 1e6) if timeout_us is None else timeout_us
    receiver = Receiver(request.id, connection, queue, wanted.limit, lease_us)
    queue.serve(receiver)
    queue.deliver()
    receiver.wait(max(wanted.wait_us / 1e6, READ_WAIT_S if _is_held_up(queue) else 0))


def _is_held_up(queue: Queue) -> bool:
    """Whether ready messages may be delivered soon that could not be delivered now."""
    waits = queue.lane.paging or queue.returning or queue in queue.shared.turns.due
    return queue.ready > 0 and bool(waits or queue.order.is_reading)


def lease(broker: Broker, connection: Connection, request: Request, wanted: Lease) -> Doing:
    if wanted.ack:
        return dropped(broker, wanted.queue, _do(broker, wanted, _ack), confirm=request.confirm)
    check_writable(broker, request)
    return _do(broker, wanted, _extend if wanted.for_us else _give_back)


def _do(
    broker: Broker, wanted: Lease, act: Callable[[Queue, Lease, int, Mark], Work[bool]]
) -> Work[int]:
    """Do this with the message of the lease; return whether it was possible."""
    queue = broker.queues.get(wanted.queue)
    found = None if queue is None else _leased(queue, wanted.lease, held=wanted.held)
    if queue is None or found is None or not (yield from act(queue, wanted, *found)):
        return 0
    yield from queue.tidy()
    return 1


def _ack(queue: Queue, wanted: Lease, number: int, mark: Mark) -> Work[bool]:
    yield from ()
    if not take(queue, number, mark):
        if wanted.held:
            raise BadRequest(ENDED)
        if not queue.lane.is_ready(number):
            return False
        queue.lane.take_out(number)
    queue.shared.counters.consumed += 1
    queue.lane.settle([number])
    for tracer in queue.tracers:
        tracer.left(queue, "acked", [number])
    return True


def _extend(queue: Queue, wanted: Lease, number: int, mark: Mark) -> Work[bool]:
    clocks, for_us = queue.shared.schedule, wanted.for_us or 0
    # Not one that was given back with a delay.
    if mark.keeps_place and queue.is_put_off(number):
        mark = mark.changed(due_us=clocks.wall_us() + for_us)
        queue.lane.mark(number, mark)
        timed(queue).delays.put_off(number, mark, clocks.clock_us() + for_us)
        return True
    # It is ready again: hide it as its last lease has. In order, it would need its key.
    if queue.rules.ordered or not (wanted.lease.endswith(b".0") and queue.lane.is_ready(number)):
        return False
    lines, _ = yield from some_bodies(queue, [number], queue.lane.body)
    if queue.deleted or number not in lines or not queue.lane.is_ready(number):
        return False
    queue.lane.take_out(number)
    mark = queue.lane.mark_of(number)
    fates.put_off(queue, number, lines[number], mark, for_us, keeps_place=True)
    return True


def _give_back(queue: Queue, wanted: Lease, number: int, mark: Mark) -> Work[bool]:
    lines, _ = yield from some_bodies(queue, [number], timed(queue).delays.bodies.get)
    # It may have ended meanwhile, or a body that was asked for may have come too late.
    found = None if queue.deleted else _leased(queue, wanted.lease)
    if found is None or number not in lines or not take(queue, *found):
        return False
    event = Event.UNDELIVERED if wanted.undelivered else Event.END
    if wanted.reject:
        event = Event.KILL if wanted.dead else Event.REJECT
    give_back(queue, number, lines[number], found[1], event, wanted.delay_us, wanted.why)
    return True


def _leased(queue: Queue, lease: bytes, *, held: bool = False) -> tuple[int, Mark] | None:
    """Number and mark of the message of a lease, if it was not delivered again (that is an error if
    the lease must be `held`); the deliveries 0 name the last one."""
    epoch, *numbers = lease.rsplit(b".", 2)
    if len(numbers) < 2 or not all(each.isdigit() and len(each) < 20 for each in numbers):
        raise BadRequest("lease: this is not a lease")
    number, deliveries = map(int, numbers)
    if number > SEQ_MAX or epoch != queue.shared.facts.epoch_of(queue.id).encode():
        return None
    mark = queue.lane.marks.get(number)
    if mark and 0 < mark.retry == (deliveries or mark.retry):
        return number, mark
    if mark and held:
        raise BadRequest(ENDED)
    return None
