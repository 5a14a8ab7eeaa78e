"""Cron expressions: when the next tick of a schedule is.

The one rule: only moments after the given one count. The library enumerates local times as if no
clock were ever changed; what a change leaves out or repeats is decided here, as by Debian's cron.
"""

from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from itertools import islice
from math import inf
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from mqks.errors import BadRequest

DAY: Final = timedelta(days=1)
FIELDS: Final = 5
LOCAL_TIMES_MAX: Final = 1500
"""Those looked at for one tick: as many as there are minutes in a day that a zone leaves out."""


def next_tick(cron: str, zone: str, after_us: int) -> int:
    """A `NextTick` of the broker."""
    try:
        place = ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        raise BadRequest(f"{zone[:80]!r} is not a time zone, as in Europe/Berlin") from None
    try:
        return _next_s(cron, place, after_us // 1_000_000) * 1_000_000
    except (CronSimError, OverflowError, ValueError):
        raise BadRequest(
            f"{cron[:80]!r} is not a cron expression with a time to come, as in 0 3 * * *"
        ) from None


def _next_s(cron: str, zone: ZoneInfo, after_s: int) -> int:
    """In seconds since 1970."""
    words = cron.split()
    if len(words) != FIELDS:
        raise CronSimError(f"{len(words)} fields")
    is_fixed = not words[0].startswith("*") and not words[1].startswith("*")
    after = datetime.fromtimestamp(after_s, UTC)
    # If clocks are set back within a day, local times before this one come again.
    start = min(_shown(after, zone), _shown(after + DAY, zone) - DAY)
    next_s = inf
    for local in islice(CronSim(cron, start), LOCAL_TIMES_MAX):
        first_s, last_s = (_utc_s(local, zone, fold) for fold in (0, 1))
        if first_s > last_s:  # It is left out.
            times = [_change_s(zone, last_s, first_s)] if is_fixed else []
        else:
            times = [first_s] if is_fixed else [first_s, last_s]
        next_s = min([next_s, *(each_s for each_s in times if each_s > after_s)])
        if first_s >= next_s:  # Later local times are not shown before it.
            return int(next_s)
    raise CronSimError("no time to come")


def _shown(moment: datetime, zone: ZoneInfo) -> datetime:
    """What a clock in the zone shows."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def _utc_s(local: datetime, zone: ZoneInfo, fold: int) -> int:
    """When a clock shows a local time that comes twice, first or last. Of one that is left out, the
    last time is before the change, and the first is after it."""
    return round(local.replace(tzinfo=zone, fold=fold).timestamp())


def _change_s(zone: ZoneInfo, before_s: int, after_s: int) -> int:
    """When clocks are changed, between these times."""
    offset = datetime.fromtimestamp(before_s, zone).utcoffset()
    return before_s + bisect_left(
        range(before_s, after_s),
        True,
        key=lambda each_s: datetime.fromtimestamp(each_s, zone).utcoffset() != offset,
    )
