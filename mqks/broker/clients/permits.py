"""The permissions that actions need: one function for each kind, named in the table of actions.

The one rule: only connections with limited permissions are checked; a check changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from mqks.broker.base.turns import GOES_ON, Work
from mqks.errors import NotAllowed
from mqks.limits import WORDS_MAX
from mqks.protocol.requests import (
    Rebind,
    Request,
    parse_consume,
    parse_move,
    parse_publish,
    parse_rebind,
    parse_redrive,
    parse_set_queue,
    parse_subscribe,
    parse_tail,
    shown,
)
from mqks.users import STRANGER, Permissions

if TYPE_CHECKING:
    from mqks.broker.broker import Broker

Needs = Callable[["Broker", Permissions, Request], Work[None] | None]
"""Raises NotAllowed, or returns work that does."""


def check(
    needs: Needs, broker: "Broker", permissions: Permissions, request: Request
) -> Work[None] | None:
    if permissions is STRANGER and needs is not nothing:
        raise NotAllowed("the connection is not authenticated; send auth first")
    return needs(broker, permissions, request)


def nothing(broker: "Broker", permissions: Permissions, request: Request) -> None:
    """Allowed for everybody, also before authentication."""


def admin(broker: "Broker", permissions: Permissions, request: Request) -> None:
    _require(permissions.admin, "this needs the permission admin")


def eval_(broker: "Broker", permissions: Permissions, request: Request) -> None:
    _require(permissions.eval, "this needs the permission eval")


def stats(broker: "Broker", permissions: Permissions, request: Request) -> None:
    """Of the errors everybody may see their own."""
    if b"errors" not in _first_word(request):
        _require(permissions.monitoring, "this needs the permission monitoring")


def publish(broker: "Broker", permissions: Permissions, request: Request) -> None:
    wanted = parse_publish(request.rest)
    event = wanted.event
    _require(permissions.may_publish(event), f"no permission to publish {shown(event)}")
    if wanted.to is not None:
        _consume(permissions, wanted.to)


def queue(broker: "Broker", permissions: Permissions, request: Request) -> None:
    """The queue is the first argument; without one the action itself fails."""
    for name in _first_word(request):
        _consume(permissions, name)


def read(broker: "Broker", permissions: Permissions, request: Request) -> None:
    """The same for an action that changes nothing."""
    for name in _first_word(request):
        _require(permissions.may_read(name), f"no permission to read {shown(name)}")


def move(broker: "Broker", permissions: Permissions, request: Request) -> None:
    """The action itself checks the queues that dead letters return to."""
    parse = parse_move if request.action == b"move" else parse_redrive
    wanted = parse(request.rest)
    _consume(permissions, wanted.source)
    if wanted.to is not None:
        _consume(permissions, wanted.to)


def set_queue(broker: "Broker", permissions: Permissions, request: Request) -> None:
    wanted = parse_set_queue(request.rest)
    _consume(permissions, wanted.queue)
    target = wanted.changes.get("dead_letters")
    if target is not None:
        _consume(permissions, target)


def consumer(broker: "Broker", permissions: Permissions, request: Request) -> None:
    """The consumer is the first argument. One that does not exist is allowed."""
    for consumer_id in _first_word(request):
        _consumer(broker, permissions, consumer_id)


def subscribe(broker: "Broker", permissions: Permissions, request: Request) -> Work[None]:
    queue(broker, permissions, request)
    yield from _bind(
        permissions, (yield from parse_subscribe(request.rest, broker.bindings.events_max))
    )


def rebind(broker: "Broker", permissions: Permissions, request: Request) -> Work[None]:
    queue(broker, permissions, request)
    yield from _bind(
        permissions, (yield from parse_rebind(request.rest, broker.bindings.events_max))
    )


def consume(broker: "Broker", permissions: Permissions, request: Request) -> Work[None]:
    """It also ends a consumer that had this id before."""
    queue(broker, permissions, request)
    wanted = yield from parse_consume(request.rest, broker.bindings.events_max)
    binds = not (wanted.keep and wanted.queue in broker.queues)
    changes = Rebind(wanted.queue, wanted.events, add=wanted.add, add_masks=wanted.add_masks)
    yield from _bind(permissions, changes if binds else Rebind(wanted.queue))
    _consumer(broker, permissions, request.id)


def tail(broker: "Broker", permissions: Permissions, request: Request) -> Work[None]:
    """It shows what can be read in the queue, or what a queue bound like this would get."""
    wanted = parse_tail(request.rest)
    if wanted.queue is not None:
        allowed = permissions.may_read(wanted.queue)
        _require(allowed, f"no permission to read {shown(wanted.queue)}")
    else:
        _require(permissions.consumes, "no permission to consume any queue")
        yield from _may_bind(permissions, wanted.events, wanted.masks)


def _first_word(request: Request) -> Iterator[bytes]:
    """The word that the parsers take for the queue or the consumer: flags may precede it. They
    refuse more words than are looked at, except of names: those are checked once more."""
    some = request.rest.split(b" ", WORDS_MAX)
    words = (word for word in some if word and not word.startswith(b"--"))
    return islice(words, 1)


def _consumer(broker: "Broker", permissions: Permissions, consumer_id: bytes) -> None:
    found = broker.consumers.get(consumer_id)
    if found is not None:
        # The reason must not contain the queue of another user's consumer.
        allowed = permissions.may_consume(found.queue.name)
        _require(allowed, f"no permission for the consumer {shown(consumer_id)}")


def _consume(permissions: Permissions, name: bytes) -> None:
    _require(permissions.may_consume(name), f"no permission to consume {shown(name)}")


def _bind(permissions: Permissions, wanted: Rebind) -> Work[None]:
    _consume(permissions, wanted.queue)
    yield from _may_bind(permissions, chain(wanted.replace or (), wanted.add), wanted.add_masks)


def _may_bind(
    permissions: Permissions, events: Iterable[bytes], masks: Iterable[bytes]
) -> Work[None]:
    """Name by name: a user may have many masks."""
    for event in events:
        if not permissions.may_bind(event):
            raise NotAllowed(f"no permission to bind {shown(event)}")
        yield GOES_ON
    for mask in masks:
        if not permissions.may_bind_mask(mask):
            raise NotAllowed(f"no permission to bind all events that {shown(mask)} matches")
        yield GOES_ON


def _require(allowed: bool, reason: str) -> None:
    if not allowed:
        raise NotAllowed(reason)
