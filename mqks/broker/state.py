"""What an expression of `_eval` can see of the broker.

The one rule: every attribute is a plain value made when it is asked for; changing it changes
nothing.
"""

from itertools import chain, repeat

from mqks.broker.broker import Broker
from mqks.broker.consumer import Consumer
from mqks.broker.views import Flag, Items


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _held(consumer: Consumer) -> list[str]:
    """Ids of the messages that it holds, one as often as it is held."""
    later = (repeat(each, len(found)) for each, found in consumer.repeated.items())
    return [*map(_text, consumer.unacked), *map(_text, chain.from_iterable(later))]


class State:
    """Names and meanings are told in `docs/protocol.md`."""

    __slots__ = ("_broker",)

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

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
        return self._broker.consumed

    @property
    def commands_put(self) -> int:
        """Commands sent to other workers: there are none."""
        return 0

    @property
    def commands_got(self) -> int:
        """Commands that came from other workers."""
        return 0

    @property
    def commands_to_workers(self) -> dict[int, Items]:
        """Worker → commands that wait for it: there is no other one."""
        return {}

    @property
    def queues(self) -> dict[str, Items]:
        """Queue → its waiting messages, as something that has a length."""
        return {_text(name): Items(queue.ready) for name, queue in self._broker.queues.items()}

    @property
    def queues_used(self) -> dict[str, Flag]:
        """Queue → whether it has consumers."""
        return {
            _text(name): Flag(bool(queue.consumers)) for name, queue in self._broker.queues.items()
        }

    @property
    def queues_to_delete_when_unused(self) -> dict[str, float | None]:
        """Queue with a delete rule → its delay in seconds, None where there is none."""
        return {
            _text(name): queue.rule.delay_s
            for name, queue in self._broker.queues.items()
            if queue.rule is not None
        }

    @property
    def queues_by_events(self) -> dict[str, list[str]]:
        """Event → names bound to it."""
        names: dict[str, list[str]] = {}
        for name, events in self._broker.bindings.by_name.items():
            for event in events:
                names.setdefault(_text(event), []).append(_text(name))
        return {event: sorted(queues) for event, queues in names.items()}

    @property
    def events_by_queues(self) -> dict[str, list[str]]:
        """Name → events it is bound to."""
        return {
            _text(name): sorted(map(_text, events))
            for name, events in self._broker.bindings.by_name.items()
        }

    @property
    def consumers_by_queues(self) -> dict[str, list[str]]:
        """Queue → its consumers' ids, in the order they came."""
        return {
            _text(name): [_text(consumer.id) for consumer in queue.consumers]
            for name, queue in self._broker.queues.items()
        }

    @property
    def queues_by_consumer_ids(self) -> dict[str, str]:
        return {
            _text(consumer.id): _text(consumer.queue.name)
            for consumer in self._broker.consumers.values()
        }

    @property
    def consumer_ids_by_clients(self) -> dict[int, list[str]]:
        """Connection number → ids of its consumers."""
        return {
            connection.id: [_text(consumer_id) for consumer_id in connection.consumers]
            for connection in self._broker.connections.values()
        }

    @property
    def clients_by_consumer_ids(self) -> dict[str, int]:
        return {
            _text(consumer.id): consumer.connection.id
            for consumer in self._broker.consumers.values()
        }

    @property
    def messages_by_consumer_ids(self) -> dict[str, list[str]]:
        """Consumer with manual ack → ids of the messages that it holds."""
        return {
            _text(consumer.id): _held(consumer)
            for consumer in self._broker.consumers.values()
            if consumer.manual_ack
        }

    @property
    def responses_by_clients(self) -> dict[int, Items]:
        """Connection number → pieces of replies that wait to be sent at the end of the turn."""
        return {
            connection.id: Items(len(connection.outbox))
            for connection in self._broker.connections.values()
        }

    @property
    def socks_by_clients(self) -> dict[int, str]:
        """Connection number → address of the peer."""
        return {
            connection.id: connection.address for connection in self._broker.connections.values()
        }
