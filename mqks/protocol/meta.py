"""Attributes of a message: percent-encoded pairs `key=value` joined by `&`.

The one rule: what passes `check_meta` can be told in a delivery, between a comma and a space.
"""

import re
from urllib.parse import unquote_to_bytes

from mqks.errors import BadRequest
from mqks.limits import META_BYTES_MAX

RESERVED = frozenset({b"reason", b"queue", b"tries", b"published", b"died"})
"""Keys that the broker adds to dead letters."""
# Visible ASCII, except the comma, and `%` only before two hexadecimal digits.
_ALLOWED = re.compile(rb"(?:[!-$&-+\--~]|%[0-9A-Fa-f]{2})+")


def check_meta(meta: bytes) -> bytes:
    """Return the same. Raises BadRequest."""
    if len(meta) > META_BYTES_MAX:
        raise BadRequest(f"the attributes may have {META_BYTES_MAX} bytes at most")
    if not _ALLOWED.fullmatch(meta):
        raise BadRequest("attributes are pairs key=value joined by &, percent-encoded")
    keys = set()
    for pair in meta.split(b"&"):
        name, equals, _ = pair.partition(b"=")
        key = unquote_to_bytes(name)
        if not key or not equals:
            raise BadRequest("an attribute is key=value, and its key is not empty")
        if key in RESERVED:
            raise BadRequest(f"the attribute {key.decode()} is set by the broker alone")
        if key in keys:
            raise BadRequest("an attribute is there twice")
        keys.add(key)
    return meta
