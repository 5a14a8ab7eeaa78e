"""Everything that can grow has a limit: what happens at each, and that life goes on behind it."""

import re
import sqlite3
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path

import pytest

from mqks.broker.features.admission.capacity import Capacity
from mqks.broker.spine.base.turns import finish
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.queue.paging import page_in
from mqks.broker.spine.queue.recovery import restore
from mqks.broker.spine.routing import bindings, publishing
from mqks.limits import GATHERED_MAX, GROUPS_QUEUES, MASKS_MAX, ONCE_ID_BYTES_MAX
from tests.kit.bare import BareWorld, ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.marks import slow
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

ERROR = re.compile(rb"(\S+) error [0-9a-f]{24}\n")
MIB = 1024 * 1024


def test_masks_of_a_request() -> None:
    """Each is tried on all events: a line full of them would keep everybody waiting for hours."""
    world = bare()
    assert ask(world, b"s subscribe --confirm q a.b") == b"s ok \n"
    assert ERROR.fullmatch(ask(world, b"r rebind q --remove-mask" + b" a.*" * (MASKS_MAX + 1)))
    assert ask(world, b"ev _eval state.events_by_queues") == b'ev ok {"q": ["a.b"]}\n'
    assert ask(world, b"r rebind --confirm q --remove-mask" + b" a.*" * MASKS_MAX) == b"r ok \n"


def test_a_full_queue_slows_only_those_who_publish_to_it() -> None:
    """What others publish in one chunk is still delivered in one piece."""
    world = bare(queue_messages_max=3)
    assert ask(world, b"s subscribe full e\nc consume --confirm free f") == b"c ok \n"
    assert ask(world, b"m publish e x\nm publish e x\nm1 publish --confirm e x") == b"m1 ok \n"
    connection = world.connection("k")

    world.intake.receive(connection, b"m2 publish f a\nm3 publish f b\nm4 publish f c\n")

    assert connection.outbox == [b"c ok m2 event=f a\nc ok m3 event=f b\nc ok m4 event=f c\n"]
    assert ERROR.fullmatch(ask(world, b"m5 publish --confirm e x").splitlines(keepends=True)[-1])


def waiting(world: BareWorld) -> dict[bytes, int]:
    return {name: queue.ready + queue.scheduled for name, queue in world.broker.queues.items()}


@pytest.mark.parametrize(
    ("limit", "flags"),
    [
        *[(limit, "--confirm ") for limit in (1, 1574, 1575, 1576)],
        *slow((GATHERED_MAX + 500, "--confirm ")),
        *[(100, flags) for flags in ("", "--once ", "--mandatory ", "--ttl=60 ")],
        *slow(*[(1576, f"--confirm {each}") for each in ("--once ", "--mandatory ", "--ttl=60 ")]),
    ],
)
def test_a_chunk_does_not_pass_the_limit_of_a_queue(limit: int, flags: str) -> None:
    """Not that of any queue that it goes to: by names and by masks, gathered or one by one."""
    world = bare(queue_messages_max=limit)
    subscribe = b"s subscribe wide a b c d\nm subscribe masked --add-mask a.*\n"
    assert ask(world, subscribe + b"n subscribe --confirm narrow b c") == b"n ok \n"
    done = refused = 0
    for start in range(0, 2 * max(limit, 1575), 1575):
        events = [("a", "b", "c", "d", "a.b")[number % 5] for number in range(1575)]
        ids = [f"m{start + number}" for number in range(1575)]
        lines = [f"{i} publish {flags}{e} x\n" for i, e in zip(ids, events, strict=True)]
        world.send("k", "".join(lines).encode())
        replies = world.received("k").splitlines()
        refused += sum(b" error " in reply for reply in replies)
        done += sum(reply.endswith(b" ok ") for reply in replies)
    published = sum(waiting(world)[name] for name in (b"wide", b"masked"))
    assert waiting(world)[b"wide"] == limit
    assert max(waiting(world).values()) == limit
    assert done == (published if "--confirm" in flags else 0)
    assert refused == start + 1575 - published
    assert "queue_messages_max is" in world.broker.last_errors[-1].reason


