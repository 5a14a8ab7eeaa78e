"""What a store may tell the server, shown with the one in memory, and large commits."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.log import pending
from mqks.broker.log.pending import Entry, Mark, QueueState
from mqks.broker.message.policy import DEFAULT, Policy
from mqks.errors import ClaimLost, DiskFull
from mqks.journal import default_store, segment
from mqks.journal import memory as memory_module
from mqks.journal.memory import Memory, MemoryStore
from mqks.journal.segment import Lines, Section, cut, decode, encode
from mqks.journal.store import LastWords, Metadata, NewSegment, OpenStore, QueueRow, Store
from mqks.protocol.requests import DeleteRule
from mqks.settings import Settings
from mqks.testing import Broker
from tests.compiled import patches_modules
from tests.line_client import LineClient
from tests.waiting import WAIT_S, until

LOSING = """
import sys
from functools import partial
from mqks.commands import main
from mqks.journal.memory import Memory, MemoryStore
from mqks.server import running

class Losing(MemoryStore):
    async def commit(self, segments, *rest):
        if any(segment.texts for segment in segments):
            self._memory.holder = None
        await super().commit(segments, *rest)

async def open_store(settings, report):
    memory = Memory()
    memory.holder = Losing(memory, settings)
    return memory.holder

running.serve = partial(running.serve, open_store=open_store)
sys.exit(main(["serve", "--port", "0"]))
"""


def served(memory: Memory) -> Broker:
    broker = Broker(Path("none"))
    broker.open_store = memory.open
    return broker


def client_of(broker: Broker) -> LineClient:
    return LineClient(("127.0.0.1", broker.port))


def test_a_claim_that_is_lost_ends_the_server_and_confirms_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", LOSING], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        while "event=listening" not in (line := process.stderr.readline()):
            assert line
        host, _, port = line.partition("address=")[2].strip().partition(":")
        with LineClient((host, int(port))) as client:
            assert client.ask(b"s subscribe --confirm q e") == b"s ok "
            client.send(b"m publish --confirm e x\n")
            with pytest.raises(EOFError):
                client.line()
        log = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == ClaimLost.exit_code
    assert log.splitlines()[-1] == "mqks: another process has opened this store"


def test_what_a_server_writes_after_its_claim_is_lost_is_not_there() -> None:
    memory = Memory()
    old = served(memory)
    old.start()
    with client_of(old) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        with served(memory) as new:
            client.send(b"n publish --confirm e y\n")
            until(old._ended.done)
            with pytest.RaisesGroup(ClaimLost):
                old.stop()
            with client_of(new) as other:
                assert other.ask(b"c consume q") == b"c ok m event=e x"
                assert other.ask(b"p ping x") == b"p ok x"


def test_a_store_that_is_full_takes_acks_and_goes_on_when_there_is_room() -> None:
    memory = Memory()
    with served(memory) as broker, client_of(broker) as client:
        client.send(b"c consume --confirm q e --manual-ack\n")
        assert client.line() == b"c ok "
        client.send(b"m publish --confirm e x\n")
        assert {client.line(), client.line()} == {b"c ok m event=e x", b"m ok "}
        memory.is_full = True
        client.send(b"n publish --confirm e y\n")
        lines = [client.line(), client.line()]
        assert b"c ok n event=e y" in lines
        assert any(line.startswith(b"n error ") for line in lines)
        assert client.ask(b"a ack --confirm c m") == b"a ok "
        assert client.ask(b"o publish --confirm e z").startswith(b"o error ")
        memory.is_full = False
        with client_of(broker) as other:
            while other.ask(b"w publish --confirm none x") != b"w ok ":
                pass
    assert len(memory.segments) <= 2


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "memory", "postgresql"])
async def test_a_commit_may_say_everything_at_once(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings, told = Settings(db=tmp_path / "mqks.db", db_replication="none"), list[str]()
    open_store: OpenStore = default_store.open_store
    if kind == "memory":
        open_store = Memory().open
    elif kind == "postgresql":
        settings = replace(settings, db=request.getfixturevalue("journal_url"))

    async def loaded() -> tuple[Store, Metadata]:
        store = await open_store(settings, told.append)
        await store.claim(wait=False)
        metadata = await store.load()
        async for _ in store.segments(metadata):
            pass
        await store.begin()
        return store, metadata

    store, _ = await loaded()
    policy = Policy(DeleteRule(1.0))
    await store.commit(
        [], Entry(queues={1: QueueState(b"a", DEFAULT), 2: QueueState(b"b", DEFAULT)})
    )
    await store.commit([NewSegment(1, b"head", [b"text"], 8)])
    entry = Entry(queues={1: QueueState(b"a", policy), 3: QueueState(b"c", DEFAULT)})
    words = [LastWords(1, 9, 7), LastWords(2, 8, 8)]
    await store.commit([NewSegment(2, b"head", [], 4)], entry, [1], words)
    await store.close()
    store, metadata = await loaded()
    await store.close()
    assert (told, metadata.damage) == ([], [])
    assert sorted(metadata.queues.values()) == [
        QueueRow(1, b"a", policy.encode(), 9, 7),
        QueueRow(2, b"b", DEFAULT.encode(), 8, 8),
        QueueRow(3, b"c"),
    ]


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_what_a_full_store_has_no_room_for_is_not_confirmed(
    commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message for four queues, in pieces, of which as many commits find room."""
    monkeypatch.setattr(pending, "BATCH_QUEUES_MAX", 1)
    has_room = chain([False], repeat(True, commits), repeat(False))

    class Meagre(MemoryStore):
        async def commit(self, segments: Sequence[NewSegment], *rest: Any) -> None:
            if any(segment.texts for segment in segments) and not next(has_room):
                raise DiskFull("there is no room")
            await super().commit(segments, *rest)

    monkeypatch.setattr(memory_module, "MemoryStore", Meagre)
    memory = Memory()
    with served(memory) as broker, client_of(broker) as client:
        for queue in b"abcd":
            assert client.ask(b"s subscribe --confirm %c e" % queue) == b"s ok "
        reply = client.ask(b"m publish --confirm e x")
        kept = [
            run.total
            for head, _ in memory.segments.values()
            for section in decode(head)
            for run in section.runs
        ]
        assert reply.startswith(b"m error ") or kept == [1, 1, 1, 1]


