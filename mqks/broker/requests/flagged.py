"""The flags of publishes that gather.

The one rule: what has other flags, or is wrong, is handled singly, and gets its error there.
"""

from functools import lru_cache
from typing import Any, Final

from mqks.errors import BadRequest
from mqks.limits import ESCAPED_STEP_BYTES
from mqks.protocol import replies
from mqks.protocol.escapes import is_escaped
from mqks.protocol.requests import ACTIONS, Publish

_SHARED: Final = b"--ttl=", b"--delay=", b"--at=", b"--mandatory ", b"--to=", b"--batch="
"""Flags that many messages have with the same value, so that they share their terms."""
_TRAITS: Final = b"--escaped", b"--priority=", b"--key=", b"--meta="
"""Flags of single messages, which gather with those of their event that have none."""


def shared(key: bytes) -> Publish | None:
    """The flags before an event, if many messages may have them. It has no event, as those of
    several events that have the same flags gather together."""
    if not key.startswith(_SHARED):
        return None
    try:
        flags: Publish = ACTIONS[b"publish"].parse(key, 0)._replace(event=b"")
    except BadRequest:
        return None
    return flags


def traited(flag: bytes, rest: bytes) -> tuple[bytes, bytes] | None:
    """The event of a publish with no other flags than traits, and its data followed by what they
    add; None if it must be parsed singly."""
    if not flag.startswith(_TRAITS):
        return None
    event, _, data = rest.partition(b" ")
    for _ in _TRAITS[1:]:
        if not event.startswith(_TRAITS):
            break
        flag = b"%b %b" % (flag, event)
        event, _, data = data.partition(b" ")
    try:
        attributes = _attributes(flag)
    except BadRequest:
        return None
    if replies.ESCAPED in attributes and (len(data) > ESCAPED_STEP_BYTES or not is_escaped(data)):
        return None
    return event, data + attributes


@lru_cache(maxsize=1024)
def _attributes(flags: bytes) -> bytes:
    """What these flags add to a message, see `replies.Parts`. Raises BadRequest."""
    fields: dict[str, Any] = {}
    for flag in flags.split(b" "):
        ACTIONS[b"publish"].take(flag, fields)
    publish = Publish(b"", b"", **fields)
    return replies.Parts(b"", publish.meta, b"", publish.traits).joined()