@pytest.mark.parametrize("delay", ["", "--delay=600 "])
@pytest.mark.parametrize("policy", ["--messages-max=100", "--bytes-max=1405"])
def test_a_chunk_does_not_pass_the_limit_of_a_policy(policy: str, delay: str) -> None:
    """In the same chunk as the policy, which does not count what came before the queue."""
    world = bare()
    assert ask(world, b"s subscribe --confirm free e") == b"s ok \n"
    lines = [f"{number:04} publish --confirm {delay}e x\n" for number in range(1575)]
    policy_lines = f"s subscribe q e\np set_queue q {policy}\n"
    world.send("k", "".join(["m publish e x\n", policy_lines, *lines]).encode())
    replies = world.received("k").splitlines()

    count, size = world.broker.queues[b"q"].contents
    if "messages" in policy:
        assert count == 100
        reason = "messages_max is 100, and 100 messages wait in a queue bound to 'e'"
    else:
        each = size // count
        assert size <= 1405 < size + each
        reason = (
            f"bytes_max is 1405, the message has {each}, and {size} bytes wait in a queue bound "
            "to 'e'"
        )
    assert waiting(world) == {b"free": count + 1, b"q": count}
    assert sum(reply.endswith(b" ok ") for reply in replies) == count
    assert sum(b" error " in reply for reply in replies) == 1575 - count
    assert world.broker.last_errors[-1].reason == reason


@patches_modules
def test_messages_that_go_to_very_many_queues_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another connection, which come in between, find the places taken."""
    monkeypatch.setattr(publishing, "ROUTE_QUEUES", 1)
    world = bare(queue_messages_max=3)
    for number in range(GROUPS_QUEUES):
        world.send("k", b"s subscribe q%d e\n" % number)
    assert ask(world, b"p set_queue --confirm q0 --messages-max=2") == b"p ok \n"
    world.broker.turns.chunk_s = -1.0  # A turn is one step.
    for name in "kl":
        world.intake.receive(world.connection(name), b"m publish e x\n")
        assert waiting(world)[b"q%d" % (GROUPS_QUEUES - 1)] == 0
    world.broker.turns.chunk_s = inf
    for name in "kl":
        world.send(name, b"m publish e x\n")
    assert {*waiting(world).values()} == {2}


@patches_modules
def test_a_queue_whose_consumer_takes_what_was_on_its_way_is_not_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer attaches while the place is taken, and gets the message before it is stored."""
    monkeypatch.setattr(publishing, "ROUTE_QUEUES", 1)
    world = bare(queue_messages_max=1)
    for number in range(GROUPS_QUEUES):
        world.send("k", b"s subscribe q%d e\n" % number)
    world.send("k", b"s subscribe --confirm q63 --add alone\n")
    last = world.broker.queues[b"q63"]
    assert isinstance(last.capacity, Capacity)
    world.broker.turns.chunk_s = -1.0  # A turn is one step.
    world.intake.receive(world.connection("k"), b"m publish e x\n")
    world.intake.receive(world.connection("l"), b"c consume q63 --existing\n")
    for _ in range(20):
        world.broker.go_on()
    assert b"c" in world.broker.consumers
    assert (last.capacity.coming, last.capacity.refuses_all) == (1, True)
    world.broker.turns.chunk_s = inf
    world.send("l", b"p ping\n")
    assert (last.ready, last.capacity.coming) == (0, 0)
    world.received("k")
    assert ask(world, b"n publish --confirm alone x") == b"n ok \n"


def test_returned_messages_count_and_make_room_when_they_are_purged() -> None:
    world = bare(queue_messages_max=10)
    ask(world, b"s subscribe q e\n" + b"".join(b"m%d publish e x\n" % n for n in range(10)))
    world.send("l", b"c consume --confirm q --manual-ack\n")
    world.disconnect("l")
    queue = world.broker.queues[b"q"]
    assert (queue.ready, queue.capacity.refuses_all) == (10, True)
    ask(world, b"n publish e x")
    for number in (b"5", b"6", b"7"):
        assert ask(world, b"p purge --confirm q --id=m" + number) == b"p ok 1\n"
    assert (queue.ready, queue.capacity.refuses_all) == (7, False)
    ask(world, b"".join(b"n%d publish e x\n" % n for n in range(20)))
    assert (queue.ready, queue.capacity.refuses_all) == (10, True)
    assert ask(world, b"p purge --confirm q") == b"p ok 10\n"
    assert (queue.ready, queue.capacity.refuses_all) == (0, False)


