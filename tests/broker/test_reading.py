"""Looking at queues without consuming: range, read, peek and stats over TCP, under load, after
crashes, and while the journal tidies up."""

import json
import socket
import struct
from collections import Counter
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Self

import anyio
import pytest

from mqks.broker.spine.base.ranges import numbers
from mqks.journal import queue_log
from mqks.journal.index import Index, QueueIndex
from mqks.journal.journal import Journal
from mqks.journal.living import living_in, living_of
from mqks.journal.memory import Memory
from mqks.server import running
from mqks.server.reads import Reads
from mqks.settings import Settings
from mqks.testing import Broker
from tests.kit.bare import BareWorld
from tests.kit.called import lines_of
from tests.kit.compiled import patches_modules
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

RUN = struct.Struct("<4q")


class Reader:
    """One connection that asks one thing at a time and understands `read`."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, WAIT_S)
        self.stream = self._socket.makefile("rwb")

    def send(self, *lines: str) -> None:
        self.stream.write("".join(f"{line}\n" for line in lines).encode())
        self.stream.flush()

    def ask(self, line: str) -> str:
        self.send(f"x {line}")
        return self.stream.readline().decode().removeprefix("x ok ").removesuffix("\n")

    def range(self, queue: str, *flags: str) -> dict[str, str]:
        answer = self.ask(" ".join(["range", queue, *flags]))
        return dict(word.split("=") for word in answer.split())

    def stats(self, what: str = "") -> object:
        return json.loads(self.ask(f"stats {what}".rstrip()))

    def page(self) -> tuple[dict[str, str], list[tuple[int, int, str]]]:
        """The header of one answer to read, and number, time and text of its messages."""
        header = self.stream.readline().decode()
        assert header.startswith("x ok --read "), header
        facts = dict(word.split("=") for word in header.split()[3:])
        body = self.stream.read(int(facts["bytes"]))
        start = RUN.size * int(facts["runs"])
        found = []
        for first, count, time_us, size in RUN.iter_unpack(body[:start]):
            lines = body[start : start + size].decode().split("\n")
            assert len(lines) == count + 1
            assert lines.pop() == ""
            found += [(seq, time_us, line) for seq, line in enumerate(lines, first)]
            start += size
        assert start == len(body)
        assert len(found) == int(facts["rows"])
        return facts, found

    def read(self, queue: str, first: int, *flags: str) -> list[tuple[int, int, str]]:
        """Everything from there on."""
        found: list[tuple[int, int, str]] = []
        while True:
            self.send(" ".join(["x read", queue, f"--from={first}", *flags]))
            facts, page = self.page()
            assert int(facts["next"]) >= first
            if not page:
                return found
            found += page
            first = int(facts["next"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self._socket.close()


@pytest.mark.slow
def test_a_log_is_read_in_pages_of_any_size(server: ServerProcess) -> None:
    with Reader(server.address) as reader:
        reader.ask("subscribe --confirm q e")
        sent = [f"m{i} event=e {'d' * (i % 300)}" for i in range(20_000)]
        for start in range(0, len(sent), 1000):
            chunk = sent[start : start + 1000]
            reader.send(*[line.replace(" event=", " publish ", 1) for line in chunk])
            assert reader.ask("publish --confirm elsewhere x") == ""
        facts = reader.range("q")
        assert (facts["first"], facts["next"]) == ("1", "20001")
        everything = reader.read("q", 1)
        assert [(seq, line) for seq, _, line in everything] == list(enumerate(sent, 1))
        times = [time_us for _, time_us, _ in everything]
        assert times == sorted(times)
        assert reader.read("q", 15_000, "--limit=7")[:20] == everything[14_999:15_019]
        assert reader.read("q", 1, "--to=500", "--limit=100") == everything[:499]
        assert reader.read("q", 30_000) == []
        # The first message of the batch that came then, and where a later time leads.
        for seq in (1, 7, 9_000, 20_000):
            time_us = everything[seq - 1][1]
            at = int(reader.range("q", f"--at={time_us}")["at"])
            assert at == 1 + times.index(time_us)
        assert reader.range("q", f"--at={times[-1] + 1}")["at"] == "20001"
        assert reader.range("q", "--at=0")["at"] == "1"


def test_attributes_and_traits_are_behind_the_data(server: ServerProcess) -> None:
    """Where an event's name could have them they would be told apart by nobody."""
    with Reader(server.address) as reader:
        reader.ask("subscribe --confirm q a,priority=3")
        for flags in ("--escaped --priority=5 --key=k --meta=a=b&c=d", "--key=k", "--meta=a=b", ""):
            reader.ask(f"publish --confirm {flags} a,priority=3 x".replace("  ", " "))
        told = [line for _, _, line in reader.read("q", 1, "--meta")]
        plain = [line for _, _, line in reader.read("q", 1)]
    line = "x event=a,priority=3 x"
    behind = ["\ta=b&c=d,escaped=1,priority=5,key=k", "\t,key=k", "\ta=b", ""]
    assert told == [line + each for each in behind]
    assert plain == ["x event=a,priority=3,escaped=1 x", line, line, line]


