"""Days in which clocks are changed: schedules in many zones, on a server that is killed, stopped
and started again.

The one rule: which ticks are due is found here minute by minute, from what a clock in the zone
shows, and from the rules in docs/protocol.md; nothing of the server's own reckoning is asked.

What looks at something each second or minute, for whatever outside may have changed, is made to
look once an hour: the names of files, a wall clock that was set, peers that have vanished, queues
that wait.
"""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from tests.simulation.host import Host
from tests.simulation.loop import Clock, Process, Violation
from tests.simulation.world import PORT, URL, World, mqks

ZONES: Final = (
    *("Europe/Berlin", "Europe/London", "America/New_York", "America/St_Johns", "America/Santiago"),
    *("Australia/Lord_Howe", "Australia/Adelaide", "Africa/Casablanca", "Asia/Kathmandu"),
    *("Pacific/Chatham", "Pacific/Apia", "America/Havana", "Africa/Cairo", "Asia/Beirut", "UTC"),
)
FIELDS: Final = (
    ("0", "30", "59", "*/20", "5,35", "*", "10-12"),
    ("*", "0", "1", "2", "2", "3", "23", "*/6", "1-3", "0,2"),
    ("*", "*", "*", "1", "29", "31", "*/2"),
    ("*", "*", "*", "2", "3,10", "1-6"),
    ("*", "*", "*", "0", "1-5", "6,7"),
)
RANGES: Final = (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)
LOOKS: Final = {
    "mqks.server.writer": "LOOK_S",
    "mqks.server.vanished": "LOOK_S",
    "mqks.server.lag": "LOOK_S",
    "mqks.broker.spine.base.schedule": "WALL_LOOK_S",
    "mqks.broker.features.time.ticks": "WALL_LOOK_S",
}
LOOK_S: Final = 3600.0
MINUTE: Final = timedelta(minutes=1)
GONE_S: Final = 20.0
"""A server is away for less than that, and the clock wrong: no tick is late by a minute."""
SCHEDULES: Final = 20


class Planned(NamedTuple):
    cron: str
    zone: str

    def ticks(self, start: datetime, end: datetime) -> list[int]:
        """In seconds since 1970, from the minute of `start` on, up to that of `end`."""
        words = self.cron.split()
        fields = [_field(*each) for each in zip(words, RANGES, strict=True)]
        is_fixed = words[0][0] != "*" and words[1][0] != "*"
        minutes, found = _minutes(self.zone, start - timedelta(days=1), end), []
        latest = minutes[0][1]
        for moment, shown in minutes:
            if is_fixed and shown - latest != MINUTE:
                # Also those that were left out since; those that were shown before come no more.
                due = range(1, 1 + max(0, round((shown - latest) / MINUTE)))
                is_due = any(_matches(fields, words, latest + MINUTE * each) for each in due)
            else:
                is_due = _matches(fields, words, shown)
            latest = max(latest, shown)
            if is_due and moment >= start:
                found.append(round(moment.timestamp()))
        return found


@cache
def _minutes(name: str, start: datetime, end: datetime) -> list[tuple[datetime, datetime]]:
    """Each of them, and what a clock in the zone shows then."""
    zone, moment, found = ZoneInfo(name), start, []
    while moment < end:
        found.append((moment, moment.astimezone(zone).replace(tzinfo=None, fold=0)))
        moment += MINUTE
    return found


def _field(word: str, limits: tuple[int, int]) -> set[int]:
    found: set[int] = set()
    for part in word.split(","):
        bounds, _, step = part.partition("/")
        first, _, last = bounds.partition("-")
        low, high = limits if bounds == "*" else (int(first), int(last or first))
        found.update(range(low, high + 1, int(step or 1)))
    return found


def _matches(fields: list[set[int]], words: list[str], local: datetime) -> bool:
    minutes, hours, days, months, weekdays = fields
    if local.minute not in minutes or local.hour not in hours or local.month not in months:
        return False
    weekday = local.isoweekday()
    is_day, is_weekday = local.day in days, bool({weekday, weekday % 7} & weekdays)
    if words[2][0] == "*" or words[4][0] == "*":
        return is_day and is_weekday
    return is_day or is_weekday


