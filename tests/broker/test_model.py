"""The broker with its real journal against the plain model, step by step, crashes included.

Every line that any consumer gets must be the model's, in the model's order: so nothing confirmed
is lost, nothing goes to two consumers at once, each queue keeps its order, and a confirmed ack
never comes back.
"""

import asyncio
import re
import shutil
import sys
import tempfile
from copy import deepcopy
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.log.pending import Batch, ErrorRecord, Run
from mqks.broker.spine.queue import blocks as blocks_module
from mqks.broker.spine.queue import lane as lane_module
from mqks.broker.spine.queue.paging import page_in
from mqks.broker.spine.queue.shared import Place
from mqks.errors import DiskFull
from mqks.journal import compaction, index, journal
from mqks.journal.compaction import Compaction
from mqks.journal.default_store import open_store
from mqks.journal.index import QueueIndex
from mqks.journal.journal import Journal
from mqks.journal.memory import Memory
from mqks.journal.recovery import Recovery
from mqks.journal.store import OpenStore
from mqks.settings import DatabaseUrl, Settings
from tests.fuzz.invariants import waiting
from tests.kit.compiled import patches_modules
from tests.kit.marks import slow
from tests.kit.model import Message, Model, ModelBatch
from tests.kit.postgres import Postgres

CONNECTIONS = st.sampled_from(["k1", "k2", "k3"])
CONSUMERS = st.sampled_from(["c1", "c2", "c3"])
QUEUES = st.sampled_from(["q1", "q2"])
EVENTS = st.sampled_from(["e1", "a.b", "a.c.b"])
SOME_EVENTS = st.lists(EVENTS, max_size=3)
MESSAGES = st.sampled_from(["m1", "m#2", "m#3"])
JOBS = st.sampled_from(["j1", "j2"])
PRIORITIZED = st.tuples(MESSAGES, st.sampled_from([5, -1, 0]))
SETTLED = st.sampled_from(["m1", "m#2", "m#3", "--all"])
RULES = st.sampled_from([None, None, "", "5"])
DELAYS = st.sampled_from([1.0, 2.0, 4.0])
FLAGS = st.sets(
    st.sampled_from(
        ["--once", "--mandatory", "--confirm", "--meta=a=b", "--key=k", "--ttl=1000000"]
    )
)
BOUND_MASKS = st.lists(st.sampled_from(["a.*", "a.**", "*.*b", "**"]), max_size=1)
MASKS = st.lists(st.sampled_from(["a.*", "*.b", "*", "a.*.*", "a*.b", "a.**", "**"]), max_size=2)


