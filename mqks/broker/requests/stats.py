"""The replies of `stats`, as plain JSON values.

The one rule: a list is sorted by its keys, starts after a given key and has a given maximum length,
so that a client can read it page by page. It is made in pieces, some of them empty, each a step of
work.
"""

import json
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final, TypeVar

from mqks.broker.broker import Broker
from mqks.broker.features.order.keyed import Keyed
from mqks.broker.features.order.ranked import Ranked
from mqks.broker.features.throttle.common import CommonLimit
from mqks.broker.requests import batching
from mqks.broker.requests.batching import count_running
from mqks.broker.spine.base.turns import GOES_ON, Work, ordered, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer, consumers_of
from mqks.broker.spine.log.pending import ErrorRecord
from mqks.broker.spine.message.mark import NO_MARK
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.readers import archive_lag, archived_seq, readers_of
from mqks.errors import BadRequest
from mqks.limits import STATS_BYTES_MAX, STATS_ROWS_DEFAULT, STEP_BODIES, STEP_MASKS, STEP_NAMES
from mqks.protocol.masks import MASK, bound_matches
from mqks.protocol.requests import Stats, sequence_number, shown
from mqks.users import LIMITS

Row = dict[str, Any]
Rows = Iterator[list[Row]]
T = TypeVar("T")
K = TypeVar("K")
STEP_ROWS: Final = 256
"""A millisecond, JSON included."""
ARCHIVE_SILENT_S: Final = 60.0
"""An archive that has told nothing for longer has ended, hangs, or waits for its store."""
Key = tuple[bytes, bytes]
"""Where a list continues: the first and the second part of a key."""


def totals(broker: Broker) -> Work[Row]:
    ready = scheduled = bindings = unacked = 0
    for some in slices([*broker.queues.values()], STEP_NAMES):
        ready += sum(queue.ready for queue in some)
        scheduled += sum(queue.scheduled for queue in some)
        yield GOES_ON
    for table in (broker.bindings.by_name, broker.bindings.masks_by_name):
        for bound in slices([*table.values()], STEP_BODIES):
            bindings += sum(map(len, bound))
            yield GOES_ON
    for holders in slices([*broker.consumers.values()], STEP_NAMES):
        unacked += sum(consumer.unacked_count for consumer in holders if consumer.manual_ack)
        yield GOES_ON
    return {
        "name": broker.settings.broker_name,
        "version": broker.shared.facts.version,
        "epoch": broker.shared.facts.epoch,
        "uptime_s": round(broker.clock() - broker.started_s, 3),
        "connections": broker.connection_count(),
        "queues": len(broker.queues),
        "consumers": len(broker.consumers),
        "bindings": bindings,
        "messages_ready": ready,
        "messages_unacked": unacked,
        "messages_scheduled": scheduled,
        "memory_bytes": broker.shared.memory.used,
        "metadata_bytes": broker.metadata.bytes,
        "unacked_bytes": broker.flow.unacked.used,
        "unhandled_bytes": broker.flow.unhandled_bytes,
        "unsent_bytes": broker.shared.outboxes.used,
        "disk_full": bool(broker.unwritable),
        "draining": broker.shared.draining,
        "read_only": broker.shared.read_only,
        "received": broker.shared.counters.published,
        "routed": broker.shared.counters.queued,
        "unroutable": broker.shared.counters.unroutable,
        "confirmed": broker.answers.confirmed,
        "delivered": broker.shared.counters.delivered,
        "redelivered": broker.shared.counters.redelivered,
        "acknowledged": broker.shared.counters.consumed,
        "rejected": broker.shared.counters.rejected,
        "dead": dict(broker.shared.counters.dead),
        "dropped": broker.shared.counters.dropped,
        "duplicates": broker.shared.counters.duplicates,
        "replaced": broker.shared.counters.replaced,
        "purged": broker.purged,
        "errors": broker.shared.counters.errors,
        "failed_logins": broker.audit.failed_logins,
        "loop_held": broker.loop_held,
        "loop_late": broker.loop_late,
        "reverts_seen": broker.reverts_seen,
        "timer_repeats": broker.schedule.repeats,
        "traces": len(broker.traces.rows),
        "trace_bytes": broker.traces.bytes,
        "results": len(broker.results.rows),
        "result_bytes": broker.results.bytes,
    }


