"""What one line takes grows with its bytes and no faster, whatever words of the grammar it has."""

import gc
from math import inf
from random import Random
from time import process_time

import pytest

from mqks.protocol.requests import ACTIONS
from mqks.users import STRANGER, Permissions
from tests.fuzz import grammar
from tests.fuzz.long_lines import LongLines
from tests.kit.bare import BareWorld
from tests.kit.marks import slow

SMALL, MEDIUM, LARGE = 64 * 1024, 128 * 1024, 1024 * 1024 - 2
RATIO_MAX = 40
"""For 16 times the bytes."""
FLOOR_S = 0.0005
"""What is below cannot be measured, and does no harm."""
PINGS_MAX = 20
NOBODY = Permissions()


def cpu_s(line: bytes, permissions: Permissions | None) -> float:
    world = BareWorld()
    world.connection("a").permissions = permissions
    world.connection("a").splitter.line_bytes_max = LARGE
    gc.disable()
    try:
        start_s = process_time()
        world.send("a", line + b"\n")
        return process_time() - start_s
    finally:
        gc.enable()


def ratio(small: bytes, large: bytes, permissions: Permissions | None) -> float:
    """Of the least times: what is linear may be slow now and then, what is not is so each time."""
    small_s = large_s = inf
    for _ in range(5):
        large_s = min(large_s, cpu_s(large, permissions))
        if large_s <= FLOOR_S * RATIO_MAX:
            return 0.0  # No faster than the floor grows.
        small_s = max(FLOOR_S, min(small_s, cpu_s(small, permissions)))
        if large_s <= small_s * RATIO_MAX or large_s > 4 * small_s * RATIO_MAX:
            break
    return large_s / small_s


def lines(action: str, size: int) -> list[bytes]:
    every = [*grammar.plain_lines(action.encode(), size)]
    if action.encode() in grammar.MANY_NAMES:
        every += grammar.numbered(action.encode(), size)
    return every


QUICK = "publish", "reject", "stats"
"""A sample of what all have in common: flags, their values, and what stands between them."""


@pytest.mark.parametrize(
    "action", [*QUICK, *slow(*(each.decode() for each in ACTIONS if each.decode() not in QUICK))]
)
def test_a_line_takes_time_by_its_bytes(action: str) -> None:
    pairs = zip(lines(action, SMALL), lines(action, LARGE), strict=True)
    for small, large in pairs:
        assert ratio(small, large, None) <= RATIO_MAX, large[:80]


def test_names_take_time_by_their_bytes() -> None:
    """A sample of what takes longest, to the limit of bindings."""
    for line in (b"x subscribe q --add-mask ", b"x rebind q ", b"x consume q --add "):
        small, large = (
            line + b" ".join(b"a%d.*" % number for number in range(size // 16))
            for size in (SMALL, LARGE)
        )
        assert ratio(small, large, None) <= RATIO_MAX


@pytest.mark.slow
@pytest.mark.parametrize("who", [NOBODY, *slow(STRANGER)], ids=["limited", "stranger"])
def test_who_may_do_nothing_is_refused_at_once(who: Permissions) -> None:
    """Whatever is asked for takes hardly longer than a ping of as many bytes."""
    ping_s = min(cpu_s(b"p ping " + b"x" * (MEDIUM - 7), NOBODY) for _ in range(5))
    most_s = PINGS_MAX * max(FLOOR_S, ping_s)
    dear = [
        line[:80]
        for action in ACTIONS
        for line in lines(action.decode(), MEDIUM)
        if all(cpu_s(line, who) > most_s for _ in range(5))
    ]
    assert dear == []


def test_the_fuzzer_finds_nothing() -> None:
    long = LongLines(seed := Random().randrange(10**6))
    print("seed", seed)
    for _ in range(10):
        long.one()
    assert long.found == []