def by_id(lines: dict[str, list[str]]) -> dict[tuple[str, str, bool], list[str]]:
    """Connection, request or consumer id, and whether it is an update → what was told, errors
    without their ids. An update may overtake a delivery that has to come from disk."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for connection, told in lines.items():
        for line in told:
            line = re.sub(" error [0-9a-f]{24}$", " error", line)
            key = connection, line.split(" ")[0], " ok --update " in line
            found.setdefault(key, []).append(line)
    return found


class Machine(RuleBasedStateMachine):
    is_in_memory = False
    """The journal's store; else it is a file of SQLite."""
    share = 2
    """Of the examples, one in so many is played: half where others have all of the rules, too."""

    def __init__(self) -> None:
        super().__init__()
        self.open_store: OpenStore = Memory().open if self.is_in_memory else open_store
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.now = 0.0
        self.model = Model()
        self.on_disk = deepcopy(self.model)
        self.requests = count(1)
        self.is_slow = False
        """Whether the disk is: what is only there comes when `a_page_comes`."""
        self.page: tuple[Place, int | None, list[Run]] | None = None
        """The page that is under way: its queue, where it begins, what was read."""
        self.seen: dict[tuple[int, int], str] = {}
        """Queue and number → the message that a reader has seen there."""

    @initialize(
        bounds=st.sampled_from([(0, 2**28), (2**29, 2**28), (2**29, 1), (2**29, 700)]),
        text_file_bytes_min=st.sampled_from([0, 1, 100]),
    )
    def begin(self, bounds: tuple[int, int], text_file_bytes_min: int) -> None:
        memory_bytes, unacked_bytes_max = bounds
        self.bounded = unacked_bytes_max < 2**28
        self.model.unacked_bytes_max = unacked_bytes_max
        self.on_disk = deepcopy(self.model)
        if self.bounded:
            # The bound is looked at before each step of a delivery, by the model each message.
            self.patch.setattr(blocks_module, "DELIVERY_BYTES", 1)
        if not memory_bytes:
            self.patch.setattr(lane_module, "SCARCE_BYTES", 100)
            self.patch.setattr(blocks_module, "BLOCK", 4)
            self.patch.setattr(blocks_module, "SHORT", 1)
        self.settings = Settings(
            db=self.directory / "mqks.db",
            # Without fsync it is quicker; what is tested is what the file says.
            synchronous="off",
            text_file_bytes_min=text_file_bytes_min,
            memory_bytes=memory_bytes,
            unacked_bytes_max=unacked_bytes_max,
        )
        self._open()
        for number in ("1", "2", "3"):
            self.consume_more(f"k{number}", f"c{number}", "q1", confirm=False)

    def _open(self) -> None:
        store = self.runner.run(self.open_store(self.settings, lambda line: None))
        self.journal = Journal(store)
        numbers = count(1)
        self.broker = Broker(
            self.settings,
            clock=lambda: self.now,
            now_us=lambda: int(self.now * 1e6),
            new_error_id=lambda: (f"{next(numbers):024x}", 0),
            on_error=self.refused,
        )
        self.intake = Intake(self.broker)
        damage: list[str] = []
        recovery = Recovery(self.journal, self.broker, damage.append)
        self.runner.run(recovery.run(salvage=False))
        assert not damage
        self.broker.start_timers()
        self.connections: dict[str, Connection] = {}
        self.received: dict[str, list[str]] = {}

    def teardown(self) -> None:
        self.runner.run(self.journal.store.close())
        self.runner.close()
        shutil.rmtree(self.directory)
        self.patch.undo()

    @staticmethod
    def refused(record: ErrorRecord) -> bool:
        told = "no queue is bound to", "consumes under this id now", "has ended it"
        assert any(reason in record.reason for reason in told)
        return True

    def send(self, name: str, line: str) -> None:
        if name not in self.connections:
            self.connections[name] = self.broker.connect(name, local=True)
        for each in line.splitlines() if self.bounded else [line]:
            self.intake.receive(self.connections[name], each.encode() + b"\n")

    def bound_to(self, event: str) -> list[str]:
        return [
            queue.name.decode() for queue in self.broker.bindings.routes.route(event.encode()) or ()
        ]

    # -- rules: what clients do

    @rule(connection=CONNECTIONS, ids=st.lists(MESSAGES, min_size=1, max_size=5), event=EVENTS)
    def publish(self, connection: str, ids: list[str], event: str) -> None:
        datas = [f"d{next(self.requests)}" for _ in ids]
        lines = [f"{m} publish {event} {d}" for m, d in zip(ids, datas, strict=True)]
        self.send(connection, "\n".join(lines))
        for message_id, data in zip(ids, datas, strict=True):
            self.model.publish(message_id, event, data, self.bound_to(event))

    # These once more, and so that they meet: rules are tried about equally often, and most of the
    # others take away what a delivery needs.
    @rule(connection=CONNECTIONS, ids=st.lists(MESSAGES, min_size=2, max_size=5))
    def publish_more(self, connection: str, ids: list[str]) -> None:
        self.publish(connection, ids, "e1")

    @rule(connection=CONNECTIONS, consumer_id=CONSUMERS, queue=QUEUES, confirm=st.booleans())
    def consume_more(self, connection: str, consumer_id: str, queue: str, confirm: bool) -> None:
        self.consume(connection, consumer_id, queue, [], ["e1"], None, True, confirm)

    @rule(connection=CONNECTIONS, ids=st.lists(MESSAGES, min_size=1, max_size=4))
    def publish_in_batch(self, connection: str, ids: list[str]) -> None:
        if self.bounded:
            ids = ids[:1]
        if self.model.batch is None:
            number = next(self.requests)
            self.send(connection, f"o open_batch b1 publish e1 d{number}")
            self.model.batch = ModelBatch(number, f"d{number}")
        datas = [f"d{next(self.requests)}" for _ in ids]
        lines = [f"{m} publish --batch=b1 e1 {d}" for m, d in zip(ids, datas, strict=True)]
        self.send(connection, "\n".join(lines))
        for message_id, data in zip(ids, datas, strict=True):
            self.model.publish_in_batch(message_id, data, self.bound_to("e1"))

    @rule(connection=CONNECTIONS)
    def close_batch(self, connection: str) -> None:
        self.send(connection, "cb close_batch b1")
        if self.model.batch is not None:
            self.model.batch.closed = True

    def _take(self) -> Batch:
        """What follows a batch is published as the commit takes what is pending."""
        queues = self.bound_to("e1")
        batch = self.broker.pending.take()
        self.model.end_batch(queues)
        return batch

    @rule(connection=CONNECTIONS, message_id=MESSAGES, event=EVENTS)
    def publish_confirmed(self, connection: str, message_id: str, event: str) -> None:
        data = f"d{next(self.requests)}"
        self.send(connection, f"{message_id} publish --confirm {event} {data}")
        self.model.publish(message_id, event, data, self.bound_to(event))
        self.model.confirm(connection, message_id)

    @rule(
        connection=CONNECTIONS,
        publishes=st.lists(st.tuples(MESSAGES, FLAGS), min_size=1),
        event=EVENTS,
    )
    def publish_with_flags(
        self, connection: str, publishes: list[tuple[str, set[str]]], event: str
    ) -> None:
        """Among others that may come twice or go nowhere, all in one chunk."""
        lines = []
        for message_id, flags in publishes:
            data = f"d{next(self.requests)}"
            words = [message_id, "publish", *sorted(flags), event, data]
            lines.append(" ".join(words))
            queues = self.bound_to(event)
            self.model.publish_with(connection, message_id, event, data, flags, queues)
        self.send(connection, "\n".join(lines))

    @rule(connection=CONNECTIONS, name=QUEUES, share=st.floats(0, 1), confirm=st.booleans())
    def trim(self, connection: str, name: str, share: float, confirm: bool) -> None:
        queue, count, end = self.broker.queues.get(name.encode()), 0, 3
        if queue is not None:
            numbers = sorted(waiting(queue))
            count = round(len(numbers) * share)
            end = numbers[count] if count < len(numbers) else queue.lane.next_seq
        self.send(connection, f"t trim{' --confirm' * confirm} {name} {end}")
        dropped = self.model.trim(name, count)
        if confirm:
            self.model.confirm(connection, "t", dropped)

    @precondition(lambda self: self.model.queues)
    @rule(connection=CONNECTIONS, data=st.data(), pauses=st.booleans())
    def pause_or_resume(self, connection: str, data: st.DataObject, pauses: bool) -> None:
        self.pause(connection, data.draw(st.sampled_from(sorted(self.model.queues))), pauses)

    def pause(self, connection: str, name: str, pauses: bool) -> None:
        request = f"pause --confirm {name} --deliveries" if pauses else f"resume --confirm {name}"
        self.send(connection, f"p {request}")
        self.model.queues[name].paused = pauses
        self.model.deliver(name)
        self.model.confirm(connection, "p")

    @rule(connection=CONNECTIONS, name=QUEUES)
    def purge(self, connection: str, name: str) -> None:
        self.send(connection, f"t purge --confirm {name}")
        self.model.confirm(connection, "t", self.model.trim(name, sys.maxsize))

    @rule(
        connection=CONNECTIONS,
        consumer_id=CONSUMERS,
        queue=QUEUES,
        events=SOME_EVENTS,
        add=SOME_EVENTS,
        delete=RULES,
        manual_ack=st.booleans(),
        confirm=st.booleans(),
    )
    def consume(
        self,
        connection: str,
        consumer_id: str,
        queue: str,
        events: list[str],
        add: list[str],
        delete: str | None,
        manual_ack: bool,
        confirm: bool,
    ) -> None:
        words = [consumer_id, "consume"] + ["--confirm"] * confirm + [queue, *events]
        words += ["--add", *add] if add else []
        if delete is not None:
            words.append("--delete-queue-when-unused" + (f"={delete}" if delete else ""))
        words += ["--manual-ack"] * manual_ack
        self.send(connection, " ".join(words))
        self.model.consume(connection, consumer_id, queue, events, add, delete, manual_ack, confirm)

    @rule(
        connection=CONNECTIONS,
        queue=QUEUES,
        events=SOME_EVENTS,
        remove=SOME_EVENTS,
        masks=MASKS,
        add=SOME_EVENTS,
        add_masks=BOUND_MASKS,
    )
    def rebind(
        self,
        connection: str,
        queue: str,
        events: list[str],
        remove: list[str],
        masks: list[str],
        add: list[str],
        add_masks: list[str],
    ) -> None:
        words = ["rb", "rebind", queue, *events]
        flags = {"--add-mask": add_masks, "--add": add, "--remove-mask": masks, "--remove": remove}
        for flag, names in flags.items():
            words += [flag, *names] if names else []
        self.send(connection, " ".join(words))
        self.model.rebind(queue, events, remove, masks, add, add_masks)

    @rule(connection=CONNECTIONS, consumer_id=CONSUMERS, message_id=SETTLED, confirm=st.booleans())
    def ack(self, connection: str, consumer_id: str, message_id: str, confirm: bool) -> None:
        flag = " --confirm" if confirm else ""
        self.send(connection, f"a ack{flag} {consumer_id} {message_id}")
        self.model.ack(consumer_id, message_id)
        if confirm:
            self.model.confirm(connection, "a")

    @rule(connection=CONNECTIONS, consumer_id=CONSUMERS, message_id=SETTLED, confirm=st.booleans())
    def reject(self, connection: str, consumer_id: str, message_id: str, confirm: bool) -> None:
        flag = " --confirm" if confirm else ""
        self.send(connection, f"r reject{flag} {consumer_id} {message_id}")
        self.model.reject(consumer_id, message_id)
        if confirm:
            self.model.confirm(connection, "r")

    @rule(
        connection=CONNECTIONS,
        consumer_id=CONSUMERS,
        publishes=st.lists(st.tuples(MESSAGES, EVENTS), max_size=3),
        is_done=st.booleans(),
    )
    def transaction(
        self, connection: str, consumer_id: str, publishes: list[tuple[str, str]], is_done: bool
    ) -> None:
        """It acks one message that the consumer holds, and publishes others."""
        if self.bounded:
            publishes = publishes[:1]  # More are one step of a delivery.
        consumer = self.model.consumers.get(consumer_id)
        held = consumer.unacked[:1] if consumer is not None else []
        datas = [f"d{next(self.requests)}" for _ in publishes]
        made = [(*each, data) for each, data in zip(publishes, datas, strict=True)]
        lines = ["x begin", *(f"x ack {consumer_id} {message.id}" for message in held)]
        lines += [f"{m} publish {event} {data}" for m, event, data in made]
        lines.append("x commit --confirm" if is_done else "x rollback")
        self.send(connection, "\n".join(lines))
        if is_done:
            for message in held:
                self.model.ack(consumer_id, message.id)
            for message_id, event, data in made:
                self.model.publish(message_id, event, data, self.bound_to(event))
            self.model.confirm(connection, "x")

    @rule(connection=CONNECTIONS, consumer_id=CONSUMERS, tell=st.booleans())
    def delete_consumer(self, connection: str, consumer_id: str, tell: bool = False) -> None:
        self.send(connection, f"dc delete_consumer {consumer_id}{' --tell' * tell}")
        self.model.delete_consumer(connection, consumer_id, tell=tell)

    @rule(connection=CONNECTIONS, queue=QUEUES)
    def delete_queue(self, connection: str, queue: str) -> None:
        self.send(connection, f"dq delete_queue {queue}")
        self.model.delete_queue(queue)

    @rule(connection=CONNECTIONS, queue=QUEUES, delete=st.sampled_from(["", "5"]))
    def delete_when_unused(self, connection: str, queue: str, delete: str) -> None:
        value = f"={delete}" if delete else ""
        self.send(connection, f"dq delete_queue {queue} --when-unused{value}")
        self.model.delete_when_unused(queue, delete)

    @rule(connection=CONNECTIONS)
    def disconnect(self, connection: str) -> None:
        known = self.connections.pop(connection, None)
        if known is not None:
            consumer_ids = [consumer_id.decode() for consumer_id in known.consumers]
            self.broker.disconnect(known)
            self.model.disconnect(connection, consumer_ids)
        self.received.pop(connection, None)
        self.model.told.pop(connection, None)

    # -- rules: what happens around them

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.broker.schedule.run_due(self.broker.turns)
        self.model.advance(seconds)

    @rule()
    def commit(self) -> None:
        self._flush()
        batch = self._take()
        self.runner.run(self.journal.write(batch.entry))
        # What the confirms set going is not in this commit any more.
        self.on_disk = deepcopy(self.model)
        queues = self.broker.queues.items()
        self.model.commit({n.decode() for n, each in queues if not each.lane.blocks.is_first_held})
        self.broker.answers.committed(batch)
        self._tell_what_is_away()
        for name in self.on_disk.queues:
            self.read_all(name)

    def read_all(self, name: str) -> None:
        """What a reader sees is what is on disk, and a number is never another message's."""
        queue_id = self.broker.queues[name.encode()].id
        queue = self.journal.index.queues.get(queue_id, QueueIndex(1, 1))
        first, told = 1, []
        while first < queue.next_seq:
            page = self.runner.run(self.journal.log.page(queue_id, queue, first, None, 3, 100))
            assert first < page.next_seq <= queue.next_seq
            for piece in page.pieces:
                for seq, line in enumerate(piece.text.decode().splitlines(), piece.first):
                    assert first <= seq < page.next_seq
                    assert self.seen.setdefault((queue_id, seq), line) == line
                    told.append(line.partition("\t")[0])
            first = page.next_seq
        assert told == [f"{m.id} event={m.event} {m.data}" for m in self.on_disk.messages(name)]
        living = [seq for (its_queue, seq), line in self.seen.items() if its_queue == queue_id]
        assert not living or max(living) < queue.next_seq

    @rule(queue=QUEUES)
    def commit_fails(self, queue: str) -> None:
        self._flush()
        batch = self._take()
        if batch.waiters:
            # What a failure tells to those who wait is the disk-full tests' to check.
            self.broker.pending.put_back(batch)
            return
        self.broker.answers.failed(batch, DiskFull("full"), for_room=True)
        self.broker.pending.put_back(batch)

    @rule(idle=st.booleans())
    def maintain(self, idle: bool) -> None:
        for _ in range(20):
            if not self.runner.run(Compaction(self.journal).maintain(idle=idle)):
                break

    @rule()
    def crash(self) -> None:
        self.runner.run(self.journal.store.close())
        self.is_slow, self.page = False, None
        self.model = deepcopy(self.on_disk)
        self.model.recover(self.now)
        self._open()
        self._tell_what_is_away()
        if self.bounded:
            # Who waits for a page is overtaken by who does not: the model knows no pages.
            self._page_in_all()
        # A start notes what it gave back; nothing else changes before the first commit.
        self.on_disk = deepcopy(self.model)

    def _page_in_all(self) -> None:
        for queue in self.broker.queues.values():
            while queue.lane.blocks.on_disk:
                self._page_in(queue)

    def _page_in(self, queue: Place) -> None:
        page_in(queue, *self._read_page(queue))

    def _read_page(self, queue: Place) -> tuple[int | None, list[Run]]:
        first = queue.order.page_first
        return first, self.runner.run(self.journal.log.read(queue.id, first)) if first else []

    # Which consumer held back goes first depends on pages then, of which the model knows nothing.
    @precondition(lambda self: not self.is_slow and not self.bounded)
    @rule()
    def the_disk_becomes_slow(self) -> None:
        self.is_slow = True
        self._tell_what_is_away()

    @precondition(lambda self: not self.bounded)
    @rule(
        connection=CONNECTIONS,
        ids=st.lists(MESSAGES, min_size=2, max_size=5),
        only_new=st.booleans(),
        share=st.none() | st.floats(0, 1),
    )
    def a_page_is_under_way(
        self, connection: str, ids: list[str], only_new: bool, share: float | None
    ) -> None:
        """Of messages that were never delivered, too: chance seldom finds the way there."""
        self.crash()
        self.consume_more(connection, "c1", "q1", confirm=False)
        self._flush()
        self.delete_consumer(connection, "c1")
        if only_new:
            self.purge(connection, "q1")
        self.publish_more(connection, ids)
        self.commit()
        self.crash()
        self.the_disk_becomes_slow()
        self.consume_more(connection, "c1", "q1", confirm=False)
        self.a_page_is_read()
        if share is not None and self.page is not None:
            self.trim(connection, "q1", share, confirm=False)
            self.a_page_comes()

    @precondition(
        lambda self: self.is_slow and self.page is None and self.broker.shared.wanted.pages
    )
    @rule()
    def a_page_is_read(self) -> None:
        if self.broker.shared.wanted.pages:
            queue = self.broker.shared.wanted.pages.pop()
            self.page = queue, *self._read_page(queue)

    @precondition(lambda self: self.page is not None)
    @rule()
    def a_page_comes(self) -> None:
        assert self.page is not None
        (queue, first, runs), self.page = self.page, None
        page_in(queue, first, runs)
        self._tell_what_is_away()
        self._deliver_what_came()

    @precondition(lambda self: self.is_slow and self.page is None)
    @rule()
    def the_disk_becomes_fast(self) -> None:
        self.is_slow = False
        self._tell_what_is_away()
        self._deliver_what_came()

    def _tell_what_is_away(self) -> None:
        """The model is told which of its messages are only on a slow disk."""
        for name, model_queue in self.model.queues.items():
            queue = self.broker.queues[name.encode()]
            away = [line is None for _, line in queue.lane.blocks]
            for message in model_queue.ready:
                message.is_away = False
            # Those that have come may have been delivered in the same moment: they are the first.
            for message, is_away in zip(model_queue.ready[::-1], away[::-1], strict=False):
                message.is_away = is_away and self.is_slow

    def _deliver_what_came(self) -> None:
        for name in self.model.queues:
            self.model.deliver(name)

    # -- what must hold

    def _flush(self) -> None:
        broker = self.broker
        self._fetch()
        while broker.flow.touched or (broker.shared.wanted.pages and not self.is_slow):
            while broker.shared.wanted.pages and not self.is_slow:
                self._page_in(broker.shared.wanted.pages.pop())
            for connection in broker.flow.touched:
                told = b"".join(connection.outbox).decode().split("\n")
                self.received.setdefault(connection.address, []).extend(told[:-1])
                connection.touched = False
                connection.outbox.clear()
                connection.outbox_bytes = 0
            broker.flow.touched = []
            self._fetch()

    def _fetch(self) -> None:
        """What is wanted from disk apart from pages comes at once."""
        broker = self.broker
        while broker.shared.wanted.fetches:
            fetches, broker.shared.wanted.fetches = broker.shared.wanted.fetches, []
            for queue, numbers, then in fetches:
                lines = self.runner.run(self.journal.log.fetch(queue.id, numbers))
                if not queue.deleted:
                    then(lines)
            broker.go_on()
        for connection in self.connections.values():
            if connection.overrun:
                self.intake.receive(connection, b"")

    @invariant()
    def every_line_is_the_models(self) -> None:
        self._flush()
        told, self.model.told = self.model.told, {}
        received, self.received = self.received, {}
        assert by_id(received) == by_id(told)

    @invariant()
    def every_queue_is_the_models(self) -> None:
        names = {name.decode(): queue for name, queue in self.broker.queues.items()}
        assert {name: queue.ready for name, queue in names.items()} == {
            name: len(queue.ready) for name, queue in self.model.queues.items()
        }
        bindings = self.broker.bindings
        assert {
            name.decode(): {each.decode() for each in chain(*bindings.bound(name))}
            for name in {*bindings.by_name, *bindings.masks_by_name}
        } == self.model.bindings

    @invariant()
    def the_batch_is_the_models(self) -> None:
        batch, rows = self.model.batch, self.broker.batches.rows
        assert {
            name: (row.living, row.row.total, row.row.closed) for name, row in rows.items()
        } == (
            {} if batch is None else {b"b1": (self.model.living(batch), batch.total, batch.closed)}
        )