def queues(broker: Broker, after: bytes, limit: int) -> Rows:
    names = yield from _smallest(limit, [*broker.queues], after)
    yield from _rows(names, broker.queues, partial(queue_row, broker))


def queue_row(broker: Broker, queue: Queue) -> Row:
    rule, target = queue.policy.delete_when_unused, queue.rules.dead_letters
    held_by, until_us = queue.held_back or (None, None)
    return {
        "name": _text(queue.name),
        "ready": queue.ready,
        "unacked": queue.unacked,
        "scheduled": queue.scheduled,
        "leased": queue.leased,
        "dead_letters": None if target is None else _text(target),
        "consumers": len(queue.consumers),
        "bindings": broker.bindings.count(queue.name),
        "rule": None if rule is None else {"delay_s": rule.delay_s},
        "dead": queue.dead,
        "paused": queue.rules.pause,
        "paused_until_s": queue.rules.paused_until_s,
        "held_by": held_by,
        "held_until_s": None if until_us is None else until_us / 1e6,
        "next_seq": queue.lane.next_seq,
        "oldest_age_s": queue.oldest_age_s,
        "readers": {_text(name): mark for name, mark in readers_of(queue).items()} or None,
        **_archive_row(queue, broker.clock()),
        "memory_bytes": queue.lane.blocks.memory_bytes,
    }


def _archive_row(queue: Queue, now_s: float) -> Row:
    told = queue.archive
    told_age_s = None if told is None else round(now_s - told.told_s, 3)
    committed_s = None if told is None else told.committed_s
    state = "paused" if queue.rules.paused else "running"
    if (told_age_s or 0.0) > ARCHIVE_SILENT_S:
        state = "silent"
    return {
        "archive_state": None if told is None else state,
        "archived_seq": archived_seq(queue),
        "archive_lag": archive_lag(queue),
        "archive_told_age_s": told_age_s,
        "archive_commit_age_s": None if committed_s is None else round(now_s - committed_s, 3),
    }


def queue(broker: Broker, name: bytes, after: bytes, limit: int) -> Work[Row]:
    """One queue with its events and consumers; of each list so many that follow a name."""
    found = broker.queues.get(name)
    if found is None:
        raise BadRequest(f"stats: there is no queue {shown(name)}")
    events, masks = yield from broker.bindings.events(name)
    row = queue_row(broker, found) | {"made_by": found.policy.made_by or None}
    row["policy"] = broker.policies.told(found)
    consumer_ids = [each.id for each in found.consumers]
    if after or len(consumer_ids) >= limit:  # Otherwise they are in the order in which they came.
        consumer_ids = yield from ordered(consumer_ids)
    lists: dict[str, list[str]] = {"events": [], "masks": [], "consumer_ids": []}
    for names, texts in zip((events, masks, consumer_ids), lists.values(), strict=True):
        first = bisect_right(names, after)
        for some in slices(names[first:][:limit], STEP_NAMES):
            texts += map(_text, some)
            yield GOES_ON
    if isinstance(found.order, Keyed):
        row |= {"keys": found.order.known, "keys_held": found.order.held}
    elif isinstance(found.order, Ranked):
        row["priorities"] = found.order.counts()
    elif found.policy.has_priorities:  # It has forgotten them, as all that is ready has none.
        row["priorities"] = {0: found.ready} if found.ready else {}
    if (unique := found.lane.unique) is not None:
        row["unique_keys"] = len(unique) if unique.is_known else None
    return row | lists