def test_a_new_queue_or_database_has_another_epoch(tmp_path: Path) -> None:
    epochs = []
    for name in ("one.db", "two.db"):
        with ServerProcess(tmp_path / name) as server, Reader(server.address) as reader:
            for _ in range(2):
                reader.ask("subscribe --confirm q e")
                reader.ask("publish --confirm e x")
                epochs.append(reader.range("q")["epoch"])
                # Who knows the queue as it was before does not trim the new one.
                for epoch in epochs[:-1]:
                    assert " error " in reader.ask(f"trim --confirm q 2 --epoch={epoch}")
                assert reader.range("q")["first"] == "1"
                assert reader.ask(f"trim --confirm q 2 --epoch={epochs[-1]}") == "1"
                assert reader.range("q")["first"] == "2"
                reader.ask("delete_queue --confirm q")
                assert reader.ask(f"trim --confirm q 2 --epoch={epochs[-1]}") == "0"
    assert len(set(epochs)) == 4


def test_more_reads_ahead_than_allowed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them come in one turn, however long it takes, and a read is answered after a turn."""
    monkeypatch.setattr(running, "CHUNK_S", inf)
    with Broker(tmp_path / "mqks.db") as broker, Reader(("127.0.0.1", broker.port)) as reader:
        reader.ask("subscribe --confirm q e")
        reader.send(*[f"r{i} peek q" for i in range(17)])
        answers = [reader.stream.readline().split() for _ in range(17)]
        assert answers[0][:2] == [b"r16", b"error"]
        assert answers[1:] == [[b"r%d" % i, b"ok", b"--end"] for i in range(16)]
        assert reader.ask("peek q") == "--end"


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_up_nobody(server: ServerProcess) -> None:
    with Reader(server.address) as slow, Reader(server.address) as reader:
        reader.ask("subscribe --confirm q e")
        for _ in range(40):
            reader.send(*[f"m publish e {'x' * 10_000}" for _ in range(100)])
            reader.ask("publish --confirm elsewhere x")
        before = server.resident_bytes
        slow.send(*["x read q --from=1"] * 16)
        for _ in range(20):
            assert len(reader.read("q", 3_900)) == 101
        assert reader.stats("connections")
        # One answer and one more: the others wait until those are taken.
        assert server.resident_bytes - before < 40 * 1024 * 1024
        pages = [slow.page()[1] for _ in range(16)]
        assert all(page == pages[0] for page in pages)


def test_a_queue_between_much_else_is_read_in_short_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads one holds up the others no longer than a few segments take."""
    monkeypatch.setattr(queue_log, "READ_DISK_BYTES", 250_000)
    with Broker(tmp_path / "mqks.db") as broker, Reader(("127.0.0.1", broker.port)) as reader:
        reader.ask("subscribe --confirm q e")
        reader.ask("subscribe --confirm log much")
        for number in range(20):
            # Both in one segment, however the line comes in.
            reader.send("t begin", f"m publish much {'x' * 100_000}", f"m{number} publish e x")
            reader.ask("commit --confirm")
        first, found = 1, []
        for _ in range(7):
            reader.send(f"x read q --from={first}")
            facts, page = reader.page()
            assert 0 < len(page) <= 3
            found += page
            first = int(facts["next"])
        assert [(seq, text) for seq, _, text in found] == [
            (number + 1, f"m{number} event=e x") for number in range(20)
        ]