class MachineWithTimes(Machine):
    """Messages wait for a time, die, and are redriven. Played by those below, which add to it."""

    share = 1

    @initialize(
        bounds=st.sampled_from([(0, 2**28), (2**29, 2**28)]),
        text_file_bytes_min=st.sampled_from([0, 1, 100]),
    )
    def begin(self, bounds: tuple[int, int], text_file_bytes_min: int) -> None:
        Machine.begin(self, bounds, text_file_bytes_min)

    @rule()
    def crash(self) -> None:
        Machine.crash(self)
        # What has become due meanwhile joins before anything else does.
        self.time_passes(0.0)
        self._flush()

    def the_disk_becomes_slow(self) -> None:
        """It stays fast: what comes from it, comes in the same step."""

    def a_page_is_under_way(self, *_: object) -> None:
        """No page is."""

    @rule(connection=CONNECTIONS, message_id=MESSAGES, event=EVENTS, delay=DELAYS)
    def publish_later(self, connection: str, message_id: str, event: str, delay: float) -> None:
        data = f"d{next(self.requests)}"
        self.send(connection, f"{message_id} publish --confirm --delay={delay} {event} {data}")
        self.model.publish_later(message_id, event, data, self.bound_to(event), delay)
        self.model.confirm(connection, message_id)

    @rule(
        connection=CONNECTIONS,
        consumer_id=CONSUMERS,
        message_id=SETTLED,
        how=st.sampled_from(["reject", "reject --dead", "release", "touch --for=0"]),
        delay=st.just(0.0) | DELAYS,
    )
    def give_up(
        self, connection: str, consumer_id: str, message_id: str, how: str, delay: float
    ) -> None:
        action, _, flag = how.partition(" ")
        delay = 0.0 if flag else delay
        words = ["g", action, "--confirm", consumer_id, message_id]
        words += [flag] * bool(flag) + [f"--delay={delay}"] * bool(delay)
        self.send(connection, " ".join(words))
        self.model.give_up(consumer_id, message_id, how, delay)
        self.model.confirm(connection, "g")

    @rule(connection=CONNECTIONS, queue=QUEUES)
    def set_dead_letters(self, connection: str, queue: str) -> None:
        self.send(connection, f"s set_queue --confirm {queue} --dead-letters=dead")
        self.model.set_dead_letters(queue, "dead")
        self.model.confirm(connection, "s")

    @precondition(lambda self: "dead" in self.model.queues)
    @rule(connection=CONNECTIONS)
    def redrive(self, connection: str) -> None:
        self.send(connection, "rd redrive --confirm dead")
        self._fetch()
        self.model.confirm(connection, "rd", self.model.redrive("dead"))

    # Chance seldom finds the ways there.
    @rule(
        connection=CONNECTIONS,
        ids=st.lists(MESSAGES, min_size=1, max_size=4),
        delay=DELAYS,
        crashes=st.booleans(),
        more=st.lists(MESSAGES, max_size=2),
    )
    def some_are_due(
        self, connection: str, ids: list[str], delay: float, crashes: bool, more: list[str]
    ) -> None:
        """Some of them may be on disk only, and `more` in memory."""
        self.consume_more(connection, "c1", "q1", confirm=False)
        for message_id in ids:
            self.publish_later(connection, message_id, "e1", delay)
        self.commit()
        if crashes:
            self.crash()
            self.consume_more(connection, "c1", "q1", confirm=False)
            self._flush()
        for message_id in more:
            self.publish_later(connection, message_id, "e1", delay)
        self.time_passes(delay)

    @rule(
        connection=CONNECTIONS,
        ids=st.lists(MESSAGES, min_size=1, max_size=4),
        consumer_id=CONSUMERS,
        commits=st.sets(st.integers(0, 2)),
    )
    def some_die_and_come_back(
        self, connection: str, ids: list[str], consumer_id: str, commits: set[int]
    ) -> None:
        self.consume_more(connection, consumer_id, "q1", confirm=False)
        self.set_dead_letters(connection, "q1")
        self.publish_more(connection, ids)
        for step in range(3):
            self._flush()
            if step in commits:
                self.commit()
            if step == 0:
                self.give_up(connection, consumer_id, "--all", "reject --dead", 0.0)
            elif step == 1:
                self.redrive(connection)

    @rule(connection=CONNECTIONS, queue=QUEUES, message_id=SETTLED | st.just("m#*"))
    def cancel(self, connection: str, queue: str, message_id: str) -> None:
        self.send(connection, f"cl cancel --confirm {queue} {message_id}")
        self._fetch()
        self.model.confirm(connection, "cl", self.model.cancel(queue, message_id))


