"""From the steps of a finding to few that show the same.

The one rule: what is left is run at each step of the way, and its failure must be of the same kind.
"""

import re
import traceback
from collections.abc import Callable, Sequence
from time import monotonic

from tests.fuzz.steps import Step, Steps, lines_apart
from tests.fuzz.world import play

_PARTICULAR = re.compile(r"b'.*'|b\".*\"|\d+|\{.*\}")


def kind_of(failure: BaseException) -> tuple[str, ...]:
    """What makes two failures the same: its type, its text without particulars, and its place."""
    places = traceback.extract_tb(failure.__traceback__)
    text = _PARTICULAR.sub("", str(failure))[:60]
    return type(failure).__name__, text, places[-1].name if places else ""


def failure_of(steps: Steps) -> Exception | None:
    try:
        play(steps)
    except Exception as failure:
        return failure
    return None


def reduced(steps: Steps, kind: tuple[str, ...]) -> Steps:
    """The fewest steps, lines and words found in a minute that fail in the same way."""
    end_s = monotonic() + 60

    def fails(tried: Sequence[Step]) -> bool:
        failure = failure_of(tuple(tried))
        return failure is not None and kind_of(failure) == kind

    if not fails(steps):
        return steps
    steps = _fewest(steps, fails, end_s)
    apart = lines_apart(steps)
    if fails(apart):
        steps = _fewest(apart, fails, end_s)
    return _fewest(_shortest(steps, fails, end_s), fails, end_s)


def _fewest(steps: Steps, fails: Callable[[Sequence[Step]], bool], end_s: float) -> Steps:
    """Leave out ever smaller runs of steps."""
    size = max(1, len(steps) // 2)
    while size:
        start = 0
        while start < len(steps) and monotonic() < end_s:
            tried = steps[:start] + steps[start + size :]
            if tried and fails(tried):
                steps = tried
            else:
                start += size
        size //= 2
    return steps


def _shortest(steps: Steps, fails: Callable[[Sequence[Step]], bool], end_s: float) -> Steps:
    """Leave words out of lines."""
    for at in range(len(steps)):
        words = steps[at].data.split(b" ")
        place = len(words) - 1
        while place >= 0 and monotonic() < end_s and len(words) > 1:
            fewer = words[:place] + words[place + 1 :]
            tried = (*steps[:at], steps[at]._replace(data=b" ".join(fewer)), *steps[at + 1 :])
            if fails(tried):
                steps, words = tried, fewer
            place -= 1
    return steps