# -- large commits

NUMBERS = st.integers(1, 99)
TEXTS = [[b"%d" % n * (n % 40) for n in range(first, first + 7)] for first in range(5)]
COUNTS = st.sampled_from([0, 1, 0xFFFF, 0x10000, 0xFFFFFFFF])
TIMES = st.sampled_from([0, 1, 2**63])
FLAGS = st.booleans()
MARKS = st.builds(
    Mark, st.sampled_from([0, 3, 2**32]), *([COUNTS] * 3 + [FLAGS] * 3 + [TIMES] * 3 + [COUNTS])
)
RUNS = st.builds(
    Lines, NUMBERS, st.just(0), st.sampled_from(TEXTS) | st.lists(st.binary(), min_size=1)
)
SECTIONS = st.lists(
    st.builds(
        Section,
        st.integers(1, 9),
        NUMBERS,
        NUMBERS,
        st.lists(RUNS, max_size=3),
        st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5),
        st.lists(st.tuples(NUMBERS, MARKS), max_size=5),
    ),
    min_size=1,
    unique_by=lambda section: section.queue_id,
)


def said(parts: list[list[Section]]) -> list[object]:
    """Everything, a message at a time."""
    found: list[object] = []
    for section in (section for part in parts for section in part):
        queue_id, next_seq, cursor, runs, acks, marks = section
        found += {(queue_id, "numbers", next_seq, cursor)}
        found += ((queue_id, "ack", *acked) for acked in acks)
        found += ((queue_id, "mark", *mark) for mark in marks)
        for run in runs:
            found += ((queue_id, number, line) for number, line in enumerate(run.lines, run.first))
    return sorted(set(found), key=repr)


@pytest.mark.slow
@given(SECTIONS, st.integers(1, 500))
def test_parts_of_a_commit_say_what_it_says(sections: list[Section], size_max: int) -> None:
    parts = list(cut(sections, size_max))
    assert said(parts) == said([sections])
    for part in parts:
        head, texts = encode(part)
        stored = decode(head)
        assert len(stored) == len(part)
        for section, read in zip(part, stored, strict=True):
            assert sorted(read.marks.items()) == sorted(section.marks)
        lengths = [len(line) for section in part for run in section.runs for line in run.lines]
        assert sum(map(len, texts)) <= max([size_max, *lengths])


@patches_modules
@pytest.mark.parametrize("kind", ["sqlite", "memory", "postgresql"])
def test_a_large_commit_is_several_segments(
    db: Path, monkeypatch: pytest.MonkeyPatch, kind: str, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(segment, "SEGMENT_BYTES_MAX", 2000)
    url = request.getfixturevalue("journal_url") if kind == "postgresql" else None
    broker = Broker(url or db, db_replication="none")
    if kind == "memory":
        broker.open_store = Memory().open
    with broker, client_of(broker) as client:
        for queue in (b"q", b"r"):
            assert client.ask(b"s subscribe --confirm %b e" % queue) == b"s ok "
        lines = [b"m%d publish e %b\n" % (n, b"x" * (n * 7 % 500)) for n in range(100)]
        client.send(b"".join(lines) + b"last publish --confirm e x\n")
        assert client.line() == b"last ok "
        assert json.loads(client.ask(b"j stats journal").split(b" ", 2)[2])["segments"] > 10
    with broker, client_of(broker) as client:
        for queue in (b"q", b"r"):
            client.send(b"c%b consume %b\n" % (queue, queue))
            found = [client.line().split(b" ") for _ in range(101)]
            assert [words[2] for words in found] == [*(b"m%d" % n for n in range(100)), b"last"]
            assert [len(words[4]) for words in found] == [*(n * 7 % 500 for n in range(100)), 1]