class MachineWithJobs(MachineWithTimes):
    """What becomes of some messages is kept."""

    @precondition(lambda self: "q1" in self.model.queues)
    @rule(connection=CONNECTIONS, job=JOBS, delay=st.just(0.0) | DELAYS)
    def submit(self, connection: str, job: str, delay: float) -> None:
        data = f"d{next(self.requests)}"
        flags = f"--keep-result=604800 --to=q1{f' --delay={delay}' * bool(delay)}"
        self.send(connection, f"{job} publish --confirm {flags} e1 {data}")
        self.model.submit(job, "q1", data, delay)
        self.model.confirm(connection, job)

    @rule(connection=CONNECTIONS, consumer_id=CONSUMERS, job=JOBS)
    def ack_job(self, connection: str, consumer_id: str, job: str) -> None:
        self.send(connection, f"a ack --confirm {consumer_id} {job} --result=x")
        self.model.ack(consumer_id, job)
        self.model.confirm(connection, "a")

    @rule(
        connection=CONNECTIONS,
        consumer_id=CONSUMERS,
        job=JOBS,
        how=st.sampled_from(["reject", "reject --dead", "release"]),
        delay=st.just(0.0) | DELAYS,
    )
    def give_up_job(
        self, connection: str, consumer_id: str, job: str, how: str, delay: float
    ) -> None:
        self.give_up(connection, consumer_id, job, how, delay)

    @rule(connection=CONNECTIONS, job=JOBS)
    def cancel_job(self, connection: str, job: str) -> None:
        self.send(connection, f"cj cancel_job --confirm q1 {job}")
        self._fetch()
        self.model.confirm(connection, "cj", self.model.cancel_job("q1", job))

    @invariant()
    def every_job_is_the_models(self) -> None:
        self._flush()
        while self.broker.has_work and not self.broker.go_on():
            pass
        for job in self.model.jobs:
            told = self.broker.results.told(job.encode()).decode().split(" ")[0]
            assert told in self.model.job_states(job), job
        assert len(self.broker.results.rows) == len(self.model.jobs)


