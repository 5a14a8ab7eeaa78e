"""A copy that follows a journal: each of its moments is what had been confirmed by then, whoever is
killed; what is damaged is named; what is old is removed."""

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from mqks.commands import main
from mqks.errors import ClaimLost, InspectionFailed, JournalDamaged
from mqks.follow import following
from mqks.follow.copies import Copy, moment
from mqks.follow.following import Follower
from mqks.follow.restoring import restore
from mqks.journal.sqlite.database_file import DatabaseFile
from tests.kit.line_client import LineClient
from tests.kit.seeds import printed_seed
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

DAMAGED, REFUSED = 65, 78
LARGE = b"x" * 200_000
"""Its text gets a file of its own."""


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "mqks.db"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(str(tmp_path / "copy"))


def now_us() -> int:
    return time.time_ns() // 1000


def refused(line: str) -> None:
    raise AssertionError(line)


def follower(db: Path, copy: Copy, keep_s: float = 1e6) -> Follower:
    return Follower(db, copy, keep_s, refused)


def looks(copy: Copy) -> list[int]:
    """Their times."""
    return [look.time_us for each in copy.generations() for look in copy.looks(each)]


def there(path: Path) -> dict[int, bytes]:
    """The ids of the messages of `q` in a whole database, by number."""
    with DatabaseFile.open(path) as file:
        assert file.damage == []
        return {message.seq: message.id for message in file.messages(b"q")}


def restored(copy: Copy, until_us: int | None = None) -> dict[int, bytes]:
    path = Path(copy.name).parent / "restored.db"
    path.unlink(missing_ok=True)
    return restored_at(copy, path, until_us)


def restored_at(copy: Copy, path: Path, until_us: int | None = None) -> dict[int, bytes]:
    restore(copy, path, None if until_us is None else moment(until_us))
    return there(path)


@contextmanager
def served(db: Path, *flags: str) -> Iterator[LineClient]:
    with ServerProcess(db, *flags) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        yield client
        server.terminate()


def publish(client: LineClient, first: int, count: int, data: bytes = b"x") -> None:
    numbers = range(first, first + count)
    client.send(b"".join(b"m%d publish --confirm e %b\n" % (number, data) for number in numbers))
    assert [client.line() for _ in numbers] == [b"m%d ok " % number for number in numbers]


class Following:
    """`mqks follow`, as a process."""

    def __init__(self, db: Path, copy: Copy, *flags: str) -> None:
        self._command = [sys.executable, "-m", "mqks", "follow", copy.name, "--db", str(db), *flags]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self._process.send_signal(number)
        _, told = self._process.communicate(timeout=WAIT_S)
        return self._process.returncode, told


# ------------------------------------------------------------------------------ any moment


class Busy:
    """A client of a server that is killed, and what it knows of each request: when it was sent, and
    when it was confirmed."""

    def __init__(self, db: Path, rng: random.Random) -> None:
        self.db, self.rng = db, rng
        self.published: list[tuple[int, int]] = []
        """Of the number one higher."""
        self.trimmed: list[tuple[int, int, int]] = []
        """With the lowest number that stays."""
        self.server = ServerProcess(db)
        self.client = LineClient(self.server.address)
        assert self.client.ask(b"s subscribe --confirm q e") == b"s ok "

    def publish(self) -> None:
        first, sent_us = len(self.published) + 1, now_us()
        count = self.rng.randint(1, 20)
        publish(self.client, first, count, self.rng.choice([b"x", b"y" * 999, LARGE]))
        self.published += [(sent_us, now_us())] * count

    def trim(self) -> None:
        stays, sent_us = self.rng.randint(1, len(self.published) + 1), now_us()
        assert self.client.ask(b"t trim --confirm q %d" % stays).startswith(b"t ok ")
        self.trimmed.append((sent_us, now_us(), stays))

    def be_killed(self) -> None:
        """While it publishes: what of that has become durable is asked afterwards."""
        first, sent_us = len(self.published) + 1, now_us()
        self.client.send(b"".join(b"m%d publish e x\n" % i for i in range(first, first + 50)))
        self.client.leave()
        self.server.kill()
        self.server.launch()
        self.client = LineClient(self.server.address)
        end = max(there(self.db), default=0) + 1
        self.published += [(sent_us, now_us())] * max(0, end - first)

    def check(self, found: dict[int, bytes], from_us: int, until_us: float) -> None:
        """What was confirmed before the first time is there, nothing that was sent after the
        second, and what was sent in between may be."""
        stays = max((stays for _, done_us, stays in self.trimmed if done_us < from_us), default=1)
        may_stay = max(
            (stays for sent_us, _, stays in self.trimmed if sent_us < until_us), default=1
        )
        for number, (sent_us, done_us) in enumerate(self.published, 1):
            if done_us < from_us and number >= may_stay:
                assert number in found, f"{number} was confirmed at {done_us}, before {from_us}"
            if number in found:
                assert found[number] == b"m%d" % number
                assert sent_us < until_us, f"{number} was sent at {sent_us}, after {until_us}"
                assert number >= stays, f"{number} was trimmed before {from_us}"
        assert max(found, default=0) <= len(self.published)


