"""Every story under `tests/conformance/`, and every transcript in three pages, holds.

Each is played over TCP against a server, in a process of its own if it dies in the story, and else
against the bare broker: a line at a time and a byte at a time. No way of playing knows the others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from mqks.errors import ClaimLost
from mqks.journal.memory import Memory
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from tests.conftest import SCHEMAS
from tests.fuzz.invariants import check
from tests.kit.bare import BareWorld
from tests.kit.line_client import LineClient
from tests.kit.marks import slow
from tests.kit.postgres import Postgres, taken_over
from tests.kit.server_process import ServerProcess
from tests.kit.transcripts import Story, StoryError, play, stories_of
from tests.kit.waiting import WAIT_S

HERE = Path(__file__).parents[1]
DOCS = HERE.parent / "docs"
PAGES = DOCS / "protocol.md", HERE / "README.md"
EXAMPLES = list(stories_of(PAGES))
assert EXAMPLES, "without examples the tests below would not check them"
STORIES = [*stories_of(sorted((HERE / "conformance").glob("*.txt"))), *EXAMPLES]
assert STORIES != EXAMPLES, "without stories, neither"
DURABLE = [story for story in STORIES if story.needs_a_process]
BARE = [story for story in STORIES if not story.needs_a_process]
ATTEMPTS = 5
KILLED = (
    *("crash-keeps", "restart", "batch-out", "dead-counts", "job-out", "lease-out", "mask-surv"),
    *("move-out", "once-surv", "rename-out", "schedule-out", "transaction-out"),
)
"""Of each kind of row in the database one story kills a real server in each run; the others are
played in memory there."""
SERVED = (
    *("line-", "end-of-", "close-", "http-", "eval", "error-", "help", "ping", "hello", "escaped-"),
    *("publish-", "unacked-", "consumer-id-", "name-", "confirm-", "limit-of-", "tail", "README"),
)
"""Of what sockets, and the server around the broker, have a part in; in each run the other stories
are played against the bare broker alone."""


def is_served(story: Story) -> bool:
    return story.needs_a_process or story.name.startswith(SERVED)


def each(
    stories: Iterable[Story], is_quick: Callable[[Story], bool] = lambda _: True
) -> pytest.MarkDecorator:
    rows = [story if is_quick(story) else slow(story)[0] for story in stories]
    return pytest.mark.parametrize("story", rows, ids=lambda story: story.name)


class TcpWorld:
    """A server process and real sockets. Time passes by itself."""

    patience_seconds: float = WAIT_S

    def __init__(self, db: Path, story: Story) -> None:
        self._db = db
        self._flags = [
            f"--{key.replace('_', '-')}={value}" for key, value in story.settings.items()
        ]
        self._clients: dict[str, LineClient] = {}
        self.server = ServerProcess(db, *self._flags)

    def connect(self, name: str) -> None:
        self._clients[name] = LineClient(self.server.address)

    def send(self, name: str, data: bytes) -> None:
        self._clients[name].send(data)

    def read_line(self, name: str) -> bytes:
        return self._clients[name].line()

    def disconnect(self, name: str) -> None:
        self._clients.pop(name).leave()

    def break_off(self, name: str) -> None:
        self._clients.pop(name).break_off()

    def end_of_stream(self, name: str) -> None:
        self._clients[name].close_sending_side()

    def advance(self, seconds: float) -> None:
        """What follows is asked until it is so."""

    def restart(self, *, crash: bool) -> None:
        if crash:
            self.server.kill()
        else:
            assert self.server.stop() == 0, self.server.log
        self._close_clients()
        self.server = ServerProcess(self._db, *self._flags)

    @property
    def log(self) -> str:
        return self.server.log

    def close(self) -> None:
        self._close_clients()
        is_running = self.server.is_running
        self.server.kill()
        assert is_running, f"the server died:\n{self.log}"

    def _close_clients(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class MemoryWorld(TcpWorld):
    """A server in this process that keeps everything in memory, and real sockets."""

    log = "pytest has it"

    def __init__(self, db: Path, story: Story) -> None:
        self._clients = {}
        self._settings = {"db": db, **story.settings}
        self._memory = Memory()
        self._start()

    def _start(self) -> None:
        self.broker = Broker(**self._settings)
        self.broker.open_store = self._memory.open
        self.broker.start()

    def connect(self, name: str) -> None:
        self._clients[name] = LineClient(("127.0.0.1", self.broker.port))

    def restart(self, *, crash: bool) -> None:
        if crash:
            self.cut_off()
        self.close()
        self._start()

    def cut_off(self) -> None:
        """It can't write any more, as if it were dead."""
        self._memory.holder = None

    def close(self) -> None:
        with suppress(ClaimLost, ExceptionGroup):
            self.broker.stop()
        self._close_clients()