class MachineWithPriorities(MachineWithTimes):
    """The same, of several priorities."""

    is_in_memory = True

    def send(self, name: str, line: str) -> None:
        """What comes from disk, comes before the next request: one of a higher priority that joins
        meanwhile would go first, and the model knows no disk."""
        super().send(name, line)
        self._flush()

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        """So does what is due, before any of it is delivered."""
        delivering = [name for name, queue in self.model.queues.items() if not queue.paused]
        for name in delivering:
            self.pause("k1", name, True)
        super().time_passes(seconds)
        self._flush()
        for name in delivering:
            if name in self.model.queues:
                self.pause("k1", name, False)

    @rule(
        connection=CONNECTIONS,
        publishes=st.lists(PRIORITIZED, min_size=1, max_size=5),
    )
    def publish_with_priority(self, connection: str, publishes: list[tuple[str, int]]) -> None:
        datas = [f"d{next(self.requests)}" for _ in publishes]
        told = [*zip(publishes, datas, strict=True)]
        lines = [f"{m} publish --priority={p} e1 {d}" for (m, p), d in told]
        self.send(connection, "\n".join(lines))
        for (message_id, priority), data in told:
            self.model.publish(message_id, "e1", data, self.bound_to("e1"), priority)

    @rule(
        connection=CONNECTIONS,
        publishes=st.lists(PRIORITIZED, min_size=2, max_size=5),
        crashes=st.booleans(),
    )
    def some_wait(self, connection: str, publishes: list[tuple[str, int]], crashes: bool) -> None:
        """And are delivered then: chance seldom finds the way there."""
        self.consume_more(connection, "c1", "q1", confirm=False)
        self.crash()
        self.publish_with_priority(connection, publishes)
        if crashes:
            self.commit()
            self.crash()
        self.consume_more(connection, "c1", "q1", confirm=False)


