"""Replies as bytes. The one rule: a reply is one line and ends with one newline."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from mqks.protocol.requests import DeleteRule


def ok(request_id: bytes, data: bytes) -> bytes:
    return b"%b ok %b\n" % (request_id, data)


def confirms(request_ids: Sequence[bytes]) -> bytes:
    """The confirms of many requests of one connection, joined at once: 25 ns each."""
    return b" ok \n".join(request_ids) + b" ok \n"


def error(request_id: bytes, error_id: str, reason: str = "") -> bytes:
    """With a reason only where nobody can ask for it."""
    return b"%b error %b\n" % (request_id, f"{error_id} {reason}".rstrip().encode())


def bound(
    queue: bytes, events: Sequence[bytes], masks: Sequence[bytes], rule: DeleteRule | None
) -> bytes:
    """The part of an update that is the same for all consumers: sorted bindings, and the delete
    rule."""
    words = [b" ok --update", queue, *events]
    if masks:
        words += [b"--add-mask", *masks]
    return b" ".join([*words, *([rule.flag()] if rule else ())])


def update(consumer_id: bytes, about: bytes, flags: bytes) -> bytes:
    """An update: `about` as from `bound`, then the consumer's own flags, each after a space."""
    return b"%b%b%b\n" % (consumer_id, about, flags)


def body(message_id: bytes, event: bytes, data: bytes) -> bytes:
    """A message as queue and journal store it: a delivery without its consumer id."""
    return b"%b event=%b %b" % (message_id, event, data)


ATTRIBUTES: Final = b"\t"
"""Separates data, attributes, and internal facts of a message: a request cannot contain a tab."""


ESCAPED: Final = b",escaped=1"
"""The first of the traits of a message whose data are escaped."""


PRIORITY: Final = b",priority="
"""Among the traits, which have commas only between them, and attributes none."""


UNIQUE: Final = b",unique="
"""Among the traits, before the key."""


class Parts(NamedTuple):
    """A message in its stored form: text, attributes, and internal facts, each after a tab."""

    text: bytes
    meta: bytes = b""
    """Attributes, percent-encoded."""
    published: bytes = b""
    """When it was first published, if that is not the time of its number."""
    traits: bytes = b""
    """How it was published, as a delivery tells it: `,escaped=1,priority=5,unique=b,key=a`."""

    def joined(self) -> bytes:
        return ATTRIBUTES.join(self).rstrip(ATTRIBUTES)


class Traits(NamedTuple):
    escaped: bool
    priority: int
    key: bytes
    """Percent-encoded; empty without one."""
    unique: bytes = b""
    """As after `--unique=`: its key, until when that is held, and for how long."""


NO_TRAITS: Final = Traits(False, 0, b"")


def read_traits(traits: bytes) -> Traits:
    """What `Parts.traits` say."""
    values = dict(each.split(b"=", 1) for each in traits.split(b",")[1:])
    unique = b"%b%b%b" % (
        values.get(b"unique", b""),
        b",until=acked" if b"until" in values else b"",
        b",for=" + values[b"for"] if b"for" in values else b"",
    )
    priority = int(values.get(b"priority", 0))
    return Traits(b"escaped" in values, priority, values.get(b"key", b""), unique)


def parts(message: bytes) -> Parts:
    return Parts(*message.split(ATTRIBUTES)) if ATTRIBUTES in message else Parts(message)


def key_of(message: bytes) -> bytes:
    """The key of a message, percent-encoded; empty if it has none."""
    at = message.rfind(b"\t,")
    return message[at:].partition(b",key=")[2] if at >= 0 else b""


def priority_of(message: bytes) -> int:
    """The priority of a message, from its traits."""
    traits = message.rfind(b"\t,")
    if traits < 0:
        return 0
    _, found, priority = message[traits:].partition(PRIORITY)
    return int(priority.partition(b",")[0]) if found else 0


def plain(message: bytes) -> bytes:
    """A message without its attributes, as it is delivered."""
    text, _, behind = message.partition(ATTRIBUTES)
    return _with(text, ESCAPED) if ESCAPED in behind else text


def all_plain(messages: Sequence[bytes]) -> list[bytes]:
    """What `plain` makes of many: in a fourth of the time."""
    if ESCAPED in b"".join(messages):
        return [*map(plain, messages)]
    return [message.partition(ATTRIBUTES)[0] for message in messages]


def with_retry(message: bytes, retry: int) -> bytes:
    """The message as in its `retry`-th redelivery, without its attributes."""
    text, _, behind = message.partition(ATTRIBUTES)
    return _with(text, b",retry=%d%b" % (retry, ESCAPED if ESCAPED in behind else b""))


def shown(request_id: bytes, message: bytes, retry: int, told: bytes) -> bytes:
    """The message as one that is looked at: with retry, traits and attributes, where it has any,
    and what else is `told`."""
    text, meta, _, traits = parts(message)
    message_id, event, data = text.split(b" ", 2)
    if retry:
        event += b",retry=%d" % retry
    event += traits
    if meta:
        event += b",meta=" + meta
    return b"%b ok %b %b%b %b\n" % (request_id, message_id, event, told, data)


def with_meta(message: bytes, retry: int) -> bytes:
    """The message with `retry`, traits and attributes; `retry` and attributes are always there."""
    text, meta, _, traits = parts(message)
    return _with(text, b",retry=%d%b,meta=%b" % (retry, traits, meta))


def _with(text: bytes, told: bytes) -> bytes:
    """A message with this behind its event."""
    message_id, event, data = text.split(b" ", 2)
    return b"%b %b%b %b" % (message_id, event, told, data)


def message_id(message: bytes) -> bytes:
    return message[: message.index(b" ")]
