"""`rename`: a queue gets another name.

    C: r1 rename --confirm orders orders.old
    S: r1 ok

The one rule: what belongs to the queue is by its number, and stays. What names it (its bindings,
schedules with `--to`, dead-letter queues that `set_queue` has set) is changed in one step, and
written in one commit.
"""

from mqks.broker.broker import Broker
from mqks.broker.requests.checks import Doing, existing
from mqks.broker.spine.base.places import one_at_a_time
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer, consumers_of
from mqks.broker.spine.log.metadata import queue_bytes
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import BadRequest, LimitExceeded, Unwritable
from mqks.limits import RENAMED_BINDINGS_MAX, RENAMED_BYTES_MAX, RENAMED_QUEUES_MAX, STEP_NAMES
from mqks.protocol.requests import Renaming, Request, shown


def rename(broker: Broker, connection: Connection, request: Request, wanted: Renaming) -> Doing:
    busy, (first, second) = broker.bindings.busy, sorted((wanted.queue, wanted.new))
    # In this order, or two renames would wait for each other.
    return one_at_a_time(busy, first, one_at_a_time(busy, second, _rename(broker, wanted)))


def _rename(broker: Broker, wanted: Renaming) -> Work[int | bytes | None]:
    queue = existing(broker, "rename", wanted.queue)
    changes = yield from _bindings(broker, wanted)
    # All of it from here on is one step.
    if broker.queues.get(wanted.queue) is not queue:
        raise BadRequest(f"rename: queue {shown(wanted.queue)} was deleted meanwhile")
    _check(broker, queue, wanted.new)
    queues = broker.queues.values()
    letters = [each for each in queues if each.policy.dead_letters == wanted.queue]
    schedules = broker.schedules.to_queue(wanted.queue, wanted.new)
    size = sum(len(row.publish) for row in schedules.values())
    if len(letters) > RENAMED_QUEUES_MAX or size > RENAMED_BYTES_MAX:
        raise LimitExceeded(
            "rename_max",
            f"rename: {len(letters)} queues, and schedules of {size} bytes, name it; the limits "
            f"are {RENAMED_QUEUES_MAX} and {RENAMED_BYTES_MAX}",
        )
    broker.rename_queue(queue, wanted.new)
    broker.bindings.renamed(wanted.queue, wanted.new, changes)
    for each in letters:
        policy = each.policy.changed({"dead_letters": wanted.new}, reset=False)
        broker.set_policy(each, policy)
    for name, row in schedules.items():
        broker.schedules.store(name, row)
    broker.pending.in_one_piece = True
    _end_strangers(broker, queue)
    yield from broker.tell_update(wanted.new)
    return None


def _bindings(broker: Broker, wanted: Renaming) -> Work[dict[tuple[bytes, bytes], bool]]:
    """What the journal is to learn of them."""
    tables = broker.bindings.bound(wanted.queue)
    if (count := sum(map(len, tables))) > RENAMED_BINDINGS_MAX:
        reason = f"rename: queue {shown(wanted.queue)} has {count} bindings, the limit is "
        reason += f"{RENAMED_BINDINGS_MAX}"
        raise LimitExceeded("rename_max", reason)
    changes: dict[tuple[bytes, bytes], bool] = {}
    for table in tables:
        for some in slices([*table], STEP_NAMES):
            for event in some:
                changes[wanted.queue, event], changes[wanted.new, event] = False, True
            yield GOES_ON
    return changes


def _check(broker: Broker, queue: Queue, new: bytes) -> None:
    if queue.policy.delete_when_unused is not None:
        reason = "is deleted when it is unused, as one for replies"
        raise BadRequest(f"rename: queue {shown(queue.name)} {reason}")
    if new in broker.queues:
        raise BadRequest(f"rename: there is a queue {shown(new)} already")
    if broker.bindings.count(new):
        raise BadRequest(f"rename: there are bindings of a queue {shown(new)}; remove them first")
    if broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: the new name would not be durable")
    broker.metadata.check_names("queue", [new])
    broker.metadata.check_room(max(0, 2 * (queue_bytes(new) - queue_bytes(queue.name))))
    target = queue.policy.dead_letters
    if target is not None and target != queue.name:
        broker.policies.check(new, target, "rename")


def _end_strangers(broker: Broker, queue: Queue) -> None:
    """Those whose users may not consume what has this name."""
    strangers: list[Consumer] = []
    for consumer in consumers_of(queue):
        holder = broker.connections.get(consumer.connection.id)
        may = None if holder is None else holder.permissions
        if may is not None and not may.may_consume(queue.name):
            strangers.append(consumer)
            broker.tell_end(consumer, f"its queue has another name now: {shown(queue.name)}")
    broker.end_consumers(strangers)
