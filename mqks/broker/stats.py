"""What `stats` tells of the running broker, as plain values that JSON can hold.

The one rule: a list comes in the order of its keys, from after a key on and no longer than asked
for, so that a client can ask page by page however much there is.
"""

import heapq
from collections.abc import Iterable
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.connection import Connection
from mqks.broker.consumer import Consumer
from mqks.broker.queue import Queue
from mqks.errors import BadRequest
from mqks.limits import SEQ_MAX
from mqks.protocol.requests import parse_number, shown

Row = dict[str, Any]
Key = tuple[bytes, bytes]
"""Where a list goes on: what a key begins with, and its second part."""


def totals(broker: Broker) -> Row:
    queues = broker.queues.values()
    return {
        "version": broker.facts.version,
        "epoch": broker.facts.epoch,
        "uptime_s": round(broker.clock() - broker.started_s, 3),
        "connections": broker.connection_count(),
        "queues": len(broker.queues),
        "consumers": len(broker.consumers),
        "bindings": sum(map(len, broker.bindings.by_name.values())),
        "messages_ready": sum(queue.ready for queue in queues),
        "messages_unacked": sum(
            consumer.unacked_count for consumer in broker.consumers.values() if consumer.manual_ack
        ),
        "memory_bytes": broker.memory_bytes,
        "metadata_bytes": broker.metadata.bytes,
        "unacked_bytes": broker.unacked_bytes,
        "unsent_bytes": broker.unsent_bytes,
        "disk_full": bool(broker.unwritable),
        "received": broker.published,
        "routed": broker.queued,
        "unroutable": broker.unroutable,
        "confirmed": broker.confirmed,
        "delivered": broker.delivered,
        "redelivered": broker.redelivered,
        "acknowledged": broker.consumed,
        "rejected": broker.rejected,
        "purged": broker.purged,
        "errors": broker.errors,
    }


def queues(broker: Broker, after: bytes, limit: int) -> list[Row]:
    return [queue_row(broker, broker.queues[name]) for name in _page(broker.queues, after, limit)]


def queue_row(broker: Broker, queue: Queue) -> Row:
    return {
        "name": _text(queue.name),
        "ready": queue.ready,
        "unacked": queue.unacked,
        "consumers": len(queue.consumers),
        "bindings": len(broker.bindings.by_name.get(queue.name, ())),
        "rule": None if queue.rule is None else {"delay_s": queue.rule.delay_s},
        "next_seq": queue.next_seq,
        "oldest_age_s": queue.oldest_age_s,
        "memory_bytes": queue.memory_bytes,
    }


def queue(broker: Broker, name: bytes) -> Row:
    """One queue with its events and consumers."""
    found = broker.queues.get(name)
    if found is None:
        raise BadRequest(f"stats: there is no queue {shown(name)}")
    return queue_row(broker, found) | {
        "events": [_text(event) for event in broker.bindings.events(name)],
        "consumer_ids": [_text(consumer.id) for consumer in found.consumers],
    }


def bindings(broker: Broker, event: bytes | None, after: Key, limit: int) -> list[Row]:
    last = after[0]
    names = broker.bindings.by_name
    if event is not None:
        keys = ((name, event) for name, events in names.items() if event in events)
    else:
        keys = ((name, each) for name, events in names.items() if name >= last for each in events)
    found = heapq.nsmallest(limit, (key for key in keys if key > after))
    return [
        {"queue": _text(name), "event": _text(each), "exists": name in broker.queues}
        for name, each in found
    ]


def consumers(broker: Broker, after: bytes, limit: int) -> list[Row]:
    return [
        {
            "id": _text(consumer.id),
            "queue": _text(consumer.queue.name),
            "connection": consumer.connection.id,
            "address": consumer.connection.address,
            "manual_ack": consumer.manual_ack,
            "unacked": consumer.unacked_count,
            "unacked_bytes": consumer.unacked_bytes,
            "blocked": consumer.connection.blocked,
        }
        for consumer_id in _page(broker.consumers, after, limit)
        for consumer in [broker.consumers[consumer_id]]
    ]


