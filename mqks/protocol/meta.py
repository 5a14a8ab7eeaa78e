"""Attributes of a message: percent-encoded pairs `key=value` joined by `&`.

The one rule: text that passes `check_meta` fits into a delivery, between a comma and a space.
"""

import re
from urllib.parse import unquote_to_bytes

from mqks.errors import BadRequest
from mqks.limits import KEY_BYTES_MAX, META_BYTES_MAX, REASON_BYTES_MAX

LETTER = ("reason", "queue", "tries", "published", "died", "why")
"""Keys that the server sets in dead letters, in this order and behind all others. The last one only
if the reject that killed the message had a `--reason`."""
RESERVED = frozenset(key.encode() for key in LETTER)
_NUMBER = re.compile(rb"[0-9]+")
_LETTER = re.compile(
    rb"reason=(?:rejects|losses|deliveries|ttl|overflow|dead)&queue=[^&]+&tries=[0-9]{1,15}"
    rb"&published=[0-9]{1,11}\.[0-9]{3}&died=[0-9]{1,11}\.[0-9]{3}(?:&why=[^&]+)?"
)
# Visible ASCII, except the comma, and `%` only before two hexadecimal digits.
_ALLOWED = re.compile(rb"(?:[!-$&-+\--~]|%[0-9A-Fa-f]{2})+")


def check_meta(meta: bytes, *, reserved: bool = False, bytes_max: int = META_BYTES_MAX) -> bytes:
    """Return `meta` unchanged if it is valid; with `reserved`, it may have keys that the server
    sets. Raises BadRequest."""
    if len(meta) > bytes_max:
        raise BadRequest(f"the attributes have {len(meta)} bytes, the limit is {bytes_max}")
    if not _ALLOWED.fullmatch(meta):
        raise BadRequest(f"attributes {_shown(meta)} are not percent-encoded, as in a=1&b=x%20y")
    keys = set()
    for pair in meta.split(b"&"):
        name, equals, _ = pair.partition(b"=")
        key = unquote_to_bytes(name)
        if not key or not equals:
            raise BadRequest(f"{_shown(pair)} is not an attribute, as in key=value")
        if key in RESERVED and not reserved:
            raise BadRequest(f"the attribute {key.decode()} is reserved: the server sets it")
        if key in keys:
            raise BadRequest(f"the attribute {_shown(key)} is given twice")
        keys.add(key)
    return meta


def check_letter(told: bytes) -> bytes:
    """Return the attributes of a dead letter unchanged if they are all there, in their order.
    Raises BadRequest."""
    if not _LETTER.fullmatch(check_meta(told, reserved=True)):
        raise BadRequest(
            f"{_shown(told)} is not a dead letter, as in "
            "reason=rejects&queue=q&tries=1&published=1790000000.000&died=1790000000.000"
        )
    return told


def pairs_of(meta: bytes) -> dict[bytes, bytes]:
    """The decoded attributes of valid `meta`."""
    if not meta:
        return {}
    split = [pair.partition(b"=") for pair in meta.split(b"&")]
    if b"%" in meta:
        return {unquote_to_bytes(key): unquote_to_bytes(value) for key, _, value in split}
    return {key: value for key, _, value in split}


def cause(why: bytes) -> bytes:
    """The reason of a reject with a `#` for each number, so that ids do not part dead letters with
    the same cause."""
    return _NUMBER.sub(b"#", why)


def has_pairs(meta: bytes, wanted: dict[bytes, bytes]) -> bool:
    """Whether valid `meta` has these attributes; one that is missing counts as empty, and `why`
    also matches its `cause`."""
    found = pairs_of(meta)
    return all(
        (value := found.get(key, b"")) == each or (key == b"why" and cause(value) == each)
        for key, each in wanted.items()
    )


def check_reason(value: bytes) -> bytes:
    """Return the reason of a reject unchanged if it is valid. Raises BadRequest."""
    if len(value) > 3 * REASON_BYTES_MAX or len(unquote_to_bytes(value)) > REASON_BYTES_MAX:
        raise BadRequest(f"the reason has more than {REASON_BYTES_MAX} bytes")
    if b"&" in value or not _ALLOWED.fullmatch(value):
        raise BadRequest(f"{_shown(value)} is not percent-encoded, as in no%20such%20customer")
    return value


def check_key(key: bytes) -> bytes:
    """Return `key` unchanged if it is valid. Raises BadRequest."""
    if len(key) > KEY_BYTES_MAX:
        raise BadRequest(f"the key has {len(key)} bytes, the limit is {KEY_BYTES_MAX}")
    if not _ALLOWED.fullmatch(key):
        raise BadRequest(f"the key {_shown(key)} is not percent-encoded, as in a%20b")
    return key


def split_dead_letter(meta: bytes) -> tuple[bytes, list[bytes] | None]:
    """The attributes that a message was published with, and those of a dead letter: the values of
    `LETTER`, as they stand there, empty if it is missing."""
    own, equals, told = (b"&" + meta).partition(b"&reason=")
    values = [pair.partition(b"=")[2] for pair in (equals + told)[1:].split(b"&")]
    if len(values) == len(LETTER) - 1:
        values.append(b"")
    return (own[1:], values) if len(values) == len(LETTER) else (meta, None)


def _shown(text: bytes) -> str:
    return repr(text[:80])[1:]
