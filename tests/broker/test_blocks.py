"""Ready messages in blocks, compared with a plain dict."""

from __future__ import annotations

import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.turns import Turns
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue import blocks as module
from mqks.broker.spine.queue.blocks import MESSAGE_OVERHEAD_BYTES, Blocks
from tests.kit.called import lines_of
from tests.kit.compiled import patches_modules

STEPS = st.lists(
    st.tuples(st.sampled_from("aaaddioottppmmmccsff"), st.integers(0, 9), st.integers(0, 60)),
    max_size=60,
)


def empty() -> Blocks:
    return Blocks(Budget(1 << 40, Turns(time.monotonic)))


def size(lines: list[bytes]) -> int:
    return sum(map(len, lines))


def check(blocks: Blocks, plain: dict[int, bytes | None]) -> None:
    assert [*blocks] == sorted(plain.items())
    assert len(blocks) == len(plain)
    lines = [line for line in plain.values() if line is not None]
    assert blocks.held == len(lines)
    assert blocks.memory_bytes == sum(map(len, lines)) + MESSAGE_OVERHEAD_BYTES * len(lines)
    assert blocks.memory.used == blocks.memory_bytes
    assert blocks.first == min(plain, default=None)
    on_disk = [number for number, line in plain.items() if line is None]
    assert blocks.first_on_disk() == min(on_disk, default=None)
    for first in (3, 20):
        later = [number for number in on_disk if number >= first]
        assert blocks.first_on_disk(first) == min(later, default=None)
    assert bool(blocks.disk_bytes) <= bool(on_disk)
    assert blocks.is_first_held == (bool(plain) and plain[min(plain)] is not None)
    for number in range(max(plain, default=0) + 2):
        assert (number in blocks) == (number in plain)
        assert blocks.get(number) == plain.get(number)
    ordered = sorted(plain)
    for number in (0, *ordered[::7], 10_000):
        later = [each for each in ordered if each >= number]
        assert blocks.from_number(number) == min(later, default=None)
        assert blocks.after(number, number + 20, 9) == [n for n in later if n < number + 20][:9]