@pytest.mark.slow
def test_any_moment_is_what_had_been_confirmed_by_then(db: Path, copy: Copy) -> None:
    seed = printed_seed()
    rng = random.Random(seed)
    busy, following = Busy(db, rng), Following(db, copy)
    until(lambda: bool(looks(copy)))
    begin_us, kills, started_after = now_us(), 0, 0
    while now_us() < begin_us + 25_000_000 or kills < 10:
        [step] = rng.choices([busy.publish, busy.trim, busy.be_killed], [20, 6, 1])
        step()
        if rng.random() < 0.03:
            assert main(["verify", copy.name]) == 0
        if rng.random() < 0.04:
            if kills % 2:  # Every other one has begun its copy.
                until(lambda: len(copy.generations()) > started_after)  # noqa: B023
            following.kill()
            started_after, kills = len(copy.generations()), kills + 1
            following.start()
        time.sleep(rng.random() / 10)
    until(lambda: len(copy.generations()) > started_after)
    end_us = now_us()
    # Its last look is from after the signal.
    assert following.end() == (0, "")
    busy.client.leave()
    busy.server.terminate()
    times = looks(copy)
    assert times == sorted(times)
    assert len(copy.generations()) > kills / 2
    # Between two looks any moment is the same.
    for state_us, until_us in pairwise([*times, now_us()]):
        asked_us = rng.randrange(state_us, until_us)
        busy.check(restored(copy, asked_us), state_us, until_us)
    busy.check(restored(copy), end_us, float("inf"))
    assert main(["verify", copy.name]) == 0


def test_each_look_is_a_moment(db: Path, copy: Copy) -> None:
    with served(db) as client:
        seen = []
        following = follower(db, copy)
        for first in range(1, 13, 2):
            publish(client, first, 1)
            publish(client, first + 1, 1, LARGE)
            seen.append((following.look(), first + 1))
            if first == 5:
                assert client.ask(b"t trim --confirm q 4").startswith(b"t ok ")
            if first == 7:
                following = follower(db, copy)
        assert following.look() > seen[-1][0]
        assert len(looks(copy)) == len(seen), "nothing has changed since"
    for time_us, last in seen:
        first = 4 if last > 6 else 1
        assert [*restored(copy, time_us)] == [*range(first, last + 1)]
        assert [*restored(copy, time_us + 1)] == [*range(first, last + 1)]
    assert [*restored(copy)] == [*range(4, 13)]
    with pytest.raises(InspectionFailed, match="or before"):
        restored(copy, seen[0][0] - 1)


