"""The state of the broker that an expression of `_eval` can read.

The one rule: every attribute is a plain value, made when it is read, and paid for; changing it
changes nothing in the broker. The value for each queue, consumer or connection is made when that
one is read.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, Generic, TypeVar

from mqks.broker.base.turns import GOES_ON, Work, ordered, slices
from mqks.broker.broker import Broker
from mqks.broker.clients.consumer import Consumer
from mqks.broker.evaluate.views import Flag, Items
from mqks.limits import STEP_NAMES
from mqks.protocol.masks import MASK

K = TypeVar("K", str, int)
V = TypeVar("V")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _held(consumer: Consumer) -> list[str]:
    """Ids of its unacked messages, each as often as it is unacked."""
    later = (repeat(each, len(found)) for each, found in consumer.repeated.items())
    return [*map(_text, consumer.unacked), *map(_text, chain.from_iterable(later))]


class View(Mapping[K, V], Generic[K, V]):
    """The value that `tell` makes for each key; it costs its size."""

    __slots__ = ("_pay", "_tell", "_things")

    def __init__(
        self,
        pay: Callable[[int], None],
        things: Mapping[Any, Any],
        tell: Callable[[Any], V],
    ) -> None:
        self._pay, self._things, self._tell = pay, things, tell

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[Any]:
        for key in list(self._things):
            if key not in self._things:
                continue  # It was removed while the expression waited for its next turn.
            yield _text(key) if isinstance(key, bytes) else key

    def __contains__(self, key: object) -> bool:
        return (_bytes(key) if isinstance(key, str) else key) in self._things

    def __getitem__(self, key: K) -> V:
        value = self._tell(self._things[_bytes(key) if isinstance(key, str) else key])
        self._pay(1 + (len(value) if isinstance(value, list) else 0))
        return value


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class State:
    """`docs/protocol.md` describes the attributes."""

    __slots__ = ("_broker", "_pay")

    def __init__(self, broker: Broker, pay: Callable[[int], None]) -> None:
        self._broker = broker
        self._pay = pay
        """Pays for steps, and raises if there are no more."""

    def _view(self, things: Mapping[Any, Any], tell: Callable[[Any], V]) -> View[Any, V]:
        return View(self._pay, things, tell)

    @property
    def worker(self) -> int:
        """Number of this server: always 0."""
        return 0

    @property
    def published(self) -> int:
        """Messages published since the start."""
        return self._broker.published

    @property
    def queued(self) -> int:
        """Copies put into queues since the start."""
        return self._broker.queued

    @property
    def consumed(self) -> int:
        """Copies acked, or delivered without manual ack, since the start."""
        return self._broker.shared.counters.consumed

    @property
    def commands_put(self) -> int:
        """Commands sent to other workers: always 0."""
        return 0

    @property
    def commands_got(self) -> int:
        """Commands received from other workers: always 0."""
        return 0

    @property
    def commands_to_workers(self) -> dict[int, Items]:
        """Worker → commands that wait for it: there are no other workers."""
        return {}

    @property
    def queues(self) -> Mapping[str, Items]:
        """Queue → its ready messages, as an object with a length."""
        return self._view(self._broker.queues, lambda queue: Items(queue.ready))

    @property
    def queues_used(self) -> Mapping[str, Flag]:
        """Queue → whether it has consumers."""
        return self._view(self._broker.queues, lambda queue: Flag(bool(queue.consumers)))

    @property
    def queues_to_delete_when_unused(self) -> dict[str, float | None]:
        """Queue with a delete rule → its delay in seconds, None without a delay."""
        self._pay(len(self._broker.queues) // 4)
        return {
            _text(name): rule.delay_s
            for name, queue in self._broker.queues.items()
            if (rule := queue.policy.delete_when_unused) is not None
        }

    @property
    def queues_by_events(self) -> Work[dict[str, list[str]]]:
        """Event → names bound to it."""
        bound = self._broker.bindings.by_name
        self._pay(len(bound) // 4)
        names: dict[str, list[str]] = {}
        weight = 0
        for name in (yield from ordered(bound)):
            text = _text(name)
            for some in slices([*bound.get(name, ())], STEP_NAMES):
                self._pay(1 + len(some))
                for event in some:
                    names.setdefault(_text(event), []).append(text)
                weight += 1 + len(some)
                if weight > STEP_NAMES:
                    weight = 0
                    yield GOES_ON
        return names

    @property
    def events_by_queues(self) -> Mapping[str, list[str]]:
        """Name → events it is bound to."""
        return self._view(self._broker.bindings.by_name, lambda events: sorted(map(_text, events)))

    @property
    def masks_by_queues(self) -> Mapping[str, list[str]]:
        """Name → masks it is bound to."""
        return self._view(
            self._broker.bindings.masks_by_name,
            lambda masks: sorted(_text(mask.removeprefix(MASK)) for mask in masks),
        )

    @property
    def consumers_by_queues(self) -> Mapping[str, list[str]]:
        """Queue → ids of its consumers, in order of attachment."""
        return self._view(
            self._broker.queues,
            lambda queue: [_text(consumer.id) for consumer in queue.consumers],
        )

    @property
    def queues_by_consumer_ids(self) -> Mapping[str, str]:
        return self._view(self._broker.consumers, lambda consumer: _text(consumer.queue.name))

    @property
    def consumer_ids_by_clients(self) -> Mapping[int, list[str]]:
        """Connection number → ids of its consumers."""
        return self._view(
            self._broker.connections, lambda connection: [*map(_text, connection.consumers)]
        )

    @property
    def clients_by_consumer_ids(self) -> Mapping[str, int]:
        return self._view(self._broker.consumers, lambda consumer: consumer.connection.id)

    @property
    def messages_by_consumer_ids(self) -> Work[dict[str, list[str]]]:
        """Consumer with manual ack → ids of its unacked messages."""
        holding = [each for each in self._broker.consumers.values() if each.manual_ack]
        self._pay(len(self._broker.consumers) // 4)
        ids: dict[str, list[str]] = {}
        weight = 0
        for each in holding:
            if each.deleted:
                continue
            count = each.unacked_count
            self._pay(count)
            ids[_text(each.id)] = _held(each)
            weight += 1 + count
            if weight > STEP_NAMES:
                weight = 0
                yield GOES_ON
        return ids

    @property
    def responses_by_clients(self) -> Mapping[int, Items]:
        """Connection number → pieces of replies that wait to be sent at the end of the turn."""
        return self._view(
            self._broker.connections, lambda connection: Items(len(connection.outbox))
        )

    @property
    def socks_by_clients(self) -> Mapping[int, str]:
        """Connection number → address of the peer."""
        return self._view(self._broker.connections, lambda connection: connection.address)
