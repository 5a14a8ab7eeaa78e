"""Ticks of cron expressions where clocks are changed, against a walk from minute to minute."""

import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo, available_timezones

import pytest

from mqks.server.cron import next_tick
from tests.kit.seeds import printed_seed

SECOND_US = 1_000_000
LOOK_S = 5 * 86_400
"""No zone changes its clocks and changes them back within this time."""
AROUND_S = 26 * 3600
EXPRESSIONS = (
    *("30 2 * * *", "0,30 2 * * *", "*/30 2 * * *", "30 * * * *", "*/17 * * * *"),
    *("0 0 * * *", "*/10 5 * * *", "15 1-3 * * 0", "5 */2 1-7 3,4,10,11 *", "59 23 * * *"),
)
ODD = (
    *("Africa/Cairo", "America/Havana", "America/New_York", "America/Santiago"),
    *("Antarctica/Troll", "Australia/Lord_Howe", "Europe/Berlin", "Europe/London"),
)
AUTUMN = "2026-10-25T02:30+02:00 2026-10-26T02:30+01:00"
TWICE = "2026-10-25T02:30+02:00 2026-10-25T02:00+01:00 2026-10-25T02:30+01:00"
SPRING = "2026-03-29T03:00+02:00 2026-03-30T02:00+02:00"
HALF_AN_HOUR = "2026-10-04T05:00+11:00 2026-10-04T05:10+11:00"
Minutes = list[tuple[int, datetime]]
"""Seconds since 1970, and what clocks show then."""


def changes(zones: Iterable[str], *years: int) -> Iterator[tuple[str, Minutes]]:
    """The minutes around each change of clocks. Zones that are alike in all these years are one."""
    begin_s, end_s = (round(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in years)
    looks, known = range(begin_s, end_s, LOOK_S), set[tuple[timedelta | None, ...]]()
    for name in zones:
        zone = ZoneInfo(name)

        def offset(at_s: int, zone: ZoneInfo = zone) -> timedelta | None:
            return datetime.fromtimestamp(at_s, zone).utcoffset()

        offsets = tuple(map(offset, looks))
        if offsets in known:
            continue
        known.add(offsets)
        for look_s, (before, after) in zip(looks, pairwise(offsets), strict=False):
            if before != after:
                each_s = range(look_s, look_s + LOOK_S + 1)
                change_s = each_s[bisect_left(each_s, True, key=lambda s: offset(s) != before)]
                around = range(change_s - AROUND_S, change_s + AROUND_S, 60)
                shown = (datetime.fromtimestamp(s, zone).replace(tzinfo=None) for s in around)
                yield name, list(zip(around, shown, strict=True))


def numbers(field: str, least: int, most: int) -> set[int]:
    """What a field of a cron expression names."""
    found = set[int]()
    for part in field.split(","):
        words, _, step = part.partition("/")
        first, _, last = words.replace("*", f"{least}-{most}").partition("-")
        found.update(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


class Expression:
    def __init__(self, cron: str) -> None:
        fields, ranges = cron.split(), ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
        minutes, hours, self._days, self._months, self._weekdays = (
            numbers(field, *each) for field, each in zip(fields, ranges, strict=True)
        )
        self._times = {(hour, minute) for hour in hours for minute in minutes}
        self._is_fixed = "*" not in fields[0] + fields[1]

    def _names(self, day: date) -> bool:
        is_weekday = day.isoweekday() % 7 in self._weekdays
        return day.day in self._days and day.month in self._months and is_weekday

    def _matches(self, shown: datetime) -> bool:
        return (shown.hour, shown.minute) in self._times and self._names(shown)

    def ticks(self, minutes: Minutes) -> list[int]:
        """Those after the first minute. A fixed time comes when clocks show it, or a later time,
        for the first time, any other whenever they show it."""
        if not self._is_fixed:
            return [at_s for at_s, shown in minutes[1:] if self._matches(shown)]
        ticks, minute, latest = list[int](), timedelta(minutes=1), minutes[0][1]
        for at_s, shown in minutes[1:]:
            passed = range(1, (shown - latest) // minute + 1)
            if any(self._matches(latest + each * minute) for each in passed):
                ticks.append(at_s)
            latest = max(latest, shown)
        return ticks


def check(zone: str, minutes: Minutes, chance: random.Random, count: int) -> None:
    """Ticks of so many of the expressions."""
    begin_s, end_s = minutes[0][0], minutes[-1][0]
    near = range(len(minutes) // 2 - 150, len(minutes) // 2 + 150)
    for cron in chance.sample(EXPRESSIONS, count):
        ticks = Expression(cron).ticks(minutes)
        found, at_s = list[int](), begin_s
        while (at_s := next_tick(cron, zone, at_s * SECOND_US) // SECOND_US) <= end_s:
            found.append(at_s)
        assert found == ticks, (cron, zone, begin_s)
        for number in chance.sample(near, 4):
            after_us = minutes[number][0] * SECOND_US + chance.randrange(60 * SECOND_US)
            later_us = [each * SECOND_US for each in ticks if each * SECOND_US > after_us]
            if later_us:
                assert next_tick(cron, zone, after_us) == later_us[0], (cron, zone, after_us)


def test_where_clocks_are_changed_in_an_odd_way() -> None:
    chance = random.Random(printed_seed())
    for zone, minutes in changes(ODD, 2026, 2027):
        check(zone, minutes, chance, len(EXPRESSIONS))


@pytest.mark.slow
def test_each_zone_in_ten_years() -> None:
    chance, count = random.Random(printed_seed()), 0
    for zone, minutes in changes(sorted(available_timezones()), 2022, 2032):
        check(zone, minutes, chance, 3)
        count += 1
    assert count > 500


@pytest.mark.parametrize(
    ("cron", "zone", "after", "ticks"),
    [
        # In the second two o'clock: not before the next day.
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10Z", "2026-10-26T02:30+01:00"),
        # The first half past two, not the second.
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:10Z", AUTUMN),
        # Two times that are left out are one tick, when the clocks are changed.
        ("0,30 2 * * *", "Europe/Berlin", "2026-03-28T12:00Z", SPRING),
        # A star follows the clocks: not at all in March, twice in October.
        ("*/30 2 * * *", "Europe/Berlin", "2026-03-28T12:00Z", "2026-03-30T02:00+02:00"),
        ("*/30 2 * * *", "Europe/Berlin", "2026-10-25T00:00Z", TWICE),
        # After a change by half an hour.
        ("*/10 5 * * *", "Australia/Lord_Howe", "2026-10-03T12:00Z", HALF_AN_HOUR),
        # A whole day was left out.
        ("0 12 30 * *", "Pacific/Apia", "2011-12-30T00:00Z", "2011-12-31T00:00+14:00"),
    ],
)
def test_ticks_of_one(cron: str, zone: str, after: str, ticks: str) -> None:
    at_us = round(datetime.fromisoformat(after).timestamp()) * SECOND_US
    for tick in ticks.split():
        at_us = next_tick(cron, zone, at_us)
        assert at_us == round(datetime.fromisoformat(tick).timestamp()) * SECOND_US