def test_everything_of_a_journal_comes_back(db: Path, copy: Copy, tmp_path: Path) -> None:
    with served(db) as client:
        assert client.ask(b"p set_queue --confirm q --retries=3") == b"p ok "
        assert client.ask(b"s subscribe --confirm r e2") == b"s ok "
        assert client.ask(b"k schedule --confirm beat --every=3600 publish e tick") == b"k ok "
        assert client.ask(b"o publish --once --confirm e once") == b"o ok "
        assert b" error " in client.ask(b"x frob")
        publish(client, 1, 3, b"\xff")
        follower(db, copy).look()
    target = tmp_path / "new.db"
    restore(copy, target, None)
    with closing(sqlite3.connect(db)) as old, closing(sqlite3.connect(target)) as new:
        for table in ("queue", "binding", "once", "schedule", "error", "audit"):
            sql = f"select * from {table} order by 1, 2"
            assert new.execute(sql).fetchall() == old.execute(sql).fetchall(), table
        epochs = [each.execute("select value from meta").fetchall() for each in (old, new)]
        assert epochs[0] != epochs[1]
    with served(target) as client:
        assert client.ask(b"o publish --once --confirm e again").startswith(b"o ok ")
        assert client.stats("queues")[0]["ready"] == 4


# ------------------------------------------------------------------------------ what goes wrong


def test_a_damaged_or_missing_file_is_named(
    db: Path, copy: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(db) as client:
        following = follower(db, copy)
        for number in range(1, 5):
            publish(client, number, 1)
            following.look()
    files = sorted(Path(copy.name).glob("*/*"))
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], whole[:-3] + b"abc"):
            file.write_bytes(damaged)
            with pytest.raises(JournalDamaged, match=file.name):
                restored(copy)
            assert main(["verify", copy.name]) == DAMAGED
            assert file.name in capsys.readouterr().out
        file.write_bytes(whole)
    assert main(["verify", copy.name]) == 0
    files[2].rename(files[2].with_name(files[1].name))
    with pytest.raises(JournalDamaged, match="000002-… is missing"):
        restored(copy)
    assert main(["verify", copy.name]) == DAMAGED


def test_a_file_with_bodies_that_is_missing_is_named(db: Path, copy: Copy) -> None:
    with served(db) as client:
        publish(client, 1, 30, LARGE)
        follower(db, copy).look()
    bodies = next(Path(copy.name).glob("*/000000-0000"))
    bodies.unlink()
    with pytest.raises(JournalDamaged, match=f"{bodies.name} is missing"):
        restored(copy)
    assert main(["verify", copy.name]) == DAMAGED
    # A follower that begins again finds out, and copies them once more.
    follower(db, copy).look()
    assert len(restored(copy)) == 30


def test_a_damaged_database_is_not_copied(db: Path, copy: Copy) -> None:
    with served(db) as client:
        publish(client, 1, 2)
    follower(db, copy).look()
    for sql in ("update segment set crc = crc + 1", "delete from binding", "delete from segment"):
        shutil.copy(db, whole := db.with_name("whole.db"))
        with closing(sqlite3.connect(db, isolation_level=None)) as raw:
            raw.execute(sql)
        with pytest.raises(JournalDamaged, match="is damaged"):
            follower(db, copy).look()
        whole.replace(db)
    assert len(restored(copy)) == 2


@pytest.mark.slow
def test_a_copy_that_is_away_holds_nothing_of_the_broker(db: Path, copy: Copy) -> None:
    with served(db, "--db-bytes-max", "64MiB") as client:
        following = Following(db, copy)
        publish(client, 1, 1)
        until(lambda: len(restored(copy)) == 1 if looks(copy) else False)
        away = Path(copy.name).rename(Path(copy.name).with_name("away"))
        Path(copy.name).touch()
        for number in range(2, 22):  # Three times the limit.
            publish(client, number * 100, 100, b"x" * 100_000)
            assert client.ask(b"p purge --confirm q").startswith(b"p ok ")
        publish(client, 2, 1)
        Path(copy.name).unlink()
        away.rename(copy.name)
        until(lambda: [*restored(copy).values()] == [b"m2"])
        assert len(copy.generations()) > 1
        code, told = following.end()
        assert code == 0
        assert "it is tried again" in told
        assert "is up to date again" in told
        assert sum(file.stat().st_size for file in Path(copy.name).glob("*/*")) < 32 << 20


