"""How long a name may be, what all names take, and that what is there already can be used."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mqks.broker.spine.log.metadata import BINDING_BYTES, CONSUMER_BYTES, QUEUE_BYTES
from mqks.commands import main
from mqks.limits import CREDENTIALS_BYTES_MAX
from tests.kit.bare import BareWorld, ask
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess

ERROR = re.compile(rb"(\S+) error [0-9a-f]{24}\n")
MAX = 64
FITS, LONG = b"n" * MAX, b"n" * (MAX + 1)


def bare(**settings: Any) -> BareWorld:
    return BareWorld(**{"name_bytes_max": MAX, **settings})


def is_refused(world: BareWorld, line: bytes, reached: int = 1) -> bool:
    """It gets one error under its own id, counts, and leaves everything as it was."""
    before, told = image(world), world.broker.limits_reached["name_bytes_max"]
    [error] = [ERROR.fullmatch(ask(world, line))]
    assert image(world) == before
    assert world.broker.limits_reached["name_bytes_max"] == told + reached
    return error is not None and error[1] == line.split(b" ")[0]


def image(world: BareWorld) -> object:
    broker = world.broker
    return (
        {
            name: (queue.lane.next_seq, list(queue.consumers))
            for name, queue in broker.queues.items()
        },
        {name: list(events) for name, events in broker.bindings.by_name.items()},
        list(broker.consumers),
        broker.metadata.bytes,
        (broker.shared.counters.published, len(broker.once), broker.flow.unacked.used),
    )


REFUSED = [
    each.replace(b"LONG", LONG)
    for each in (
        *(b"LONG ping x", b"LONG publish e x", b"LONG publish --confirm e x"),
        *(b"LONG publish --once e x", b"LONG consume q", b"LONG ack c m", b"LONG stats"),
        *(b"LONG ack --confirm c m", b"LONG peek q", b"LONG auth x"),
        *(b"r publish LONG x", b"r publish --confirm LONG x", b"r publish --once LONG x"),
        *(b"r publish --mandatory LONG x", b"r subscribe LONG e", b"r subscribe other e LONG"),
        *(b"r subscribe q LONG", b"r consume LONG", b"r consume other e LONG"),
        *(b"r consume other --add LONG", b"r rebind LONG e", b"r rebind q --add LONG"),
        b"r rebind q LONG",
    )
]


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line.replace(LONG, b"LONG").decode())
def test_a_new_name_that_is_too_long(line: bytes) -> None:
    world = bare()
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    assert is_refused(world, line)


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line.replace(LONG, b"LONG").decode())
def test_the_longest_name_that_fits(line: bytes) -> None:
    world = bare()
    assert ask(world, b"s subscribe --confirm q e %b" % FITS) == b"s ok \n"
    ask(world, line.replace(LONG, FITS))
    assert world.broker.limits_reached["name_bytes_max"] == 0


def test_a_long_name_that_is_not_there_is_not_remembered() -> None:
    world = bare()
    assert ask(world, b"r peek %b" % LONG) == b""
    [read] = world.connection("k").reads
    assert read.queue == b""


def test_longer_names_of_before_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made under a higher limit, as by a version without one; used under the default."""
    db, flags = tmp_path / "mqks.db", ("--name-bytes-max", "1000")
    queue, event, other = b"q" * 900, b"e" * 900, b"o" * 900
    ids = [b"%d" % number * 900 for number in range(6)]
    with ServerProcess(db, *flags) as server, LineClient(server.address) as client:
        assert client.ask(b"s subscribe --confirm %b %b" % (queue, event)) == b"s ok "
        assert client.ask(b"s rebind --confirm %b %b" % (other, event)) == b"s ok "
        for each in ids:
            assert client.ask(b"%b publish --confirm %b x" % (each, event)) == each + b" ok "
        assert server.stop() == 0
    assert main(["export", "--messages", "--db", str(db)]) == 0
    told = capsys.readouterr().out
    assert queue.decode() in told
    assert event.decode() in told
    with ServerProcess(db) as server, LineClient(server.address) as client:
        [line] = [line for line in server.log.splitlines() if "event=long_names" in line]
        assert "names=4 name_bytes_max=255" in line
        assert client.stats("queue " + queue.decode())["events"] == [event.decode()]
        # Its subscription is told, and comes again when a client reconnects.
        consume = b"c consume --confirm %b %b --manual-ack" % (queue, event)
        assert client.ask(consume) == b"c ok "
        for each in ids:
            assert client.line() == b"c ok %b event=%b x" % (each, event)
        assert client.ask(b"a ack --confirm c " + ids[0]) == b"a ok "
        assert client.ask(b"r reject c " + ids[1]) == b"c ok %b event=%b,retry=1 x" % (
            ids[1],
            event,
        )
        assert b" error " in client.ask(b"r publish %b x" % event)
        assert b" error " in client.ask(b"r subscribe %b %b" % (other, event))
        client.send(b"r delete_consumer c\n")
        assert client.ask(b"t trim --confirm %b 5" % queue) == b"t ok 2"
        assert client.ask(b"r rebind --confirm %b --add new" % queue) == b"r ok "
        assert client.ask(b"r rebind --confirm %b --remove %b" % (queue, event)) == b"r ok "
        assert client.stats("queue " + queue.decode())["events"] == ["new"]
        assert client.ask(b"p purge --confirm " + queue) == b"p ok 3"
        assert client.ask(b"d delete_queue --confirm " + queue) == b"d ok "
        assert client.ask(b"d delete_queue --confirm " + other) == b"d ok "
        assert client.stats()["metadata_bytes"] == 0
        assert server.stop() == 0
    with ServerProcess(db) as server:
        assert "event=long_names" not in server.log