def changes(zone: ZoneInfo, year: int) -> list[datetime]:
    """When clocks are changed in the zone, and other days that are not like others."""
    moment = datetime(year, 1, 1, tzinfo=UTC)
    found = [moment, datetime(year, 3, 1, tzinfo=UTC)]
    while moment.year == year:
        halves = [moment + timedelta(minutes=30 * each) for each in range(-1, 48)]
        if _offset(halves[0], zone) != _offset(halves[-1], zone):
            pairs = pairwise(halves)
            found += [each for old, each in pairs if _offset(old, zone) != _offset(each, zone)]
        moment += timedelta(days=1)
    return found


def _offset(moment: datetime, zone: ZoneInfo) -> timedelta | None:
    return moment.astimezone(zone).utcoffset()


class Year(World):
    """`messages` is the number of hours."""

    clients = 0
    kinds = ("break_things",)

    def __init__(self, seed: int, directory: Path, messages: int) -> None:
        super().__init__(seed, directory, messages)
        rng = self.rng
        zone = rng.choice(ZONES)
        change = rng.choice(changes(ZoneInfo(zone), rng.randrange(2020, 2037)))
        self.start = change - timedelta(hours=messages * rng.random())
        self.clock = Clock(self.start.timestamp())
        self.planned = {
            f"s{number}": Planned(
                " ".join(map(rng.choice, FIELDS)), rng.choice((zone, zone, rng.choice(ZONES)))
            )
            for number in range(SCHEDULES)
        }
        self.got: Counter[str] = Counter()

    def __str__(self) -> str:
        return (
            f"{len(self.got)} ticks from {self.start:%Y-%m-%d %H:%M}, {self.host.lives} lives, "
            f"{self.stops} stops, {self.sets} clocks set"
        )

    def install(self) -> None:
        super().install()
        for module, name in LOOKS.items():
            vars(import_module(module))[name] = LOOK_S

    async def main(self) -> None:
        self.host = Host(self.network, self.directory / "year", PORT, self.note)
        await self.host.serve()
        Process("consumer").spawn(self.count())
        await asyncio.sleep(5)
        await self.add()
        added = datetime.fromtimestamp(self.clock.wall(), UTC)
        faults = asyncio.ensure_future(self.break_things())
        await asyncio.sleep(self.messages * 3600)
        self.has_faults = False
        await faults
        self.clock.set(0.0)
        await asyncio.sleep(90)
        self.judge_ticks(added, datetime.fromtimestamp(self.clock.wall(), UTC))

    async def add(self) -> None:
        from mqks.errors import MqksError

        async with mqks().connect(URL) as client:
            for name, each in [*self.planned.items()]:
                try:
                    await client.schedule(name, each.cron, "tick", tz=each.zone)
                except MqksError:  # It never comes, as the 31st of February.
                    del self.planned[name]

    async def count(self) -> None:
        async with (
            mqks().connect(URL, mqks().Options(keep_alive_s=LOOK_S)) as client,
            client.consume("ticks", ["tick"]) as messages,
        ):
            async for message in messages:
                self.note("tick", message.id)
                self.got[message.id] += 1
                message.ack()

    async def break_things(self) -> None:
        rng = self.rng
        async for _ in self.now_and_then(3000):
            what = rng.random()
            if what < 0.6:
                await self.host.end(kill=what < 0.4)
                await asyncio.sleep(rng.uniform(0, GONE_S))
                await self.host.serve()
            elif what < 0.8:
                self.stops += 1
                await self.host.process.stop_for(rng.uniform(0, GONE_S))
            else:
                self.sets += 1
                self.clock.set(rng.uniform(-GONE_S, GONE_S))

    def is_open(self, second: int) -> bool:
        """Whether a tick at this time may come, and need not."""
        return False

    def judge_ticks(self, added: datetime, now: datetime) -> None:
        first = added.replace(second=0, microsecond=0) + MINUTE
        last = now.replace(second=0, microsecond=0)
        got: dict[str, list[int]] = {name: [] for name in self.planned}
        for id_ in self.got.elements():
            name, _, second = id_.partition(":")
            is_judged = first.timestamp() <= int(second) < last.timestamp()
            if is_judged and not self.is_open(int(second)):
                got[name].append(int(second))
        for name, each in self.planned.items():
            ticks = (second for second in each.ticks(first, last) if not self.is_open(second))
            wanted, found = Counter(ticks), Counter(got[name])
            if found != wanted:
                missing, extra = sorted(wanted - found), sorted(found - wanted)
                raise Violation(f"{each}: missing {missing[:5]}, surplus {extra[:5]}")