def connections(broker: Broker, after: int, limit: int) -> list[Row]:
    numbers = heapq.nsmallest(limit, (number for number in broker.connections if number > after))
    return [
        {
            "id": connection.id,
            "address": connection.address,
            "user": connection.user,
            "consumers": len(connection.consumers),
            "unconfirmed": connection.unconfirmed,
            "outbox_bytes": connection.outbox_bytes,
            "blocked": connection.blocked,
            "unacked": sum(each.unacked_count for each in connection.consumers.values()),
        }
        for number in numbers
        for connection in [broker.connections[number]]
    ]


def unacked(broker: Broker, name: bytes | None, after: Key, limit: int) -> list[Row]:
    last, last_seq = after
    key = last, _number(last_seq)
    held = (
        ((queue.name, seq), consumer, line)
        for queue in broker.queues.values()
        if (name is None or queue.name == name) and queue.name >= last
        for consumer in queue.consumers
        for seq, line in _held(consumer)
        if (queue.name, seq) > key
    )
    rows = []
    for (queue_name, seq), consumer, line in heapq.nsmallest(limit, held, key=lambda each: each[0]):
        message_id, event, data = line.split(b" ", 2)
        rows.append(
            {
                "queue": _text(queue_name),
                "consumer": _text(consumer.id),
                "id": _text(message_id),
                "event": _text(event.removeprefix(b"event=")),
                "seq": seq,
                "retry": consumer.queue.retries.get(seq, 0),
                "data_bytes": len(data),
            }
        )
    return rows


def errors(
    broker: Broker, viewer: Connection, error_id: bytes | None, after: bytes, limit: int
) -> list[Row]:
    """The last ones, or those that came after one. Only administrators are told others' errors."""
    sees_all = viewer.permissions is None or viewer.permissions.admin
    wanted, last = error_id and _text(error_id), _text(after)
    found = sorted(
        record
        for record in broker.last_errors
        if (sees_all or record.user == viewer.user)
        and wanted in (None, record.id)
        and record.id > last
    )
    return [
        {
            "id": record.id,
            "time_us": record.time_us,
            "connection": record.connection,
            "user": record.user,
            "request_id": _text(record.request_id),
            "action": _text(record.action),
            "reason": record.reason,
        }
        for record in (found[:limit] if after else found[-limit:])
    ]


def _held(consumer: Consumer) -> Iterable[tuple[int, bytes]]:
    yield from consumer.unacked.values()
    for later in consumer.repeated.values():
        yield from later


def _page(names: Iterable[bytes], after: bytes, limit: int) -> list[bytes]:
    return heapq.nsmallest(limit, (name for name in names if name > after))


def _number(key: bytes) -> int:
    """What a list of numbers goes on after; 0 begins it."""
    return parse_number("stats", key, 0, SEQ_MAX) if key else 0


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def ask(
    broker: Broker, viewer: Connection, words: list[bytes], after: Key, limit: int
) -> Row | list[Row]:
    """What a request asks for: `words` are its plain arguments. Raises BadRequest."""
    match words:
        case []:
            return totals(broker)
        case [b"queues"]:
            return queues(broker, after[0], limit)
        case [b"queue", name]:
            return queue(broker, name)
        case [b"bindings", *event]:
            return bindings(broker, event[0] if event else None, after, limit)
        case [b"consumers"]:
            return consumers(broker, after[0], limit)
        case [b"connections"]:
            return connections(broker, _number(after[0]), limit)
        case [b"unacked", *name]:
            return unacked(broker, name[0] if name else None, after, limit)
        case [b"errors", *error_id]:
            return errors(broker, viewer, error_id[0] if error_id else None, after[0], limit)
        case [b"journal"]:
            return broker.facts.journal()
    raise BadRequest(f"stats: there is nothing to tell of {shown(b' '.join(words))}")
