"""Messages that move from one queue to another: never lost, never twice, whatever is killed when.

The broker and a journal in memory that knows entries and nothing else; a crash is what a new
broker finds there.
"""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.features.death import moves as moves_module
from mqks.broker.features.death.moves import move_ready
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.log import pending as pending_module
from mqks.broker.spine.queue import lane as lane_module
from mqks.settings import Settings
from tests.fuzz.disk import Disk
from tests.kit.compiled import patches_modules
from tests.kit.played import ALL, Played

SOURCE, TARGET = b"from", b"to"


class World(Played):
    """`memory_bytes` 0: what is written is on disk only."""

    def __init__(self, disk: Disk, memory_bytes: int = 0) -> None:
        super().__init__(Settings(memory_bytes=memory_bytes), disk)
        self.connection = self.broker.connect("test", local=True)

    def send(self, *lines: bytes) -> None:
        self.intake.receive(self.connection, b"".join(line + b"\n" for line in lines))

    def page(self) -> None:
        self.read()
        self.answer(ALL)

    def messages(self, name: bytes) -> list[bytes]:
        """What a reader of the journal would see."""
        queue = self.broker.queues[name]
        return [line for _, line in sorted(self.disk.queues[queue.id].lines.items())]

    def moves(self, end: int = 1 << 40) -> Work[int]:
        source, target = (self.broker.queues[name] for name in (SOURCE, TARGET))
        return move_ready(source, lambda message: (target, message), end=end)


def filled(disk: Disk, messages: int, memory_bytes: int = 0) -> World:
    world = World(disk, memory_bytes)
    world.send(b"s subscribe from e", b"s subscribe to f")
    world.send(*(b"m%d publish e x" % number for number in range(messages)))
    world.commit()
    return world


def names(lines: list[bytes]) -> list[int]:
    return [int(line[1 : line.index(b" ")]) for line in lines]


STEPS = st.lists(
    st.sampled_from(["move", "move", "page", "commit", "take", "fail", "write", "publish", "hold"]),
    max_size=40,
)


@given(steps=STEPS, memory_bytes=st.sampled_from([0, 1 << 20]), crash=st.integers(0, 40))
def test_a_crash_anywhere_loses_nothing_and_doubles_nothing(
    steps: list[str], memory_bytes: int, crash: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Few messages in each step.
        patch.setattr(moves_module, "STEP_MESSAGES", 2)
        patch.setattr(lane_module, "SCARCE_BYTES", 100)
        # Each lane is a piece of its own.
        patch.setattr(pending_module, "BATCH_QUEUES_MAX", 1)
        disk = Disk()
        world = filled(disk, 6, memory_bytes)
        # Some have been delivered before, and come back.
        world.send(b"c consume from --manual-ack")
        world.page()
        world.send(b"d delete_consumer c")
        world.commit()
        moves, published = world.moves(), count(100)
        written = set(range(6))
        for step in steps[:crash]:
            match step:
                case "move":
                    next(moves, None)
                case "page":
                    world.page()
                case "commit" if not world.in_flight:
                    world.commit()
                case "take":
                    world.take()
                case "write":
                    world.land()
                case "fail":
                    world.fail()
                case "publish":
                    world.send(b"m%d publish e x" % next(published))
                case "hold":
                    # Another lane, so that batches have several.
                    world.send(
                        b"h publish f x", b"c consume to --manual-ack", b"d delete_consumer c"
                    )
        again = World(disk)
        found = names([line for line in again.messages(SOURCE) if line[:1] == b"m"])
        found += names([line for line in again.messages(TARGET) if line[:1] == b"m"])
        assert [each for each, times in Counter(found).items() if times > 1] == []
        assert written <= set(found)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_waiting_messages_move_in_their_order_wherever_they_are(memory_bytes: int) -> None:
    world = filled(Disk(), 300, memory_bytes)
    world.send(b"p publish f before")
    moves = world.moves(end=201)
    moved = 0
    while True:
        try:
            next(moves)
        except StopIteration as end:
            moved = end.value
            break
        world.page()
    world.commit()
    assert moved == 200
    assert names(world.messages(SOURCE)) == list(range(200, 300))
    assert names(world.messages(TARGET)[1:]) == list(range(200))
    assert world.broker.queues[SOURCE].ready == 100


def test_a_message_that_was_moved_has_not_come_back_yet() -> None:
    world = filled(Disk(), 2)
    world.send(b"c consume from --manual-ack")
    world.page()
    world.send(b"r reject c m0", b"d delete_consumer c")
    world.commit()
    moves = world.moves()
    while next(moves, None) is not None:
        world.page()
    world.commit()
    lane = world.broker.queues[TARGET].lane
    assert not lane.marks
    world.connection.outbox.clear()
    world.send(b"c consume to")
    world.page()
    told = b"".join(world.connection.outbox)
    assert told == b"c ok m1 event=e x\nc ok m0 event=e x\n"


@patches_modules
def test_a_move_is_written_in_one_commit_among_very_many_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_module, "BATCH_QUEUES_MAX", 3)
    world = filled(Disk(), 4, 1 << 20)
    world.send(*(b"s subscribe q%d all" % number for number in range(10)))
    world.commit()
    world.send(b"m publish all x")
    piece = world.broker.pending.take()
    world.send(b"m publish e x")
    moves = world.moves()
    while next(moves, None) is not None:
        pass
    batch = world.broker.pending.take()
    lanes = {change.lane_id for change in batch.entry.changes}
    assert len(piece.entry.changes) == 3
    assert {world.broker.queues[name].id for name in (SOURCE, TARGET)} <= lanes
