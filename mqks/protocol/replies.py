"""Replies to bytes. The one rule: a reply is one line and ends with one newline."""

from collections.abc import Sequence
from typing import Final

from mqks.protocol.requests import DeleteRule


def ok(request_id: bytes, data: bytes) -> bytes:
    return b"%b ok %b\n" % (request_id, data)


def confirms(request_ids: Sequence[bytes]) -> bytes:
    """The confirms of many requests of one connection, joined in one go: 25 ns each."""
    return b" ok \n".join(request_ids) + b" ok \n"


def error(request_id: bytes, error_id: str) -> bytes:
    return b"%b error %b\n" % (request_id, error_id.encode())


def bound(
    queue: bytes, events: Sequence[bytes], masks: Sequence[bytes], rule: DeleteRule | None
) -> bytes:
    """What a queue is bound to, each sorted, and its rule: the same for all its consumers."""
    words = [b" ok --update", queue, *events]
    if masks:
        words += [b"--add-mask", *masks]
    return b" ".join([*words, *([rule.flag()] if rule else ())])


def update(consumer_id: bytes, about: bytes, flags: bytes) -> bytes:
    """Tell a consumer what its queue is bound to now, and its own flags, each behind a space."""
    return b"%b%b%b\n" % (consumer_id, about, flags)


def body(message_id: bytes, event: bytes, data: bytes) -> bytes:
    """A message as queue and journal hold it: a delivery without its consumer's prefix."""
    return b"%b event=%b %b" % (message_id, event, data)


ATTRIBUTES: Final = b"\t"
"""Behind a message's data, before its attributes, and behind those before what nobody is told: a
request can hold no tab."""


def plain(message: bytes) -> bytes:
    """A message without its attributes."""
    return message.partition(ATTRIBUTES)[0]


def split(message: bytes) -> tuple[bytes, bytes]:
    """A message without its attributes, and these, percent-encoded."""
    text, _, behind = message.partition(ATTRIBUTES)
    return text, behind.partition(ATTRIBUTES)[0]


def with_retry(message: bytes, retry: int) -> bytes:
    """The same, told as delivered for the `retry`-th time again."""
    message_id, event, data = message.split(b" ", 2)
    return b"%b %b,retry=%d %b" % (message_id, event, retry, data)


def with_meta(message: bytes, retry: int) -> bytes:
    """The same with retry and attributes, which are always there."""
    text, meta = split(message)
    message_id, event, data = text.split(b" ", 2)
    return b"%b %b,retry=%d,meta=%b %b" % (message_id, event, retry, meta, data)


def message_id(message: bytes) -> bytes:
    return message[: message.index(b" ")]