def test_once_to_a_queue_after_others_is_stored_before_its_confirm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for a publish of another connection, while the chunk of a third is unfinished."""
    monkeypatch.setattr(publishing, "ROUTE_QUEUES", 1)
    world = bare()
    for number in range(GROUPS_QUEUES):
        world.send("k", b"s subscribe q%d e\n" % number)
    world.send("k", b"s subscribe alone f\n")
    broker = world.broker
    broker.turns.chunk_s = -1.0  # A turn is one step.
    for name, line in zip(
        "klm",
        (b"w publish --once e x", b"o publish --once --confirm --to=alone g x", b"z publish e x"),
        strict=True,
    ):
        if name != "k":
            world.connect(name)
        world.intake.receive(world.connection(name), line + b"\n")
    confirmed, once = list[bytes](), list[bytes]()
    while broker.has_work or broker.pending:
        broker.go_on()
        batch = broker.pending.take()
        confirmed += [each for _, ids, _ in batch.waiters.confirms for each in ids]
        once += batch.entry.once
        if b"o" in confirmed:
            assert broker.queues[b"alone"].ready == 1
            assert b"o" in once
        broker.answers.committed(batch)
    assert confirmed == [b"o"]
    assert once == [b"w", b"o"]


def test_the_error_of_a_queue_that_was_full_says_when_it_is_not() -> None:
    world = bare(queue_messages_max=100)
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    world.send("k", b"m publish e x\n" * 100 + b"t trim q 6\nm publish e x\n")
    assert world.broker.last_errors[-1].reason == (
        "queue_messages_max is 100, and 95 messages wait in a queue bound to 'e'; "
        "it accepts messages again below 87"
    )


@patches_modules
def test_a_full_queue_that_is_being_deleted_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bindings go in turns, while another queue is full, too."""
    monkeypatch.setattr(bindings, "STEP_NAMES", 1)
    world = bare(queue_messages_max=1)
    ask(world, b"s1 subscribe a first e\ns2 subscribe b g\nm1 publish e x\nm2 publish g x")
    deletion = world.broker.delete_queue(b"a")
    next(deletion)
    assert [each.name for each in world.broker.bindings.routes.bound[b"e"]] == [b"a"]
    world.intake.receive(world.connection("k"), b"m3 publish --mandatory e x\n")
    finish(deletion)
    assert world.broker.last_errors[-1].reason == "publish: no queue is bound to 'e'"