@patches_modules
@given(STEPS)
def test_blocks_are_a_dict_in_order(steps: list[tuple[str, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 6)
        patch.setattr(module, "SHORT", 2)
        blocks, plain, disk = empty(), dict[int, bytes | None](), dict[int, bytes]()
        end = 1
        for step, count, number in steps:
            match step:
                case "a" if count:
                    lines = [b"%d" % each for each in range(end, end + count)]
                    blocks.append(end, lines)
                    plain |= enumerate(lines, end)
                    end += count
                case "d" if count:
                    blocks.append_on_disk(end, count)
                    blocks.disk_bytes += 10 * count
                    plain |= dict.fromkeys(range(end, end + count))
                    end += count
                case "i":
                    end += count
                case "o" if 0 < number < end and number not in plain:
                    line = b"%d" % number if count else None
                    blocks.add(number, line)
                    plain[number] = line
                case "t" if blocks.is_first_held:
                    first, taken = blocks.take(max(1, count), max(number, min(plain) + 1))
                    assert first == min(plain)
                    assert 1 <= len(taken) <= max(1, count)
                    for each, taken_line in enumerate(taken, first):
                        assert plain.pop(each) == taken_line
                    if number % 2:
                        blocks.put_front(first, taken)
                        plain |= enumerate(taken, first)
                case "p" if number in plain:
                    assert blocks.get(number) == plain.pop(number)
                    blocks.pop(number)
                case "m":
                    wanted_ones = [*range(number, end, 1 + count % 3)]
                    found, bodies, looked = blocks.pop_some(wanted_ones, 3 * count)
                    there = [each for each in wanted_ones[:looked] if each in plain]
                    assert found == there
                    assert [plain.pop(each) for each in found] == bodies
                    if looked < len(wanted_ones):
                        assert plain[wanted_ones[looked]] is None or size(bodies) >= 3 * count
                    assert size(bodies[:-1]) < 3 * count or not bodies
                case "c" if plain:
                    gone = [*blocks.pop_first(min(plain) + number + 1, max(1, count))]
                    ordered = sorted(plain)
                    assert gone
                    assert gone == ordered[: len(gone)]
                    assert gone[-1] <= ordered[0] + number
                    for each in gone:
                        del plain[each]
                case "s":
                    before = {each for each, line in plain.items() if line is not None}
                    spilled = blocks.spill(number, 66 * count)
                    plain = dict(blocks)
                    kept = {each for each, line in plain.items() if line is not None}
                    assert kept <= before
                    assert spilled == (kept != before)
                    assert all(each < number for each in before - kept)
                    if not spilled and not count:
                        assert all(each >= number for each in before)
                case "f" if (wanted := blocks.first_on_disk()) is not None:
                    disk = {each: b"%d" % each for each in range(wanted, wanted + 12)}
                    middle = wanted + 1 + count % 5
                    runs = [
                        Run(wanted, [disk[each] for each in range(wanted, middle)]),
                        Run(middle + 1, [disk[each] for each in range(middle + 1, wanted + 11)]),
                    ]
                    blocks.fill(runs, 1 + 66 * number)
                    filled = dict(blocks)
                    assert filled.keys() == plain.keys()
                    assert filled[wanted] is not None
                    for each, now in filled.items():
                        assert now == plain[each] or (plain[each] is None and now == disk[each])
                    assert filled.get(middle) == plain.get(middle)
                    plain = filled
            check(blocks, plain)
        freed = blocks.emptied()
        assert not blocks
        assert not blocks.memory.used
        assert len([*freed]) >= sum(line is not None for line in plain.values())


@patches_modules
def test_a_body_in_the_middle_costs_as_much_as_the_first() -> None:
    blocks = empty()
    blocks.append(1, [b"m event=e x"] * 500_000)
    for number in range(1_000_000, 1_200_000, 2):
        blocks.add(number, b"m event=e x")
    for middle in (250_000, 1_100_000):
        assert lines_of(partial(blocks.get, middle)) < 20 * lines_of(partial(blocks.get, 1))


def steps_to_the_end(blocks: Blocks) -> int:
    steps = 0
    while blocks:
        blocks.pop_first(1 << 40, 1 << 40)
        steps += 1
    return steps


LINE = b"m event=e x"
MANY = 20_000


def test_what_is_taken_out_here_and_there_leaves_no_piece_for_each() -> None:
    blocks = empty()
    blocks.append_on_disk(1, 2 * MANY)
    for number in range(2, 2 * MANY, 2):
        blocks.pop(number)
    assert len(blocks) == MANY + 1
    assert steps_to_the_end(blocks) < MANY // 100


def test_what_comes_and_spills_one_by_one_leaves_no_piece_for_each() -> None:
    blocks = empty()
    for number in range(1, 2 * MANY, 2):
        blocks.append(number, [LINE])
        while blocks.spill(number + 1, 0):
            pass
    assert blocks.on_disk == MANY
    assert steps_to_the_end(blocks) < MANY // 100


def test_a_page_of_single_messages_is_as_good_as_one_run() -> None:
    blocks = empty()
    blocks.append_on_disk(1, MANY)
    blocks.fill([Run(number, [LINE]) for number in range(1, MANY + 1)], 1 << 40)
    assert blocks.held == MANY
    assert steps_to_the_end(blocks) < MANY // 100


def test_a_large_message_that_comes_and_goes_counts_once() -> None:
    blocks, large = empty(), b"x" * 1_000_000
    blocks.append(1, [large, *[LINE] * 10_000])
    while blocks.spill(1 << 40, 0):
        pass
    before = blocks.disk_bytes
    for _ in range(10):
        blocks.fill([Run(1, [large])], 1)
        assert blocks.spill(1 << 40, 0)
    assert blocks.disk_bytes == before
