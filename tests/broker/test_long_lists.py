"""Lists of `stats` that are long, or of long rows: no reply is, and those who ask get all of it."""

import json
from typing import Any

from mqks.broker.spine.clients.outbox import Slow
from mqks.client.wire import queue, rows
from mqks.limits import LISTS_MAX, STATS_BYTES_MAX, STATS_ROWS_DEFAULT
from tests.kit.bare import BareWorld, ask

LONG = 60_000


class Asking:
    """Asks as a client does, and notes how long the replies are."""

    def __init__(self, world: BareWorld) -> None:
        self.world = world
        self.lengths: list[int] = []

    def __call__(self, *words: str) -> Any:
        reply = ask(self.world, b"s stats " + " ".join(words).encode())
        self.lengths.append(len(reply))
        return json.loads(reply.removeprefix(b"s ok "))


def test_schedules_of_long_messages() -> None:
    world = BareWorld()
    line = b"s schedule s%02d --every=60 publish e " + b"x" * LONG + b"\n"
    world.send("k", b"".join(line % number for number in range(50)))
    asking = Asking(world)
    assert [row["name"] for row in rows(asking, "schedules", "name")] == [
        f"s{number:02}" for number in range(50)
    ]
    assert len(asking.lengths) == 4
    assert max(asking.lengths) < STATS_BYTES_MAX + 2 * LONG
    assert len(ask(world, b"s schedules")) == asking.lengths[0]


def test_a_queue_of_many_events_masks_and_consumers() -> None:
    world, count = BareWorld(), 2 * STATS_ROWS_DEFAULT + 1
    numbers = range(count)
    events, masks, ids = ([f"{kind}{n:04}" for n in numbers] for kind in ("e", "m.*", "c"))
    world.send("k", f"s subscribe q {' '.join(events)}\n".encode())
    for mask in masks:
        world.send("k", f"r rebind q --add-mask {mask}\n".encode())
    for each in reversed(ids):
        world.send("k", f"{each} consume q --existing\n".encode())
    asking = Asking(world)
    first = asking("queue", "q")
    assert first["events"] == events[:STATS_ROWS_DEFAULT]
    assert first["consumer_ids"] == ids[:STATS_ROWS_DEFAULT]
    row = queue(asking, "q")
    assert (row["events"], row["masks"], row["consumer_ids"]) == (events, masks, ids)


def test_few_consumers_of_a_queue_of_many_events() -> None:
    """They are told once, in the order in which they came."""
    world, events = BareWorld(), [f"e{number:04}" for number in range(STATS_ROWS_DEFAULT + 1)]
    world.send("k", f"s subscribe q {' '.join(events)}\n".encode())
    world.send("k", b"z consume q\na consume q\nm consume q\n")
    row = queue(Asking(world), "q")
    assert (row["events"], row["consumer_ids"]) == (events, ["z", "a", "m"])


def test_names_of_a_queue_that_are_long() -> None:
    world = BareWorld(name_bytes_max=65536)
    events = [f"{n:02}" + "e" * LONG for n in range(40)]
    world.send("k", f"s subscribe q {' '.join(events[:15])}\n".encode())
    for each in events[15:]:
        world.send("k", f"r rebind q --add {each}\n".encode())
    asking = Asking(world)
    row = queue(asking, "q")
    assert row["bindings"] == len(row["events"])
    assert row["events"] == events[: row["bindings"]]
    assert max(asking.lengths) < STATS_BYTES_MAX + 2 * LONG


def test_of_long_errors_the_last_ones_are_told() -> None:
    world = BareWorld()
    world.send("k", b"".join(b"%b%d peculiar\n" % (b"\xff" * 240, n) for n in range(1000)))
    world.received("k")
    asking = Asking(world)
    told = asking("errors")
    assert STATS_BYTES_MAX < asking.lengths[0] < STATS_BYTES_MAX + LONG
    numbers = [row["request_id"].lstrip("\udcff") for row in told]
    assert numbers == [str(number) for number in range(1000 - len(told), 1000)]


def test_lists_wait_for_room_and_totals_do_not() -> None:
    """Whoever asks and reads nothing gets no more than there is room for."""
    world = BareWorld()
    outboxes = world.broker.shared.outboxes
    outboxes.used = outboxes.limit
    names = [f"k{number}" for number in range(3 * LISTS_MAX)]
    for name in names:
        connection = world.connection(name)
        world.intake.receive(connection, b"s stats queues\n")
        assert connection.works
        world.broker.go_on()
        assert not connection.outbox
    watcher = world.connection("watcher")
    world.intake.receive(watcher, b"t stats\n")
    world.broker.go_on()
    assert b'"queues": 0' in b"".join(watcher.outbox)
    world.connection(names[0]).closed = True
    outboxes.used = 0
    for name in names[1:]:
        world.send(name, b"")
        assert world.received(name) == b"s ok []\n"


def test_a_list_does_not_hold_up_the_end() -> None:
    world = BareWorld()
    outboxes = world.broker.shared.outboxes
    outboxes.used = outboxes.limit
    connection = world.connection("k")
    connection.rest(Slow.END)
    world.intake.receive(connection, b"s stats queues\n")
    world.broker.go_on()
    assert connection.outbox


def test_updates_of_consumers_wait_for_room() -> None:
    world = BareWorld()
    world.send("c", b"c consume q e\nd consume q e\n")
    world.received("c")
    outboxes = world.broker.shared.outboxes
    outboxes.used = outboxes.limit
    world.intake.receive(world.connection("k"), b"r rebind --confirm q e f\n")
    world.broker.go_on()
    assert not world.connection("c").outbox
    outboxes.used = 0
    world.send("k", b"")
    assert world.received("c").count(b" ok --update q e f") == 2
    assert world.received("k") == b"r ok \n"


def test_what_receives_take_is_unsent_before_it_is_told() -> None:
    world = BareWorld(unsent_bytes_max=1024 * 1024)
    world.send("k", b"s subscribe q e\n" + b"m publish e %b\n" % (b"x" * 10_000) * 300)
    outboxes = world.broker.shared.outboxes
    outboxes.used = 0
    for number in range(20):
        world.intake.receive(world.connection(f"r{number}"), b"r receive q --limit=20 --wait=9\n")
    assert outboxes.used < outboxes.limit * 3 // 2
    assert world.broker.queues[b"q"].ready > 100
    for _ in range(50):
        outboxes.set(world.broker.flow.promised_bytes)
        world.send("k", b"")
    assert world.broker.flow.promised_bytes == 0
    got = b"".join(world.received(f"r{number}") for number in range(20))
    assert got.count(b"r ok --end\n") == 20
    assert got.count(b"r ok m ") + world.broker.queues[b"q"].ready == 300