def test_a_second_follower_takes_over(
    db: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(db) as client:
        first = follower(db, copy)
        publish(client, 1, 1)
        first.look()
        second = follower(db, copy)
        publish(client, 2, 1)
        second.look()
        publish(client, 3, 1)
        first.look()
        second.look()
        monkeypatch.setattr(following, "CLAIM_S", 0.0)
        with pytest.raises(ClaimLost):
            first.look()
        second.look()
    assert len(restored(copy)) == 3
    assert main(["verify", copy.name]) == 0


def test_another_database_at_its_path_is_told_apart(db: Path, copy: Copy) -> None:
    with served(db) as client:
        publish(client, 1, 3)
    shutil.copy(db, before := db.with_name("before.db"))
    with served(db) as client:
        publish(client, 4, 3, b"lost")
        follower(db, copy).look()
    before.replace(db)  # Without a new epoch: its next segments have the same numbers.
    with served(db) as client:
        publish(client, 4, 3, b"other")
        follower(db, copy).look()
    assert len(restored(copy)) == 6
    with DatabaseFile.open(Path(copy.name).parent / "restored.db") as file:
        assert [each.data for each in file.messages(b"q")][3:] == [b"other"] * 3


# ------------------------------------------------------------------------------ what is kept


def test_what_no_restore_needs_is_removed(
    db: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GENERATION_S", 0.0)
    with served(db) as client:
        following_it = follower(db, copy, keep_s=0.3)
        number = 0

        def step() -> bool:
            nonlocal number
            number += 1
            publish(client, number, 1)
            assert client.ask(b"t trim --confirm q %d" % number).startswith(b"t ok ")
            following_it.look()
            return len(copy.generations()) < number / 2

        until(step)
        generations = copy.generations()
    for each in generations:
        if each.time_us > generations[-1].time_us - 300_000:
            restored(copy, each.time_us)
    assert len(restored(copy, generations[-1].time_us - 300_000)) == 1
    assert main(["verify", copy.name]) == 0


def test_a_clock_that_is_set_back_removes_nothing(
    db: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GENERATION_S", 0.0)
    with served(db) as client:
        a_follower = follower(db, copy, keep_s=1)
        publish(client, 1, 1)
        first_us = a_follower.look()
        clock = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: clock() - 3600 * 10**9)
        publish(client, 2, 1)
        second_us = a_follower.look()
    assert second_us < first_us
    assert len(restored(copy)) == 2, "the last look is the last, whatever its time"
    assert len(restored(copy, second_us)) == 2
    assert len(copy.generations()) == 2


# ------------------------------------------------------------------------------ the commands


def test_the_commands(
    db: Path, copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "mqks.prom"
    with served(db) as client:
        publish(client, 1, 7)
        before_s = time.time()
        words = ["follow", copy.name, "--db", str(db), "--once", "--metrics", str(metrics)]
        assert main(words) == 0
        publish(client, 8, 1)
    name, value = metrics.read_text().splitlines()[-1].split()
    assert name == "mqks_follow_until_seconds"
    assert before_s <= float(value) <= time.time()
    capsys.readouterr()
    at = (moment(looks(copy)[-1]) + timedelta(seconds=1)).isoformat()
    assert main(["restore", copy.name, str(tmp_path / "a.db"), "--at", at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["queues"], told["messages"]) == (1, 7)
    assert told["time"] == moment(looks(copy)[-1]).isoformat()
    assert main(["restore", copy.name, str(tmp_path / "a.db")]) == 73, "it exists"
    assert main(["restore", str(tmp_path / "none"), str(tmp_path / "b.db")]) == DAMAGED
    assert main(["follow", copy.name, "--db", str(tmp_path / "none.db")]) == DAMAGED
    assert main(["follow", copy.name, "--db", "postgresql://mqks@nowhere/mqks"]) == REFUSED
    assert "pg_basebackup" in capsys.readouterr().err
