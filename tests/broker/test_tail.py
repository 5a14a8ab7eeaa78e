"""Tails: live views of messages, which nobody waits for."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from select import select
from typing import Any

import anyio
import pytest

from mqks import RequestFailed, blocking
from mqks.broker.features.tails import tails as tails_module
from mqks.testing import Broker
from mqks.users import Permissions
from tests.client.conftest import QUICK
from tests.commands.console import Console
from tests.kit.bare import BareWorld, bare
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until


def shown(world: BareWorld) -> list[bytes]:
    return [line.split(b" ")[2] for line in world.received("t").splitlines()]


def test_what_a_slow_client_misses_is_counted() -> None:
    world = bare(tail_buffer_bytes_max=200)
    world.send("t", b"t tail e\n")
    tail = world.broker.tails.of(world.connection("t"))[b"t"]
    line = b"m%d publish e 0123456789\n"
    world.send("k", b"".join(line % number for number in range(10, 40)))
    first = world.received("t").splitlines()
    assert 1 < len(first) < 10
    assert first[0] == b"t ok m10 event=e,retry=0,meta= 0123456789"
    assert tail.dropped == 30 - len(first)
    world.send("k", line % 50)
    again = world.received("t").splitlines()
    assert again == [
        b"t ok --dropped %d" % (30 - len(first)),
        b"t ok m50 event=e,retry=0,meta= 0123456789",
    ]
    assert tail.dropped == 0


def test_who_is_shown_nothing_more_is_told_what_it_missed() -> None:
    world = bare(tail_buffer_bytes_max=1)
    world.send("t", b"t tail e\n")
    world.send("k", b"m1 publish e x\nm2 publish e x\n")
    assert shown(world) == [b"m1"]
    world.advance(2.0)
    assert world.received("t") == b"t ok --dropped 1\n"
    world.advance(10.0)
    assert world.received("t") == b""


def test_a_slow_client_misses_all_until_it_takes_its_replies() -> None:
    world = bare(tail_buffer_bytes_max=1)
    world.send("t", b"t tail e\n")
    world.connection("t").outbox_bytes = 10
    world.send("k", b"m1 publish e x\n")
    world.advance(2.0)
    assert world.broker.tails.of(world.connection("t"))[b"t"].dropped == 1
    world.connection("t").outbox_bytes = 0
    world.advance(2.0)
    assert world.received("t") == b"t ok --dropped 1\n"


def test_more_than_can_be_compared_is_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails_module, "TAIL_BACKLOG_MESSAGES", 5)
    world = bare()
    world.broker.turns.chunk_s = -1.0
    world.send("t", b"t tail e.*\n")
    tail = world.broker.tails.of(world.connection("t"))[b"t"]
    world.broker.tails.show((tail,), [b"m event=e.%d x" % number for number in range(3000)])
    for _ in range(3):
        world.broker.tails.show((tail,), [b"m event=e.x x"] * 4)
    assert tail.dropped == 12
    world.advance(0)
    assert world.received("t").count(b"t ok m ") == 3000
    assert not world.broker.tails._backlog
    assert world.broker.tails._backlog_messages == world.broker.tails._backlog_bytes == 0


def test_masks_are_compared_in_steps() -> None:
    world = bare()
    masks = b" ".join(b"a.*%d*" % number for number in range(100))
    world.send("t", b"t tail " + masks + b"\n")
    tail = world.broker.tails.of(world.connection("t"))[b"t"]
    lines = [b"m event=a.x%s x" % (b"y" * number) for number in range(100)]
    assert len([*tail.choose(lines)]) > 100


def test_nothing_is_done_for_tails_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = bare()
    calls: list[int] = []
    monkeypatch.setattr(world.broker.tails, "show", lambda *what: calls.append(1))
    world.send("k", b"s subscribe q e\nm1 publish e x\n")
    world.send("t", b"t tail --queue=q\nu tail e\n")
    world.send("k", b"m2 publish e x\n")
    assert len(calls) == 2
    world.disconnect("t")
    world.send("k", b"m3 publish e x\n")
    assert len(calls) == 2
    assert len(world.broker.tails) == 0


def test_the_end_of_a_connection_ends_a_tail_that_is_being_shown_messages() -> None:
    world = bare()
    world.broker.turns.chunk_s = -1.0
    world.send("t", b"t tail e\n")
    world.send("k", b"".join(b"m%d publish e x\n" % number for number in range(3000)))
    world.end_of_stream("t")
    world.advance(0)
    assert len(world.broker.tails) == 0
    assert not world.broker.tails._backlog


@pytest.mark.anyio
async def test_clients_show_messages(connect: Any, mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["order.new"])
        async with client.tail("order.*", "hello") as tail, client.tail(queue="q") as of_queue:
            await client.publish("order.new", "1", id="m1", meta={"k": "v"}, confirm=True)
            await client.publish("other", "2", confirm=True)
            await client.publish("hello", "3", confirm=True)
            first = await tail.receive(WAIT_S)
            assert (first.id, first.event) == ("m1", "order.new")
            assert (first.data, first.meta) == (b"1", {"k": "v"})
            assert (await tail.receive(WAIT_S)).text == "3"
            assert (await of_queue.receive(WAIT_S)).id == "m1"
            with pytest.raises(TimeoutError):
                await of_queue.receive(0.05)
            assert tail.dropped == 0
        assert await client.evaluate("len(state.queues['q'])") == "1"
        with pytest.raises(RequestFailed):
            async with client.tail(queue="nobody"):
                pass


@pytest.mark.anyio
async def test_a_tail_begins_again_after_a_reconnect(
    connect: Any, mqks_broker: Broker, proxy: Proxy
) -> None:
    async with (
        connect(mqks_broker.url) as client,
        connect(proxy.url, QUICK) as watching,
        watching.tail("e") as tail,
    ):
        await client.publish("e", "1", confirm=True)
        assert (await tail.receive(WAIT_S)).data == b"1"
        proxy.cut()
        with anyio.fail_after(WAIT_S):
            while True:
                await client.publish("e", "2", confirm=True)
                try:
                    assert (await tail.receive(0.05)).data == b"2"
                    break
                except TimeoutError:
                    pass


@pytest.mark.anyio
async def test_a_client_that_does_not_read_is_told_how_many_it_missed(
    connect: Any, mqks_broker: Broker
) -> None:
    count, data = 3000, "x" * 10_000
    told: list[int] = []
    async with connect(mqks_broker.url) as client, client.tail("e") as tail:
        tail.on_dropped = told.append
        await client.publish_many(("e", data) for _ in range(count))
        seen = 0
        with anyio.fail_after(2 * WAIT_S):
            while seen + tail.dropped < count:
                try:
                    await tail.receive(0.2)
                    seen += 1
                except TimeoutError:
                    pass
        assert seen
        assert tail.dropped
        assert seen + tail.dropped == count
        assert sum(told) == tail.dropped


def test_users_see_what_they_might_consume_or_bind() -> None:
    world = bare()
    world.send("k", b"s subscribe mine a.x\ns subscribe theirs b.x\n")
    connection = world.connection("t")
    mine = Permissions(consume=["mine"], bind=["a.**"])
    world.broker.access.grant(connection, mine)
    for allowed in (b"--queue=mine", b"--queue=mine **", b"a.x", b"a.* a.b.**"):
        world.send("t", b"t tail --confirm " + allowed + b"\n")
        assert world.received("t") == b"t ok \n", allowed
    for refused in (b"--queue=theirs", b"b.x", b"a.* b.*", b"**", b"*.x", b"--queue=theirs a.x"):
        world.send("t", b"u tail --confirm " + refused + b"\n")
        assert world.received("t").startswith(b"u error "), refused
    assert [*world.broker.tails.of(connection)] == [b"t"]
    for nothing in (Permissions(consume=["mine"]), Permissions(["**"], bind=["**"])):
        world.broker.access.grant(connection, mine)
        world.send("t", b"t tail --confirm a.x\n")
        assert world.received("t") == b"t ok \n"
        world.broker.access.grant(connection, nothing)
        assert not world.broker.tails.of(connection)
        world.send("t", b"u tail a.x\n")
        assert world.received("t").startswith(b"u error ")


@pytest.mark.slow
def test_the_command_shows_a_queue_or_events(server: ServerProcess, tmp_path: Path) -> None:
    with blocking.connect(server.url) as client:
        shell = Console(tmp_path, server.url)
        client.subscribe("orders", ["order.new"])

        of_queue = shell.start("tail", "orders", "--count", 1, "--timeout", WAIT_S)
        of_events = shell.start("tail", "order.*", "other", "--json", "--timeout", WAIT_S)
        with of_queue, of_events:
            # They may not be there yet: what they show then is one of many.
            shown = of_events.stdout
            assert shown is not None

            def both_have_shown_it() -> bool:
                client.publish("order.new", "a  b", id="m1", meta={"k": "v"}, confirm=True)
                time.sleep(0.05)  # Nobody reads the other one meanwhile: its pipe must not fill.
                can_read, _, _ = select([shown], [], [], 0)
                return of_queue.poll() is not None and bool(can_read)

            until(both_have_shown_it)
            assert of_queue.communicate() == (b"order.new a  b\n", b"")
            assert of_queue.returncode == 0
            row = {"id": "m1", "event": "order.new", "meta": {"k": "v"}, "data": "a  b"}
            assert json.loads(shown.readline()) == row
            of_events.send_signal(signal.SIGINT)
            assert of_events.wait(WAIT_S) == 130
        assert shell("tail")[0] == 64
        code, out, err = shell("tail", "--queue", "ordrs")
        assert (code, out) == (65, b"")
        assert b"there is no queue 'ordrs'" in err
        note = b"mqks: found no queue nothing: showing the event nothing\n"
        assert shell("tail", "nothing", "--timeout", 0.1) == (0, b"", note)
        assert shell("tail", "nothing.*", "--timeout", 0.1) == (0, b"", b"")