def test_a_warning_before_a_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each time that it gets so far, however often it goes up and down there."""
    world = bare(queue_messages_max=100)
    told: list[tuple[str, int]] = []
    for notice in ("queue_nearly_full", "queue_full", "queue_has_room"):
        tell = partial(lambda notice, queue, ready: told.append((notice, ready)), notice)
        monkeypatch.setattr(world.broker.notices, notice, tell)
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    [queue] = world.broker.queues.values()

    def go_to(ready: int) -> None:
        if queue.ready < ready:
            world.send("k", b"m publish e x\n" * (ready - queue.ready))
        else:
            world.send("k", b"t trim q %d\n" % (queue.lane.next_seq - ready))
        assert queue.ready == ready

    for ready in (79, 80, 79, 85, 66, 99, 70, 90):
        go_to(ready)
    assert told == [("queue_nearly_full", 80)]
    go_to(65)
    go_to(100)
    assert told[1:] == [("queue_full", 100)]
    for ready in (87, 86, 95, 65, 79, 81):
        go_to(ready)
    assert told[2:] == [("queue_has_room", 86), ("queue_nearly_full", 81)]


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_warning_does_not_flutter_at_small_limits(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = bare(queue_messages_max=limit)
    told: list[int] = []
    monkeypatch.setattr(
        world.broker.notices, "queue_nearly_full", lambda queue, ready: told.append(ready)
    )
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    assert told == []
    world.send("k", b"m publish e x\n" * limit)
    world.send("k", b"t trim q 2\nm publish e x\n" * 20)
    assert len(told) <= 1


def test_warnings_of_queues_that_fill_and_stand_still(tmp_path: Path) -> None:
    flags = ("--queue-messages-max", "10", "--queue-age-warning-s", "0.5")
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        # At once, so that none has waited before the last one is there.
        assert client.ask(b"m publish e x\n" * 7 + b"m publish --confirm e x") == b"m ok "
        until(lambda: "event=queue_waits queue=q " in server.log)
        # By the time that another one is told, this one has been looked at again.
        assert client.ask(b"s subscribe --confirm other e2") == b"s ok "
        assert client.ask(b"m publish --confirm e2 x") == b"m ok "
        until(lambda: "event=queue_waits queue=other " in server.log)
        lines = [line for line in server.log.splitlines() if " event=queue_" in line]
    assert len(lines) == 3, "each is told once"
    assert "event=queue_nearly_full queue=q ready=8" in lines[0]
    assert "ready=8 consumers=0" in lines[1]


def test_long_ids_are_remembered_by_their_hash() -> None:
    world = bare()
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    for message_id in (b"a" * 254, b"a" * 255):
        for _ in range(2):
            assert (
                ask(world, message_id + b" publish --confirm --once e x") == message_id + b" ok \n"
            )
    assert ask(world, b"ev _eval len(state.queues['q'])") == b"ev ok 2\n"
    connection = world.broker.connect("k2", local=True)
    assert len(connection.once_id(b"a" * 255)) <= ONCE_ID_BYTES_MAX


def test_errors_waiting_for_the_journal() -> None:
    world = bare(errors_kept_max=3)
    connection = world.broker.connect("flood", local=True)
    world.intake.receive(connection, b"x dance\n" * 50)
    assert len(world.broker.pending.entry.errors) == 3
    assert len(ERROR.findall(b"".join(connection.outbox))) == 50


def test_a_page_that_a_trim_has_overtaken() -> None:
    """The consumer that waits for it gets what is left, without anybody doing anything."""
    world = bare(memory_bytes=0)
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    lines = [b"m%d event=e x" % number for number in range(1, 11)]
    for number in range(1, 11):
        assert ask(world, b"m%d publish --confirm e x" % number) == b"m%d ok \n" % number
    assert ask(world, b"c consume --confirm q") == b"c ok \n"
    [queue] = world.broker.shared.wanted.pages
    world.broker.shared.wanted.pages.clear()
    assert ask(world, b"t trim --confirm q 6") == b"t ok 5\n"
    page_in(queue, 1, [Run(1, lines[:7]), Run(8, lines[7:])])
    assert world.broker.shared.wanted.pages == []
    told = b"".join(b"c ok %b\n" % line for line in lines[5:])
    assert ask(world, b"p ping") == told + b"p ok \n"


def test_a_purge_of_many_messages_with_one_that_came_back() -> None:
    """What a purge takes does not grow with the messages that are on disk only."""
    world = bare()
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    queue = world.broker.queues[b"q"]
    restore(queue, 10**15, 1, [], [(7, Mark(1, retry=1))])
    assert ask(world, b"t purge --confirm q") == b"t ok %d\n" % (10**15 - 1)
    assert queue.ready == 0
    assert not queue.lane.marks


def test_a_consumer_that_does_not_read(server: ServerProcess) -> None:
    """It gets no more than its connection can hold; the rest stays in the queue, others go on."""
    count, data = 400, b"x" * 100_000
    with LineClient(server.address) as stuck, LineClient(server.address) as publisher:
        assert stuck.ask(b"c consume --confirm q e") == b"c ok "
        for number in range(count):
            publisher.send(b"m%d publish e %s\n" % (number, data))
        assert publisher.ask(b"m publish --confirm e last") == b"m ok "
        waiting = int(publisher.ask(b"ev _eval len(state.queues['q'])").split()[-1])
        assert count // 2 < waiting <= count
        for number in range(count):
            assert stuck.line() == b"c ok m%d event=e %s" % (number, data)
        assert stuck.line() == b"c ok m event=e last"


def test_waiting_messages_beyond_the_memory_budget(tmp_path: Path) -> None:
    """They live on disk only, and come back in order, page by page."""
    count, data = 40_000, b"x" * 1000
    with served(tmp_path / "mqks.db", "--memory-bytes", "8MiB") as (server, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        for start in range(0, count, 1000):
            client.send(
                b"".join(b"m%d publish e %s\n" % (n, data) for n in range(start, start + 1000))
            )
            assert client.ask(b"m publish --confirm nowhere x") == b"m ok "
        assert server.resident_bytes < 100 * MIB + count * len(data) // 4
        client.send(b"c consume q --manual-ack\n")
        for number in range(count):
            assert client.line() == b"c ok m%d event=e %s" % (number, data)
            if number % 1000 == 999:
                client.send(b"a ack c --all\n")


def test_a_publisher_ahead_of_the_journal_is_paused(tmp_path: Path) -> None:
    """It waits, and nothing that it sent is lost."""
    flags = ("--batch-records-max", "10", "--batch-bytes-max", "1KiB")
    count = 20_000
    with (
        served(tmp_path / "mqks.db", *flags) as (server, client),
        LineClient(server.address) as other,
    ):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        client.send(b"".join(b"m%d publish e x\n" % number for number in range(count)))
        assert other.ask(b"p ping") == b"p ok "
        assert client.ask(b"z publish --confirm e last") == b"z ok "
        client.send(b"c consume q\n")
        for number in range(count):
            assert client.line() == b"c ok m%d event=e x" % number
        assert client.line() == b"c ok z event=e last"


def test_a_reader_that_holds_the_wal(tmp_path: Path) -> None:
    """Publishes are refused when the WAL has reached its bound, and go on when the reader ends."""
    db, data = tmp_path / "mqks.db", b"x" * 100_000
    wal = db.with_name(db.name + "-wal")
    bound = 24 * MIB
    with served(db, "--wal-bytes-max", str(bound)) as (_, client):
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        reader = sqlite3.connect(f"{db.as_uri()}?mode=ro", uri=True, isolation_level=None)
        reader.execute("begin")
        reader.execute("select count(*) from segment").fetchall()
        confirmed = 0
        for _ in range(1000):
            if client.ask(b"m publish --confirm e " + data) != b"m ok ":
                break
            confirmed += 1
        assert 100 < confirmed < 1000
        assert wal.stat().st_size < bound + 8 * MIB
        reader.close()
        until(
            lambda: client.ask(b"m publish --confirm e " + data) == b"m ok ",
            "publishing does not resume",
        )
        client.send(b"c consume q\n")
        for _ in range(confirmed + 1):
            assert client.line() == b"c ok m event=e " + data


@pytest.mark.parametrize(
    "line",
    [
        b"a ack --confirm c %d\n",
        *slow(b"r rebind q --add e%d\n", b"m%d publish --confirm nowhere x\n"),
    ],
    ids=["acks", "bindings", "publishes to no queue"],
)
def test_what_waits_for_a_journal_that_hangs(
    tmp_path: Path, sync_library: Path, line: bytes
) -> None:
    """A connection that makes it grow is not read until the commit; others are."""
    trigger = tmp_path / "sync-hangs"
    environment = {"LD_PRELOAD": str(sync_library), "SYNC_HANGS_WHILE_EXISTS": str(trigger)}
    flags = ("--batch-bytes-max", "64KiB")
    flood = b"".join(line % number for number in range(500_000))
    with (
        ServerProcess(tmp_path / "mqks.db", *flags, environment=environment) as server,
        LineClient(server.address, seconds=0.5) as stuck,
        LineClient(server.address) as other,
    ):
        trigger.touch()
        # Committed beside the event loop.
        assert other.ask(b"s subscribe --confirm q waiting\np ping") == b"p ok "
        with suppress(TimeoutError):
            stuck.send(flood)

        def kept() -> tuple[int, int]:
            rows = other.stats("connections")
            totals = other.stats()
            return max(row["unconfirmed"] for row in rows), totals["metadata_bytes"]

        told = kept()
        while told != (told := kept()):
            pass  # What has come is still being done.
        assert told[0] * len(line) < MIB
        assert told[1] < 8 * MIB
        trigger.unlink()
        assert other.line() == b"s ok "
