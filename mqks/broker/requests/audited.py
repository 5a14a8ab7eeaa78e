"""Records of requests that change what exists or remove messages.

The one rule: a request is recorded when it is done; one that has changed nothing is not.
"""

from collections.abc import Callable
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.requests.checks import NOTHING, Doing, Effect
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.connection import Connection
from mqks.protocol.requests import Batching, Request, Scheduling, Trim

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
    told = yield from work
    if told == NOTHING:
        pass
    elif not isinstance(told, int):
        note(broker, connection, request, wanted)
    elif told > 0 or (told == 0 and isinstance(told, Effect)):
        note(broker, connection, request, wanted, told or None)
    return None if isinstance(told, Effect) else told


def note(
    broker: Broker, connection: Connection, request: Request, wanted: Any, count: int | None = None
) -> None:
    # Who trims with an epoch has read what it drops: for the reader of a log that is an ack.
    if not (isinstance(wanted, Trim) and wanted.epoch is not None):
        broker.audit.note(connection, request.action.decode(), _what(request, wanted), count)


def _what(request: Request, wanted: Any) -> bytes:
    if isinstance(wanted, Scheduling | Batching) and wanted.publish is not None:
        # The data of what it publishes are a payload.
        before = request.rest.partition(b" publish ")[0]
        return b"%b publish %b" % (before, wanted.publish.event)
    return request.rest