class MachineWithKeys(MachineWithTimes):
    """The same, of unique messages."""

    is_in_memory = True

    def send(self, name: str, line: str) -> None:
        """What comes from disk, comes before the next request: the model knows no disk."""
        super().send(name, line)
        while any(connection.works for connection in self.connections.values()):
            self.broker.go_on()
            self._flush()
        self._flush()

    @rule(
        connection=CONNECTIONS,
        event=EVENTS,
        key=st.sampled_from(["k", "l"]),
        until_acked=st.booleans(),
        replaces=st.booleans(),
        delay=st.just(0.0) | DELAYS,
    )
    def publish_unique(
        self, connection: str, event: str, key: str, until_acked: bool, replaces: bool, delay: float
    ) -> None:
        number, queues = next(self.requests), self.bound_to(event)
        flags = [f"--unique={key}{',until=acked' * until_acked}{',on=replace' * replaces}"]
        flags += [f"--delay={delay}"] if delay else []
        words = [f"u{number} publish --confirm", *flags, event, f"d{number}"]
        self.send(connection, " ".join(words))
        wanted = Message(0, f"u{number}", event, f"d{number}", unique=key, until_acked=until_acked)
        self.model.publish_unique(connection, wanted, queues, replaces, delay)

    @rule(
        connection=CONNECTIONS,
        publishes=st.lists(st.tuples(st.sampled_from(["k", "l"]), st.booleans()), min_size=1),
        crashes=st.booleans(),
    )
    def some_are_replaced(
        self, connection: str, publishes: list[tuple[str, bool]], crashes: bool
    ) -> None:
        """And their keys are learned from disk: chance seldom finds the way there."""
        self.consume_more(connection, "c1", "q1", confirm=False)
        self.pause(connection, "q1", True)
        for key, until_acked in publishes:
            self.publish_unique(connection, "e1", key, until_acked, True, 0.0)
            self.publish(connection, ["m1"], "e1")
        if crashes:
            self.commit()
            self.crash()
        self.publish_unique(connection, "e1", "k", False, False, 0.0)
        self.consume_more(connection, "c1", "q1", confirm=False)
        self.pause(connection, "q1", False)


