"""Replies as bytes. The one rule: a reply is one line and ends with one newline."""

from collections.abc import Sequence
from typing import Final

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


def plain(message: bytes) -> bytes:
    """A message without its attributes."""
    return message.partition(ATTRIBUTES)[0]


def split(message: bytes) -> tuple[bytes, bytes]:
    """A message without its attributes, and the attributes, percent-encoded."""
    text, _, behind = message.partition(ATTRIBUTES)
    return text, behind.partition(ATTRIBUTES)[0]


def with_retry(message: bytes, retry: int) -> bytes:
    """The message as in its `retry`-th redelivery."""
    message_id, event, data = message.split(b" ", 2)
    return b"%b %b,retry=%d %b" % (message_id, event, retry, data)


def with_meta(message: bytes, retry: int) -> bytes:
    """The message with `retry` and attributes, both always present."""
    text, meta = split(message)
    message_id, event, data = text.split(b" ", 2)
    return b"%b %b,retry=%d,meta=%b %b" % (message_id, event, retry, meta, data)


def message_id(message: bytes) -> bytes:
    return message[: message.index(b" ")]
