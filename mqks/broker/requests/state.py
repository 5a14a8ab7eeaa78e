"""The state of the broker that an expression of `_eval` can read.

The one rule: every attribute is a plain value, made when it is read, and paid for; changing it
changes nothing in the broker. The value for each queue, consumer or connection is made when that
one is read. `docs/protocol.md` describes the attributes.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, TypeVar

from mqks.broker.broker import Broker
from mqks.broker.features.evaluate.expression import BooleanView, Items
from mqks.broker.spine.base.turns import GOES_ON, Work, ordered, slices
from mqks.limits import STEP_NAMES
from mqks.protocol.masks import MASK

Pay = Callable[[int], None]
"""Pays for steps, and raises if there are no more."""
V = TypeVar("V")
QUEUES = attrgetter("queues")
CONSUMERS = attrgetter("consumers")
CONNECTIONS = attrgetter("connections")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _texts(names: Iterable[bytes]) -> list[str]:
    return [*map(_text, names)]


def _key(key: object) -> object:
    return key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key


class View(Mapping[Any, V]):
    """The value that `tell` makes for each key; it costs its size."""

    __slots__ = ("_pay", "_tell", "_things")

    def __init__(self, pay: Pay, things: Mapping[Any, Any], tell: Callable[[Any], V]) -> None:
        self._pay, self._things, self._tell = pay, things, tell

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[Any]:
        for key in list(self._things):
            if key in self._things:  # Else it was removed since the expression's last turn.
                yield _text(key) if isinstance(key, bytes) else key

    def __contains__(self, key: object) -> bool:
        return _key(key) in self._things

    def __getitem__(self, key: object) -> V:
        value = self._tell(self._things[_key(key)])
        self._pay(1 + (len(value) if isinstance(value, list) else 0))
        return value


class EvalState:
    """Its attributes are those of `ATTRIBUTES`."""

    __slots__ = ("_broker", "_pay")

    def __init__(self, broker: Broker, pay: Pay) -> None:
        self._broker, self._pay = broker, pay

    def __getattr__(self, name: str) -> Any:
        if name not in ATTRIBUTES:
            raise AttributeError(f"state has no attribute {name}")
        return ATTRIBUTES[name](self._broker, self._pay)


def _viewed(
    of: Callable[[Broker], Mapping[Any, Any]], tell: Callable[[Any], V]
) -> Callable[[Broker, Pay], View[V]]:
    return lambda broker, pay: View(pay, of(broker), tell)


def _rules(broker: Broker, pay: Pay) -> dict[str, float | None]:
    pay(len(broker.queues) // 4)
    rules = ((name, queue.policy.delete_when_unused) for name, queue in broker.queues.items())
    return {_text(name): rule.delay_s for name, rule in rules if rule is not None}


def _queues_by_events(broker: Broker, pay: Pay) -> Work[dict[str, list[str]]]:
    bound = broker.bindings.by_name
    pay(len(bound) // 4)
    names: dict[str, list[str]] = {}

    def parts() -> Generator[int, None, None]:
        for name in sorted_names:
            text = _text(name)
            for some in slices([*bound.get(name, ())], STEP_NAMES):
                yield 1 + len(some)
                for event in some:
                    names.setdefault(_text(event), []).append(text)

    sorted_names = yield from ordered(bound)
    yield from _paid(parts(), pay)
    return names


def _unacked(broker: Broker, pay: Pay) -> Work[dict[str, list[str]]]:
    """Each id as often as it is unacked."""
    pay(len(broker.consumers) // 4)
    holding = [each for each in broker.consumers.values() if each.manual_ack]
    ids: dict[str, list[str]] = {}

    def parts() -> Generator[int, None, None]:
        for each in holding:
            if not each.deleted:
                yield each.unacked_count
                again = (repeat(name, len(found)) for name, found in each.repeated.items())
                ids[_text(each.id)] = _texts(chain(each.unacked, chain.from_iterable(again)))

    yield from _paid(parts(), pay)
    return ids


def _paid(parts: Iterable[int], pay: Pay) -> Work[None]:
    """Pay for each part of a value before it is made, in steps."""
    weight = 0
    for size in parts:
        pay(size)
        weight += 1 + size
        if weight > STEP_NAMES:
            weight = 0
            yield GOES_ON


ATTRIBUTES: dict[str, Callable[[Broker, Pay], Any]] = {
    "worker": lambda broker, pay: 0,
    "published": lambda broker, pay: broker.shared.counters.published,
    "queued": lambda broker, pay: broker.shared.counters.queued,
    "consumed": lambda broker, pay: broker.shared.counters.consumed,
    "commands_put": lambda broker, pay: 0,
    "commands_got": lambda broker, pay: 0,
    "commands_to_workers": lambda broker, pay: {},
    "queues": _viewed(QUEUES, lambda queue: Items(queue.ready)),
    "queues_used": _viewed(QUEUES, lambda queue: BooleanView(bool(queue.consumers))),
    "queues_to_delete_when_unused": _rules,
    "queues_by_events": _queues_by_events,
    "events_by_queues": _viewed(
        attrgetter("bindings.by_name"), lambda events: sorted(map(_text, events))
    ),
    "masks_by_queues": _viewed(
        attrgetter("bindings.masks_by_name"),
        lambda masks: sorted(_text(mask.removeprefix(MASK)) for mask in masks),
    ),
    "consumers_by_queues": _viewed(
        QUEUES, lambda queue: _texts(each.id for each in queue.consumers)
    ),
    "queues_by_consumer_ids": _viewed(CONSUMERS, lambda consumer: _text(consumer.queue.name)),
    "consumer_ids_by_clients": _viewed(
        CONNECTIONS, lambda connection: _texts(connection.consumers)
    ),
    "clients_by_consumer_ids": _viewed(CONSUMERS, lambda consumer: consumer.connection.id),
    "messages_by_consumer_ids": _unacked,
    "responses_by_clients": _viewed(CONNECTIONS, lambda connection: Items(len(connection.outbox))),
    "socks_by_clients": _viewed(CONNECTIONS, lambda connection: connection.address),
}
