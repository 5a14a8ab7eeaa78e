"""Whose lines are handled in a turn of the event loop, and in which order.

The one rule: the time of a turn is that of all connections together; reading has as much, where it
takes time. Who has had no turn since something came from it goes before those who need more than
one; but where none of these had one in a turn, one of them goes first in the next. Each turn
handles something.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import inf

from mqks.broker.base.turns import Turns
from mqks.server.client import Client


class FairTurn:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._begins = True
        """Nothing has been handled in it."""
        self._read_end_s = inf
        """The end of its time for reading."""
        self._put_off = OrderedDict[Client, None]()
        """Clients who have had no turn, in order."""
        self._overrun = OrderedDict[Client, None]()
        """Clients who have had one and need more, in order."""
        self._starved = False
        """None of them had one in the last turn."""

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._put_off or self._overrun)

    def begin_reading(self) -> bool:
        """Begin the time for reading; False if it has begun."""
        begins = self._read_end_s == inf
        if begins:
            self._read_end_s = self._turns.clock() + self._turns.chunk_s
        return begins

    @property
    def is_late(self) -> bool:
        """What is read from now on has to wait, or takes too long by itself."""
        has_begun = not self._begins
        return (has_begun and self._turns.over) or self._turns.clock() > self._read_end_s

    def end(self) -> None:
        self._begins, self._read_end_s = True, inf

    def put_off(self, client: Client) -> None:
        """Nothing was done of what has come from it."""
        self._put_off[client] = None

    def go_on_with(self, client: Client) -> None:
        """It needs one more turn."""
        if client not in self._put_off:
            self._overrun[client] = None

    def leave(self, client: Client) -> None:
        for waiting in (self._put_off, self._overrun):
            waiting.pop(client, None)

    def take(self, chunks: Sequence[tuple[Client, bytes]]) -> Iterator[tuple[Client, bytes, bool]]:
        """What is to be handled now: the chunks, and what earlier turns have left, without data;
        with each whether it has to wait because the turn is over."""
        turns, count = self._turns, len(self._overrun)
        begins, self._begins = self._begins, False
        if begins:
            turns.begin()
        was_starved, is_first = begins and self._starved and count > 0, begins
        if was_starved:
            yield self._overrun.popitem(last=False)[0], b"", False
            count, is_first = count - 1, False
        while self._put_off and (is_first or not turns.over):
            yield self._put_off.popitem(last=False)[0], b"", False
            is_first = False
        for client, data in chunks:
            yield client, data, not is_first and turns.over
            is_first = False
        if begins:
            self._starved = count > 0 and turns.over and not was_starved
        while count and self._overrun and (is_first or not turns.over):
            yield self._overrun.popitem(last=False)[0], b"", False
            count, is_first = count - 1, False
