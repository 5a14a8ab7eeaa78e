"""Masks of names: `*` stands for any run of bytes without a dot, `**` for any run at all, every
other byte for itself. There is one language of masks, described in `docs/protocol.md`.

Permissions, tables of queues and filters take all of it (`name_masks`). A mask that a queue is
bound to, or that `--remove-mask` names, has `**` only as its last part, which stands for one part
or more: so it fits into a trie, and matching is fast for names of any length.

The one rule: matching never goes back in a name. Mask and name are split at their dots; within a
part, each piece between stars matches at the first place where it occurs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from mqks.errors import BadRequest
from mqks.limits import MASK_BYTES_MAX

MASK: Final = b"\t"
"""Prefix of a mask in a list of events: no event can contain a tab."""
REST: Final = b"**"
"""The last part of a bound mask: one part or more."""
FRESH: Final = b"\n"
"""Stands for what a star matches: no mask can contain it."""
Part = list[bytes]
"""Pieces with a star between each two of them, no dots."""
Span = list[Part]
"""Parts with a dot between each two of them: the text between `**` and `**`."""


class EventMasks:
    """The events that `rebind --remove-mask` removes: those with a dot that one of the masks
    matches. Raises BadRequest."""

    def __init__(self, masks: Iterable[bytes]) -> None:
        self._by_dots: dict[int, list[Span]] = {}
        self._rests: list[Span] = []
        """Of masks that end in `**`: the parts before it."""
        for mask in dict.fromkeys(masks):
            _check_length(mask)
            _check_rest(mask)
            span = _span(mask)
            if _is_rest(mask):
                self._rests.append(span[:-1])
            else:
                self._by_dots.setdefault(mask.count(b"."), []).append(span)

    def tries(self, event: bytes) -> Iterator[bool]:
        """False, then whether a mask matches, mask by mask; the caller can check the time between
        them."""
        yield False
        # A star takes no dots: mask and event have as many.
        dots = event.count(b".")
        spans = self._by_dots.get(dots, ())
        if not dots or not (spans or self._rests):
            return
        parts = event.split(b".")
        for span in spans:
            yield all(map(fits, span, parts))
        for span in self._rests:
            yield len(parts) > len(span) and all(map(fits, span, parts))


def check_bound(mask: bytes) -> None:
    """Raise BadRequest if a queue cannot be bound to this mask."""
    _check_length(mask)
    if mask == REST:
        return
    if b"." not in mask:
        raise BadRequest(
            f"the mask {_shown(mask)} has no dot, as in orders.*; ** matches all events"
        )
    _check_rest(mask)


def _check_rest(mask: bytes) -> None:
    if mask != REST and REST in mask.removesuffix(b".**"):
        raise BadRequest(
            f"the mask {_shown(mask)} has ** before its end; write it last, as in logs.**"
        )


def _is_rest(mask: bytes) -> bool:
    return mask == REST or mask.endswith(b".**")


def bound_matches(mask: bytes, event: bytes) -> bool:
    """Whether this mask of a binding matches this event."""
    span, parts = _span(mask), event.split(b".")
    if _is_rest(mask):
        span.pop()
        return len(parts) > len(span) and all(map(fits, span, parts))
    return len(parts) == len(span) and all(map(fits, span, parts))


def covering(masks: Iterable[bytes]) -> Callable[[bytes], bool]:
    """Whether one of these masks of names covers all events that a bound mask matches. Masks that
    cover them only together do not count. Raises BadRequest.

    A star of the bound mask is replaced by a byte that only a star matches; its `**` can only be
    covered by a `**` that is also at the end.
    """
    given = list(masks)
    allows = name_masks(given)
    allows_rest = name_masks(mask for mask in given if mask.endswith(REST))

    def covers(mask: bytes) -> bool:
        if mask.endswith(REST):
            return allows_rest(mask.removesuffix(REST).replace(b"*", FRESH))
        return allows(mask.replace(b"*", FRESH))

    return covers


def name_masks(masks: Iterable[bytes]) -> Callable[[bytes], bool]:
    """Whether one of these masks matches a name, in all of the language. Raises BadRequest."""
    plain: set[bytes] = set()
    prefixes: list[bytes] = []
    others: list[list[Span]] = []
    for mask in masks:
        _check_length(mask)
        mask = re.sub(rb"\*{2,}", b"**", mask)
        prefix = mask.removesuffix(b"**")
        if b"*" not in mask:
            plain.add(mask)
        elif b"*" not in prefix:
            prefixes.append(prefix)
        else:
            others.append(_spans(mask))
    starts = tuple(prefixes)

    def matches(name: bytes) -> bool:
        if name in plain or name.startswith(starts):
            return True
        parts = name.split(b".") if others else []
        return any(_covers(spans, parts) for spans in others)

    return matches


def _check_length(mask: bytes) -> None:
    if len(mask) > MASK_BYTES_MAX:
        raise BadRequest(f"the mask has {len(mask)} bytes, the limit is {MASK_BYTES_MAX}")


def _shown(mask: bytes) -> str:
    return repr(mask[:80])[1:]


def _span(mask: bytes) -> Span:
    return [part.split(b"*") for part in mask.split(b".")]


def _spans(mask: bytes) -> list[Span]:
    # The star changes nothing: `**` matches all that it could match.
    first, *others = mask.split(b"**")
    return [_span(first), *(_span(b"*" + other) for other in others)]


def _covers(spans: list[Span], parts: Sequence[bytes]) -> bool:
    """Each span matches at its first place, so that most is left for those after it; the last one
    ends with the name."""
    *others, last = spans
    index = start = 0
    for number, span in enumerate(others):
        # The first span starts with the name.
        end = len(parts) - len(span) + 1 if number else min(1, len(parts) - len(span) + 1)
        for place in range(index, end):
            stop = _end(span, parts, place, start)
            if stop >= 0:
                index, start = place + len(span) - 1, stop
                break
            start = 0
        else:
            return False
    place = len(parts) - len(last)
    if place < index or (place and not others):
        return False
    begins = [start if place == index else 0, *[0] * len(last)]
    return all(map(fits, last, parts[place:], begins))


def _end(span: Span, parts: Sequence[bytes], place: int, start: int) -> int:
    """Where the span ends in the last of the parts that it matches from here on; -1: no match."""
    *whole, last = span
    for part, pieces in zip(parts[place:], whole, strict=False):
        if not fits(pieces, part, start):
            return -1
        start = 0
    return _find(last, parts[place + len(whole)], start)


def fits(pieces: Part, part: bytes, start: int = 0) -> bool:
    """Whether the pieces match all of `part[start:]`, with anything in place of the stars."""
    *others, last = pieces
    if not others:
        return part[start:] == last
    end = len(part) - len(last)
    stop = _find(others, part, start, end)
    return 0 <= stop <= end and part.endswith(last)


def _find(pieces: Part, part: bytes, start: int, end: int | None = None) -> int:
    """Where the last piece ends if the first starts at `start` and each matches at its first place;
    -1: no match."""
    first, *others = pieces
    if not part.startswith(first, start):
        return -1
    start += len(first)
    for piece in others:
        found = part.find(piece, start, end)
        if found < 0:
            return -1
        start = found + len(piece)
    return start