def test_what_is_kept_is_counted_and_all_of_it_is_let_go() -> None:
    world = bare()

    def counted() -> int:
        return int(json.loads(ask(world, b"s stats")[5:])["metadata_bytes"])

    assert counted() == 0
    ask(world, b"s subscribe queue event.1 event.22")
    queue = QUEUE_BYTES + 5 + 5 + 2 * BINDING_BYTES + 7 + 8
    assert counted() == queue
    ask(world, b"s subscribe queue event.22 event.1")
    assert counted() == queue
    ask(world, b"s rebind nowhere event.1")
    nowhere = 7 + BINDING_BYTES + 7
    assert counted() == queue + nowhere
    ask(world, b"consumer consume queue")
    consumer = CONSUMER_BYTES + 3 * 8
    assert counted() == queue + nowhere + consumer
    world.send("other", b"consumer consume queue\n")
    assert b"consumer error" in world.received("k"), "it is told"
    assert counted() == queue + nowhere + consumer
    # Deleted, with a consumer: it is still there.
    ask(world, b"d delete_queue queue")
    assert counted() == QUEUE_BYTES + 5 + nowhere + consumer
    ask(world, b"s subscribe queue event.1 event.22")
    assert counted() == queue + nowhere + consumer
    ask(world, b"d delete_queue queue")
    world.disconnect("other")
    assert counted() == nowhere
    ask(world, b"s rebind nowhere --remove event.1")
    ask(world, b"c consume temporary e --delete-queue-when-unused")
    ask(world, b"d delete_consumer c")
    assert counted() == 0


def test_all_of_them_together_have_a_limit() -> None:
    """What makes room again lets others in; an eighth is left to those who consume."""
    world = bare(metadata_bytes_max=2**20)
    broker = world.broker

    def refused(line: bytes) -> bool:
        before, reached = image(world), broker.limits_reached["metadata_bytes_max"]
        if not ERROR.fullmatch(ask(world, line)):
            return False
        assert image(world) == before
        assert broker.limits_reached["metadata_bytes_max"] == reached + 1
        return True

    ask(world, b"s subscribe q e")
    number = 0
    while not refused(b"r rebind --confirm q --add event.%d" % number):
        number += 1
    assert broker.metadata.bytes <= 2**20 * 7 // 8 < broker.metadata.bytes + 2 * BINDING_BYTES
    assert refused(b"r rebind --confirm nowhere event")
    assert refused(b"r subscribe --confirm other e")
    assert refused(b"r consume --confirm other")
    assert refused(b"r rebind --confirm q new e")
    # What is bound already needs no room.
    assert ask(world, b"r rebind --confirm q --add e") == b"r ok \n"
    while not refused(b"c%d consume --confirm q" % number):
        number += 1
    last = b"c%d" % (number - 1)
    assert ask(world, last + b" consume --confirm q") == last + b" ok \n", "it replaces its like"
    assert ask(world, b"m publish --confirm e x").endswith(b"m ok \n")
    ask(world, b"d delete_queue q")
    assert not refused(b"r rebind --confirm nowhere event")


def test_messages_that_are_held_count_and_are_let_go() -> None:
    world = bare(name_bytes_max=2000)
    ask(world, b"c consume q e --manual-ack")
    ids = [b"%d" % number * 1000 for number in range(4)]
    for each in ids:
        ask(world, each + b" publish e x")
    assert world.broker.flow.unacked.used == 4 * (288 + 1000 + len(b" event=e x"))
    ask(world, b"a ack c %b" % ids[0])
    # Acks of what is there and of what is not, in one go.
    ask(world, b"a ack c %b\na ack c nothing\na ack c %b" % (ids[1], ids[2]))
    assert world.broker.flow.unacked.used == 288 + 1000 + len(b" event=e x")
    ask(world, b"a ack c --all")
    assert world.broker.flow.unacked.used == 0


def test_ids_published_once_are_counted() -> None:
    world = bare(once_ids_max=2)
    ask(world, b"s subscribe q e")  # Ids of what no queue gets are not remembered.
    for each in (b"1", b"22", b"333", b"333"):
        ask(world, each + b" publish --once e x")
    assert world.broker.once.size_bytes == 2 * 90 + 2 + 3


def test_arguments_of_auth() -> None:
    world = bare(name_bytes_max=255)
    line = b"a auth %b x" % (b"u" * (CREDENTIALS_BYTES_MAX - 2))
    assert ask(world, line) == b"", "it waits to be verified"
    assert ERROR.fullmatch(ask(world, line + b"x", "another"))
    assert len(world.broker.access.logins) == 1


def test_a_new_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = tmp_path / "mqks.users"
    add = ["user", "add", "--token", "--users", str(users)]
    assert main([*add, "ü" * 128]) == 64
    assert "longer than 255 bytes" in capsys.readouterr().err
    assert main([*add, "u" * 255]) == 0
