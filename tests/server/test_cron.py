"""Ticks of cron expressions where clocks are changed, against a walk from minute to minute: that of
the simulation, which plays a server in them (`--year`)."""

from bisect import bisect_right
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from mqks.server.cron import next_tick
from tests.simulation.year import Planned, changes

SECOND_US = 1_000_000
AROUND = timedelta(hours=26)
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


@pytest.mark.parametrize("zone", ODD)
def test_where_clocks_are_changed_in_an_odd_way(zone: str) -> None:
    for change in changes(ZoneInfo(zone), 2026):
        start, end = change - AROUND, change + AROUND
        begin_s, end_s, change_s = (round(each.timestamp()) for each in (start, end, change))
        looks = *range(begin_s, end_s, 3607), *range(change_s - 9000, change_s + 9000, 601)
        for cron in EXPRESSIONS:
            ticks = Planned(cron, zone).ticks(start, end)
            for look_s in looks:
                for tick_s in ticks[bisect_right(ticks, look_s) :][:1]:
                    found_us = next_tick(cron, zone, look_s * SECOND_US + 1)
                    assert found_us == tick_s * SECOND_US, (cron, look_s)


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
