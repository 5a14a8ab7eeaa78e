"""Some messages of a queue: purged, moved, requeued and looked at by event, id and age."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks import InvalidRequest, RequestFailed, blocking
from mqks.broker.features.death.moves import purge_some
from mqks.broker.spine.base.facts import Facts
from mqks.broker.spine.base.turns import finish
from mqks.broker.spine.queue import lane as lane_module
from mqks.broker.spine.queue.selection import Chosen
from mqks.limits import SEQ_MAX, STEP_MESSAGES
from mqks.protocol.requests import Selection
from mqks.testing import Broker
from tests.broker.test_moves import World, filled, names
from tests.commands.console import Console
from tests.fuzz.disk import Disk
from tests.kit.bare import BareWorld
from tests.kit.called import lines_of
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.memory import allocated
from tests.kit.preloaded import Clock
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

HOUR_S = 3600
STEPS = st.lists(
    st.sampled_from(["purge", "purge", "page", "commit", "take", "publish", "give back", "delete"]),
    max_size=40,
)


@given(steps=STEPS, memory_bytes=st.sampled_from([0, 1 << 20]), limit=st.integers(1, 8))
def test_a_purge_counts_what_it_drops_whoever_else_takes_messages(
    steps: list[str], memory_bytes: int, limit: int
) -> None:
    """Between two of its steps consumers take messages and give them back, pages come, and the
    queue may be deleted; what it asks of the disk comes late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_module, "SCARCE_BYTES", 100)
        world = World(Disk(), memory_bytes)
        world.send(b"s subscribe from good bad")
        world.send(*(b"m%d publish %b x" % (n, (b"good", b"bad")[n % 2]) for n in range(8)))
        world.commit()
        queue, published = world.broker.queues[b"from"], count(100)
        work = purge_some(queue, Chosen(Selection(b"bad"), 0), limit)
        purged = 0
        is_deleted = False

        def step() -> None:
            nonlocal purged
            try:
                next(work)
            except StopIteration as end:
                purged = end.value or purged

        for what in steps:
            match what:
                case "purge":
                    step()
                case "page":
                    world.page()
                case "commit":
                    world.commit()
                case "take":
                    world.send(b"c consume from --manual-ack --prefetch=2")
                case "give back":
                    world.send(b"d delete_consumer c")
                case "publish":
                    world.send(b"m%d publish bad x" % next(published))
                case "delete" if not is_deleted:
                    world.send(b"x delete_queue from")
                    is_deleted = True
                    # A server lets nobody wait for messages of a queue that is gone.
                    world.broker.shared.wanted.fetches.clear()
        for _ in range(40):
            step()
            world.page()
            world.commit()
        if is_deleted:
            return
        world.send(b"d delete_consumer c")
        for _ in range(10):
            world.page()
            world.commit()
        left = names(world.messages(b"from"))
        assert purged <= limit
        assert 8 + next(published) - 100 - purged == len(left)
        assert {0, 2, 4, 6} <= {*left}
        assert queue.ready == len(left)


def test_no_step_of_a_purge_drops_more_than_a_thousand() -> None:
    world = filled(Disk(), 5 * STEP_MESSAGES)
    queue = world.broker.queues[b"from"]
    before = queue.ready
    for _ in purge_some(queue, Chosen(Selection(b"**"), 0), SEQ_MAX):
        assert before - queue.ready <= STEP_MESSAGES
        before = queue.ready
        world.commit()
        world.page()
    assert queue.ready == 0
    assert world.messages(b"from") == []


