"""Exchanges and routing keys of AMQP as events and masks: `{exchange}.{routing_key}`.

The one rule: the event of a message tells its exchange and its routing key, and does not depend on
the type of the exchange, which only those know who bind queues to it.
"""

from urllib.parse import quote, unquote

from kombu.exceptions import ChannelError

_SAFE = "@:/+$!~"
TASK_BYTES_MAX = 200
"""Of an id: 17 bytes more are what differs in a group."""


def key(text: str) -> str:
    """The name of a queue, or a routing key, as a name of the protocol."""
    quoted = quote(text, safe=_SAFE)
    return f"%2D{quoted[1:]}" if quoted.startswith("-") else quoted


def event(exchange: str, routing_key: str) -> str:
    """What a message is published as; the default exchange has no name."""
    return f"{key(exchange).replace('.', '%2E')}.{key(routing_key)}"


def published(event: str) -> tuple[str, str]:
    """Exchange and routing key of a message with this event."""
    exchange, _, routing_key = event.partition(".")
    return unquote(exchange), unquote(routing_key)


def group(task_id: str) -> str:
    """What the ids of the messages of a task begin with; empty if that would be too long."""
    quoted = key(task_id)
    return f"{quoted}#" if len(quoted) <= TASK_BYTES_MAX else ""


def bound(kind: str, exchange: str, routing_key: str) -> tuple[list[str], list[str]]:
    """The events and the masks that bind a queue to an exchange of this type. Raises ChannelError
    for a `#` that is followed by anything."""
    if kind == "fanout":
        return [], [f"{event(exchange, '')}**"]
    words = routing_key.split(".")
    if kind == "direct" or not {"*", "#"}.intersection(words):
        return [event(exchange, routing_key)], []
    *head, last = words
    if "#" in head:
        raise ChannelError(f"routing key {routing_key!r}: `#` must be its last word")
    told = ["*" if word == "*" else key(word) for word in (head if last == "#" else words)]
    prefix = event(exchange, "")
    if last == "#" and not head:
        return [], [f"{prefix}**"]
    name = prefix + ".".join(told)
    events, masks = ([], [name]) if "*" in told else ([name], [])
    return events, [*masks, f"{name}.**"] if last == "#" else masks
