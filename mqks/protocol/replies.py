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


def bound(queue: bytes, events: Sequence[bytes], rule: DeleteRule | None) -> bytes:
    """What a queue is bound to, `events` sorted, and its rule: the same for all its consumers."""
    return b" ".join([b" ok --update", queue, *events, *([rule.flag()] if rule else ())])


def update(consumer_id: bytes, about: bytes, manual_ack: bool) -> bytes:
    """Tell a consumer what its queue is bound to now."""
    return b"%b%b%b\n" % (consumer_id, about, b" --manual-ack" if manual_ack else b"")


def body(message_id: bytes, event: bytes, data: bytes) -> bytes:
    """A message as queue and journal hold it: a delivery without its consumer's prefix."""
    return b"%b event=%b %b" % (message_id, event, data)


ATTRIBUTES: Final = b"\t"
"""Behind a message's data, before its attributes: a request can hold no tab."""


def plain(message: bytes) -> bytes:
    """A message without its attributes."""
    return message.partition(ATTRIBUTES)[0]


def with_retry(message: bytes, retry: int) -> bytes:
    """The same, told as delivered for the `retry`-th time again."""
    message_id, event, data = message.split(b" ", 2)
    return b"%b %b,retry=%d %b" % (message_id, event, retry, data)


def message_id(message: bytes) -> bytes:
    return message[: message.index(b" ")]
