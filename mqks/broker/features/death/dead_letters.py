"""The attributes after a message's text, and those of a dead letter.

    id event=orders.new data<TAB>trace=7&reason=rejects&queue=jobs&...<TAB>1790000000000000

The one rule: the broker's own pairs are last in meta, and only in dead-letter queues. What
follows meta is described at `replies.Parts`; clients never get it in this form.
"""

from collections.abc import Callable
from urllib.parse import quote_from_bytes, unquote_to_bytes

from mqks.protocol.meta import split_dead_letter
from mqks.protocol.replies import Parts, parts


def with_published(message: bytes, time_us: int) -> bytes:
    """A message with the time of its first publishing, to keep it under a new number."""
    told = parts(message)
    return message if told.published else told._replace(published=b"%d" % time_us).joined()


class Death:
    """One for all messages that die together. `why`: the reason that their consumer gave,
    percent-encoded."""

    __slots__ = ("_died", "_died_us", "_first")

    def __init__(self, reason: str, queue: bytes, died_us: int, why: bytes) -> None:
        name = quote_from_bytes(queue, safe="").encode()
        self._first = b"reason=%b&queue=%b" % (reason.encode(), name)
        self._died_us, self._died = died_us, _seconds(died_us)
        if why:
            self._died += b"&why=" + why

    def dead_letter(self, message: bytes, tries: int, arrived_us: Callable[[], int]) -> bytes:
        """The dead letter of this message; data of an earlier death are replaced. `arrived_us` is
        called if the message does not contain the time of its first publishing."""
        text, meta, published, traits = parts(message)
        # The clock may have been set back.
        published_us = min(int(published or 0) or arrived_us(), self._died_us)
        told = self._first, tries, _seconds(published_us), self._died
        if own := split_dead_letter(meta)[0]:
            pairs = b"%b&%b&tries=%d&published=%b&died=%b" % (own, *told)
        else:
            pairs = b"%b&tries=%d&published=%b&died=%b" % told
        return Parts(text, pairs, b"%d" % published_us, traits).joined()


def _seconds(time_us: int) -> bytes:
    return b"%d.%03d" % divmod(time_us // 1000, 1000)


def restored(own: bytes, letter: bytes) -> tuple[bytes, bytes]:
    """Meta and time of the first publishing of a message with these attributes of its own that is
    this dead letter, as `check_letter` accepts it."""
    published = letter.partition(b"&published=")[2].partition(b"&")[0]
    return b"&".join(filter(None, (own, letter))), published.replace(b".", b"") + b"000"


def revived(message: bytes) -> tuple[bytes, bytes] | None:
    """The queue where a dead letter died, and the message without the data of its death; None if it
    is not one."""
    told = parts(message)
    own, values = split_dead_letter(told.meta)
    if values is None:
        return None
    _, queue, *_ = values
    return unquote_to_bytes(queue), told._replace(meta=own).joined()
