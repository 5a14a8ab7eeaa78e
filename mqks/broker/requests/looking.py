"""Requests that read messages and statistics."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.features.tails.tails import MessageTail
from mqks.broker.requests import stats
from mqks.broker.requests.checks import check_epoch, existing
from mqks.broker.spine.base.turns import GOES_ON, WAITS, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.readers import archived, archived_seq
from mqks.broker.spine.queue.selection import Chosen, Read
from mqks.errors import BadRequest
from mqks.limits import STATS_BYTES_MAX, STEP_NAMES
from mqks.protocol import replies
from mqks.protocol.requests import Log, Peek, Range, Request, Stats, WantedTail


def peek(broker: Broker, connection: Connection, request: Request, wanted: Peek) -> None:
    queue = broker.queues.get(wanted.queue)
    # A queue that does not exist has number 0, and no messages; its name is not stored.
    name, queue_id = (b"", 0) if queue is None else (queue.name, queue.id)
    form = "soonest" if wanted.soonest else "scheduled" if wanted.scheduled else "peek"
    some = wanted.selection
    chosen = None if some is None else Chosen(some, broker.schedule.wall_us())
    first, limit = wanted.after + 1, wanted.limit
    confirm = request.confirm
    read = Read(
        *(request.id, form, name, queue_id, confirm, first),
        limit=limit,
        chosen=chosen,
        has_batches=wanted.batches,
    )
    broker.read(connection, read)


def tail(broker: Broker, connection: Connection, request: Request, wanted: WantedTail) -> None:
    queue = None if wanted.queue is None else existing(broker, "tail", wanted.queue)
    broker.tails.check_room(connection, request.id)
    broker.metadata.check_names("event", wanted.events)
    if (before := broker.tails.of(connection).get(request.id)) is not None:
        broker.end_these_tails([before])
    broker.tails.add(MessageTail(request.id, connection, *wanted), queue)


def read(broker: Broker, connection: Connection, request: Request, wanted: Log) -> None:
    _, first, end, limit, epoch, has_meta = wanted
    queue = existing(broker, "read", wanted.queue)
    check_epoch(broker, "read", queue, epoch)
    if epoch is not None:
        _check_history(broker, connection, queue, first)
    page = Read(
        *(request.id, "read", queue.name, queue.id, request.confirm, first, end, limit),
        has_meta=has_meta,
    )
    broker.read(connection, page)


def _check_history(broker: Broker, connection: Connection, queue: Queue, first: int) -> None:
    """Clients read only what is durable. So none with this epoch has read beyond the end, unless
    the database went back since."""
    if first > queue.lane.next_seq:
        broker.reverts_seen += 1
        broker.notices.epoch_is_stale(connection.who, queue.name, first, queue.lane.next_seq)
        raise BadRequest(
            f"read: the queue ends at {queue.lane.next_seq}, and was read up to {first} under the "
            "same epoch: the database went back to an earlier state. Stop the server and run mqks "
            "new-epoch"
        )


def range_(broker: Broker, connection: Connection, request: Request, wanted: Range) -> None:
    queue = existing(broker, "range", wanted.queue)
    if wanted.archived is not None:
        # Of several readers, each only tells that it is there: the slowest counts, by its trims.
        seq = wanted.archived if not queue.rules.readers else archived_seq(queue)
        if seq is not None:
            archived(queue, seq, broker.clock())
    read = Read(request.id, "range", queue.name, queue.id, request.confirm, at_us=wanted.at_us)
    broker.read(connection, read)


def tell_stats(
    broker: Broker, connection: Connection, request: Request, wanted: Stats
) -> Work[None]:
    if [*wanted.words] not in ([], [b"journal"]):
        place = yield from broker.lists.take()
        try:
            # Whoever leaves its replies gets no more lists than there is room for.
            while broker.shared.outboxes.room <= 0 and not connection.rests & Slow.END:
                yield WAITS
            yield from _tell(broker, connection, request, wanted)
        finally:
            broker.lists.leave(place)
    else:
        yield from _tell(broker, connection, request, wanted)


def _tell(broker: Broker, connection: Connection, request: Request, wanted: Stats) -> Work[None]:
    if connection.closed:
        return
    told = yield from stats.ask(broker, connection, wanted)
    result = yield from (_object(told) if isinstance(told, dict) else _array(told))
    if not connection.closed:
        connection.write(replies.ok(request.id, result.encode()))


def _object(row: stats.Row) -> Work[str]:
    """A row as JSON; a list in it may be long."""
    members = []
    for name, value in row.items():
        told = _array(slices(value, STEP_NAMES)) if isinstance(value, list) else None
        text = json.dumps(value) if told is None else (yield from told)
        members.append(f'"{name}": {text}')
    return f"{{{', '.join(members)}}}"


def _array(pieces: Iterable[Sequence[Any]]) -> Work[str]:
    """The first rows of a list as JSON, as many as one reply has."""
    texts, size = list[str](), 0
    for piece in pieces:
        for row in piece:
            texts.append(json.dumps(row))
            size += len(texts[-1])
            if size > STATS_BYTES_MAX:
                return f"[{', '.join(texts)}]"
        yield GOES_ON
    return f"[{', '.join(texts)}]"
