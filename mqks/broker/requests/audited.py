"""Records of requests that change what exists or remove messages.

The one rule: a request is recorded when it is done; one that has changed nothing is not.
"""

from collections.abc import Callable
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.requests.checks import NOTHING, Doing, Effect
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.connection import Connection
from mqks.protocol.requests import Batching, Request, Scheduling, Settle, Trim

Run = Callable[[Broker, Connection, Request, Any], Doing]
"""Does what a request wants. Raises BadRequest."""


def audited(run: Run) -> Run:
    def recorded(broker: Broker, connection: Connection, request: Request, wanted: Any) -> Doing:
        work = run(broker, connection, request, wanted)
        if work is None:
            note(broker, connection, request, wanted)
            return None
        return _noting(broker, connection, request, wanted, work)

    return recorded


def _noting(
    broker: Broker,
    connection: Connection,
    request: Request,
    wanted: Any,
    work: Work[int | bytes | None],
) -> Work[int | bytes | None]:
    whose = _whose(broker, wanted)  # Afterwards it may have gone.
    told = yield from work
    if told == NOTHING:
        pass
    elif not isinstance(told, int):
        note(broker, connection, request, wanted)
    elif told > 0 or (told == 0 and isinstance(told, Effect)):
        note(broker, connection, request, wanted, told or None, whose)
    return None if isinstance(told, Effect) else told


def note(
    broker: Broker,
    connection: Connection,
    request: Request,
    wanted: Any,
    count: int | None = None,
    more: bytes = b"",
) -> None:
    # Who trims with an epoch has read what it drops: for the reader of a log that is an ack.
    if not (isinstance(wanted, Trim) and wanted.epoch is not None):
        broker.audit.note(connection, request.action.decode(), _what(request, wanted) + more, count)


def _whose(broker: Broker, wanted: Any) -> bytes:
    """Of a consumer: its queue, and the user of its connection, if it has one."""
    consumer = broker.consumers.get(wanted.consumer) if isinstance(wanted, Settle) else None
    if consumer is None:
        return b""
    user = getattr(consumer.connection, "user", None)
    return b" queue=" + consumer.queue.name + (b" user=" + user.encode() if user else b"")


def _what(request: Request, wanted: Any) -> bytes:
    if isinstance(wanted, Scheduling | Batching) and wanted.publish is not None:
        # The data of what it publishes are a payload.
        before = request.rest.partition(b" publish ")[0]
        return b"%b publish %b" % (before, wanted.publish.event)
    return request.rest
