"""Every story under `tests/conformance/`, and every transcript in two pages of `docs/`, holds.

Each is played over TCP against a server process and, unless the server itself dies in it, against
the bare broker: a line at a time and a byte at a time. No way of playing knows the others.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path

import pytest

from mqks.errors import ClaimLost
from mqks.journal.memory import Memory
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from tests.bare import BareWorld
from tests.line_client import LineClient
from tests.postgres import taken_over
from tests.server_process import ServerProcess
from tests.transcripts import Story, StoryError, play, stories_of
from tests.waiting import WAIT_S

HERE = Path(__file__).parent
STORIES = list(stories_of(sorted((HERE / "conformance").glob("*.txt"))))
DOCS = HERE.parent / "docs"
EXAMPLES = list(stories_of([DOCS / "protocol.md", DOCS / "coming-from.md"]))
assert STORIES, "without stories the tests below would check nothing"
assert EXAMPLES, "without examples, neither"


class TcpWorld:
    """A server process and real sockets. Time passes by itself."""

    patience_seconds: float = WAIT_S

    def __init__(self, db: Path, story: Story, *flags: str) -> None:
        self._db = db
        self._flags = [
            *flags,
            *(
                text
                for key, value in story.settings.items()
                for text in (f"--{key.replace('_', '-')}", str(value))
            ),
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

    def close(self) -> None:
        self._close_clients()
        self.server.kill()

    def _close_clients(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class MemoryWorld(TcpWorld):
    """A server in this process that keeps everything in memory, and real sockets."""

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
            # It can't write any more, as if it were dead.
            self._memory.holder = None
        self.close()
        self._start()

    def close(self) -> None:
        with suppress(ClaimLost, ExceptionGroup):
            self.broker.stop()
        self._close_clients()


class PostgresWorld(MemoryWorld):
    """A server in this process that keeps everything in PostgreSQL."""

    def __init__(self, url: DatabaseUrl, story: Story) -> None:
        self._clients = {}
        self._settings = {"db": url, "db_replication": "none", **story.settings}
        self._start()

    def _start(self) -> None:
        self.broker = Broker(**self._settings)
        self.broker.start()

    def restart(self, *, crash: bool) -> None:
        if crash:
            # It can't write any more, as if it were dead.
            taken_over(self._settings["db"])
        self.close()
        self._start()


class BrokerWorld:
    """The broker without sockets, disk or clock, fed in pieces of one line or of one byte."""

    patience_seconds = 0.0

    def __init__(self, story: Story, *, byte_by_byte: bool) -> None:
        self._broker = BareWorld(**story.settings)
        self._byte_by_byte = byte_by_byte
        self._tails: defaultdict[str, bytes] = defaultdict(bytes)
        self._lines: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def connect(self, name: str) -> None:
        self._broker.connect(name)

    def send(self, name: str, data: bytes) -> None:
        pieces = [data[i : i + 1] for i in range(len(data))] if self._byte_by_byte else [data]
        for piece in pieces:
            self._broker.send(name, piece)

    def read_line(self, name: str) -> bytes:
        lines = self._lines[name]
        *new, self._tails[name] = (self._tails[name] + self._broker.received(name)).split(b"\n")
        lines.extend(new)
        if lines:
            return lines.popleft()
        if self._broker.is_closed(name):
            raise EOFError("the connection is closed")
        raise TimeoutError("nothing comes")

    def disconnect(self, name: str) -> None:
        self._broker.disconnect(name)
        self._lines.pop(name, None)
        self._tails.pop(name, None)

    def break_off(self, name: str) -> None:
        self.disconnect(name)

    def end_of_stream(self, name: str) -> None:
        self._broker.end_of_stream(name)

    def advance(self, seconds: float) -> None:
        self._broker.advance(seconds)

    def restart(self, *, crash: bool) -> None:
        raise AssertionError("there is nothing to start again")


@pytest.mark.parametrize("story", STORIES + EXAMPLES, ids=lambda story: story.name)
def test_in_memory(story: Story, tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path / "none.db", story)
    try:
        play(story, world)
    finally:
        world.close()
    assert not (tmp_path / "none.db").exists()


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES + EXAMPLES, ids=lambda story: story.name)
def test_in_postgresql(story: Story, journal_url: DatabaseUrl) -> None:
    world = PostgresWorld(journal_url, story)
    try:
        play(story, world)
    finally:
        world.close()


def play_over_tcp(story: Story, db: Path, *flags: str) -> None:
    world = TcpWorld(db, story, *flags)
    try:
        play(story, world)
        assert world.server.is_running, "the server died"
    except BaseException as error:
        error.add_note(f"log of the server:\n{world.server.log}")
        raise
    finally:
        world.close()


def play_in_time(story: Story, directory: Path, *flags: str) -> None:
    for attempt in range(3):
        began_s = time.monotonic()
        try:
            play_over_tcp(story, directory / f"{attempt}.db", *flags)
        except StoryError:
            # Timers run for a second: where it took longer to tell the story, it says nothing.
            if attempt == 2 or not story.tells_time or time.monotonic() - began_s < 1:
                raise
        else:
            break


@pytest.mark.parametrize("story", STORIES + EXAMPLES, ids=lambda story: story.name)
def test_over_tcp(story: Story, tmp_path: Path) -> None:
    play_in_time(story, tmp_path)


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(
            story,
            id=story.name,
            marks=[] if story.name.startswith("crash-keeps") else pytest.mark.slow,
        )
        for story in STORIES + EXAMPLES
    ],
)
def test_over_tcp_with_all_texts_in_files(story: Story, tmp_path: Path) -> None:
    play_in_time(story, tmp_path, "--text-file-bytes-min=1")


@pytest.mark.parametrize("byte_by_byte", [False, True], ids=["lines", "bytes"])
@pytest.mark.parametrize(
    "story",
    [story for story in STORIES + EXAMPLES if not story.needs_a_process],
    ids=lambda story: story.name,
)
def test_on_the_bare_broker(story: Story, byte_by_byte: bool) -> None:
    play(story, BrokerWorld(story, byte_by_byte=byte_by_byte))