def bindings(broker: Broker, event: bytes | None, after: Key, limit: int) -> Rows:
    """Bindings of all events, or of one event and the masks that match it. Masks of a queue are
    first."""
    last = after[0]
    tables = broker.bindings.by_name, broker.bindings.masks_by_name
    bound, masked = ([pair for pair in table.items() if pair[0] >= last] for table in tables)
    if event is None:
        keys: Iterable[Key] = (
            (name, each) for name, names in chain(bound, masked) for each in [*names]
        )
    else:
        exact = [(name, event) for name, events in bound if event in events]
        keys = exact + (yield from _masked(event, masked))
    found = yield from _smallest(limit, keys, after)
    for some in slices(found, STEP_ROWS):
        yield [_binding_row(name, each) | {"exists": name in broker.queues} for name, each in some]


def _masked(
    event: bytes, names: list[tuple[bytes, dict[bytes, None]]]
) -> Generator[list[Row], None, list[Key]]:
    """The masks of these names that match an event."""
    found: list[Key] = []
    for name, masks in names:
        for some in slices([*masks], STEP_MASKS):
            found += [(name, mask) for mask in some if bound_matches(mask[1:], event)]
            yield []
    return found


def _binding_row(name: bytes, bound: bytes) -> Row:
    is_mask = bound[:1] == MASK
    return {
        "queue": _text(name),
        "event": None if is_mask else _text(bound),
        "mask": _text(bound[1:]) if is_mask else None,
    }


def consumers(broker: Broker, connection: bytes | None, after: bytes, limit: int) -> Rows:
    """Those of all connections, or of one."""
    holders: Mapping[bytes, Consumer] = broker.consumers
    if connection is not None:
        found = broker.connections.get(_number(connection))
        holders = {} if found is None else found.consumers
    return _consumer_rows(broker, holders, after, limit)


def consumers_of_queue(broker: Broker, name: bytes, after: bytes, limit: int) -> Rows:
    found = broker.queues.get(name)
    holders = {} if found is None else {each.id: each for each in consumers_of(found)}
    return _consumer_rows(broker, holders, after, limit)


def _consumer_rows(
    broker: Broker, holders: Mapping[bytes, Consumer], after: bytes, limit: int
) -> Rows:
    names = yield from _smallest(limit, [*holders], after)
    now_us = broker.schedule.wall_us()
    some: list[Row] = []
    for name in names:
        if (consumer := holders.get(name)) is not None:
            some.append(_consumer_row(consumer, now_us))
        # A consumer with repeated message ids takes longer.
        if len(some) == STEP_ROWS or (consumer is not None and consumer.out_of_order):
            yield some
            some, now_us = [], broker.schedule.wall_us()
    yield some


def _consumer_row(consumer: Consumer, now_us: int) -> Row:
    oldest_us = consumer.oldest_us()
    return {
        "id": _text(consumer.id),
        "queue": _text(consumer.queue.name),
        "connection": consumer.connection.id,
        "address": consumer.connection.address,
        "client": consumer.connection.name,
        "manual_ack": consumer.manual_ack,
        "prefetch": consumer.prefetch or None,
        "ack_timeout_s": consumer.defaults.ack_timeout_s,
        "meta": consumer.meta,
        "cancellable": consumer.cancellable,
        "unacked": consumer.unacked_count,
        "unacked_bytes": consumer.unacked_bytes,
        "oldest_age_s": None if oldest_us is None else max(0, now_us - oldest_us) / 1e6,
        "blocked": bool(consumer.connection.rests),
    }


def journal(broker: Broker) -> Row:
    return broker.shared.facts.journal() | {
        "disk_full": bool(broker.unwritable),
        "unwritable": broker.unwritable,
        "once_ids": len(broker.once),
        "once_bytes": broker.once.size_bytes,
    }


def connections(broker: Broker, after: int, limit: int) -> Rows:
    numbers = yield from _smallest(limit, [*broker.connections], after)
    yield from _rows(numbers, broker.connections, partial(_connection_row, broker.clock()))


def _connection_row(now_s: float, connection: Connection) -> Row:
    return {
        "id": connection.id,
        "address": connection.address,
        "name": connection.name,
        "user": connection.user,
        "slowed": connection.rate is not None and connection.rate.is_in_debt(now_s),
        "consumers": len(connection.consumers),
        "unconfirmed": connection.unconfirmed,
        "outbox_bytes": connection.outbox_bytes,
        "blocked": bool(connection.rests),
        "unacked": sum(each.unacked_count for each in connection.consumers.values()),
    }


