"""What clients were promised, against the power cuts that the promises were made for.

A real server works under a bounded load and is killed, stopped and started again meanwhile, while
all that it asks of its disk and says to its clients is written down in one log. For many points of
that log the directory is made as a disk may hold it if the power goes there, and a server is
started on it: it must start, and what had been promised up to there must hold.

    python -m tests.power_cut 2000             # that many cuts
    python -m tests.power_cut 200 --seed 7     # the same load again, as far as threads allow

The one rule: what passed between server and clients is taken from the log alone, so that a promise
and the syncs before it stand in one order.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from mqks.testing import Broker
from tests.kit import disk_log, unsynced
from tests.kit.line_client import LineClient
from tests.kit.promises import LATE, LATE_S, MADE, ONCE_IDS, RAW, WEB, Found, Promises, look, peeked
from tests.kit.server_process import ServerProcess
from tests.kit.unsynced import Disk
from tests.kit.waiting import WAIT_S, until

_DATABASE = "mqks.db"
_SQS = re.compile(r"address=sqs:http://(\S+):(\d+)")
_INDEX = "mqks.db-shm"
"""SQLite's index of the WAL: mapped, never synced, made anew."""
_FLAGS = (
    *("--wal-checkpoint-pages", "20", "--once-ids-max", str(ONCE_IDS)),
    *("--sqs-port", "0", "--ballast-bytes", "64KiB", "--disk-free-bytes-min", "0"),
)
_LIVES = "killed", "failing", "once", "stopped", "once", "killed"
"""How each life of the server ends: killed in a sync, by syncs that fail or one that does, or
stopped by a signal, and its database compacted then."""
_EXIT_CODES = {"killed": -signal.SIGKILL, "failing": 74, "once": 74, "stopped": 0}
# A few steps of load are enough to merge, drop and compact then.
_SMALL = """
import sys
from mqks.commands import main
from mqks.journal import index, journal, segment
from mqks.journal.sqlite import space
journal.SEGMENT_MERGE_COUNT, journal.SMALL_COUNT_MAX = 8, 40
journal.SPARSE_BYTES_MIN, journal.DROP_COUNT_MIN = 4096, 4
space.FREE_PAGES_KEPT, space.VACUUM_LOOK_S, space.FREE_PAGES_BUSY = 8, 0.1, 32
index.SEGMENT_SMALL_BYTES, segment.SEGMENT_BYTES_MAX = 1024, 4096
sys.exit(main(sys.argv[1:]))
"""


class _Watched(ServerProcess):
    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._spawn([command[0], "-c", _SMALL, *command[command.index("serve") :]])


# -------------------------------------------------------------------------------- the load


