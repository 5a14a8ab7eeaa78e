"""Many mutated lines at full speed, in episodes: each a broker of its own, with chance of its own.

The one rule: an episode's steps come from the seed and its number alone, so that it can be had
again, and what it found be reduced.
"""

from collections.abc import Sequence
from itertools import count
from random import Random
from time import perf_counter
from typing import Final

from tests.fuzz.mutations import Mutator, event, settings
from tests.fuzz.reduce import failure_of
from tests.fuzz.steps import Step, Steps, send
from tests.fuzz.world import TooSlow, World, split_settings

EPISODE_LINES: Final = 5000
CHECKED_EVERY: Final = 50
"""Steps between two looks at the invariants: some hundred lines."""
BUSY: Final = b"books=1 small_steps=1"
"""What finds lines that are lost or doubled when turns end."""
POOL_LINES: Final = 2500
"""Mutated for each episode, which sends each of them about twice."""


class Mass:
    def __init__(self, corpus: Sequence[Steps], seed: int) -> None:
        self._seed = seed
        self._mutator = Mutator(corpus, Random(seed))
        self.lines = 0
        self.mutated = 0
        self.slowest_s = 0.0
        self.found: list[tuple[Steps, Exception]] = []

    def run(self, lines: int) -> None:
        """So many lines, or up to what is found first."""
        for number in count():
            if self.lines >= lines or self.found:
                break
            self.episode(number)

    def episode(self, number: int) -> None:
        chance = self._mutator.chance = Random(f"{self._seed}:{number}")
        taken: list[Step] = []
        kind = chance.random()
        if kind < 0.7:
            taken.append(Step("settings", "*", settings(chance)))
        elif kind < 0.85:
            taken.append(Step("settings", "*", b"%b calls_a_turn=%d" % (BUSY, kind * 100 % 9)))
        chosen, _ = split_settings(tuple(taken))
        try:
            with World(CHECKED_EVERY, perf_counter, **chosen) as world:
                self._go_on(world, taken, chance)
                world.settle()
        except TooSlow as failure:
            if all(isinstance(failure_of(tuple(taken)), TooSlow) for _ in range(3)):
                self.found.append((tuple(taken), failure))
        except Exception as failure:
            self.found.append((tuple(taken), failure))
        self.lines += world.lines
        self.slowest_s = max(self.slowest_s, world.slowest_s)

    def _go_on(self, world: World, taken: list[Step], chance: Random) -> None:
        mutator = self._mutator
        pool = [mutator.line() for _ in range(POOL_LINES)]
        self.mutated += POOL_LINES
        sent = 0
        while sent < EPISODE_LINES:
            kind = chance.random()
            if kind < 0.08:
                steps: Sequence[Step] = [event(chance)]
            elif kind < 0.25:
                steps = [each for each in mutator.steps() if each.verb != "settings"]
                self.mutated += 1
            elif kind < 0.26:
                steps = [send(mutator.who(), mutator.burst())]
            else:
                chunk = mutator.chunk(chance.choices(pool, k=1 << int(chance.random() * 8)))
                who = mutator.who()
                cut = int(chance.random() * 4 * len(chunk))
                steps = [send(who, chunk[:cut]), send(who, chunk[cut:])]
            for step in steps:
                taken.append(step)
                world.run(step)
                sent += 1 + step.data.count(b"\n")
