"""Sets of sequence numbers."""

import random

from mqks.broker.spine.base.ranges import Numbers


def test_numbers_are_a_set_of_numbers() -> None:
    chance, expected, found = random.Random(1), set[int](), Numbers()
    for _ in range(20_000):
        number = chance.randrange(600)
        if chance.random() < 0.5:
            expected.add(number)
            found.add(number)
        else:
            expected.discard(number)
            found.discard(number)
        assert len(found) == len(expected)
    assert [number for number in range(700) if number in found] == sorted(expected)
    for number in expected:
        found.discard(number)
    assert not found
    assert not found.blocks
