"""Makes the plan of a seed smaller while it fails in the same way.

    python -m tests.simulation SEED [COUNT] --shrink

The one rule: what is left out makes all that follows another run, so a smaller plan counts if one
of a few seeds fails in it, with the same words but for names and numbers.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

SEEDS = 3
PLAY_S = 600
_DETAILS = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|-?\d[\w.-]*")


class Plan(NamedTuple):
    seed: int
    messages: int
    kind: tuple[str, ...]
    """Its flag, if it has one."""
    clients: int
    kinds: frozenset[str]
    """What may be left out."""
    without: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        clients = ["--clients", str(self.clients)] if self.clients else []
        without = [f"--without={each}" for each in self.without]
        return [str(self.seed), str(self.messages), *self.kind, *clients, *without]

    def failure(self) -> str:
        """How it fails, without names and numbers; empty if it does not."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.simulation", *self.arguments],
                capture_output=True,
                text=True,
                timeout=PLAY_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no end"
        told = done.stderr.strip().splitlines() if done.returncode else []
        return _DETAILS.sub("…", told[-1]) if told else ""

    def smaller(self) -> Iterator["Plan"]:
        if self.messages > 1:
            yield self._replace(messages=self.messages // 2)
        if self.clients > 1:
            yield self._replace(clients=self.clients // 2)
        for each in sorted(self.kinds.difference(self.without)):
            yield self._replace(without=(*self.without, each))


def shrink(plan: Plan) -> Plan | None:
    """The smallest plan that fails as this one does; None if this one does not fail."""
    failure = plan.failure()
    if not failure:
        return None
    print(failure, flush=True)
    while (smaller := _first(plan, failure)) is not None:
        plan = smaller
        print("python -m tests.simulation", *plan.arguments, flush=True)
    return plan


def _first(plan: Plan, failure: str) -> Plan | None:
    for smaller in plan.smaller():
        for seed in range(plan.seed, plan.seed + SEEDS):
            if (found := smaller._replace(seed=seed)).failure() == failure:
                return found
    return None
