"""Expressions of `_eval`, mutated: only ExpressionError comes out, soon, and no long result."""

from random import Random
from time import thread_time
from typing import Final

from mqks.broker.features.evaluate.expression import (
    LIMITS,
    RESULT_BYTES_MAX,
    Allowance,
    ExpressionError,
    evaluate,
    render,
)
from mqks.broker.requests.state import EvalState
from mqks.broker.spine.base.turns import finish
from tests.fuzz import Finding
from tests.fuzz.mutations import EXPRESSIONS, mutated_expression
from tests.fuzz.steps import Step, Steps, send
from tests.fuzz.world import World

ATTACKS: Final = [
    *("9 ** 9 ** 9", "'a' * 10 ** 9", "[0] * 10 ** 9", "sorted(range(10 ** 8))", "1 << 10 ** 9"),
    *("[0 for x in range(999) for y in range(999)]", "set(range(0, 10 ** 25, 2 ** 61 - 1))"),
    *("('a' * 9999).replace('a', 'b' * 9999)", "[{i} for i in range(90000)]", "int('9' * 999)"),
    *("('ab' * 20000).rsplit('a' * 20000)", "zip(range(10 ** 8), range(10 ** 8))", "10.0 ** 400"),
    *("[x | x for x in [set(range(9000))] for i in range(30)]", "sorted(['a' * 1600] * 1000)"),
    *(
        "[str(c) for a in [[1]*9] for b in [[a]*9] for c in [[b]*9]]",
        "'%1000d' % 1",
        "round(5, -99)",
    ),
    *("{x: y for x in range(999) for y in 'ab'}", "b'\\xff' * 999", "[x[:] for x in [[0] * 2000]]"),
    *("state.__class__", "().__class__", "lambda: 1", "open('/etc/passwd')", "len", "f'{1:>9999}'"),
]
AGAIN: Final = 3
"""What was slow is evaluated again, so often, before it is believed."""
SOURCE_S: Final = 0.05
STEP_S: Final = 5e-6
"""CPU time that an expression may take, whatever it is, and for each step that it has paid for:
three times what it takes where both cores are busy."""
MOVES = b"".join(b"s%d subscribe q%d e e%d a.b\n" % (n, n, n) for n in range(100))
MESSAGES = b"m1 publish e x\nm2 publish e1 y\n"


class Expressions:
    """They look at a broker with some queues, consumers and messages."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(f"{seed}:expressions")
        with World(0) as world:
            for lines in (MOVES, b"c1 consume q1 --manual-ack\n", MESSAGES):
                world.run(send("a", lines))
        self._names = {
            "state": EvalState(world.broker, lambda steps: None),
            "request": {"id": "x", "action": "_eval"},
            "WORKERS": 1,
            "config": world.broker.settings.public(),
        }
        self.count = 0
        self.slowest_s = 0.0
        self.found: list[tuple[Steps, Exception]] = []

    def one(self) -> None:
        source = mutated_expression(self._chance, EXPRESSIONS + ATTACKS)
        self.count += 1
        took_s, steps = self._evaluate(source)
        for _ in range(AGAIN):
            if took_s <= SOURCE_S + steps * STEP_S:
                break
            # A collection of garbage may have come in between, or another one on this core.
            took_s = min(took_s, self._evaluate(source)[0])
        else:
            slow = Finding(f"an expression took {took_s * 1000:.0f} ms for {steps} steps: {source}")
            self.found.append(((), slow))
        self.slowest_s = max(self.slowest_s, took_s)

    def _evaluate(self, source: str) -> tuple[float, int]:
        """Return seconds of CPU time, and steps."""
        budget = Allowance()
        start_s = thread_time()
        try:
            result = render(finish(evaluate(source, self._names, budget)))
            if len(result) > RESULT_BYTES_MAX or b"\n" in result or b"\t" in result:
                raise Finding(f"a result that is no line: {result[:100]!r}")
        except ExpressionError:
            pass
        except Exception as failure:
            failure.add_note(source)
            self.found.append(((Step("send", "a", source.encode()),), failure))
        return thread_time() - start_s, LIMITS.steps_max - max(0, budget.steps)
