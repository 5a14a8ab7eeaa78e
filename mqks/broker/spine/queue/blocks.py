"""The ready messages of a queue by number: their bodies, or the mere fact that they are on disk.

The one rule: blocks in ascending order, each with at most `BLOCK` numbers and their bodies, or None
for those that are only on disk. Consecutive messages that are all only on disk need no list: their
block has a range of any length.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.turns import emptied
from mqks.broker.spine.log.pending import Run
from mqks.limits import DELIVERY_BYTES

BLOCK: Final = 1024
SHORT: Final = 64
"""So many consecutive messages on disk are worth a block of their own."""
MESSAGE_OVERHEAD_BYTES: Final = 64
"""Memory of a bytes object and its entry in a list, besides its length (measured: 33 + 8, rounded
up by the allocator)."""


class Block:
    """`held` of its messages are in memory, with bodies of `size` bytes."""

    __slots__ = ("held", "lines", "numbers", "size")

    def __init__(
        self, numbers: "range | array[int]", lines: list[bytes | None] | None, held: int, size: int
    ) -> None:
        self.numbers = numbers
        self.lines = lines
        self.held = held
        self.size = size

    @property
    def memory_bytes(self) -> int:
        return self.size + MESSAGE_OVERHEAD_BYTES * self.held

    @property
    def is_open(self) -> bool:
        """Whether it can get some more messages."""
        return self.lines is not None and len(self.lines) <= BLOCK - SHORT

    def place(self, number: int) -> int:
        """Place of the first number that is not below this one."""
        numbers = self.numbers
        if isinstance(numbers, range):
            return min(max(0, number - numbers.start), len(numbers))
        return bisect_left(numbers, number)

    def take(
        self, numbers: Sequence[int], most_bytes: int, taken: list[int], bodies: list[bytes]
    ) -> tuple[int | None, int]:
        """Take out those of these numbers that are in it, see `Blocks.pop_some`. Return the first
        one that stays though it is in it, and how many bytes are left. The caller counts them.

        A number takes 0.4 µs, one of consecutive numbers 0.05 µs."""
        its, lines, count = self.numbers, self.lines, len(numbers)
        if lines is None:
            stays = bisect_left(numbers, its[0])
            return (numbers[stays] if stays < count else None), most_bytes
        if numbers[-1] - numbers[0] == count - 1:
            start = self.place(numbers[0])
            some, stop = lines[start : start + count], start + count
            if len(some) == count and its[start] == numbers[0] and its[stop - 1] == numbers[-1]:
                held, size = size_of(some)
                if held == count and size <= most_bytes:
                    taken += numbers
                    bodies += cast(list[bytes], some)
                    self.remove(start, stop)
                    return None, most_bytes - size
        if isinstance(its, range):
            its = self.numbers = array("q", its)
        for number in numbers:
            place = bisect_left(its, number)
            if its[place] != number:
                continue
            line = lines[place]
            if line is None or most_bytes <= 0:
                return number, most_bytes
            del its[place], lines[place]
            taken.append(number)
            bodies.append(line)
            most_bytes -= len(line)
        return None, most_bytes

    def insert(self, number: int, lines: Sequence[bytes | None]) -> None:
        """Add messages, with consecutive numbers from `number` on, that are not in it."""
        assert self.lines is not None
        numbers, place, stop = self.numbers, self.place(number), number + len(lines)
        self.lines[place:place] = lines
        if isinstance(numbers, range):
            if number == numbers.stop:
                self.numbers = range(numbers.start, stop)
                return
            if stop == numbers.start:
                self.numbers = range(number, numbers.stop)
                return
            numbers = self.numbers = array("q", numbers)
        numbers[place:place] = array("q", range(number, stop))

    def remove(self, start: int, stop: int) -> None:
        """Remove the messages in these places; not from the middle of a range without bodies."""
        numbers = self.numbers
        if self.lines is not None:
            del self.lines[start:stop]
        if not start:
            self.numbers = numbers[stop:]
        elif stop == len(numbers):
            self.numbers = numbers[:start]
        else:
            numbers = self.numbers = array("q", numbers)
            del numbers[start:stop]


def _last(block: Block) -> int:
    return block.numbers[-1]


def size_of(lines: Iterable[bytes | None]) -> tuple[int, int]:
    """How many of them are in memory, and their length."""
    sizes = [len(line) for line in lines if line is not None]
    return len(sizes), sum(sizes)


class Blocks:
    """`memory` counts the bodies that are in memory."""

    __slots__ = ("_blocks", "count", "disk_bytes", "held", "memory", "size")

    def __init__(self, memory: Budget) -> None:
        self.memory = memory
        self._blocks: list[Block] = []
        self.count = 0
        self.held = self.size = 0
        """How many are in memory, and the length of their bodies."""
        self.disk_bytes = 0
        """Approximate length of the bodies that are only on disk."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        for block in self._blocks:
            yield from zip(block.numbers, block.lines or [None] * len(block.numbers), strict=True)

    def __contains__(self, number: int) -> bool:
        return self._find(number) is not None

    @property
    def on_disk(self) -> int:
        """How many are only on disk."""
        return self.count - self.held

    @property
    def memory_bytes(self) -> int:
        return self.size + MESSAGE_OVERHEAD_BYTES * self.held

    @property
    def first(self) -> int | None:
        """The smallest number."""
        return self._blocks[0].numbers[0] if self._blocks else None

    @property
    def is_first_held(self) -> bool:
        """Whether the first one is in memory."""
        lines = self._blocks[0].lines if self._blocks else None
        return lines is not None and lines[0] is not None

    def get(self, number: int) -> bytes | None:
        """Body of a message; None if it is only on disk."""
        position = self._find(number)
        if position is None:
            return None
        at, place = position
        lines = self._blocks[at].lines
        return None if lines is None else lines[place]

    def _parts(self, numbers: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """These increasing numbers by the block where they are, if they are there: its index."""
        blocks, at, end = self._blocks, -1, 0
        while end < len(numbers):
            at += 1
            if at < len(blocks) and blocks[at].numbers[-1] < numbers[end]:
                at = bisect_left(blocks, numbers[end], at + 1, key=_last)
            if at == len(blocks):
                return
            start, end = end, bisect_right(numbers, blocks[at].numbers[-1], end)
            yield at, numbers[start:end]

    def from_number(self, number: int) -> int | None:
        """The smallest number that is not below this one."""
        at = self._at(number)
        if at == len(self._blocks):
            return None
        block = self._blocks[at]
        return block.numbers[block.place(number)]

    def after(self, first: int, end: int, count: int) -> list[int]:
        """The first numbers from `first` on and below `end`, at most so many."""
        numbers: list[int] = []
        for at in range(self._at(first), len(self._blocks)):
            block = self._blocks[at]
            start, stop = block.place(first), block.place(end)
            numbers += block.numbers[start : min(stop, start + count - len(numbers))]
            if len(numbers) == count or stop < len(block.numbers):
                break
        return numbers

    def held_from(self, first: int, count: int) -> tuple[list[tuple[int, bytes]], int | None]:
        """Messages from number `first` on, until one that is only on disk, at most about `count`;
        and the number to go on with, None at the end."""
        messages: list[tuple[int, bytes]] = []
        for at in range(self._at(first), len(self._blocks)):
            block = self._blocks[at]
            numbers, lines = block.numbers, block.lines
            for place in range(block.place(first), len(numbers)):
                line = None if lines is None else lines[place]
                if line is None or len(messages) >= count:
                    return messages, numbers[place]
                messages.append((numbers[place], line))
        return messages, None

    def before(self, end: int) -> Sequence[int]:
        """The last numbers below `end`, some of them."""
        at = self._at(end)
        for block in self._blocks[max(0, at - 1) : at + 1][::-1]:
            if stop := block.place(end):
                return block.numbers[max(0, stop - BLOCK) : stop]
        return ()

    def _at(self, number: int) -> int:
        """Index of the first block that does not end below this number."""
        return bisect_left(self._blocks, number, key=_last)

    def _find(self, number: int) -> tuple[int, int] | None:
        """Index of its block, and its place there."""
        at = self._at(number)
        if at < len(self._blocks):
            block = self._blocks[at]
            place = block.place(number)
            if block.numbers[place] == number:
                return at, place
        return None

    def _counted(self, block: Block, held: int, size: int) -> None:
        """Count bodies that have come into memory, or have left it."""
        block.held += held
        block.size += size
        self.held += held
        self.size += size
        self.memory.used += size + MESSAGE_OVERHEAD_BYTES * held

    # -- adding

    def append(self, first: int, lines: list[bytes]) -> None:
        """Append messages in memory, with consecutive numbers from `first` on."""
        blocks, count = self._blocks, len(lines)
        self.count += count
        if blocks and (old := (last := blocks[-1]).lines) is not None and len(old) + count <= BLOCK:
            numbers = last.numbers
            if isinstance(numbers, range) and numbers.stop == first:
                # Written out: most publishes come here.
                last.numbers = range(numbers.start, first + count)
                old += lines
            else:
                last.insert(first, lines)
            self._counted(last, count, sum(map(len, lines)))
            return
        # One of many messages is cut: what is taken out of a block costs as much as is behind it.
        for start in range(0, count, BLOCK):
            self._insert(len(blocks), first + start, lines[start : start + BLOCK])

    def append_on_disk(self, first: int, count: int) -> None:
        """Append messages that are only on disk."""
        self.count += count
        if count > SHORT:
            self._blocks.append(Block(range(first, first + count), None, 0, 0))
        else:
            if not (self._blocks and self._blocks[-1].is_open):
                self._blocks.append(Block(range(first, first), [], 0, 0))
            self._blocks[-1].insert(first, [None] * count)

    def append_numbers(self, numbers: Sequence[int]) -> None:
        """Append messages on disk with any numbers, in order."""
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            self.append_on_disk(numbers[0], len(numbers))
            return
        self.count += len(numbers)
        for start in range(0, len(numbers), BLOCK):
            some = array("q", numbers[start : start + BLOCK])
            last = self._blocks[-1] if self._blocks else None
            if last and last.lines is not None and len(last.lines) + len(some) <= BLOCK:
                last.numbers = array("q", last.numbers) + some
                last.lines += [None] * len(some)
            else:
                self._blocks.append(Block(some, [None] * len(some), 0, 0))

    def parts(self) -> Iterator[Sequence[int]]:
        """All numbers, block by block."""
        return (block.numbers for block in self._blocks)

    def put_front(self, first: int, lines: list[bytes]) -> None:
        """Put these messages in front of all others."""
        self.count += len(lines)
        self._insert(0, first, lines)

    def _insert(self, at: int, first: int, lines: list[bytes]) -> None:
        """Insert a block of messages in memory, which gets this list."""
        numbers = range(first, first + len(lines))
        block = Block(numbers, cast(list[bytes | None], lines), 0, 0)
        self._blocks.insert(at, block)
        self._counted(block, len(lines), sum(map(len, lines)))

    def add(self, number: int, line: bytes | None) -> None:
        """Add a message at its place; None: it is only on disk."""
        blocks, at = self._blocks, self._at(number)
        is_inside = at < len(blocks) and blocks[at].numbers[0] < number
        if not is_inside and at and blocks[at - 1].is_open:
            at -= 1
        elif not is_inside and not (at < len(blocks) and blocks[at].is_open):
            blocks.insert(at, Block(range(number, number), [], 0, 0))
        block = blocks[at]
        block.insert(number, [line])
        self.count += 1
        if line is not None:
            self._counted(block, 1, len(line))
        if len(block.numbers) > BLOCK:
            self._halve(at)

    def _halve(self, at: int) -> None:
        block, half = self._blocks[at], BLOCK // 2
        assert block.lines is not None
        lines = block.lines[half:]
        held, size = size_of(lines)
        self._blocks.insert(at + 1, Block(block.numbers[half:], lines, held, size))
        block.remove(half, len(block.numbers))
        block.held -= held
        block.size -= size

    # -- taking out

    def take(self, most: int, end: int) -> tuple[int, list[bytes]]:
        """Take out the first message, which is in memory, and those of the numbers after it that
        are: below `end`, at most `most`, and as many as one delivery takes. Return the number of
        the first and the bodies."""
        block = self._blocks[0]
        numbers, lines = block.numbers, block.lines
        assert lines is not None
        first = numbers[0]
        fitting = DELIVERY_BYTES * block.held // block.size
        count = max(1, min(most, len(lines), end - first, fitting))
        # Most blocks have no gap: the last number says so, and no other is looked at.
        if numbers[count - 1] != first + count - 1:
            count = next(place for place in range(count) if numbers[place] != first + place)
        if block.held < len(lines) and None in (some := lines[:count]):
            count = some.index(None)
        taken = cast(list[bytes], lines[:count])
        self._remove(0, 0, count)
        return first, taken

    def pop(self, number: int) -> None:
        """Take out this message."""
        position = self._find(number)
        assert position is not None
        at, place = position
        if self._blocks[at].lines is None and 0 < place < len(self._blocks[at].numbers) - 1:
            at, place = self._open_beside(at, number)
        self._remove(at, place, place + 1)

    def pop_some(
        self, numbers: Sequence[int], most_bytes: int
    ) -> tuple[list[int], list[bytes], int]:
        """Take out those of these increasing numbers that are there, until one that is only on
        disk, or until they have so many bytes. Return them, their bodies, and how many of the
        numbers were looked at."""
        taken, bodies, stop = list[int](), list[bytes](), None
        emptied_ones = list[int]()
        for at, part in self._parts(numbers):
            block, before, left = self._blocks[at], len(taken), most_bytes
            stop, most_bytes = block.take(part, left, taken, bodies)
            self._counted(block, before - len(taken), most_bytes - left)
            if not block.numbers:
                emptied_ones.append(at)
            if stop is not None:
                break
        for at in reversed(emptied_ones):
            del self._blocks[at]
        self.count -= len(taken)
        return taken, bodies, len(numbers) if stop is None else bisect_left(numbers, stop)

    def pop_first(self, end: int, count: int) -> "range | array[int]":
        """Take out some of the first messages, below `end`, at most so many; return the numbers."""
        block = self._blocks[0]
        count = min(count, block.place(end))
        numbers = block.numbers[:count]
        self._remove(0, 0, count)
        return numbers

    def _remove(self, at: int, start: int, stop: int) -> None:
        """Remove the messages in these places of a block."""
        block, count, on_disk = self._blocks[at], stop - start, self.on_disk
        self.count -= count
        held = 0
        if block.lines is not None:
            if block.held == len(block.lines) == count:
                held, size = block.held, block.size
            else:
                held, size = size_of(block.lines[start:stop])
            self._counted(block, -held, -size)
        if held < count:
            # By the mean: the true length is in the journal only.
            self.disk_bytes -= self.disk_bytes * (count - held) // on_disk
        if count == len(block.numbers):
            del self._blocks[at]
        else:
            block.remove(start, stop)

    # -- between memory and disk

    def spill(self, end: int, keep_bytes: int) -> bool:
        """Remove some bodies from memory, the last ones below `end`; the first ones stay, as many
        as `keep_bytes` take. Return whether there were any."""
        # From the last block on: what is delivered first is read again last.
        before = self.memory_bytes
        for at in range(len(self._blocks) - 1, -1, -1):
            block = self._blocks[at]
            before -= block.memory_bytes
            if not block.held or block.numbers[0] >= end:
                continue
            lines = block.lines
            assert lines is not None
            start, stop = 0, block.place(end)
            while start < stop and before < keep_bytes:
                line = lines[start]
                before += 0 if line is None else len(line) + MESSAGE_OVERHEAD_BYTES
                start += 1
            held, size = size_of(lines[start:stop])
            if held:
                lines[start:stop] = [None] * (stop - start)
                self._counted(block, -held, -size)
                self.disk_bytes += size
                self._close(at)
                return True
            if start:
                break
        return False

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove these bodies from memory, where they are there; they are on disk."""
        for number in numbers:
            position = self._find(number)
            lines = None if position is None else self._blocks[position[0]].lines
            if position is not None and lines and (line := lines[position[1]]) is not None:
                lines[position[1]] = None
                self._counted(self._blocks[position[0]], -1, -len(line))
                self.disk_bytes += len(line)

    def _close(self, at: int) -> None:
        """A block of consecutive messages on disk needs no list, and grows with the next ones."""
        block = self._blocks[at]
        if block.held or not isinstance(block.numbers, range):
            return
        before = self._blocks[at - 1] if at else block
        grows = before.lines is None and before.numbers[-1] + 1 == block.numbers[0]
        if len(block.numbers) <= SHORT and not grows:
            return  # The next messages may come into its list.
        block.lines = None
        for place in (at, at - 1):
            if 0 <= place < len(self._blocks) - 1:
                one, other = self._blocks[place : place + 2]
                touch = one.numbers[-1] + 1 == other.numbers[0]
                if touch and one.lines is None and other.lines is None:
                    one.numbers = range(one.numbers[0], other.numbers[-1] + 1)
                    del self._blocks[place + 1]

    def first_on_disk(self, first: int = 0) -> int | None:
        """The smallest number, from `first` on, of those that are only on disk."""
        for at in range(self._at(first), len(self._blocks)) if self.on_disk else ():
            block = self._blocks[at]
            if block.held < len(block.numbers):
                place, lines = block.place(first), block.lines
                if lines is None:
                    return block.numbers[place]
                if None in (rest := lines[place:]):
                    return block.numbers[place + rest.index(None)]
        return None

    def memory_ahead(self, enough: int) -> int:
        """About how many bytes the bodies before the first one that is only on disk take; some that
        are enough if they are more."""
        total = 0
        for block in self._blocks:
            if block.held < len(block.numbers):
                if block.held and block.lines is not None:
                    total += block.memory_bytes * block.lines.index(None) // block.held
                break
            total += block.memory_bytes
            if total >= enough:
                break
        return total

    def fill(self, runs: list[Run], room: int) -> None:
        """Add bodies from disk, about `room` bytes of them; one if that is nothing."""
        for run in _joined(runs):
            at, end = self._at(run.first), run.first + len(run.lines)
            while at < len(self._blocks) and self._blocks[at].numbers[0] < end:
                if self._blocks[at].lines is None:
                    at = self._open(at, run.first, end)
                room -= self._fill(at, run, room)
                if room <= 0:
                    return
                at += 1

    def _open(self, at: int, first: int, end: int) -> int:
        """Make a block with a list of some of a range; return its index."""
        block = self._blocks[at]
        start = block.place(first)
        stop = min(block.place(end), start + BLOCK)
        parts = [block.numbers[:start], block.numbers[start:stop], block.numbers[stop:]]
        opened = Block(parts[1], [None] * (stop - start), 0, 0)
        new = [Block(parts[0], None, 0, 0), opened, Block(parts[2], None, 0, 0)]
        self._blocks[at : at + 1] = [part for part in new if part.numbers]
        return at + (start > 0)

    def _open_beside(self, at: int, number: int) -> tuple[int, int]:
        """Open a range around one message, which others may follow: not each of them leaves a range
        of its own. Return the place of the message, too."""
        at = self._open(at, number - BLOCK // 2, number + BLOCK // 2 + 1)
        return at, self._blocks[at].place(number)

    def _fill(self, at: int, run: Run, room: int) -> int:
        """Add bodies of one run to one block; return how many bytes they take."""
        block = self._blocks[at]
        lines, numbers = block.lines, block.numbers
        assert lines is not None
        start, stop = block.place(run.first), block.place(run.first + len(run.lines))
        if not block.held and isinstance(numbers, range):
            place = numbers[start] - run.first
            bodies = run.lines[place : place + stop - start]
            size = sum(map(len, bodies))
            if (total := size + MESSAGE_OVERHEAD_BYTES * len(bodies)) > room:
                del bodies[max(1, room * len(bodies) // total) :]
                size = sum(map(len, bodies))
            lines[start : start + len(bodies)] = bodies
            held = len(bodies)
        else:
            held = size = 0
            for place in range(start, stop):
                if lines[place] is None:
                    line = lines[place] = run.lines[numbers[place] - run.first]
                    assert line is not None
                    held, size = held + 1, size + len(line)
                    if size + MESSAGE_OVERHEAD_BYTES * held >= room:
                        break
        self._counted(block, held, size)
        # As they were added: by their true size, where the mean would leave the rest of large ones.
        self.disk_bytes = max(0, self.disk_bytes - size) if self.on_disk else 0
        return size + MESSAGE_OVERHEAD_BYTES * held

    def put(self, number: int, line: bytes) -> None:
        """Add the body of one message; nothing if it has left, or is in memory."""
        position = self._find(number)
        if position is None:
            return
        at, place = position
        if self._blocks[at].lines is None:
            at, place = self._open_beside(at, number)
        block = self._blocks[at]
        assert block.lines is not None
        if block.lines[place] is None:
            block.lines[place] = line
            self._counted(block, 1, len(line))
            self.disk_bytes = max(0, self.disk_bytes - len(line)) if self.on_disk else 0

    def emptied(self) -> Iterator[object]:
        """Forget all messages at once; yield them, see `turns.emptied`."""
        blocks = self._blocks
        self.memory.used -= self.memory_bytes
        self._blocks, self.count = [], 0
        self.held = self.size = self.disk_bytes = 0
        return _each(blocks)


def _each(blocks: list[Block]) -> Iterator[object]:
    while blocks:
        lines = blocks.pop().lines
        if lines is not None:
            yield from emptied(lines)


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Runs with consecutive numbers as one: the journal has one for each commit."""
    joined = Run(0, [])
    for first, lines in runs:
        if first != joined.first + len(joined.lines):
            if joined.lines:
                yield joined
            joined = Run(first, [])
        joined.lines.extend(lines)
    if joined.lines:
        yield joined
