"""One line of a mebibyte, made of the grammar's own words, is done soon and in short steps.

The one rule: a line is judged by its CPU time for each byte and by the longest single call; what
was slow is measured again before it is believed.
"""

import gc
from random import Random
from time import thread_time
from typing import Final

from tests.fuzz import Finding, grammar
from tests.fuzz.steps import Steps, send
from tests.fuzz.world import TooSlow, World

LINE_BYTES: Final = 1024 * 1024 - 2
BYTE_S_MAX: Final = 5e-6
"""CPU time that a byte may take, whatever the line: five times what the costliest takes, 100,000
masks that are bound, and some hundred times what most take."""
AGAIN: Final = 3
SETUP: Final = b"s subscribe q e a.b\nd subscribe --confirm dead a.*\nm publish e x\n"


class LongLines:
    """Each has a broker of its own."""

    def __init__(self, seed: int, size: int = LINE_BYTES) -> None:
        self._chance = Random(f"{seed}:long")
        self._size = size
        self.count = 0
        self.slowest_byte_s = 0.0
        self.found: list[tuple[Steps, Exception]] = []

    def one(self) -> None:
        line = grammar.random_line(self._chance, self._size)
        steps = send("a", SETUP), send(self._chance.choice("aaaus"), line + b"\n")
        self.count += 1
        failure: Exception | None = None
        for _ in range(AGAIN):
            try:
                self._judge(steps)
            except Finding as found:
                failure = found
                if not isinstance(found, TooSlow):
                    break
            else:
                return
        assert failure is not None
        self.found.append((steps, failure))

    def told(self) -> str:
        return f"the slowest byte of a long line took {self.slowest_byte_s * 1e6:.2f} us"

    def _judge(self, steps: Steps) -> None:
        gc.disable()
        try:
            start_s = thread_time()
            with World(0) as world:
                for step in steps:
                    world.run(step)
                world.settle()
        finally:
            gc.enable()
        byte_s = (thread_time() - start_s) / self._size
        if byte_s > BYTE_S_MAX:
            raise TooSlow(f"{byte_s * 1e6:.2f} us for each byte: {steps[-1].data[:200]!r}")
        self.slowest_byte_s = max(self.slowest_byte_s, byte_s)
