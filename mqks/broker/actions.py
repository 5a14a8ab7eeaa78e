"""The table of actions: what each request means.

The one rule: a request that raises has changed nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

from mqks.broker import expression
from mqks.broker.broker import Broker
from mqks.broker.connection import Connection
from mqks.broker.consumer import Consumer
from mqks.broker.state import State
from mqks.errors import BadRequest, DiskFull, LimitExceeded
from mqks.protocol import replies
from mqks.protocol.requests import (
    ALL,
    Rebind,
    Request,
    parse_consume,
    parse_delete_queue,
    parse_eval,
    parse_name,
    parse_publish,
    parse_rebind,
    parse_settle,
    parse_subscribe,
)


class Action(NamedTuple):
    run: Callable[[Broker, Connection, Request], None]
    usage: str


def publish(broker: Broker, connection: Connection, request: Request) -> None:
    event, data = parse_publish(request.rest)
    if broker.disk_full:
        raise DiskFull("the disk is full: nothing can be published until space is back")
    broker.publish(event, [request.id], [replies.body(request.id, event, data)])


def subscribe(broker: Broker, connection: Connection, request: Request) -> None:
    name, events = parse_subscribe(request.rest)
    broker.check_queue_count(name)
    changed = broker.rebind(Rebind(name, replace=events))
    broker.make_queue(name)
    if changed:
        broker.tell_update(name)


def consume(broker: Broker, connection: Connection, request: Request) -> None:
    wanted = parse_consume(request.rest)
    count = len(connection.consumers) - (request.id in connection.consumers)
    if count >= broker.settings.consumers_per_connection_max:
        raise LimitExceeded(f"this connection has {count} consumers already")
    broker.check_queue_count(wanted.queue)
    rebound = broker.rebind(Rebind(wanted.queue, replace=wanted.events or None, add=wanted.add))
    queue = broker.make_queue(wanted.queue)
    ruled = broker.set_rule(queue, wanted.rule)
    consumer = Consumer(
        request.id, connection, queue, wanted.manual_ack, broker.settings.consumer_unacked_max
    )
    if request.confirm:
        consumer.held = True
        broker.pending.held.append(consumer)
    broker.add_consumer(consumer)
    if rebound or ruled:
        broker.tell_update(wanted.queue, but=None if wanted.add else consumer)
    queue.deliver()


def rebind(broker: Broker, connection: Connection, request: Request) -> None:
    wanted = parse_rebind(request.rest)
    if broker.rebind(wanted):
        broker.tell_update(wanted.queue)


def ack(broker: Broker, connection: Connection, request: Request) -> None:
    consumer_id, message_id = parse_settle("ack", request.rest)
    broker.ack(consumer_id, None if message_id == ALL else [message_id])


def reject(broker: Broker, connection: Connection, request: Request) -> None:
    consumer_id, message_id = parse_settle("reject", request.rest)
    broker.reject(consumer_id, None if message_id == ALL else [message_id])


def delete_consumer(broker: Broker, connection: Connection, request: Request) -> None:
    consumer = broker.consumers.get(parse_name("delete_consumer", request.rest))
    if consumer is not None:
        broker.delete_consumers([consumer])


def delete_queue(broker: Broker, connection: Connection, request: Request) -> None:
    name, rule = parse_delete_queue(request.rest)
    if rule is None:
        broker.delete_queue(name)
        return
    queue = broker.queues.get(name)
    if queue is None:
        return
    if broker.set_rule(queue, rule):
        broker.tell_update(name)
    if not queue.consumers:
        broker.unused(queue)


def ping(broker: Broker, connection: Connection, request: Request) -> None:
    broker.write(connection, replies.ok(request.id, request.rest))


def evaluate(broker: Broker, connection: Connection, request: Request) -> None:
    allowed = broker.settings.eval
    if allowed == "off" or (allowed == "loopback" and not connection.local):
        raise BadRequest("_eval is not allowed here")
    source = parse_eval(request.rest)
    if connection.eval_budget is None:
        connection.eval_budget = expression.Budget(expression.LIMITS.steps_max, "")
    # What an expression sees of the broker is made for it.
    connection.eval_budget.steps -= broker.size // 2
    names = {
        "state": State(broker),
        "request": {"id": request.id.decode("utf-8", "surrogateescape"), "action": "_eval"},
        "WORKERS": 1,
        "config": broker.settings.public(),
    }
    result = expression.render(expression.evaluate(source, names, budget=connection.eval_budget))
    broker.write(connection, replies.ok(request.id, result))


ACTIONS = {
    b"publish": Action(publish, "{event} {data}"),
    b"subscribe": Action(subscribe, "{queue} {event} ... {event}"),
    b"consume": Action(
        consume,
        "{queue} [{event} ...] [--add {event} ...] [--delete-queue-when-unused[={seconds}]] "
        "[--manual-ack]",
    ),
    b"rebind": Action(
        rebind,
        "{queue} [{event} ...] [--remove {event} ...] [--remove-mask {mask} ...] "
        "[--add {event} ...]",
    ),
    b"ack": Action(ack, "{consumer_id} {msg_id}|--all"),
    b"reject": Action(reject, "{consumer_id} {msg_id}|--all"),
    b"delete_consumer": Action(delete_consumer, "{consumer_id}"),
    b"delete_queue": Action(delete_queue, "{queue} [--when-unused[={seconds}]]"),
    b"ping": Action(ping, "{data}"),
    b"_eval": Action(evaluate, "[--worker=0] {expression}"),
}
