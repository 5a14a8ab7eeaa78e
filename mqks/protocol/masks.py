"""Masks of names: `*` stands for any run of bytes without a dot, every other byte for itself.

The one rule: matching may not start over and over, whatever the mask and whatever the name.
"""

import re

from mqks.errors import BadRequest
from mqks.limits import MASK_BYTES_MAX


def mask_pattern(mask: bytes) -> re.Pattern[bytes]:
    """What events `rebind --remove-mask` means. Raises BadRequest."""
    _check_length(mask)
    # Neighbouring stars mean one.
    return re.compile(_within(re.sub(rb"\*+", b"*", mask)), re.DOTALL)


def masks_pattern(masks: list[bytes]) -> re.Pattern[bytes]:
    """What names these masks allow; in them `**` stands for any run at all. Raises BadRequest."""
    for mask in masks:
        _check_length(mask)
    return re.compile(b"|".join(map(_across, masks)) or b"(?!)", re.DOTALL)


def _check_length(mask: bytes) -> None:
    if len(mask) > MASK_BYTES_MAX:
        raise BadRequest(f"an event mask may have {MASK_BYTES_MAX} bytes at most")


def _within(mask: bytes) -> bytes:
    # Each piece between stars takes its first place and keeps it (an atomic group): a mask of
    # many stars can't make the matching start over and over.
    first, *rest = map(re.escape, mask.split(b"*"))
    if not rest:
        return first
    *middle, last = rest
    return first + _pieces(middle) + b"[^.]*" + last


def _across(mask: bytes) -> bytes:
    first, *rest = re.sub(rb"\*{2,}", b"**", mask).split(b"**")
    if not rest:
        return _within(first)
    *middle, last = rest
    # What stands between two `**` may end as early as it can: more is left to the second.
    spans = b"".join(b"(?>.*?%b)" % _earliest(span) for span in middle)
    return _earliest(first) + spans + b".*" + _within(last)


def _earliest(span: bytes) -> bytes:
    first, *rest = map(re.escape, span.split(b"*"))
    return first + _pieces(rest)


def _pieces(pieces: list[bytes]) -> bytes:
    return b"".join(b"(?>[^.]*?%b)" % piece for piece in pieces)
