"""Requests about schedules.

The one rule: a request that raises has changed nothing. What can't be written is refused: a
schedule is not durable on a full disk.
"""

from mqks.broker.broker import Broker
from mqks.broker.requests.checks import Doing
from mqks.broker.spine.clients.connection import Connection
from mqks.errors import Unwritable
from mqks.protocol.requests import Request, Scheduling


def schedule(broker: Broker, connection: Connection, request: Request, wanted: Scheduling) -> Doing:
    _check_writable(broker)
    if wanted.publish is not None:
        broker.metadata.check_names("schedule", [wanted.name])
        broker.metadata.check_names("event", [wanted.publish.event])
        broker.schedules.put(wanted)
    elif not wanted.run:
        broker.schedules.pause(wanted.name, paused=wanted.pause)
    return broker.schedules.run(wanted.name) if wanted.run else None


def unschedule(
    broker: Broker, connection: Connection, request: Request, wanted: Scheduling
) -> None:
    _check_writable(broker)
    broker.schedules.remove(wanted.name)


def _check_writable(broker: Broker) -> None:
    if broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: schedules can't be changed")
