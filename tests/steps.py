"""The longest step of the event loop, for each kind of request at the largest that limits allow.

    python -m tests.steps                all of them; some minutes
    python -m tests.steps purge move     those whose name has one of these words
    python -m tests.steps --messages 1000000 purge

A real server runs in a thread of this process, with SQLite, on asyncio's own loop, whose callbacks
are timed one by one; it logs where it was in the long ones (`event=loop_held`). A figure is the CPU
time of the longest callback, the smallest of some repetitions: what else runs on the machine counts
as little as can be. The one rule: a row does what a client can do, over TCP.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Thread
from time import monotonic, sleep, thread_time
from typing import Final, NamedTuple

from mqks import log
from mqks.protocol.requests import ACTIONS
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.fuzz import grammar
from tests.kit.line_client import LineClient

MIB: Final = 1024 * 1024
LINES: Final = 20_000
QUIET_S: Final = 0.3
BUSY_S: Final = 0.002
HELD_S: Final = 0.02
PREFETCH_MAX: Final = 100_000
MASKS: Final = 1000
"""Of the limited user."""


class Stopwatch:
    """Times each callback of the event loop of another thread."""

    longest_s = busy_at_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            start_s = thread_time()
            run(handle)
            took_s = thread_time() - start_s
            self.longest_s = max(self.longest_s, took_s)
            if took_s > BUSY_S:
                self.busy_at_s = monotonic()

        setattr(asyncio.Handle, "_run", timed)  # noqa: B010
        try:
            yield
        finally:
            setattr(asyncio.Handle, "_run", run)  # noqa: B010

    def rest(self) -> None:
        """Wait until the loop has had nothing to do for a while."""
        self.busy_at_s = monotonic()
        while monotonic() - self.busy_at_s < QUIET_S:
            sleep(QUIET_S / 4)


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
        self.send(self.client, b"".join(line + b"\n" for line in lines))

    def send(self, client: LineClient, data: bytes) -> None:
        """Send while replies are read; return when the last one has come."""
        sender = Thread(target=self._send, args=(client, data + b"the-end ping\n"))
        sender.start()
        with suppress(EOFError):
            while not any(line.startswith(b"the-end ok") for line in client.lines()):
                pass
        sender.join()

    @staticmethod
    def _send(client: LineClient, data: bytes) -> None:
        with suppress(ConnectionError):  # The server may close it.
            client.send(data)

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
    def attack(lab: Lab) -> None:
        client = lab.limited() if limited else lab.client
        for line in lines():
            lab.send(client, line + b"\n")

    return attack


def strangers(lab: Lab) -> None:
    for action in ACTIONS:
        for line in islice(grammar.plain_lines(action, 4000), 0, None, 9):
            with LineClient(lab.address) as client:
                lab.send(client, (line + b"\n") * 8)


def burst(line: bytes) -> Attack:
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


_BURSTS: Final = b"""
publish e x | publish --confirm e x | publish --once e x | publish --mandatory e x |
publish --delay=3600 e x | publish --at=4102444800 e x | publish --ttl=3600 e x |
publish --meta=a=1 e x | publish --to=q e x | publish --confirm --once --ttl=3600 --meta=a=1 e x |
subscribe q e | rebind q e f | consume q | ack c m | reject c m | release c m | touch c m |
touch c m --for=9 | touch c m --for=0 | touch c --all --for=9 | set_prefetch c 9 |
set_prefetch c 0 | cancel q m | promote q m | move q dead --limit=1 | redrive dead --limit=1 |
delete_consumer c | set_queue q --retries=1 | purge q --limit=1 | purge q --id=m |
peek q --limit=1 | range q | trim q 1 | stats | stats queues | help | set_name n | ping x |
_eval 1 | tail e | delete_queue q --when-unused=9 | nothing | close_connection 999
"""
BURSTS: Final = [line.strip() for line in _BURSTS.split(b"|")]
SELECTED: Final = (
    *(b"", b" --limit=1", b" --id=none", b" --event=none.*", b" --older=3600", b" --where=k=v"),
)

STATES: Final[dict[Attack, tuple[bytes, ...]]] = {
    scheduled: (
        *(b"purge q --scheduled", b"cancel q --all", b"promote q --all", b"cancel q none"),
    ),
    unacked: (
        *(b"ack c --all", b"reject c --all", b"reject c --all --delay=3600", b"release c --all"),
        *(b"reject c --all --event=none.*", b"touch c --all", b"touch c --all --for=9"),
        *(b"touch c --all --for=0", b"delete_consumer c", b"delete_queue q"),
    ),
    ready: (
        *(b"delete_queue q", b"trim q 1000000000", b"set_queue q --ttl=3600"),
        *(b"set_queue q --messages-max=1 --overflow=drop", b"peek q --limit=1000"),
        b"read q --from=1 --limit=1000000",
    ),
    many_names: (b"delete_queue q", b"consume q f", b"rebind q", b"rebind q --remove-mask *.*"),
    many_masks: (b"delete_queue q", b"publish a." + b"x1" * 100 + b".c x"),
    many_queues: (
        *(b"publish --confirm e x", b"stats queues --limit=10000"),
        b"stats queues --mask=*x*y*z*.**",
    ),
    many_consumers: (b"delete_queue q", b"publish e x"),
}
ROWS: Final = [
    Row("line: all actions with fixed arguments", each(all_fixed)),
    Row("line: subscribe, consume, rebind", each(names_lines)),
    Row("line: names, a user of 1,000 masks", each(names_lines, limited=True)),
    Row("line: masks of many parts", each(deep_masks)),
    Row("line: _eval", each(lambda: grammar.plain_lines(b"_eval", MIB - 100))),
    Row("lines of strangers", strangers),
    *(Row(f"burst: {line.decode()}", burst(b"m%d " + line), bound) for line in BURSTS),
    *(
        Row(f"{verb.decode()}{flag.decode()}", asked(b"x " + verb + flag), state)
        for verb in (b"purge q", b"move q dead")
        for state in (ready, returned)
        for flag in SELECTED
    ),
    *(
        Row(line.decode(), asked(b"x " + line), state)
        for state, lines in STATES.items()
        for line in lines
    ),
]


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


def measured(row: Row, messages: int, stopwatch: Stopwatch) -> float:
    """Seconds of the longest callback, without those that prepare it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        users = users_file(directory)
        how = {"users": users, "auth": "always", "eval": "on", "loop_held_s": HELD_S}
        with Broker(directory / "mqks.db", **how) as broker:
            lab = Lab(broker, messages)
            row.prepare(lab)
            stopwatch.rest()
            gc.collect()
            stopwatch.longest_s = 0.0
            row.attack(lab)
            stopwatch.rest()
            lab.close()
    return stopwatch.longest_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.steps", description=__doc__)
    parser.add_argument("words", nargs="*", help="measure the rows whose name has one of these")
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    log.configure("text", "warning")
    stopwatch = Stopwatch()
    with stopwatch.running():
        for row in ROWS:
            if options.words and not any(word in row.name for word in options.words):
                continue
            some = [measured(row, options.messages, stopwatch) for _ in range(options.repeat)]
            print(f"{min(some) * 1000:8.1f} ms  {row.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