class MachineInPostgres(Machine):
    share = 4
    server: Postgres
    schemas = count(1)

    def __init__(self) -> None:
        super().__init__()
        self.schema = f"model_{next(self.schemas)}"

    def _open(self) -> None:
        url = DatabaseUrl(self.server.url(self.schema))
        self.settings = replace(self.settings, db=url, db_replication="none")
        super()._open()

    def teardown(self) -> None:
        super().teardown()
        with self.server.connection() as connection:
            connection.execute(f"drop schema if exists {self.schema} cascade".encode())


@pytest.mark.hypothesis
@pytest.mark.timeout(900)  # Hypothesis makes a failure smaller for up to five minutes.
@pytest.mark.parametrize(
    "machine",
    [
        *(Machine, MachineWithKeys),
        *slow(MachineWithPriorities, MachineWithJobs, MachineInPostgres),
    ],
)
@patches_modules
def test_broker_and_journal_against_the_model(
    monkeypatch: pytest.MonkeyPatch, machine: type[Machine], request: pytest.FixtureRequest
) -> None:
    if machine is MachineInPostgres:
        MachineInPostgres.server = request.getfixturevalue("postgres")
    # Small numbers, so that a few steps are enough to merge, compact and page.
    for module in (journal, compaction):
        monkeypatch.setattr(module, "SEGMENT_MERGE_COUNT", 4)
    monkeypatch.setattr(journal, "SMALL_COUNT_MAX", 6)
    monkeypatch.setattr(journal, "SPARSE_BYTES_MIN", 1)
    monkeypatch.setattr(journal, "DROP_COUNT_MIN", 2)
    monkeypatch.setattr(index, "SEGMENT_SMALL_BYTES", 400)
    monkeypatch.setattr(journal, "SEGMENT_BYTES_MAX", 900)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=settings().max_examples // machine.share,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