def users(broker: Broker, after: bytes, limit: int) -> Rows:
    """Those of the users file, and how many connections each has."""
    given = broker.access.users.given
    for some in slices((yield from _smallest(limit, [*given], _text(after))), STEP_ROWS):
        yield [
            {"name": name, "connections": broker.access.connected[name]}
            | broker.made.told(name)
            | {key: getattr(given[name], key) or None for key in LIMITS}
            for name in some
        ]


def batches(broker: Broker, after: bytes, limit: int) -> Rows:
    running = Counter[int]()
    for _ in count_running(broker, running):
        yield []
    names = yield from _smallest(limit, [*broker.batches.rows], after)
    for name in names:
        if (batch := broker.batches.found(name)) is not None:
            yield [batch.row.listed(name, batch.living, running[batch.row.number])]


def schedules(broker: Broker, after: bytes, limit: int) -> Rows:
    names = yield from _smallest(limit, [*broker.schedules.rows], after)
    schedules = broker.schedules
    for name in names:
        if (found := schedules.rows.get(name)) is not None:
            yield [found.told(name, schedules.errors.get(name), schedules.last_queues.get(name))]


def results(broker: Broker, after: bytes, limit: int) -> Rows:
    ids = yield from _smallest(limit, [*broker.results.rows], after)
    for some in slices(ids, STEP_NAMES):
        yield [row.listed() for each in some if (row := broker.results.found(each)) is not None]


def limits(broker: Broker, after: bytes, limit: int) -> Rows:
    known = broker.shared.limits
    names = yield from _smallest(limit, [*known], _text(after))
    yield from _rows(names, known, CommonLimit.told)


def unacked(broker: Broker, name: bytes | None, after: Key, limit: int) -> Rows:
    last, last_seq = after
    key = last, _number(last_seq)
    held = (
        ((queue.name, seq), consumer, line)
        for queue in [*broker.queues.values()]
        if (name is None or queue.name == name) and queue.name >= last
        for consumer in [*consumers_of(queue)]
        for seq, line, _ in [*consumer.held()]
    )
    found = yield from _smallest(limit, held, key, itemgetter(0))
    for some in slices(found, STEP_ROWS):
        yield [_unacked_row(broker, consumer, seq, line) for (_, seq), consumer, line in some]


def _unacked_row(broker: Broker, consumer: Consumer, seq: int, line: bytes) -> Row:
    message_id, event, data = line.split(b" ", 2)
    progress = broker.progress.of(consumer, message_id, seq)
    return {
        "queue": _text(consumer.queue.name),
        "consumer": _text(consumer.id),
        "id": _text(message_id),
        "event": _text(event.removeprefix(b"event=")),
        "seq": seq,
        "retry": consumer.queue.lane.marks.get(seq, NO_MARK).retry,
        "data_bytes": len(data),
        "delivered_us": consumer.held_since_us(message_id, seq),
        "progress": None if progress is None else progress.percent,
        "progress_text": None if progress is None else _text(progress.text),
    }


def errors(
    broker: Broker, viewer: Connection, error_id: bytes | None, after: bytes, limit: int
) -> Rows:
    """The last ones, or those that came after one. Those of others need the permission
    monitoring. Of its own errors a connection may also ask for the first one of a burst."""
    sees_all = viewer.permissions is None or viewer.permissions.monitoring
    wanted, last = error_id and _text(error_id), _text(after)
    first = viewer.first_error
    known = {record.id: record for record in broker.last_errors}
    if first is not None and wanted == first.id:
        known[first.id] = first
    found = sorted(
        record
        for record in known.values()
        if (sees_all or record.user == viewer.user)
        and wanted in (None, record.id)
        and record.id > last
    )
    if after:
        yield [*map(_error_row, found[:limit])]
        return
    # The newest ones if a reply cannot have all.
    last_ones, size = deque[Row](), 0
    for record in islice(reversed(found), limit):
        last_ones.appendleft(_error_row(record))
        size += len(json.dumps(last_ones[0]))
        if size > STATS_BYTES_MAX:
            break
    yield [*last_ones]


