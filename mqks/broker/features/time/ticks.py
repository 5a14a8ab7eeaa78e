"""Schedules: messages that are published again and again.

The one rule: a tick is the message and the schedule's next time, in one commit.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from zlib import crc32

from mqks.broker.spine.base.schedule import WALL_LOOK_S, Alarm
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.routing import singles
from mqks.broker.spine.routing.bindings import Bindings
from mqks.broker.spine.routing.publishing import Publishing
from mqks.errors import BadRequest, LimitExceeded, SchemaTooNew
from mqks.limits import SCHEDULES_MAX, TICK_MISSED_S, TICK_RETRY_S
from mqks.protocol.requests import ACTIONS, Publish, Scheduling, shown

NextTick = Callable[[str, str, int], int]
"""The first time after a time that a cron expression names in a time zone, in microseconds since
1970. Raises BadRequest."""
SECOND_US: Final = 1_000_000


def no_cron(cron: str, zone: str, after_us: int) -> int:
    """A `NextTick` of a broker that is not served."""
    raise BadRequest("schedule: cron expressions are not supported here")


class ScheduleRow(NamedTuple):
    """What is stored of a schedule."""

    publish: str
    """Flags, event and data, as in a publish."""
    cron: str = ""
    zone: str = "UTC"
    every_us: int = 0
    """0: it has a cron expression."""
    missed: str = "skip"
    jitter_us: int = 0
    paused: bool = False
    next_us: int = 0
    """Of the next tick, without jitter."""
    last_us: int = 0
    """When the last one was published; 0: none was."""

    @property
    def wanted(self) -> Publish:
        line = self.publish.encode("utf-8", "surrogateescape")
        wanted: Publish = ACTIONS[b"publish"].parse(line, 0)
        return wanted

    @classmethod
    def parse(cls, name: bytes, stored: str) -> "ScheduleRow":
        """Raises SchemaTooNew."""
        try:
            return cls(**json.loads(stored))
        except TypeError:
            raise SchemaTooNew(f"the schedule {shown(name)} is of a newer mqks: use that") from None

    def told(
        self, name: bytes, error: str | None = None, last_queues: int | None = None
    ) -> dict[str, Any]:
        """As `stats` tells it."""
        return {
            "name": name.decode("utf-8", "surrogateescape"),
            "cron": self.cron or None,
            "tz": self.zone,
            "every_s": self.every_us / 1e6 or None,
            "event": self.wanted.event.decode("utf-8", "surrogateescape"),
            "publish": self.publish,
            "missed": self.missed,
            "jitter_s": self.jitter_us / 1e6,
            "paused": self.paused,
            "next_us": None if self.paused else self.next_us,
            "last_us": self.last_us or None,
            "last_queues": last_queues,
            "error": error,
        }

    def is_same(self, other: "ScheduleRow") -> bool:
        """Whether it is defined in the same way."""
        # Without what happens to it: a pause, its next tick and its last one.
        return self[:6] == other[:6]


class Schedules:
    """`next_tick` reads cron expressions."""

    def __init__(
        self, shared: Shared, bindings: Bindings, publishing: Publishing, next_tick: NextTick
    ) -> None:
        self.rows: dict[bytes, ScheduleRow] = {}
        self.errors: dict[bytes, str] = {}
        """Why the tick that is due could not be published."""
        self.last_queues: dict[bytes, int] = {}
        """How many queues got the last message since the start."""
        self._alarms: dict[bytes, Alarm] = {}
        self._notices = shared.owner.notices
        self._schedule, self._pending = shared.schedule, shared.pending
        self._turns, self._bindings, self._publishing = shared.turns, bindings, publishing
        self._next_tick = next_tick
        self._is_checking = False
        self._seen_us = 0
        """The wall clock a moment ago."""

    def restore(self, rows: Mapping[bytes, str]) -> None:
        """Raises SchemaTooNew."""
        self.rows = {name: ScheduleRow.parse(name, row) for name, row in rows.items()}

    def start(self) -> None:
        """After recovery."""
        for name in self.rows:
            self._wait(name)
        self._turns.add(self._bring_forward())

    # -- the clock

    def _check_clock(self) -> None:
        """Notice when the wall clock is set back, as long as there are schedules."""
        now_us = self._schedule.wall_us()
        if now_us < self._seen_us - TICK_MISSED_S * SECOND_US:
            self._turns.add(self._bring_forward())
        self._seen_us, self._is_checking = now_us, bool(self.rows)
        if self._is_checking:
            self._schedule.after(WALL_LOOK_S, self._check_clock)

    def _bring_forward(self) -> Work[None]:
        """Ticks that are further away than they can be are of a clock that was set back. The next
        one is the first from now on."""
        for name in [*self.rows]:
            yield GOES_ON
            row, now_us = self.rows.get(name), self._schedule.wall_us()
            if row is None or row.paused:
                continue
            with suppress(BadRequest):
                later_us = now_us + TICK_MISSED_S * SECOND_US
                if row.next_us > self._after(row._replace(next_us=later_us), later_us):
                    next_us = self._after(row._replace(next_us=now_us), now_us)
                    self.store(name, row._replace(next_us=next_us))

    # -- requests

    def found(self, name: bytes) -> ScheduleRow:
        """Raises BadRequest."""
        row = self.rows.get(name)
        if row is None:
            raise BadRequest(f"schedule: there is no schedule {shown(name)}")
        return row

    def put(self, wanted: Scheduling) -> None:
        """Add a schedule, or change one. One that is defined as before goes on as before."""
        name = wanted.name
        old = self.rows.get(name)
        if old is None and len(self.rows) >= SCHEDULES_MAX:
            reason = f"the limit of {SCHEDULES_MAX} schedules is reached"
            raise LimitExceeded("schedules_max", reason)
        new = ScheduleRow(
            wanted.line.decode("utf-8", "surrogateescape"),
            wanted.cron,
            wanted.zone,
            wanted.every_us,
            wanted.missed,
            wanted.jitter_us,
            wanted.pause,
            last_us=0 if old is None else old.last_us,
        )
        now_us = self._schedule.wall_us()
        new = new._replace(next_us=now_us)
        new = new._replace(next_us=self._after(new, now_us))
        if old is None or not old.is_same(new):
            self.store(name, new)
            self.last_queues.pop(name, None)
        elif wanted.pause and not old.paused:
            self.store(name, old._replace(paused=True))

    def pause(self, name: bytes, *, paused: bool) -> None:
        row = self.found(name)
        if row.paused != paused:
            # Ticks of the time in which it was paused are not missed.
            next_us = self._after(row, self._schedule.wall_us())
            self.store(name, row._replace(paused=paused, next_us=next_us))

    def remove(self, name: bytes) -> None:
        if self.rows.pop(name, None) is not None:
            self._alarms.pop(name).set(None)
            self.errors.pop(name, None)
            self.last_queues.pop(name, None)
            self._pending.entry.schedules[name] = None

    def run(self, name: bytes) -> Work[None]:
        """Publish it now, besides its ticks. Raises as `publish`."""
        row, now_us = self.found(name), self._schedule.wall_us()
        yield from self._publish(name, row, now_us, row._replace(last_us=now_us))

    def to_queue(self, old: bytes, new: bytes) -> dict[bytes, ScheduleRow]:
        """The rows of those that publish `--to` a queue, with its new name."""
        flag, to = ((b"--to=" + each).decode("utf-8", "surrogateescape") for each in (old, new))
        changed = {}
        for name, row in self.rows.items():
            if flag in row.publish and row.wanted.to == old:
                words = row.publish.split(" ")
                words[words.index(flag)] = to
                changed[name] = row._replace(publish=" ".join(words))
        return changed

    # -- ticks

    def _after(self, row: ScheduleRow, now_us: int) -> int:
        """The first tick after now."""
        if not row.every_us:
            return self._next_tick(row.cron, row.zone, now_us)
        return row.next_us + max(0, (now_us - row.next_us) // row.every_us + 1) * row.every_us

    def store(self, name: bytes, row: ScheduleRow) -> None:
        self.rows[name] = row
        self.errors.pop(name, None)
        self._pending.entry.schedules[name] = json.dumps(
            {
                field: value
                for field, value in row._asdict().items()
                if value != ScheduleRow._field_defaults.get(field)
            }
        )
        self._wait(name)

    def _wait(self, name: bytes, at_us: int = 0) -> None:
        """For the next tick, or until another time."""
        alarm, row = self._alarms.get(name), self.rows[name]
        if alarm is None:
            ring, what = partial(self._ring, name), f"schedule {shown(name)}"
            alarm = self._alarms[name] = Alarm(self._schedule, ring, dated=True, what=what)
        if not self._is_checking:
            self._seen_us = 0
            self._check_clock()
        if row.paused:
            alarm.set(None)
        else:
            # The same after a restart, and spread over schedules.
            spread = crc32(name + b" %d" % row.next_us) / 2**32
            alarm.set(at_us or row.next_us + int(row.jitter_us * spread))

    def _ring(self, name: bytes) -> bool:
        """Nothing else is due at the moment of a tick."""
        self._turns.add(self._tick(name))
        return False

    def _tick(self, name: bytes) -> Work[None]:
        """Publish what is due; if that is not possible now, try again soon."""
        row = self.rows.get(name)
        if row is None or row.paused or self._alarms[name].is_set:
            return  # It was changed meanwhile.
        now_us = self._schedule.wall_us()
        try:
            missed_us = now_us - row.jitter_us - TICK_MISSED_S * SECOND_US
            if row.next_us < missed_us and row.missed == "skip":
                self.store(name, row._replace(next_us=self._after(row, missed_us)))
                return
            # One message is for all that were missed; what is late only is published tick by tick.
            passed_us = now_us if row.next_us < missed_us else row.next_us
            later = row._replace(next_us=self._after(row, passed_us), last_us=now_us)
            yield from self._publish(name, row, row.next_us, later)
        except BadRequest as error:
            if self.rows.get(name) is row and not self._alarms[name].is_set:
                if name not in self.errors:
                    self._notices.tick_failed(name, str(error))
                self.errors[name] = str(error)
                self._wait(name, now_us + TICK_RETRY_S * SECOND_US)

    def _publish(self, name: bytes, row: ScheduleRow, time_us: int, new: ScheduleRow) -> Work[None]:
        """Publish its message, and store its new row with it. Raises BadRequest."""
        publishing, wanted = self._publishing, row.wanted
        message = singles.single(publishing, b"%b:%d" % (name, time_us // SECOND_US), wanted)
        if wanted.to is None:
            queues = yield from self._bindings.routes.find(wanted.event)
        elif (only := self._bindings.queues.get(wanted.to)) is not None:
            queues = {only: None}
        else:
            raise BadRequest(f"schedule: there is no queue {shown(wanted.to)}")
        yield from singles.read_keys(publishing, message, queues)
        singles.check(publishing, message, queues, mandatory=wanted.mandatory)
        if self.rows.get(name) is not row:
            return
        # What is in many queues takes several turns; the row is with the first of them.
        self._pending.in_one_piece = True
        self.store(name, new)
        self.last_queues[name] = sum(1 for _ in singles.takers(publishing, message, queues))
        publishing.publisher = None
        yield from publishing.put_in_turns(queues, message.new)
