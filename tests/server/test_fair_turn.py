"""The order of turns, where each takes all the time there is."""

from collections.abc import Mapping
from typing import cast

import pytest

from mqks.broker.spine.base.turns import Turns
from mqks.server.client import ServerClient
from mqks.server.fair_turn import FairTurn

A, B, C, D, E = (cast(ServerClient, name) for name in "abcde")
TURN_S = 0.02


class Played:
    """Everybody who is handled takes a whole turn, and needs one more."""

    def __init__(self, parties: Mapping[ServerClient, str] | None = None) -> None:
        """Clients without a party are one each."""
        known = parties or {}
        self.now_s = 0.0
        turns = Turns(lambda: self.now_s)
        turns.chunk_s = TURN_S
        self.turn = FairTurn(turns, lambda client: known.get(client, client))

    def handled(self, *came: ServerClient) -> list[ServerClient]:
        """Who is handled in a turn in which something has come from these."""
        handled = []
        for client, _, waits in self.turn.take([(each, b"x") for each in came]):
            if waits:
                self.turn.put_off(client)
            else:
                handled.append(client)
                self.now_s += 1.1 * TURN_S
                self.turn.go_on_with(client)
        self.turn.end()
        return handled


def test_who_has_had_no_turn_comes_first_but_for_every_other_turn() -> None:
    played = Played()
    assert played.handled(A) == [A]
    assert [played.handled(each) for each in (B, C, D, E)] == [[B], [A], [C], [B]]
    assert [played.handled() for _ in range(2)] == [[D], [A]]


def test_who_needs_more_has_just_had_a_turn() -> None:
    """So those who came with it are before it."""
    played = Played()
    assert played.handled(A, B, C) == [A]
    assert [played.handled() for _ in range(6)] == [[B], [A], [C], [B], [A], [C]]


def test_who_has_left_has_no_turn() -> None:
    played = Played()
    played.handled(A, B, C)
    played.turn.leave(A)
    played.turn.leave(B)
    assert [played.handled() for _ in range(2)] == [[C], [C]]


@pytest.mark.parametrize("reads_s", [0, TURN_S * 2])
def test_reading_has_a_time_of_its_own(reads_s: float) -> None:
    """However long it takes, as much is handled."""
    played = Played()
    assert played.turn.begin_reading()
    assert not played.turn.begin_reading()
    played.now_s += reads_s
    assert played.turn.is_late == (reads_s > TURN_S)
    taken = played.turn.take([(A, b"x"), (B, b"x"), (C, b"x")])
    assert [client for client, _, waits in taken if not waits] == [A, B, C]
    played.turn.end()
    assert not played.turn.is_late


def test_parties_take_turns_whatever_number_of_clients_they_have() -> None:
    """`A` and `B` are one user's, and need many turns; so do those who came later."""
    played = Played({A: "ab", B: "ab", C: "ab"})
    assert played.handled(A, B, C, D, E) == [A]
    assert [played.handled() for _ in range(5)] == [[B], [A], [D], [B], [E]]