def _error_row(record: ErrorRecord) -> Row:
    return {
        "id": record.id,
        "time_us": record.time_us,
        "connection": record.connection,
        "client": record.client,
        "user": record.user,
        "request_id": _text(record.request_id),
        "action": _text(record.action),
        "reason": record.reason,
    }


def audit(broker: Broker, after: int, limit: int) -> Rows:
    """The last ones, or those that came after one."""
    found = [record for record in broker.audit.last if record.id > after]
    yield [*map(asdict, found[:limit] if after else found[-limit:])]


def traces(broker: Broker, after: bytes, limit: int) -> Rows:
    names = yield from _smallest(limit, [*broker.traces.rows], after)
    now_s = broker.clock()
    yield [
        {"name": _text(name), "left_s": round(row.until_s - now_s, 3), **row.who._asdict()}
        for name in names
        if (row := broker.traces.rows.get(name)) is not None
    ]


def _smallest(
    limit: int, items: Iterable[Any], after: Any, key: Callable[[Any], Any] | None = None
) -> Generator[list[Row], None, list[Any]]:
    """The first items with keys above this one."""
    found: list[Any] = []
    left = iter(items)
    while some := list(islice(left, STEP_NAMES)):
        more = (item for item in some if (key(item) if key else item) > after)
        # Mostly sorted already: cheaper than a heap.
        found = sorted(chain(found, more), key=key)[:limit]
        yield []
    return found


def _rows(keys: Sequence[K], things: Mapping[K, T], row: Callable[[T], Row]) -> Rows:
    """Rows of the things that still exist."""
    for some in slices(keys, STEP_ROWS):
        yield [row(things[key]) for key in some if key in things]


def _number(key: bytes) -> int:
    """The number after which a list of numbers continues; 0 for its start."""
    return sequence_number(key) if key else 0


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def ask(broker: Broker, viewer: Connection, wanted: Stats) -> Work[Row | Rows]:
    """The reply to a request. Raises BadRequest."""
    after = wanted.after, wanted.then if wanted.mask is None else MASK + wanted.mask
    limit = STATS_ROWS_DEFAULT if wanted.limit is None else wanted.limit
    match wanted.words:
        case ():
            return (yield from totals(broker))
        case [b"queues"]:
            return queues(broker, after[0], limit)
        case [b"queue", name]:
            return (yield from queue(broker, name, after[0], limit))
        case [b"bindings", *event]:
            return bindings(broker, event[0] if event else None, after, limit)
        case [b"consumers", *connection]:
            return consumers(broker, connection[0] if connection else None, after[0], limit)
        case [b"consumers_of", name]:
            return consumers_of_queue(broker, name, after[0], limit)
        case [b"connections"]:
            return connections(broker, _number(after[0]), limit)
        case [b"unacked", *name]:
            return unacked(broker, name[0] if name else None, after, limit)
        case [b"errors", *error_id]:
            return errors(broker, viewer, error_id[0] if error_id else None, after[0], limit)
        case [b"audit"]:
            return audit(broker, _number(after[0]), limit)
        case [b"users"]:
            return users(broker, after[0], limit)
        case [b"traces"]:
            return traces(broker, after[0], limit)
        case [b"message", message_id]:
            return broker.traces.told(message_id, _number(after[0]), limit)
        case [b"limits"]:
            return limits(broker, after[0], limit)
        case [b"batch", name]:
            return (yield from batching.told(broker, name))
        case [b"batches"]:
            return batches(broker, after[0], limit)
        case [b"results"]:
            return results(broker, after[0], limit)
        case [b"schedules"]:
            return schedules(broker, after[0], limit)
        case [b"journal"]:
            return journal(broker)
    raise BadRequest(
        f"stats: unknown statistics {shown(b' '.join(wanted.words))}; there are queues, "
        "queue NAME, bindings, consumers, consumers_of QUEUE, connections, unacked, errors, audit, "
        "limits, batches, batch NAME, results, schedules, users, traces, message ID and journal"
    )
