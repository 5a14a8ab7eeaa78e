"""Faults put into a copy of the product, and after how many seeds the simulated world finds them.

    python -m tests.simulation.faults [NAME ...]

The one rule: a fault is a text that is replaced in one file, so that a fault whose place has
changed is noticed (`tests/lives/test_simulation.py`).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
SEEDS: Final = 12
SEED_S: Final = 300
PLAY: Final = "-m", "tests.simulation"
WORLD: Final = "5"
LIVES: Final = "3 --lives"
TALK: Final = "3 --talk"
YEAR: Final = "12 --year"
RARE: Final = "6 --rare"
TASKS: Final = "4 --tasks"
STANDBY: Final = "10 --standby"


class Fault(NamedTuple):
    """`file` is below mqks/, `plays` are the arguments of `python -m tests.simulation` after the
    seed."""

    name: str
    file: str
    old: str
    new: str
    plays: str
    was: str = ""
    """What the changelog says of it; without, it is a mutation."""

    def has_place(self, package: Path) -> bool:
        return (package / self.file).read_text().count(self.old) == 1

    def put_into(self, package: Path) -> None:
        if not self.has_place(package):
            raise LookupError(f"{self.name}: {self.file} has no such place, or several")
        path = package / self.file
        path.write_text(path.read_text().replace(self.old, self.new))

    def copy_into(self, directory: Path) -> None:
        """A product with this fault, and what plays it."""
        for each in ("mqks", "tests", "migrations"):
            shutil.copytree(ROOT / each, directory / each)
        self.put_into(directory / "mqks")

    def found(self) -> tuple[int, str] | None:
        """The first seed that finds it, and how: an import that fails finds nothing."""
        with tempfile.TemporaryDirectory() as made:
            self.copy_into(Path(made))
            for seed in range(1, SEEDS + 1):
                try:
                    done = played(made, *PLAY, str(seed), *self.plays.split())
                except subprocess.TimeoutExpired:
                    return seed, f"no end in {SEED_S} s"
                if done.returncode:
                    return seed, (done.stderr.strip().splitlines() or ["?"])[-1]
        return None


def played(
    directory: str, *arguments: str, timeout_s: float = SEED_S
) -> subprocess.CompletedProcess[str]:
    """Of Python with the product there."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": directory},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