class PostgresWorld(MemoryWorld):
    """A server in this process that keeps everything in PostgreSQL."""

    def __init__(self, postgres: Postgres, story: Story) -> None:
        self._clients = {}
        url = DatabaseUrl(postgres.url(f"story_{next(SCHEMAS)}"))
        self._settings = {"db": url, "db_replication": "none", **story.settings}
        self._start()

    def _start(self) -> None:
        self.broker = Broker(**self._settings)
        self.broker.start()

    def cut_off(self) -> None:
        taken_over(self._settings["db"])


class BrokerWorld:
    """The broker without sockets, disk or clock, fed in pieces of one line or of one byte."""

    patience_seconds = 0.0

    def __init__(self, story: Story, *, byte_by_byte: bool) -> None:
        self.bare = BareWorld(**story.settings)
        self._byte_by_byte = byte_by_byte
        self._tails: defaultdict[str, bytes] = defaultdict(bytes)
        self._lines: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def connect(self, name: str) -> None:
        self.bare.connect(name)

    def send(self, name: str, data: bytes) -> None:
        pieces = [data[i : i + 1] for i in range(len(data))] if self._byte_by_byte else [data]
        for piece in pieces:
            self.bare.send(name, piece)

    def read_line(self, name: str) -> bytes:
        lines = self._lines[name]
        *new, self._tails[name] = (self._tails[name] + self.bare.received(name)).split(b"\n")
        lines.extend(new)
        if lines:
            return lines.popleft()
        if self.bare.is_closed(name):
            raise EOFError("the connection is closed")
        raise TimeoutError("nothing comes")

    def disconnect(self, name: str) -> None:
        self.bare.disconnect(name)
        self._lines.pop(name, None)
        self._tails.pop(name, None)

    break_off = disconnect

    def end_of_stream(self, name: str) -> None:
        self.bare.end_of_stream(name)

    def advance(self, seconds: float) -> None:
        self.bare.advance(seconds)

    def restart(self, *, crash: bool) -> None:
        raise AssertionError("there is nothing to start again")

    def play(self, story: Story) -> None:
        play(story, self)
        check(self.bare.broker)


def played(story: Story, world_of: Callable[[int], TcpWorld]) -> None:
    """A story with timers fails also where the machine is busy for longer than they run."""
    for left in reversed(range(ATTEMPTS if story.tells_time else 1)):
        world = world_of(left)
        try:
            play(story, world)
            break
        except StoryError as error:
            error.add_note(f"log of the server:\n{world.log}")
            if not left:
                raise
        finally:
            world.close()


@each(STORIES, is_served)
def test_in_memory(story: Story, tmp_path: Path) -> None:
    played(story, lambda _: MemoryWorld(tmp_path / "none.db", story))
    assert not (tmp_path / "none.db").exists()


@pytest.mark.slow
@each(DURABLE)
def test_in_postgresql(story: Story, postgres: Postgres) -> None:
    played(story, lambda _: PostgresWorld(postgres, story))


@each(DURABLE, lambda story: story.name.startswith(KILLED))
def test_over_tcp(story: Story, tmp_path: Path) -> None:
    played(story, lambda left: TcpWorld(tmp_path / f"{left}.db", story))


@each(BARE)
def test_on_the_bare_broker(story: Story) -> None:
    BrokerWorld(story, byte_by_byte=False).play(story)


@each(BARE, is_served)
def test_byte_by_byte_on_the_bare_broker(story: Story) -> None:
    BrokerWorld(story, byte_by_byte=True).play(story)
