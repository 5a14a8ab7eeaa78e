"""The permissions that requests need, as the table of actions says: a check for each kind.

The one rule: only connections with limited permissions are checked; a check changes nothing.
"""

from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.errors import Draining, NotAllowed
from mqks.protocol.requests import Action, Consume, Request, Stats, WantedTail, shown
from mqks.users import STRANGER, GuestPermissions, Permissions

OPERATE = frozenset(("admin", "monitoring", "eval"))
"""Permissions without which nobody operates a server."""


def check_first(permissions: Permissions, action: Action) -> None:
    """Refuse what is not allowed whatever the arguments are: they may take long to parse. Raises
    NotAllowed."""
    if permissions is STRANGER and action.needs:
        raise NotAllowed("the connection is not authenticated; send auth first")
    # Not a ping either: by its answer a client would take itself for connected.
    is_for_all = not action.needs and action.name not in ("auth", "set_name")
    if isinstance(permissions, GuestPermissions) and (
        is_for_all or not OPERATE.issuperset(action.needs.values())
    ):
        raise Draining
    if action.needs.get("queue") == "consume":
        _require(permissions.consumes, "no permission to consume any queue")


def check(
    broker: Broker, permissions: Permissions, action: Action, request: Request, wanted: Any
) -> Work[None]:
    """Raises NotAllowed. What it allows in the last step is still so afterwards."""
    for field, permission in action.needs.items():
        value: Any = request.id if field == "id" else getattr(wanted, field) if field else b""
        if value is None:
            continue
        if permission == "bind":
            if not _binds_nothing(broker, permissions, wanted):
                yield from _may_bind(permissions, value, is_mask="mask" in field)
        elif permission == "consumer":
            # One that does not exist is allowed. The reason must not contain the queue of another
            # user's consumer.
            consumer = broker.consumers.get(value)
            if consumer is not None:
                allowed = permissions.may_consume(consumer.queue.name)
                _require(allowed, f"no permission for the consumer {shown(value)}")
        elif permission == "schedule":
            # Who may publish what it publishes may change it.
            schedule = broker.schedules.rows.get(value)
            if schedule is not None:
                event, to = schedule.wanted.event, schedule.wanted.to
                allowed = permissions.may_publish(event)
                allowed = allowed and (to is None or permissions.may_consume(to))
                _require(allowed, f"no permission for the schedule {shown(value)}")
        elif permission == "result":
            # Who may publish the message may know what became of it.
            if (found := broker.results.rows.get(value)) is not None:
                allowed = permissions.may_publish(found.event)
                _require(allowed, f"no permission for the result of {shown(value)}")
        elif permission == "batch":
            # Who may publish what follows it may add to it, look at it and close it.
            batch = broker.batches.rows.get(value)
            for publish in () if batch is None else batch.row.publishes:
                allowed = permissions.may_publish(publish.event)
                allowed = allowed and (publish.to is None or permissions.may_consume(publish.to))
                _require(allowed, f"no permission for the batch {shown(value)}")
        elif permission in ("publish", "consume", "read"):
            allowed = getattr(permissions, f"may_{permission}")(value)
            _require(allowed, f"no permission to {permission} {shown(value)}")
        elif not (isinstance(wanted, Stats) and wanted.words[:1] == (b"errors",)):
            # Of the errors everybody may see their own.
            allowed = getattr(permissions, permission)
            _require(allowed, f"this needs the permission {permission}")


def _binds_nothing(broker: Broker, permissions: Permissions, wanted: Any) -> bool:
    if isinstance(wanted, WantedTail):
        # Of a queue it shows what can be read there, otherwise what one bound like this would get.
        if wanted.queue is None:
            _require(permissions.consumes, "no permission to consume any queue")
        return wanted.queue is not None
    return isinstance(wanted, Consume) and wanted.keep and wanted.queue in broker.queues


def _may_bind(permissions: Permissions, names: list[bytes], *, is_mask: bool) -> Work[None]:
    """Name by name: a user may have many masks."""
    for name in names:
        if is_mask:
            allowed = permissions.may_bind_mask(name)
            _require(allowed, f"no permission to bind all events that {shown(name)} matches")
        else:
            _require(permissions.may_bind(name), f"no permission to bind {shown(name)}")
        yield GOES_ON


def _require(allowed: bool, reason: str) -> None:
    if not allowed:
        raise NotAllowed(reason)
