"""One batch: what it counts, as figures and as a bar.

The one rule: the bar is made of the figures beside it, and of nothing else.
"""

from typing import Any, Final

from mqks.page.tables import FORMATS, Row

STATES: Final = {"done": "Done", "running": "Running", "waiting": "Waiting", "dead": "Dead"}
"""Of messages, in the order of the bar."""


def batch_told(batch: Row) -> dict[str, Any]:
    """What the page of a batch renews. Of `bar`, by state: where it begins and how long it is, in
    percent of all messages."""
    bar, at = {}, 0.0
    for state in STATES:
        share = 100 * batch[state] / (batch["total"] or 1)
        bar[state] = round(at, 3), round(share, 3)
        at += share
    numbers = {f"batch.{key}": FORMATS["count"](batch[key]) for key in ("total", *STATES)}
    return {"numbers": numbers, "trends": {}, "bar": bar, "closed": batch["closed"]}
