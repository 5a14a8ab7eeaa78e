"""The messages of a work: how their bytes are built, and how what came back is checked.

The one rule: every message is told apart by its number, so that a lost, doubled, swapped or
damaged one is always noticed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NUMBER_BYTES = 12
PUBLISHER_BYTES = 4
MARK = b"~~~~~~~~"
"""Every payload ends with it: a load program counts what has come by searching for it."""

BLOCK = 100_000
"""Messages built at a time, so that only their joined bytes are many."""

PLACE = b"#"
"""Stands for the number in a template."""


class Wrong(Exception):
    """A server's answers are not what they must be."""


def publisher_of(payload: bytes) -> bytes:
    """The part of a payload that tells which publisher sent it."""
    return payload[:PUBLISHER_BYTES]


@dataclass(frozen=True, slots=True)
class Messages:
    """`count` messages of each of the publishers, numbered from `first`.

    A payload is `PPPPNNNNNNNN`, a filling of x and the mark; it has `payload_bytes` bytes.
    """

    count: int
    payload_bytes: int = 100
    publishers: range = range(1)
    first: int = 0

    def __post_init__(self) -> None:
        if self.payload_bytes < NUMBER_BYTES + len(MARK):
            raise ValueError(f"a payload has at least {NUMBER_BYTES + len(MARK)} bytes")

    @property
    def total(self) -> int:
        return self.count * len(self.publishers)

    @property
    def end(self) -> int:
        """One more than the last number."""
        return self.first + self.count

    @property
    def last(self) -> "Messages":
        """The last message of the last publisher alone."""
        return self.of(self.publishers[-1]).part(self.end - 1, 1)

    @property
    def payload(self) -> bytes:
        """The template of a payload."""
        filling = self.payload_bytes - NUMBER_BYTES - len(MARK)
        return PLACE + b"x" * filling + MARK

    def of(self, publisher: int) -> "Messages":
        """The messages of one publisher."""
        return Messages(self.count, self.payload_bytes, range(publisher, publisher + 1), self.first)

    def part(self, first: int, count: int) -> "Messages":
        """The messages of each publisher from `first` on."""
        return Messages(count, self.payload_bytes, self.publishers, first)

    def each(self, template: bytes) -> list[bytes]:
        """The template once for every message, with its number in place of `#`."""
        pieces = template.split(PLACE)
        return [
            (b"%04d%08d" % (publisher, number)).join(pieces)
            for publisher in self.publishers
            for number in range(self.first, self.end)
        ]

    def fill(self, template: bytes, last: bytes | None = None) -> bytes:
        """The same joined; the last message may have a template of its own."""
        blocks = [
            b"".join(self.of(publisher).part(first, min(BLOCK, self.end - first)).each(template))
            for publisher in self.publishers
            for first in range(self.first, self.end, BLOCK)
        ]
        if last is not None:
            blocks[-1] = blocks[-1][: -self.width(template)] + self.last.each(last)[0]
        return b"".join(blocks)

    def width(self, template: bytes) -> int:
        """The bytes of a filled template."""
        return len(template) + (NUMBER_BYTES - len(PLACE)) * template.count(PLACE)

    def check(self, payloads: Sequence[bytes]) -> None:
        """Each publisher's payloads must be complete and in order; raises `Wrong`."""
        expected = self.each(self.payload)
        found = sorted(payloads, key=publisher_of)
        if found == expected:
            return
        if len(found) != len(expected):
            raise Wrong(f"{len(found)} messages instead of {len(expected)}")
        at = next(
            i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]
        )
        raise Wrong(f"message {at} is {found[at][:40]!r} instead of {expected[at][:40]!r}")
