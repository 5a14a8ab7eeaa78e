"""Cron expressions: when the next tick of a schedule is.

The one rule: times that a change of the clocks leaves out or repeats come once, as with Debian's
cron.
"""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from mqks.errors import BadRequest


def next_tick(cron: str, zone: str, after_us: int) -> int:
    """A `NextTick` of the broker."""
    try:
        start = datetime.fromtimestamp(after_us / 1e6, UTC).astimezone(ZoneInfo(zone))
    except (KeyError, ValueError, OSError):
        raise BadRequest(f"{zone[:80]!r} is not a time zone, as in Europe/Berlin") from None
    try:
        return round(next(CronSim(cron, start)).timestamp()) * 1_000_000
    except (CronSimError, StopIteration, OverflowError):
        raise BadRequest(
            f"{cron[:80]!r} is not a cron expression with a time to come, as in 0 3 * * *"
        ) from None
