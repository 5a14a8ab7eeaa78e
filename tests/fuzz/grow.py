"""The corpus: inputs of which each takes an arc of the broker that no other does, kept small.

The one rule: an entry is in the corpus for the arcs that it takes, so what takes no arc of its own
goes, and what is not needed for its arcs is cut off.
"""

from collections.abc import Callable, Iterable
from random import Random
from time import monotonic

from tests.fuzz.coverage import WATCHED, Arc, traced
from tests.fuzz.mutations import Mutator
from tests.fuzz.steps import Step, Steps, lines_apart, written
from tests.fuzz.world import TooSlow, play

ENTRY_CHARACTERS_MAX = 1500
Play = Callable[[Steps], object]


def arcs_of(steps: Steps, run: Play = play, watched: tuple[str, ...] = WATCHED) -> set[Arc]:
    """What these steps reach; raises what they find."""
    found: set[Arc] = set()
    with traced(found, watched):
        run(steps)
    return found


class Growth:
    """Grows a corpus; `found` are the steps that failed, and how."""

    def __init__(self, corpus: Iterable[Steps], chance: Random) -> None:
        self.reached: dict[Steps, set[Arc]] = {}
        self.known: set[Arc] = set()
        self.found: list[tuple[Steps, Exception]] = []
        self.tried = 0
        for steps in corpus:
            self._try(steps)
        self._mutator = Mutator(list(self.reached), chance)

    def run(self, seconds: float) -> None:
        end_s = monotonic() + seconds
        while monotonic() < end_s:
            steps = self._mutator.steps()
            if steps and self._try(steps):
                self._mutator.add(steps)

    def _try(self, steps: Steps) -> bool:
        """Keep these steps if they reach something new."""
        self.tried += 1
        try:
            arcs = arcs_of(steps)
            new = arcs - self.known
            if not new:
                return False
            steps = self._cut(steps, new)
            arcs = arcs_of(steps)
        except TooSlow:  # Everything is, while it is traced.
            return False
        except Exception as failure:
            self.found.append((steps, failure))
            return False
        self.known |= arcs
        if len(written(steps)) > ENTRY_CHARACTERS_MAX:
            return False
        self.reached[steps] = arcs
        return True

    @staticmethod
    def _cut(steps: Steps, needed: set[Arc]) -> Steps:
        """Leave out the steps, and then the lines, that are not needed for these arcs."""
        steps = _fewer(steps, needed)
        apart = lines_apart(steps)
        if len(apart) > len(steps) and needed <= arcs_of(apart):
            steps = _fewer(apart, needed)
        return steps

    def minimised(self) -> list[Steps]:
        """So few entries that they reach all there is: the short ones first."""
        left: dict[Arc, list[Steps]] = {}
        for steps, arcs in self.reached.items():
            for arc in arcs:
                left.setdefault(arc, []).append(steps)
        kept: dict[Steps, None] = {}
        covered: set[Arc] = set()
        for arc, entries in sorted(left.items(), key=lambda each: len(each[1])):
            if arc not in covered:
                steps = min(entries, key=lambda each: (len(written(each)), written(each)))
                kept[steps] = None
                covered |= self.reached[steps]
        return list(kept)


def _fewer(steps: Steps, needed: set[Arc]) -> Steps:
    at = len(steps) - 1
    while at >= 0 and len(steps) > 1:
        tried: tuple[Step, ...] = steps[:at] + steps[at + 1 :]
        try:
            if needed <= arcs_of(tried):
                steps = tried
        except Exception:  # What fails is not wanted in the corpus.
            pass
        at -= 1
    return steps
