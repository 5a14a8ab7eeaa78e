"""The longest step of the event loop, for each kind of request at the largest that limits allow.

    python -m tests.steps                all of them; some minutes
    python -m tests.steps purge move     those whose name has one of these words
    python -m tests.steps --messages 1000000 purge

A real server runs in a thread of this process, with SQLite, on asyncio's own loop, whose callbacks
are timed one by one. A figure is the CPU time of the longest callback, the smallest of some
repetitions: what else runs on the machine counts as little as can be. The one rule: a row does what
a client can do, over TCP.
"""

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import monotonic, sleep, thread_time
from typing import Any, Final, NamedTuple

from mqks.protocol.requests import ACTIONS
from mqks.server.held import place
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.fuzz import grammar
from tests.kit.line_client import LineClient

MIB: Final = 1024 * 1024
LINES: Final = 20_000
REPETITIONS: Final = 3
QUIET_S: Final = 0.3
BUSY_S: Final = 0.002
PREFETCH_MAX: Final = 100_000
MASKS: Final = 1000
"""Of the limited user."""


class Stopwatch:
    """Times each callback of the event loop of another thread, and looks where it is in a long
    one."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.where = ""
        self.busy_at_s = monotonic()
        self._began: tuple[int, float] | None = None
        self._seen: Counter[str] = Counter()

    def reset(self) -> None:
        self.longest_s, self.where = 0.0, ""
        self._seen.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            self._began, start_s = (threading.get_ident(), monotonic()), thread_time()
            run(handle)
            took_s = thread_time() - start_s
            self._began = None
            if took_s > self.longest_s:
                self.longest_s = took_s
                self.where = next((where for where, _ in self._seen.most_common(1)), "")
            if took_s > BUSY_S:
                self.busy_at_s = monotonic()
                self._seen.clear()

        ended = threading.Event()
        looking = threading.Thread(target=self._look, args=(ended,))
        setattr(asyncio.Handle, "_run", timed)  # noqa: B010
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()
            setattr(asyncio.Handle, "_run", run)  # noqa: B010

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(BUSY_S):
            began = self._began
            if began is not None and monotonic() - began[1] > BUSY_S:
                where = place(sys._current_frames().get(began[0]))
                if where and self._began is began:
                    self._seen[where] += 1


class Lab:
    """A broker, a client that may do everything, and one with limited permissions."""

    def __init__(self, broker: Broker, messages: int) -> None:
        self.address = "127.0.0.1", broker.port
        self.messages = messages
        self._clients: list[LineClient] = []
        self.client = self.connect(b"token-of-admin")

    def connect(self, token: bytes) -> LineClient:
        client = LineClient(self.address)
        self._clients.append(client)
        client.ask(b"a auth --confirm " + token)
        return client

    def limited(self) -> LineClient:
        return self.connect(b"token-of-limited")

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def ask(self, *lines: bytes) -> None:
        """Send these and wait until all are done."""
        self.send(self.client, b"".join(line + b"\n" for line in lines))

    def send(self, client: LineClient, data: bytes) -> None:
        """Send while replies are read; return when the last one has come."""
        failures: list[BaseException] = []

        def read() -> None:
            try:
                while not any(line.startswith(b"the-end ok") for line in client.lines()):
                    pass
            except BaseException as failure:
                failures.append(failure)

        reader = threading.Thread(target=read)
        reader.start()
        client.send(data + b"the-end ping\n")
        reader.join()
        if failures and not isinstance(failures[0], EOFError):
            raise failures[0]

    def publish(self, count: int, event: bytes = b"e", data: bytes = b"x" * 100) -> None:
        for start in range(0, count, LINES):
            self.ask(
                *(b"m%d publish %b %b" % (n, event, data) for n in range(start, start + LINES)),
                b"c publish --confirm none x",
            )

    def held(self, consumer_id: bytes, count: int) -> LineClient:
        """So many unacked messages of a consumer of the queue `q`."""
        client = self.connect(b"token-of-admin")
        client.send(consumer_id + b" consume q --manual-ack\n")
        while count > 0:
            count -= len(client.lines())
        return client


Attack = Callable[[Lab], object]


class Row(NamedTuple):
    name: str
    attack: Attack
    prepare: Attack = lambda lab: None


def each(lines: Callable[[], Iterable[bytes]], *, limited: bool = False) -> Attack:
    """Line by line."""

    def attack(lab: Lab) -> None:
        client = lab.limited() if limited else lab.client
        for line in lines():
            lab.send(client, line + b"\n")

    return attack


def strangers(lab: Lab) -> None:
    for action in ACTIONS:
        for line in islice(grammar.plain_lines(action, 4000), 0, None, 9):
            client = LineClient(lab.address)
            lab._clients.append(client)
            lab.send(client, (line + b"\n") * 8)
            client.close()


def burst(line: bytes) -> Attack:
    """Many lines at once, a number in each."""

    def attack(lab: Lab) -> None:
        lab.send(lab.client, b"".join(line % n + b"\n" for n in range(LINES)))

    return attack


def bound(lab: Lab) -> None:
    lab.ask(b"s subscribe q e a.b", b"d subscribe dead dead")


def scheduled(lab: Lab) -> None:
    bound(lab)
    for start in range(0, lab.messages, LINES):
        burst = (b"m%d publish --delay=3600 e x" % n for n in range(start, start + LINES))
        lab.ask(*burst, b"c publish --confirm none x")


def ready(lab: Lab) -> None:
    bound(lab)
    lab.publish(lab.messages)


def returned(lab: Lab) -> None:
    """Many have come back from consumers that have left."""
    ready(lab)
    steps = range(0, lab.messages, PREFETCH_MAX)
    for client in [lab.held(b"c%d" % at, min(PREFETCH_MAX, lab.messages - at)) for at in steps]:
        client.close()
    lab.ask(b"p ping")


def unacked(lab: Lab) -> None:
    bound(lab)
    lab.publish(PREFETCH_MAX)
    lab.held(b"c", PREFETCH_MAX)


def many_names(lab: Lab) -> None:
    lab.ask(b"s subscribe q " + b" ".join(b"e%d.x" % n for n in range(99_000)))


def many_masks(lab: Lab) -> None:
    for first in range(0, 90_000, 30_000):
        masks = b" ".join(b"a.*x%d.*" % n for n in range(first, first + 30_000))
        lab.ask(b"s subscribe q --add-mask " + masks)


def many_queues(lab: Lab) -> None:
    lab.ask(*(b"s subscribe --confirm q%d e" % n for n in range(10_000)))


def many_consumers(lab: Lab) -> None:
    lab.ask(b"s subscribe q e", *(b"c%d consume q --manual-ack" % n for n in range(1000)))


def asked(*lines: bytes) -> Attack:
    return lambda lab: lab.ask(*lines)


FIXED: Final = [action for action in ACTIONS if action not in (*grammar.MANY_NAMES, b"_eval")]


def names_lines() -> Iterator[bytes]:
    for action in grammar.MANY_NAMES:
        yield from grammar.numbered(action, MIB - 100)
        yield from grammar.plain_lines(action, MIB - 100)


def deep_masks() -> Iterator[bytes]:
    masks = (b"%b%d.*" % (b"a." * 120, n) for n in range(4000))
    yield b"x subscribe q --add-mask " + b" ".join(masks)
    masks = (b"b%d." % n + b"*a." * 80 + b"*" for n in range(4000))
    yield b"x subscribe q --add-mask " + b" ".join(masks)


def all_fixed() -> Iterator[bytes]:
    for action in FIXED:
        yield from islice(grammar.plain_lines(action, MIB - 100), 0, None, 9)


BURSTS: Final = b"""
m%d publish e x
m%d publish --confirm e x
m%d publish --once e x
m%d publish --mandatory e x
m%d publish --delay=3600 e x
m%d publish --at=4102444800 e x
m%d publish --ttl=3600 e x
m%d publish --meta=a=1 e x
m%d publish --to=q e x
m%d publish --confirm --once --ttl=3600 --meta=a=1 e x
x%d subscribe q e
x%d rebind q e f
x%d consume q
x%d ack c m
x%d reject c m
x%d release c m
x%d touch c m
x%d touch c m --for=9
x%d touch c m --for=0
x%d touch c --all --for=9
x%d set_prefetch c 9
x%d set_prefetch c 0
x%d cancel q m
x%d promote q m
x%d move q dead --limit=1
x%d redrive dead --limit=1
x%d delete_consumer c
x%d set_queue q --retries=1
x%d purge q --limit=1
x%d purge q --id=m
x%d peek q --limit=1
x%d range q
x%d trim q 1
x%d stats
x%d stats queues
x%d help
x%d set_name n
x%d ping x
x%d _eval 1
x%d tail e
x%d delete_queue q --when-unused=9
x%d nothing
x%d close_connection 999
""".strip().split(b"\n")
SELECTED: Final = (
    *(b"", b" --limit=1", b" --id=none", b" --event=none.*", b" --older=3600", b" --where=k=v"),
)

ROWS: Final = [
    Row("line: all actions with fixed arguments", each(all_fixed)),
    Row("line: subscribe, consume, rebind", each(names_lines)),
    Row("line: names, a user of 1,000 masks", each(names_lines, limited=True)),
    Row("line: masks of many parts", each(deep_masks)),
    Row("line: _eval", each(lambda: grammar.plain_lines(b"_eval", MIB - 100))),
    Row("lines of strangers", strangers),
    *(
        Row(f"burst: {line.split(b' ', 1)[1].decode()}", burst(line), bound)
        for line in BURSTS
    ),
    *(
        Row(f"{verb.decode()}{flag.decode()}", asked(b"x " + verb + flag), state)
        for verb, states in (
            (b"purge q", (ready, returned)),
            (b"move q dead", (ready, returned)),
        )
        for state in states
        for flag in SELECTED
    ),
    *(
        Row(f"{verb.decode()}", asked(b"x " + verb), state)
        for verb, state in (
            (b"purge q --scheduled", scheduled),
            (b"cancel q --all", scheduled),
            (b"promote q --all", scheduled),
            (b"cancel q none", scheduled),
            (b"ack c --all", unacked),
            (b"reject c --all", unacked),
            (b"reject c --all --delay=3600", unacked),
            (b"reject c --all --event=none.*", unacked),
            (b"release c --all", unacked),
            (b"touch c --all", unacked),
            (b"touch c --all --for=9", unacked),
            (b"touch c --all --for=0", unacked),
            (b"delete_consumer c", unacked),
            (b"delete_queue q", unacked),
            (b"delete_queue q", ready),
            (b"trim q 1000000000", ready),
            (b"set_queue q --ttl=3600", ready),
            (b"set_queue q --messages-max=1 --overflow=drop", ready),
            (b"peek q --limit=1000", ready),
            (b"read q --from=1 --limit=1000000", ready),
            (b"delete_queue q", many_names),
            (b"delete_queue q", many_masks),
            (b"consume q f", many_names),
            (b"rebind q", many_names),
            (b"rebind q --remove-mask *.*", many_names),
            (b"publish a." + b"x1" * 100 + b".c x", many_masks),
            (b"publish --confirm e x", many_queues),
            (b"stats queues --limit=10000", many_queues),
            (b"stats queues --mask=*x*y*z*.**", many_queues),
            (b"delete_queue q", many_consumers),
            (b"publish e x", many_consumers),
        )
    ),
]  # fmt: skip


def users_file(directory: Path) -> Path:
    users = directory / "users.jsonl"
    masks = [f"{n}.*.x{n}*" for n in range(MASKS - 1)]
    admin = User("admin", token=hash_token("token-of-admin"), publish=["**"], consume=["**"])
    admin.admin = admin.eval = True
    limited = User("limited", token=hash_token("token-of-limited"), publish=masks, consume=["q"])
    limited.bind = [*masks, "*"]
    users.write_text(admin.line() + limited.line())
    users.chmod(0o600)
    return users


def measured(row: Row, messages: int, stopwatch: Stopwatch) -> tuple[float, str]:
    """Seconds of the longest callback, without those that prepare it, and where they went."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        options: dict[str, Any] = {
            "users": users_file(directory), "auth": "always", "eval": "on", "loop_held_s": 0,
        }  # fmt: skip
        with Broker(directory / "mqks.db", **options) as broker:
            lab = Lab(broker, messages)
            row.prepare(lab)
            wait(stopwatch)
            gc.collect()
            stopwatch.reset()
            row.attack(lab)
            wait(stopwatch)
            found = stopwatch.longest_s, stopwatch.where
            lab.close()
    return found


def wait(stopwatch: Stopwatch) -> None:
    """Until the loop has had nothing to do for a while."""
    stopwatch.busy_at_s = monotonic()
    while monotonic() - stopwatch.busy_at_s < QUIET_S:
        sleep(QUIET_S / 4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.steps", description=__doc__)
    parser.add_argument("words", nargs="*", help="measure the rows whose name has one of these")
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--repeat", type=int, default=REPETITIONS)
    options = parser.parse_args()
    logging.disable()
    stopwatch = Stopwatch()
    with stopwatch.running():
        for row in ROWS:
            if options.words and not any(word in row.name for word in options.words):
                continue
            longest_s, where = min(
                measured(row, options.messages, stopwatch) for _ in range(options.repeat)
            )
            print(f"{longest_s * 1000:8.1f} ms  {row.name}  {where}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