@dataclass
class _Load:
    """Clients of one life of a server, until it leaves them. `again` are messages to be published
    once that no confirm has come for."""

    server: ServerProcess
    life: int
    rng: random.Random
    again: dict[bytes, bytes]
    steps: int = 0
    asked: int = 0
    """Requests by SQS."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _faults: list[BaseException] = field(default_factory=list)

    def run(self, steps: int, end: Callable[[], object]) -> None:
        """`end` ends the server when the clients have done so many steps."""
        with LineClient(self.server.address) as client:
            self._retry(client)
            for binding in (b"orders orders", b"audit orders", b"once once", b"auto auto"):
                self._ask(client, b"subscribe", binding)
            self._ask(client, b"set_queue", b"jobs --dead-letters=dead --retries=2 --backoff=0.01")
            self._ask(client, b"subscribe", b"jobs jobs")
            for queue in (RAW, MADE):
                self._ask(client, b"subscribe", queue + b" " + queue)
            with closing(self._web(client, self.rng)) as first:
                next(first)  # What answers there is loaded now.
        work = [self._publish, self._publish, self._work, self._work, self._once, self._shape]
        work += [self._trim, self._take, self._plan, self._labour, self._labour, self._follow]
        work += [self._web, self._web]
        threads = [
            threading.Thread(target=self._until_left, args=(each, random.Random(self.rng.random())))
            for each in work
        ]
        for thread in threads:
            thread.start()
        until(lambda: (self.steps >= steps and self.asked >= steps // 10) or self._faults)
        end()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        if self._faults:
            raise self._faults[0]

    def _until_left(
        self, work: Callable[[LineClient, random.Random], Iterator[None]], rng: random.Random
    ) -> None:
        try:
            while True:
                with LineClient(self.server.address) as client:
                    for _ in work(client, rng):
                        with self._lock:
                            self.steps += 1
        except (EOFError, ConnectionError):
            pass
        except BaseException as fault:
            self._faults.append(fault)

    def _id(self, kind: bytes) -> bytes:
        return b"%s.%d-%d" % (kind, self.life, next(self._ids))

    def _ask(self, client: LineClient, action: bytes, rest: bytes) -> bytes:
        """What the confirm tells."""
        name = self._id(b"r")
        reply = client.ask(b"%s %s --confirm %s" % (name, action, rest))
        assert reply.startswith(name + b" ok "), reply
        return reply.removeprefix(name + b" ok ")

    def _retry(self, client: LineClient) -> None:
        """One by one: those that the killed server wrote but did not sync need no commit now."""
        for name, line in list(self.again.items()):
            assert client.ask(line) == name + b" ok "
            del self.again[name]

    def _publish(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        publisher = self._id(b"p").replace(b"-", b".")
        for number in itertools.count():
            lines, awaited = [], set()
            for n in range(rng.choice([1, 1, 1, 5, 30])):
                name = b"%s-%d-%d" % (publisher, number, n)
                event = rng.choice([b"orders"] * 4 + [b"auto"])
                confirm = b"--confirm " if rng.random() < 0.8 else b""
                awaited |= {name + b" ok "} if confirm else set()
                data = b"%x" % rng.getrandbits(4 * rng.choice([10, 100, 2000]))
                lines.append(b"%s publish %s%s %s\n" % (name, confirm, event, data))
            client.send(b"".join(lines))
            while awaited:
                awaited.remove(client.line())
            yield

    def _once(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        while True:
            names = [self._id(b"o") for _ in range(rng.choice([1, 1, 8]))]
            self.again |= {n: n + b" publish --confirm --once once data" for n in names}
            times = rng.choice([1, 1, 2])
            client.send(b"".join(self.again[n] + b"\n" for n in names for _ in range(times)))
            for _ in range(times * len(names)):
                self.again.pop(client.line().removesuffix(b" ok "), None)
            yield

    def _work(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        consumer = self._id(b"w")
        client.send(b"%s consume --confirm orders --manual-ack\n" % consumer)
        assert client.line() == consumer + b" ok "
        for _ in range(rng.randrange(5, 30)):
            lines = []
            for line in client.lines():
                if b" event=" not in line:
                    continue  # A confirm of an ack.
                name = line.split(b" ")[2]
                flag = rng.choice([b"", b"--confirm "])
                habit = rng.choice([b"ack"] * 16 + [b"reject"] * 3 + [b""])
                if habit:
                    words = self._id(b"a"), habit, flag + consumer, name
                    lines.append(b" ".join(words))
            if rng.random() < 0.02:
                lines.append(b"%s ack --confirm %s --all" % (self._id(b"a"), consumer))
            client.send(b"".join(line + b"\n" for line in lines))
            yield

    def _plan(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        """Jobs that wait for a time, or die at one."""
        planner = self._id(b"j").replace(b"-", b".")
        flags = [b"", b"--delay=0.03 ", b"--ttl=0.03 ", b"--delay=0.02 --ttl=0.02 ", b"--meta=a=1 "]
        for number in itertools.count():
            lines, awaited = [], set()
            for n in range(rng.choice([1, 1, 5, 20])):
                name = b"%s-%d-%d" % (planner, number, n)
                awaited.add(name + b" ok ")
                if rng.random() < 0.05:
                    flag, data = b"--delay=%d " % LATE_S, LATE
                else:
                    flag, data = rng.choice(flags), b"%x" % rng.getrandbits(400)
                lines.append(b"%s publish --confirm %sjobs %s\n" % (name, flag, data))
            client.send(b"".join(lines))
            while awaited:
                awaited.remove(client.line())
            if rng.random() < 0.1:
                self._ask(client, b"redrive", b"dead --limit=%d" % rng.randrange(1, 100))
            yield

    def _labour(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        consumer = self._id(b"l")
        client.send(b"%s consume --confirm jobs --manual-ack --prefetch=50\n" % consumer)
        assert client.line() == consumer + b" ok "
        habits = [b"ack"] * 6 + [
            b"reject",
            b"reject",
            b"reject --dead",
            b"release",
            b"release",
            b"",
        ]
        habits += [b"reject --delay=0.02", b"release --delay=0.02"]
        for _ in range(rng.randrange(5, 30)):
            lines = []
            for line in client.lines():
                habit = rng.choice(habits)
                if b" event=" in line and habit:
                    action, _, flag = habit.partition(b" ")
                    words = [self._id(b"a"), action, b"--confirm", consumer, line.split(b" ")[2]]
                    lines.append(b" ".join([*words, flag]).rstrip() + b"\n")
            client.send(b"".join(lines))
            yield

    def _follow(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        """Transactions: the ack of a message and what follows from it."""
        consumer = self._id(b"f")
        client.send(b"%s consume --confirm raw --manual-ack --prefetch=20\n" % consumer)
        assert client.line() == consumer + b" ok "
        publisher = self._id(b"r").replace(b"-", b".")
        for number in range(rng.randrange(5, 30)):
            for n in range(rng.choice([1, 1, 5])):
                name = b"%s-%d-%d" % (publisher, number, n)
                client.send(b"%s publish --confirm raw %x\n" % (name, rng.getrandbits(400)))
            lines = []
            for line in client.lines():
                end = rng.choice([b"commit --confirm"] * 8 + [b"rollback", b""])
                if b" event=" not in line or not end:
                    continue
                step = self._id(b"s").replace(b"-", b".")
                made = [
                    b"%s-%d publish made %x\n" % (step, n, rng.getrandbits(4000))
                    for n in range(rng.choice([1, 3, 20]))
                ]
                ack = b"%s ack %s %s\n" % (step, consumer, line.split(b" ")[2])
                lines += [step + b" begin\n", ack, *made, b"%s %s\n" % (step, end)]
            client.send(b"".join(lines))
            yield

    def _web(self, client: LineClient, rng: random.Random) -> Generator[None, None, None]:
        """By SQS: what is received is leased for an hour, and most of it deleted."""
        host, port = until(lambda: _SQS.findall(self.server.log))[-1]

        def ask(action: str, **form: str) -> bytes:
            data = urlencode({"Action": action, "QueueUrl": f"/0/{WEB.decode()}", **form})
            head = f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
            sock.sendall((head + data).encode())
            answer = b""
            while not answer.endswith(b"Response>"):
                if not (more := sock.recv(65536)):
                    raise EOFError
                answer += more
            if b" 200 " not in answer[:20]:
                raise EOFError  # The server is about to end.
            self.asked += 1
            return answer

        with socket.create_connection((host, int(port))) as sock:
            sock.settimeout(WAIT_S)
            ask("CreateQueue", QueueName=WEB.decode())
            while True:
                for _ in range(rng.choice([1, 1, 3])):
                    ask("SendMessage", MessageBody=self._id(b"web").decode())
                leased = ask("ReceiveMessage", VisibilityTimeout="3600", MaxNumberOfMessages="2")
                for handle in re.findall(r"<ReceiptHandle>(.*?)<", leased.decode()):
                    if rng.random() < 0.7:
                        ask("DeleteMessage", ReceiptHandle=handle)
                yield

    def _take(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        """Without acks, for a while, so that there is a backlog at times."""
        for _ in range(10):
            self._ask(client, b"subscribe", b"auto auto")
            yield
        client.send(b"%s consume --confirm auto\n" % self._id(b"t"))
        for _ in range(rng.randrange(1, 20)):
            client.lines()
            yield

    def _shape(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        """Queues come and go, and what is bound to them."""
        names = [b"s1", b"s2", b"dq"]
        for name in names:  # What a crash has left of them is not known here.
            self._ask(client, b"delete_queue", name)
        alive = dict.fromkeys(names, False)
        while True:
            name = rng.choice(names)
            if not alive[name]:
                events = b" ".join(rng.sample([b"x", b"y.1", b"z"], 2)) if name != b"dq" else b"dq"
                self._ask(client, b"subscribe", name + b" " + events)
                alive[name] = True
            elif rng.random() < 0.3:
                self._ask(client, b"delete_queue", name)
                alive[name] = False
            elif name == b"dq":
                for _ in range(3):
                    line = b"%s publish --confirm dq data" % self._id(b"d%d" % next(self._ids))
                    assert client.ask(line).endswith(b" ok ")
                assert b"epoch=" in client.ask(self._id(b"r") + b" range dq")
            elif rng.random() < 0.7:
                flag = rng.choice([b"--add", b"--remove"])
                event = rng.choice([b"x", b"y.1", b"z", b"z.2"])
                self._ask(client, b"rebind", b" ".join([name, flag, event]))
            else:
                consumer = self._id(b"c")
                rule = rng.choice(
                    [b"", b" --delete-queue-when-unused=%d" % rng.randrange(999, 9999)]
                )
                line = b"%s consume --confirm %s%s" % (consumer, name, rule)
                assert client.ask(line) == consumer + b" ok "
                self._ask(client, b"delete_consumer", consumer)
            yield

    def _trim(self, client: LineClient, rng: random.Random) -> Iterator[None]:
        """As a reader of a log does: all is seen before it is let go."""
        numbers = [0]
        while True:
            assert b" epoch=" in client.ask(self._id(b"r") + b" range audit")
            after, request = numbers[-1], self._id(b"r")
            client.send(b"%s peek audit --after=%d --limit=100\n" % (request, after))
            while (line := client.line().removeprefix(request + b" ok ")) != b"--end":
                numbers.append(peeked(line)[0])
            if rng.random() < 0.2:
                numbers = numbers[-rng.randrange(1, 100) :]
                self._ask(client, b"trim", b"audit %d" % numbers[0])
            yield


def record(directory: Path, library: Path, rng: random.Random, steps: int, *flags: str) -> Path:
    """The log of a server under load that ends again and again, as _LIVES tells."""
    log, files, ends = directory / "log", directory / "files", directory / "ends"
    files.mkdir()
    environment = disk_log.environment(library, log, files, ends)
    again: dict[bytes, bytes] = {}
    for life, end in enumerate(_LIVES):
        ends.unlink(missing_ok=True)
        with _Watched(files / _DATABASE, *_FLAGS, *flags, environment=environment) as server:
            ending = server.stop if end == "stopped" else partial(ends.write_text, end)
            _Load(server, life, rng, again).run(steps // len(_LIVES), ending)
            assert server.wait() == _EXIT_CODES[end], server.log
        if end == "stopped":
            compact = [sys.executable, "-m", "mqks", "compact", "--db", str(files / _DATABASE)]
            variables = os.environ | environment
            subprocess.run(compact, env=variables, check=True, capture_output=True, timeout=WAIT_S)
    check_record(log, files)
    return log


def check_record(log: Path, directory: Path) -> None:
    """The log holds all: written again, it gives the files that are there."""
    disk = Disk(failed=unsynced.everything)
    for each in disk_log.records(log):
        disk.take(each)
    assert disk.mapped <= {_INDEX}
    there = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    told = disk.files(unsynced.everything)
    told = {name: content for name, content in told.items() if not name.endswith("/")}
    assert told.keys() == there.keys()
    assert [n for n, content in told.items() if there[n] != content and n != _INDEX] == []


# -------------------------------------------------------------------------------- the cuts


@dataclass(slots=True)
class Figures:
    records: int = 0
    syncs: int = 0
    confirms: int = 0
    transactions: int = 0
    sqs: int = 0
    cuts: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)
    """No server starts on it, or none that answers."""
    broken: list[str] = field(default_factory=list)
    """One does, and a promise does not hold."""


def cut(
    log: Path,
    directory: Path,
    cuts: int,
    seed: int,
    *,
    lies: Callable[[str], bool] = lambda name: False,
    at_ends: float = 0.25,
    broken_max: int = 10,
    synchronous: str = "full",
) -> Figures:
    """Cut the power so many times: of these `at_ends` is the share where a server ends or starts,
    of the others half are right after something was sent. No more cuts once so many promises were
    broken. `lies` is as for `Disk`, `synchronous` is that of the servers that are started then."""
    rng, figures = random.Random(seed), Figures()
    kinds = [each.kind for each in disk_log.records(log)]
    sent = [n for n, kind in enumerate(kinds) if kind == "S"]
    ends = [n for n, kind in enumerate(kinds) if kind in "PF"]
    figures.records = len(kinds)
    points: Counter[int] = Counter()
    for _ in range(cuts):
        if rng.random() < at_ends:
            points[min(rng.choice(ends) + rng.randrange(50), len(kinds) - 1)] += 1
        else:
            points[rng.choice([rng.choice(sent), rng.randrange(len(kinds))])] += 1
    disk, promises = Disk(unsynced.something(rng), lies), Promises()
    for number, each in enumerate(disk_log.records(log)):
        disk.take(each)
        if each.kind == "P":
            promises.begins()
        elif each.kind == "O":
            promises.connected(each.who)
        elif each.kind in "GS":
            promises.passed(each.who, each.kind, each.data)
        for _ in range(points[number]):
            kind = rng.choice(["nothing", "nothing", "something", "something", "everything"])
            part = unsynced.something(rng) if kind == "something" else getattr(unsynced, kind)
            files = disk.files(part)
            if kind == "something":  # Whatever a disk holds of what was never synced.
                files[_INDEX] = rng.randbytes(32768)
            figures.cuts[kind] += 1
            unsynced.put(files, directory / "cut")
            try:
                found = _found(directory / "cut", promises.once_ids, synchronous)
            except Exception as failure:  # Whichever it is, of a disk that lies.
                figures.damaged.append(f"cut at {number}, {kind} unsynced: {failure!r}")
            else:
                broken = promises.broken(found)
                figures.broken += [f"cut at {number}, {kind} unsynced: {what}" for what in broken]
            finally:
                shutil.rmtree(directory / "cut")
        if len(figures.broken) >= broken_max:
            break
    figures.syncs, figures.confirms = disk.syncs, promises.confirms
    figures.transactions, figures.sqs = promises.transactions, promises.sqs
    return figures


def _found(directory: Path, once_ids: list[bytes], synchronous: str) -> Found:
    settings = {"synchronous": synchronous, "ballast_bytes": 0, "disk_free_bytes_min": 0}
    with (
        Broker(directory / _DATABASE, once_ids_max=ONCE_IDS, **settings) as broker,
        LineClient(("127.0.0.1", broker.port)) as client,
    ):
        return look(client, once_ids)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.power_cut")
    parser.add_argument("cuts", type=int)
    parser.add_argument("--steps", type=int, default=2000, help="of the load, in each round")
    parser.add_argument("--cuts-per-load", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--synchronous", default="full", choices=["full", "normal"])
    arguments = parser.parse_args()
    left, seed, was_broken = arguments.cuts, arguments.seed, False
    while left > 0:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            library = disk_log.compiled(directory)
            flags = "--synchronous", arguments.synchronous
            log = record(directory, library, random.Random(seed), arguments.steps, *flags)
            count = min(left, arguments.cuts_per_load)
            figures = cut(log, directory, count, seed)
        print(
            f"seed {seed}: {figures.records:,} records, {figures.syncs:,} syncs, "
            f"{figures.confirms:,} confirms; {figures.cuts.total()} cuts, "
            + ", ".join(f"{number} with {kind} unsynced" for kind, number in figures.cuts.items()),
            *figures.damaged,
            *figures.broken,
            sep="\n  ",
            flush=True,
        )
        was_broken |= bool(figures.damaged or figures.broken)
        left, seed = left - count, seed + 1
    return int(was_broken)


if __name__ == "__main__":
    sys.exit(main())