@pytest.mark.timeout(60)
def test_a_segment_with_many_holes_is_settled_and_read() -> None:
    index, queue, count = Index(), QueueIndex(1, 1), 100_000
    segment = index.add_segment(1, 8_000_000)
    index.add_messages(segment, queue, 1, count, 8_000_000, 0)
    for number in range(1, count, 4):
        index.settle(segment, queue, [(number, 1)])
    [span] = queue.spans
    assert segment.live == count * 3 // 4
    assert [*living_in(span)] == [(number + 1, 3) for number in range(1, count, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_numbers_settled_together_are_those_of_their_segments(seed: int) -> None:
    """Whatever gaps are between the segments, and however many of them a range spans."""
    chance = Random(seed)
    index, queue, first = Index(), QueueIndex(1, 1), 1
    for segment_id in range(1, 9):
        first, count = first + chance.choice([0, 0, 3]), chance.randrange(1, 12)
        index.add_messages(index.add_segment(segment_id, 100), queue, first, count, 100, 0)
        first += count
    cuts = sorted(chance.sample(range(first + 5), 12))
    acks = [(start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=True)]
    speaker, before = index.add_segment(9, 100), [*numbers(living_of(queue, 0, first))]
    settled, about = {*numbers(acks)}, range(1, 9)

    index.settle(speaker, queue, acks)

    left = [number for number in before if number not in settled]
    assert [*numbers(living_of(queue, 0, first))] == left
    assert [index.segments[each].live for each in about] == [
        sum(span.first <= number < span.end for number in left) for span in queue.spans
    ]
    assert speaker.about == {
        span.segment.id for span in queue.spans if settled & {*range(span.first, span.end)}
    }


def counts(text: str) -> dict[str, Any]:
    return {name: int(number) for name, _, number in (word.partition("=") for word in text.split())}


def test_stats_come_in_pages_and_tell_the_same_as_counted(server: ServerProcess) -> None:
    with Reader(server.address) as reader:
        names = sorted(f"q{i}" for i in range(25))
        for name in names:
            reader.ask(f"subscribe --confirm {name} e {name}.own")
        reader.send("m publish e 1", "c consume --confirm q3 --manual-ack")
        assert reader.stream.readline() == b"c ok \n"
        assert reader.stream.readline() == b"c ok m event=e 1\n"
        reader.ask("publish --confirm nowhere 1")
        found: list[str] = []
        while page := reader.stats(f"queues --limit=10 --after={found[-1] if found else ''}"):
            assert isinstance(page, list)
            assert len(page) <= 10
            found += [row["name"] for row in page]
        assert found == names
        bindings: list[tuple[str, str]] = []
        after = ""
        while page := reader.stats(f"bindings --limit=7 {after}"):
            assert isinstance(page, list)
            bindings += [(row["queue"], row["event"]) for row in page]
            after = f"--after={bindings[-1][0]} --then={bindings[-1][1]}"
        assert bindings == sorted((name, event) for name in names for event in ("e", f"{name}.own"))
        totals = reader.stats()
        assert isinstance(totals, dict)
        counted = counts("connections=1 queues=25 bindings=50 consumers=1 messages_ready=24")
        counted |= counts("messages_unacked=1 received=2 routed=25 unroutable=1 confirmed=1")
        counted |= counts("delivered=1 redelivered=0 acknowledged=0 rejected=0 errors=0")
        assert {name: totals[name] for name in counted} == counted
        held = {"queue": "q3", "consumer": "c", "id": "m", "event": "e"} | counts("seq=1 retry=0")
        held |= {"data_bytes": 1, "progress": None, "progress_text": None}
        rows = reader.stats("unacked")
        assert isinstance(rows, list)
        assert [row.pop("delivered_us") > 0 for row in rows] == [True]
        assert rows == [held]
        assert reader.stats("unacked --after=q3 --then=1") == []
        queue = reader.stats("queue q3")
        assert isinstance(queue, dict)
        assert (queue["ready"], queue["unacked"], queue["consumer_ids"]) == (0, 1, ["c"])
        assert queue["events"] == ["e", "q3.own"]


@pytest.mark.anyio
async def test_who_asks_for_little_does_not_wait_for_those_who_ask_for_much() -> None:
    """Forty connections have sixteen peeks each under way that find nothing among 3000 messages."""
    store = await Memory().open(Settings(), print)
    journal = Journal(store)
    world = BareWorld()
    broker = world.broker
    lines = [b"s subscribe q e\n", *(b"m%d publish e x\n" % number for number in range(3000))]
    world.intake.receive(world.connection("new"), b"".join(lines))
    batch = broker.pending.take()
    await journal.write(batch.entry)
    broker.answers.committed(batch)

    answered: list[int] = []
    wanted = [b"p peek q --id=m7\n", b"p peek q --limit=1\n", b"p range q\n"]
    waited: list[int] = []
    asked_at = 0

    def flush() -> None:
        """A reply is in an outbox; from the hundredth one on the new connection asks, too."""
        nonlocal asked_at
        for connection in broker.flow.touched:
            connection.touched = False
            answered.append(connection.id)
            connection.outbox.clear()
            if connection is world.connection("new"):
                waited.append(len(answered) - asked_at)
                asked_at = 0
        broker.flow.touched = []
        if len(answered) >= 100 and wanted and not asked_at:
            asked_at = len(answered) + 1
            world.intake.receive(world.connection("new"), wanted.pop())
        reads.wake()

    reads = Reads(broker, journal, flush)
    for number in range(40):
        peeks = b"".join(b"p%d peek q --id=none\n" % each for each in range(16))
        world.intake.receive(world.connection(f"{number}"), peeks)
    async with anyio.create_task_group() as tasks:
        reads.start(tasks)
        reads.wake()
        while len(answered) < 40 * 16 + 3:
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert len(waited) == 3
    assert max(waited) < 10
    assert max(Counter(answered[:100]).values()) < 10, "all of them have their share"
    assert len(Counter(answered[:100])) == 40


@patches_modules
def test_the_first_living_message_of_a_segment_is_found_whatever_else_is_dead() -> None:
    def lines(gaps: int) -> int:
        index = Index()
        queue = index.touch(index.add_segment(1, 1 << 20), 1, 4 * gaps + 1, 1)
        index.add_messages(index.segments[1], queue, 1, 4 * gaps, 100 * gaps, 0)
        for number in range(1, 4 * gaps, 4):
            index.settle(index.segments[1], queue, [(number, 1)])

        def find() -> None:
            assert next(living_of(queue, 2 * gaps + 1, 4 * gaps + 1)) == (2 * gaps + 2, 3)
            wanted, _ = queue_log._choose(queue, 2 * gaps + 1, 4 * gaps + 1, 10, 1 << 20)
            assert len(wanted[1]) == 4

        find()  # What was settled is put in order.
        return lines_of(find)

    assert lines(100_000) < 50 * lines(100)
