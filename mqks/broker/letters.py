"""What stands behind a message's text: its attributes, and what is told of its death.

    id event=orders.new data<TAB>trace=7&reason=rejects&queue=jobs&...<TAB>1790000000000000

The one rule: the broker's own pairs come last in meta, and only in dead-letter queues. Behind meta
is the time when the message was first published, in microseconds since 1970, if that is not the
time of its number. Nobody is told that as it stands.
"""

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from mqks.protocol.replies import ATTRIBUTES

_FIRST = b"reason="


class Letter(NamedTuple):
    """What is told of a death. `reason`: rejects, losses, ttl, overflow or dead; `queue`: where it
    died; `tries`: how often it was delivered there. Times in microseconds since 1970."""

    reason: str
    queue: bytes
    tries: int
    published_us: int
    died_us: int


class Parts(NamedTuple):
    text: bytes
    meta: bytes = b""
    published: bytes = b""

    def joined(self) -> bytes:
        if self.published:
            return ATTRIBUTES.join(self)
        return self.text + ATTRIBUTES + self.meta if self.meta else self.text


def parts(message: bytes) -> Parts:
    return Parts(*message.split(ATTRIBUTES)) if ATTRIBUTES in message else Parts(message)


def with_published(message: bytes, time_us: int) -> bytes:
    """The same, which keeps the time of its first publishing under other numbers."""
    told = parts(message)
    return message if told.published else told._replace(published=b"%d" % time_us).joined()


class Letters:
    """Messages that die together, with what is told of their death."""

    __slots__ = ("_died", "_died_us", "_first")

    def __init__(self, reason: str, queue: bytes, died_us: int) -> None:
        name = quote_from_bytes(queue, safe="").encode()
        self._first = b"reason=%b&queue=%b" % (reason.encode(), name)
        self._died_us, self._died = died_us, _seconds(died_us)

    def of(self, message: bytes, tries: int, arrived_us: Callable[[], int]) -> bytes:
        """This one, instead of what is told of an earlier death. `arrived_us` is asked when it came
        if it does not know when it was first published."""
        text, meta, published = parts(message)
        # The clock may have been set back.
        published_us = min(int(published or 0) or arrived_us(), self._died_us)
        told = self._first, tries, _seconds(published_us), self._died
        if own := _own(meta):
            pairs = b"%b&%b&tries=%d&published=%b&died=%b" % (own, *told)
        else:
            pairs = b"%b&tries=%d&published=%b&died=%b" % told
        return b"%b\t%b\t%d" % (text, pairs, published_us)


def _seconds(time_us: int) -> bytes:
    return b"%d.%03d" % divmod(time_us // 1000, 1000)


def revived(message: bytes) -> bytes:
    """The message that a letter was."""
    told = parts(message)
    return told._replace(meta=_own(told.meta)).joined()


def letter_of(message: bytes) -> Letter | None:
    """What is told of its death; None where it is none."""
    _, meta, published = parts(message)
    own = _own(meta)
    if len(own) == len(meta):
        return None
    told = meta[len(own) :].lstrip(b"&")
    reason, queue, tries, _, died = (pair.partition(b"=")[2] for pair in told.split(b"&"))
    seconds, _, thousandths = died.partition(b".")
    died_us = (int(seconds) * 1000 + int(thousandths)) * 1000
    return Letter(reason.decode(), unquote_to_bytes(queue), int(tries), int(published), died_us)


def _own(meta: bytes) -> bytes:
    """Without the pairs of a letter: no other pair may have their keys."""
    if meta.startswith(_FIRST):
        return b""
    return meta.partition(b"&" + _FIRST)[0]