FAULTS: Final = (
    Fault(
        "line-done-again",
        "broker/requests/intake.py",
        "        connection.handled = at\n        if is_apart:",
        "        connection.handled = at - (at > 0 and bool(works))\n        if is_apart:",
        TALK,
        "thousands of requests with flags at once were carried out twice",
    ),
    Fault(
        "schedule-floods",
        "server/cron.py",
        "*(each_s for each_s in times if each_s > after_s)",
        "*times",
        YEAR,
        "schedules of a fixed time flooded their queue in the hour that clocks repeat",
    ),
    Fault(
        "ticks-left-out",
        "server/cron.py",
        "start = min(_shown(after, zone), _shown(after + DAY, zone) - DAY)",
        "start = _shown(after, zone)",
        YEAR,
        "some ticks after a change by half an hour were left out",
    ),
    Fault(
        "ticks-of-left-out-hours",
        "server/cron.py",
        "times = [_change_s(zone, last_s, first_s)] if is_fixed else []",
        "times = []",
        YEAR,
        "some ticks after a change by half an hour were left out",
    ),
    Fault(
        "half-a-line",
        "client/session.py",
        (
            "        self._splitter = LineSplitter(self._options.reply_bytes_max, is_server=True)\n"
            "        self._heard_s"
        ),
        "        self._heard_s",
        WORLD,
        "an exception in the middle of a write or a read left half a message",
    ),
    Fault(
        "late-timer-never-fires",
        "server/turn.py",
        " and self._loop.time() < until_s:",
        ":",
        RARE,
        "700c7765: late timers wait for as long as they are late",
    ),
    Fault(
        "late-acks",
        "server/turn.py",
        "if late_s > LATE_S:",
        "if late_s > inf:",
        RARE,
        "after a server stood still, acks that had been sent in time came too late",
    ),
    Fault(
        "order-of-due",
        "broker/features/time/delays.py",
        "last = min(self._first_away, (now_us + 1) << _TIME_SHIFT)",
        "last = (now_us + 1) << _TIME_SHIFT",
        RARE,
        "messages with --at and with --delay join a queue in the order of their due times",
    ),
    Fault(
        "client-stands-still",
        "client/session.py",
        "was_paused = late_s >= self._answer_s",
        "was_paused = False",
        WORLD,
        "a process that was stopped for a while lost its connections",
    ),
    Fault(
        "peek-stops",
        "client/requests.py",
        "    return numbers[-1] if numbers else None",
        "    return None",
        WORLD,
        "peek gave 1,000 messages or some MiB",
    ),
    Fault(
        "close-raises",
        "client/blocking.py",
        "if kind is None and not is_sent and self._session.has_unconfirmed:",
        "if kind is None and not is_sent:",
        WORLD,
        "a client whose publishes are all confirmed is closed without an error",
    ),
    Fault(
        "timers-stay",
        "broker/features/time/times.py",
        "return not self.expiry and self.delays.is_over and not len(self.searches)",
        "return False",
        TALK,
        "a queue is as fast as before a second after its last message with a delay has left",
    ),
    Fault(
        "range-confirmed-and-refused",
        "broker/requests/single.py",
        "is_later = connection.awaits_login or connection.expelled or request.action in READING",
        "is_later = connection.awaits_login or connection.expelled",
        TALK,
        "range and read were both confirmed and refused",
    ),
    Fault(
        "half-closed-receive",
        "server/clients.py",
        ("            or connection.receivers\n            or connection.promised_bytes\n"),
        "",
        TALK,
        "a client that closed its sending side got no answers of receive",
    ),
    Fault(
        "once-too-early",
        "broker/requests/gathered_publishes.py",
        "                or (once and self._publishing.once.unfinished)\n",
        "",
        RARE,
        "publish --once could be confirmed too early",
    ),
    Fault(
        "moves-choose-the-same",
        "broker/requests/plans.py",
        "(n for n, line in lines.items() if n not in known and aim(line) is not None)",
        "(n for n, line in lines.items() if aim(line) is not None)",
        RARE,
        "two moves of one transaction chose the same messages",
    ),
    Fault(
        "delays-of-a-wrong-clock",
        "broker/features/time/times.py",
        "mark.due_us - self._ahead_us, is_dated=True)",
        "mark.due_us - self._ahead_us, is_dated=mark.is_dated)",
        WORLD,
        "delays from before a restart with a wrong clock waited on after it was put right",
    ),
    Fault(
        "acks-on-a-full-disk",
        "server/writer.py",
        "            await self._write(take_settled(pending))\n",
        "",
        RARE,
        "a full disk kept acks from being written",
    ),
    Fault(
        "sent-before-the-end",
        "server/clients.py",
        (
            "            if connection.overrun:\n"
            "                self._turn.go_on_with(client)\n"
            "                return\n"
        ),
        "",
        WORLD,
        "publishes sent just before the connection was closed could be lost",
    ),
    Fault(
        "returned-at-cursor",
        "broker/spine/queue/lane.py",
        ("        self.blocks.pop(number)\n        if number < self.cursor:"),
        ("        self.blocks.pop(number)\n        if number <= self.cursor:"),
        TALK,
    ),
    Fault(
        "budget-without-wake",
        "broker/spine/clients/consumer.py",
        "self.budget.give_back(size)",
        "self.budget.used -= size",
        TALK,
    ),
    Fault(
        "overhead-not-given-back",
        "broker/spine/clients/consumer.py",
        ("            size += UNACKED_OVERHEAD_BYTES * len(deliveries)\n"),
        "",
        TALK,
    ),
    Fault(
        "budget-wakes-nobody",
        "broker/spine/base/budget.py",
        "                wake()\n",
        "                pass\n",
        TALK,
    ),
    Fault(
        "release-to-the-tail",
        "broker/features/death/fates.py",
        "keeps_place = event not in APPENDS or rules.ordered is not None",
        "keeps_place = event is Event.LOSS or rules.ordered is not None",
        LIVES,
    ),
    Fault(
        "loss-not-counted",
        "broker/features/death/fates.py",
        "Event.LOSS: Mark.lost,",
        "Event.LOSS: Mark.released,",
        LIVES,
    ),
    Fault(
        "crash-not-counted",
        "journal/recovery.py",
        "marks.of_each(numbers(held), Mark(redelivered=True))",
        "marks.of_each(numbers(held), NO_MARK)",
        LIVES,
    ),
    Fault(
        "ack-not-written",
        "broker/spine/queue/lane.py",
        ("        self.pending.records += len(numbers)\n        self._touch()"),
        "        self.pending.records += len(numbers)",
        LIVES,
    ),
    Fault(
        "last-ack-not-written",
        "broker/spine/queue/lane.py",
        "[*below(left, taken_end), *within",
        "[*below(left, taken_end - 1), *within",
        LIVES,
    ),
    Fault(
        "put-back-as-taken",
        "broker/spine/queue/lane.py",
        "        self.taken_end = min(self.taken_end, taken_end)\n",
        "",
        WORLD,
    ),
    Fault(
        "older-marks-win",
        "broker/spine/queue/lane.py",
        "self.marked = change.marks | self.marked",
        "self.marked = self.marked | change.marks",
        WORLD,
    ),
    Fault(
        "refused-commit-dropped",
        "server/commits.py",
        ("            if not is_written:\n                self._broker.pending.put_back(batch)\n"),
        "            if not is_written:\n",
        WORLD,
    ),
    Fault("commit-releases-nobody", "server/chunks.py", "budget.set(0)", "budget.used = 0", LIVES),
    Fault(
        "put-off-once",
        "server/commits.py",
        "self._timer, self._broker.pending.is_urgent = None, bool(self._broker.pending)",
        "self._broker.pending.is_urgent = bool(self._broker.pending)",
        TALK,
    ),
    Fault(
        "expiry-without-alarm",
        "broker/features/time/times.py",
        "for each in (next_us, expiry_us) if each is not None",
        "for each in (next_us,) if each is not None",
        TALK,
    ),
    Fault(
        "gone-not-counted",
        "broker/features/time/delays.py",
        "        self._gone_count += 1\n",
        "",
        TALK,
    ),
    Fault(
        "put-off-anew",
        "broker/features/time/delays.py",
        ("        if number in self._gone:\n            self._anew[number] = entry\n"),
        "",
        RARE,
    ),
    Fault(
        "key-without-turn",
        "broker/features/order/keyed.py",
        (
            "        if hold.key in self._ready and hold.key not in self._fetched:\n"
            "            self._freed(hold.key)\n"
            "        return True"
        ),
        "        return True",
        TALK,
    ),
    Fault(
        "acks-not-carried",
        "journal/compaction.py",
        "for acked in stored.acks if still_settles(",
        "for acked in stored.acks if not still_settles(",
        LIVES,
    ),
    Fault(
        "older-mark-carried",
        "journal/compaction.py",
        "known[number] = max(mark, known.get(number, mark))",
        "known[number] = min(mark, known.get(number, mark))",
        LIVES,
    ),
    Fault(
        "room-not-given-back",
        "broker/spine/routing/publishing.py",
        ("                    queue.capacity.reserve(-len(new.ids), -size)\n"),
        "                    pass\n",
        TALK,
    ),
    Fault(
        "promise-not-resumed",
        "broker/spine/clients/outbox.py",
        ("        elif not self.promised_bytes:\n            self.resume(Slow.RECEIVES)\n"),
        "",
        RARE,
    ),
    Fault(
        "once-unfinished",
        "broker/spine/routing/once.py",
        "        self.unfinished -= bool(held)\n",
        "",
        TALK,
    ),
    Fault(
        "worked-not-resumed",
        "server/turn.py",
        "        self.clients.resume_worked()\n",
        "",
        TALK,
    ),
    Fault(
        "compaction-late",
        "journal/compaction.py",
        "            withdraw(victims)\n",
        "",
        LIVES,
    ),
    Fault(
        "commit-not-written",
        "journal/sqlite/commits.py",
        "                self._raw.execute(INSERT_SEGMENT, row)",
        "                _ = row.id % 20 and self._raw.execute(INSERT_SEGMENT, row)",
        WORLD,
    ),
    Fault(
        "not-sent-again",
        "client/session.py",
        "            self._send_again()",
        "            self._in_flight.clear()",
        WORLD,
    ),
    Fault(
        "looks-before-it-waits",
        "client/blocking_connection.py",
        (
            "                    self._waiting.add(event)\n"
            "                    if predicate():\n"
            "                        return True\n"
        ),
        (
            "                    if predicate():\n"
            "                        return True\n"
            "                with self.lock:\n"
            "                    self._waiting.add(event)\n"
        ),
        WORLD,
    ),
    Fault(
        "not-woken-by-acks",
        "client/blocking_connection.py",
        "if not is_prompt or self._out or self._problem or self.session.has_unsent:",
        "if False:",
        WORLD,
    ),
    Fault(
        "commit-not-synced",
        "journal/sqlite/store.py",
        "synchronous = {settings.synchronous}",
        "synchronous = normal",
        WORLD,
    ),
    Fault(
        "directory-not-synced",
        "journal/sqlite/texts.py",
        'if self._synchronous == "off":\n            return',
        "if descriptor == self._descriptor:\n            return",
        WORLD,
    ),
    Fault(
        "sync-tried-again",
        "journal/sqlite/commits.py",
        "{sqlite3.SQLITE_FULL, ",
        "{sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, ",
        WORLD,
    ),
    Fault(
        "full-for-ever",
        "journal/sqlite/space.py",
        "    async def has_room(self) -> bool:\n",
        "    async def has_room(self) -> bool:\n        return False\n",
        WORLD,
    ),
    Fault(
        "checksum-not-checked",
        "journal/sqlite/rows.py",
        "is_right = found is body and checksum(segment_id, found) == crc",
        "is_right = found is body",
        WORLD,
    ),
    Fault(
        "timer-at-once",
        "server/turn.py",
        "self._timer = self._loop.call_later(LATE_TURN_S, again)",
        "self._loop.call_soon(self._catch_up, 0, 0)",
        WORLD,
    ),
    Fault(
        "pipeline-forgets",
        "celery/link.py",
        "            for id_, (body, call) in self._sent.items():",
        "            self._sent.clear()\n            for id_, (body, call) in self._sent.items():",
        TASKS,
    ),
    Fault(
        "consumers-not-begun-anew",
        "celery/link.py",
        "        if self.shared.lost is not None and not self.consumers:",
        "        if False:",
        TASKS,
    ),
    Fault("published-twice", "celery/transport.py", ', f"--once={ONCE_S}"', "", TASKS),
    Fault(
        "ack-before-its-row",
        "django/worker.py",
        "        try:\n            _run(row, result)\n",
        "        try:\n            message.ack()\n            _run(row, result)\n",
        TASKS,
    ),
    Fault("success-forgotten", "django/worker.py", '.status == "SUCCESSFUL":', " is None:", TASKS),
    Fault(
        "refused-is-sent",
        "django/worker.py",
        "            return error\n\n    try:\n        with ThreadPool",
        '            return ""\n\n    try:\n        with ThreadPool',
        TASKS,
    ),
    Fault(
        "commit-of-another",
        "journal/postgres/statements.py",
        "import IS_OURS, NEXT",
        'import NEXT\n\nIS_OURS = "true"',
        STANDBY,
    ),
    Fault(
        "owner-not-silent",
        "journal/postgres/claim.py",
        "(looks >= LOOKS and now_s - first_s >= SUSPECT_S)",
        "looks",
        STANDBY,
    ),
    Fault(
        "warning-not-heard",
        "journal/postgres/claim.py",
        "if connection.warnings:",
        "if False:",
        STANDBY,
    ),
    Fault(
        "lost-reply-confirms",
        "journal/postgres/claim.py",
        "                exists = now != before\n",
        (
            "                if (exists := now != before) and self._is_ours:\n"
            '                    self.owner, self.waits = now, ""\n'
            "                    return ()\n"
        ),
        STANDBY,
    ),
)


def main(names: list[str]) -> None:
    for fault in FAULTS:
        if not names or fault.name in names:
            began_s = time.monotonic()
            seed, how = fault.found() or ("no", "")
            took_s = time.monotonic() - began_s
            print(
                f"| {fault.name} | `{fault.plays}` | {seed} | {took_s:.0f} s | {how[:200]} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
