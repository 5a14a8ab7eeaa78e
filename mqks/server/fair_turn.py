"""Whose lines are handled in a turn of the event loop, and in which order.

The one rule: the time of a turn is that of all connections together; reading has as much, where it
takes time. Who has had no turn since something came from it goes before those who need more than
one; but where none of these had one in a turn, one of them goes first in the next. Among either,
users and addresses take turns, however many connections each has. Each turn handles something.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf

from mqks.broker.spine.base.places import Rounds
from mqks.broker.spine.base.turns import Turns
from mqks.server.client import ServerClient


class FairTurn:
    """`party_of`: whose a client is."""

    def __init__(self, turns: Turns, party_of: Callable[[ServerClient], Hashable]) -> None:
        self._turns = turns
        self._party_of = party_of
        self._begins = True
        """Nothing has been handled in it."""
        self._read_end_s = inf
        """The end of its time for reading."""
        self._put_off = Rounds[ServerClient]()
        """Clients who have had no turn."""
        self._overrun = Rounds[ServerClient]()
        """Clients who have had one and need more."""
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

    def put_off(self, client: ServerClient) -> None:
        """Nothing was done of what has come from it."""
        self._put_off.add(client, self._party_of(client))

    def go_on_with(self, client: ServerClient) -> None:
        """It needs one more turn."""
        if client not in self._put_off:
            self._overrun.add(client, self._party_of(client))

    def leave(self, client: ServerClient) -> None:
        for waiting in (self._put_off, self._overrun):
            waiting.discard(client)

    def take(
        self, chunks: Sequence[tuple[ServerClient, bytes]]
    ) -> Iterator[tuple[ServerClient, bytes, bool]]:
        """What is to be handled now: the chunks, and what earlier turns have left, without data;
        with each whether it has to wait because the turn is over."""
        turns, count = self._turns, len(self._overrun)
        begins, self._begins = self._begins, False
        if begins:
            turns.begin()
        was_starved, is_first = begins and self._starved and count > 0, begins
        if was_starved:
            yield self._overrun.next(), b"", False
            count, is_first = count - 1, False
        while self._put_off and (is_first or not turns.over):
            yield self._put_off.next(), b"", False
            is_first = False
        for client, data in chunks:
            yield client, data, not is_first and turns.over
            is_first = False
        if begins:
            self._starved = count > 0 and turns.over and not was_starved
        while count and self._overrun and (is_first or not turns.over):
            yield self._overrun.next(), b"", False
            count, is_first = count - 1, False