class Compared(int):
    """A number that counts how often it is compared with another one."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_very_many_messages_with_one_id_are_rejected_in_short_steps() -> None:
    world = filled(Disk(), 1)
    world.send(b"c consume from --manual-ack")
    consumer = world.broker.consumers[b"c"]
    [*consumer.let_go()]
    held = [(Compared(number), b"m event=e x") for number in range(20_000)]
    consumer.take([number for number, _ in held], [line for _, line in held], None)
    some = held[7::20]
    Compared.count = 0
    assert [number for number, _ in consumer.take_these([*some, (30_000, some[0][1])])] == [
        number for number, _ in some
    ]
    assert Compared.count < 10 * len(some)
    left = [(number, line) for number, line, _ in consumer.held()]
    assert left == [each for each in held if each[0] % 20 != 7]


def test_a_mask_is_compared_with_few_events_in_a_step() -> None:
    lines = [(number, b"m event=e%d x" % number) for number in range(1000)]
    steps = list(Chosen(Selection(b"e*"), 0).by_body(lines))
    assert len(steps) > 10


@pytest.mark.anyio
async def test_clients_choose_messages(connect: Any, mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["a.x", "a.y", "b"])
        await client.publish_many(
            ((event, f"{n}") for n in range(7) for event in ("a.x", "a.y", "b")), id_prefix="m"
        )

        async def ids(**selection: Any) -> list[str]:
            return [peeked.id for peeked in await client.peek("q", **selection)]

        assert await ids(event="a.*", limit=3) == ["m-1", "m-2", "m-4"]
        assert await ids(id="m-3") == ["m-3"]
        assert await ids(id="m-3", event="a.*") == []
        assert len(await ids(older_s=0)) == 21
        assert await ids(older_s=1000) == []
        assert await client.purge("q", event="b", limit=2) == 2
        assert await client.purge("q", older_s=1000) == 0
        assert await client.purge("q", id="m-1") == 1
        assert await client.move("q", "p", id="m-2") == 1
        assert await client.move("q", "p", event="*.x", older_s=0) == 6
        assert await ids(event="b", limit=1) == ["m-9"]
        async with client.consume("q", prefetch=0) as consumer:
            held = [await consumer.receive(WAIT_S) for _ in range(11)]
            consumer_id = held[0].consumer_id.decode()
            assert await client.requeue(consumer_id, event="b") == 5
            again = [await consumer.receive(WAIT_S) for _ in range(5)]
            assert {(each.event, each.retry) for each in again} == {("b", 1)}
            assert await client.requeue(consumer_id, id="m-5") == 1
            assert await client.requeue(consumer_id, older_s=1000) == 0
            assert await client.requeue(consumer_id) == 11
        assert await client.purge("q") == 11
        await client.publish_many([("a.x", "1"), ("a.x", "2")], meta={"ä&": "= ü"})
        await client.publish("a.x", "3", confirm=True)
        assert len(await client.peek("q", where={"ä&": "= ü"})) == 2
        assert len(await client.peek("q", where={"ä&": ""})) == 1
        assert await client.move("q", "p", where={"ä&": "= ü", "other": ""}, limit=1) == 1
        assert await client.purge("q", where={"ä&": "= ü", "other": "x"}) == 0
        assert await client.purge("q", where={"ä&": "= ü"}) == 1
        for wrong in ({"event": "a b"}, {"where": {"": "x"}}, {"id": ""}, {"older_s": -1}):
            with pytest.raises(InvalidRequest):
                await client.purge("q", **wrong)
        with pytest.raises(RequestFailed):
            await client.purge("q", scheduled=True, event="b")


@pytest.mark.anyio
async def test_peek_finds_one_of_many_on_disk(connect: Any, tmp_path: Path) -> None:
    """It asks again and again, of a part at a time; what is scheduled is found apart."""
    with ServerProcess(tmp_path / "mqks.db", "--memory-bytes", "1MiB") as server:
        async with connect(server.url) as client:
            await client.subscribe("q", ["common", "rare"])
            every = (("rare" if n % 4000 == 3999 else "common", "x" * 50) for n in range(12_000))
            await client.publish_many(every, id_prefix="m")
            await client.publish("rare", "later", id="later", delay_s=1000, confirm=True)
            found = await client.peek("q", event="rare", limit=10)
            assert [each.id for each in found] == ["m-4000", "m-8000", "m-12000"]
            assert [each.id for each in await client.peek("q", id="m-11999")] == ["m-11999"]
            assert [
                each.id for each in await client.peek("q", event="rare", limit=1, after=4000)
            ] == ["m-8000"]
            later = await client.peek("q", scheduled=True, event="rare")
            assert [each.id for each in later] == ["later"]
            assert await client.peek("q", scheduled=True, event="common") == []
            assert await client.purge("q", event="rare") == 3
            assert await client.move("q", "p", id="m-6000") == 1
            assert await client.purge("q", event="*") == 11_996
        with LineClient(server.address) as line:
            told = line.stats()
            assert told["messages_ready"] == 1
            assert told["messages_scheduled"] == 1


def test_an_answer_of_peek_says_where_it_goes_on(mqks_broker: Broker) -> None:
    with (
        blocking.connect(mqks_broker.url) as client,
        LineClient(("127.0.0.1", mqks_broker.port)) as k,
    ):
        client.subscribe("q", ["e"])
        client.publish_many((("e", "x") for _ in range(10_001)), id_prefix="m")
        assert k.ask(b"p peek q --id=nobody") == b"p ok --end after=10000"
        assert k.ask(b"p peek q --id=nobody --after=10000") == b"p ok --end"
        k.send(b"p peek q --event=e --limit=2\n")
        assert [k.line().split(b" ")[2] for _ in range(2)] == [b"m-1", b"m-2"]
        assert k.line() == b"p ok --end after=2"
        k.send(b"p peek q --limit=1\n")
        assert k.line().startswith(b"p ok m-1 ")
        assert k.line() == b"p ok --end", "old clients know no other end"


def test_what_is_older(clock: Clock, db: Path) -> None:
    with (
        ServerProcess(db, environment=clock.environment) as server,
        blocking.connect(server.url) as client,
    ):
        client.subscribe("q", ["e"])
        client.publish("e", "old", confirm=True)
        clock.ahead(2 * HOUR_S)
        client.publish("e", "new", confirm=True)
        assert [each.text for each in client.peek("q", older_s=HOUR_S)] == ["old"]
        assert client.move("q", "p", older_s=HOUR_S) == 1
        # What is moved joins the other queue now.
        assert client.purge("p", older_s=HOUR_S) == 0
        assert client.purge("q", older_s=HOUR_S) == 0
        assert client.purge("q", older_s=0) == 1


def test_commands_choose_messages(server: ServerProcess, tmp_path: Path) -> None:
    with blocking.connect(server.url) as client:
        shell = Console(tmp_path, server.url)
        client.subscribe("q", ["a.x", "b"])
        for number in range(4):
            client.publish("a.x", "1", id=f"a{number}", confirm=True)
            client.publish("b", "2", id=f"b{number}", confirm=True)
        purge = shell("purge", "q", "--event", "a.*", "--limit", 1)
        assert purge == (0, b"1 message purged\n", b"")
        assert shell("purge", "q", "--id", "b0") == (0, b"1 message purged\n", b"")
        assert shell("purge", "q", "--older", 1000) == (0, b"0 messages purged\n", b"")
        assert shell("move", "q", "p", "--id", "b1") == (0, b"1 message moved\n", b"")
        assert shell("purge", "q", "--scheduled", "--id", "b1")[0] == 64
        with client.consume("q", prefetch=0) as consumer:
            held = [consumer.receive(WAIT_S) for _ in range(5)]
            name = held[0].consumer_id.decode()
            requeued = shell("requeue", name, "--event", "b", "--pause", 0)
            assert requeued == (0, b"2 messages requeued\n", b"")
            code, out, err = shell("requeue", name, "--older", 0, "--json")
            assert (code, err) == (0, b"")
            assert json.loads(out) == {"consumer": name, "event": None, "older_s": 0, "requeued": 5}
            for words in ([], ["--all", "--event", "b"], ["m1", "--older", 1]):
                assert shell("requeue", name, *words)[0] == 64


@pytest.mark.slow
def test_requests_for_few_of_many_returned_messages_hold_no_copy_of_them() -> None:
    """Forty of them at once, each of which finds one, or nothing that is old enough."""
    world = BareWorld()
    world.send("p", b"s subscribe q e\n")
    world.send("p", b"".join(b"m%d publish e x\n" % number for number in range(20_000)))
    world.send("c", b"c consume q --manual-ack\n")
    world.disconnect("c")
    queue = world.broker.queues[b"q"]
    assert (queue.ready, queue.lane.returned) == (20_000, 20_000)
    world.broker.turns.chunk_s = -1.0  # Each turn is one step.
    for flags in (b"--limit=1 --older=3600", b"--limit=1"):
        with allocated() as memory:
            for name in map(str, range(40)):
                world.intake.receive(world.connection(name), b"p purge --confirm q %b\n" % flags)
            for _ in range(80):
                world.broker.go_on()
        assert memory.peak_bytes < 4_000_000
        for name in map(str, range(40)):
            world.send(name, b"")
    assert queue.ready == 20_000 - 40


def test_ages_are_looked_up_by_stretches_not_by_message() -> None:
    world = filled(Disk(), 20 * STEP_MESSAGES)
    queue = world.broker.queues[b"from"]
    asked: list[int] = []

    class Arrivals(Facts):
        def arrived_by(self, queue_id: int, time_us: int, first: int, end: int) -> tuple[int, int]:
            asked.append(first)
            old = 10_000, 10_010
            return (max(first, old[0]), old[1]) if first < old[1] else (end, end)

        def arrived_us(self, queue_id: int, number: int) -> int:
            raise AssertionError("asked for one message")

    world.broker.shared.facts = Arrivals()
    work = purge_some(queue, Chosen(Selection(older_us=1), 0), SEQ_MAX)
    steps = 0
    while (purged := next(work, None)) is not None:
        steps += 1
        assert purged is False
        world.commit()
        world.page()
    assert queue.ready == 20 * STEP_MESSAGES - 10
    assert len(asked) == 2
    assert steps < 10


@patches_modules
def test_looking_at_five_times_as_many_messages_takes_five_times_as_long() -> None:

    def lines(messages: int) -> int:
        world = filled(Disk(), 0, memory_bytes=1 << 30)
        queue = world.broker.queues[b"from"]
        for _ in range(messages // 2_000):
            world.send(*[b"m publish e x"] * 2_000)
            world.commit()
        assert queue.ready == messages
        work = purge_some(queue, Chosen(Selection(None, b"none"), 0), SEQ_MAX)
        return lines_of(lambda: finish(work))

    assert lines(20_000) < 6 * lines(4_000)
