"""Unique messages while other things happen: races, restarts, clocks, full disks, many of them."""

import pytest

from mqks.broker.features.admission import unique
from mqks.broker.features.admission.unique import KEY_BYTES, UniqueKeys
from mqks.broker.features.order import placed
from mqks.broker.features.order.placed import Placed
from mqks.broker.spine.queue.order import Fifo
from mqks.limits import KEY_BYTES_MAX
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.memory import allocated

HOUR_US = 3600 * 1_000_000
PUBLISH = b"publish --confirm --unique=k%b e x"


def opened(*lines: bytes, memory: int = 1 << 24) -> Lab:
    lab = Lab(memory)
    lab.do("a", b"s subscribe q e", *lines)
    return lab


def asked(lab: Lab, request_id: bytes, options: bytes = b"", key: bytes = b"k") -> bytes:
    """What the confirm of such a publish tells."""
    lab.replies.clear()
    line = b"publish --confirm --unique=%b%b e x" % (key, options)
    lab.do("asker", b"%b %b" % (request_id, line))
    told = [line for line in lab.replies if line.startswith(request_id + b" ")]
    assert len(told) == 1, told
    return told[0][len(request_id) + 1 :]


def ready(lab: Lab) -> list[bytes]:
    """Ids of the messages on disk."""
    return [line.split(b" ")[0] for line in lab.lines(b"q")]


def keys(lab: Lab) -> UniqueKeys | None:
    found = lab.broker.queues[b"q"].lane.unique
    assert found is None or isinstance(found, UniqueKeys)
    return found


@pytest.mark.parametrize("options", [b"", b",on=replace"])
def test_two_connections_and_a_commit_that_is_under_way(options: bytes) -> None:
    """The second one is answered when the message that it names, or its own, is durable."""
    lab = opened()
    lab.replies.clear()
    lab.send("b", b"m1 " + PUBLISH % b"")
    lab.take()
    lab.send("c", b"m2 " + PUBLISH % options)
    assert lab.replies == []
    lab.fail()
    assert lab.replies == []
    lab.rest()
    told = b"replaced" if options else b"duplicate"
    assert lab.replies == [b"m1 ok ", b"m2 ok %b m1" % told]
    assert ready(lab) == [b"m2" if options else b"m1"]
    lab.check()


@pytest.mark.parametrize("lands", [False, True])
def test_a_crash_between_a_message_and_what_replaces_it(lands: bool) -> None:
    lab = opened(b"m1 " + PUBLISH % b"")
    lab.send("b", b"m2 " + PUBLISH % b",on=replace")
    lab.take()
    if lands:
        lab.land()
    lab.crash()
    living = b"m2" if lands else b"m1"
    assert ready(lab) == [living]
    assert asked(lab, b"m3") == b"ok duplicate " + living


def test_a_publish_that_a_full_disk_refuses_has_taken_no_key() -> None:
    lab = opened()
    lab.send("b", b"m1 " + PUBLISH % b"")
    lab.fill()  # It is not durable, but still there.
    lab.rest()
    assert lab.replies[-1].startswith(b"m1 error ")
    assert asked(lab, b"m2", key=b"l").startswith(b"error ")
    lab.make_room()
    lab.rest()
    assert asked(lab, b"m1") == b"ok duplicate m1"
    assert asked(lab, b"m3", key=b"l") == b"ok "


def test_what_replaces_on_a_full_disk_leaves_the_message_on_disk() -> None:
    lab = opened(b"m1 " + PUBLISH % b"")
    lab.send("b", b"m2 " + PUBLISH % b",on=replace")
    lab.fill()
    lab.rest()
    assert ready(lab) == [b"m1"]
    lab.crash()
    assert asked(lab, b"m3") == b"ok duplicate m1"


@pytest.mark.parametrize("set_us", [-HOUR_US, HOUR_US])
@pytest.mark.parametrize("rejects", [False, True])
def test_a_set_clock_changes_no_hold(set_us: int, rejects: bool) -> None:
    lab = opened(b"m1 " + PUBLISH % b",until=acked,for=10")
    lab.wall_ahead_us += set_us
    if rejects:
        lab.do("c", b"c consume q --manual-ack", b"r reject c m1")
    lab.wait(9.0)
    assert asked(lab, b"m2") == b"ok duplicate m1"
    lab.wait(1.1)
    assert asked(lab, b"m3") == b"ok "


def test_a_clock_that_is_set_back_while_the_server_is_down_begins_a_hold_anew_at_most() -> None:
    lab = opened(b"m1 " + PUBLISH % b",for=10")
    lab.wall_ahead_us -= HOUR_US
    lab.crash()
    assert asked(lab, b"m2") == b"ok duplicate m1"
    lab.wait(10.1)
    assert asked(lab, b"m3") == b"ok "


def test_a_long_key_is_refused() -> None:
    lab = opened()
    assert asked(lab, b"m1", key=b"k" * KEY_BYTES_MAX) == b"ok "
    assert asked(lab, b"m2", key=b"k" * (KEY_BYTES_MAX + 1)).startswith(b"error ")
    assert asked(lab, b"m3", b",for=1" * 100_000).startswith(b"error ")


def test_the_memory_of_a_key() -> None:
    queue, count = opened().broker.queues[b"q"], 20_000
    with allocated() as memory:
        found = UniqueKeys(queue)
        for number in range(count):
            holder = unique.KeyHolder(number, b"m%07d" % number, True, 10**9 + number)
            found.hold(b"k%07d" % number, holder)
    assert 0.7 * memory.bytes < found._size < 1.5 * memory.bytes
    assert found._size == count * (KEY_BYTES + 16)


def test_thousands_replace_each_other() -> None:
    """Each costs the same, whether it waits for a time or not, and leaves nothing."""
    for flags in (b"", b"--delay=60 "):
        lab = opened(b"m publish e x")
        line = b"m%d publish --confirm " + flags + b"--unique=k,on=replace e x"
        lab.send("b", *(line % number for number in range(1_000)))
        lab.rest()
        assert lab.replies[-1] == b"m999 ok replaced m998"
        assert len(ready(lab)) == 2
        queue = lab.broker.queues[b"q"]
        if isinstance(queue.order, Placed):
            assert len(queue.order._order) <= 2 + placed.STALE_PLACES
        lab.do("b", b"p purge q --scheduled")
        assert keys(lab) is None
        assert type(queue.order) is Fifo
        lab.check()


def test_a_client_that_reads_no_answers_is_read_no_more() -> None:
    lab = Lab(1 << 24, output_buffer_bytes_max=65536)
    lab.do("a", b"s subscribe q e", b"m publish --unique=k e x")
    lab.hear = list  # type: ignore[method-assign]
    long_id = b"m" * 100
    for number in range(10):
        line = b"%b%%d publish --confirm --unique=k e x" % long_id
        lab.send("b", *(line % (1000 * number + each) for each in range(1000)))
        for _ in range(3):
            lab.work()
            lab.commit()
    connection = lab.connections["b"]
    assert connection.outbox_bytes < 2 * lab.settings.output_buffer_bytes_max
    assert connection.rests or connection.overrun


def test_a_thousand_holders_end_in_one_commit() -> None:
    """The last ones leave no key, and take no memory."""
    lab = opened()
    lab.do("b", *(b"m%d publish --unique=k%d,until=acked e x" % (n, n) for n in range(1000)))
    found = keys(lab)
    assert found is not None
    assert len(found) == 1000
    lab.do("c", b"c consume q --manual-ack", *(b"a ack c m%d" % n for n in range(999)))
    lab.replies.clear()
    lab.do("b", *(b"n%d publish --confirm --unique=k%d e x" % (n, n) for n in range(1000)))
    assert sum(line.endswith(b" ok ") for line in lab.replies) == 999
    assert b"n999 ok duplicate m999" in lab.replies
    lab.do("c", b"a ack c --all")
    assert keys(lab) is None
    assert lab.broker.shared.memory.used == 0
    lab.check()


@patches_modules
def test_keys_are_read_while_messages_change_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start they are on disk, and a publish waits until all are known: of what is ready,
    scheduled, leased or held by then, and of what moves from one to the other meanwhile."""
    monkeypatch.setattr(unique, "STEP_MESSAGES", 2)
    lab = opened(memory=0)
    kinds = {b"r": b"", b"d": b"--delay=600 ", b"l": b"", b"h": b"", b"b": b""}
    for kind, flag in kinds.items():
        line = b"%b%%d publish %b--unique=%b%%d,until=acked e x" % (kind, flag, kind)
        lab.do("b", *(line % (n, n) for n in range(5)))
    lab.crash()
    lab.do("c", b"c consume q --manual-ack --prefetch=5")
    lab.do("d", b"t receive q --limit=5 --lease=600", b"d consume q --manual-ack --prefetch=5")
    lab.replies.clear()
    asked_for = [b"%b%d" % (kind, n) for kind in kinds for n in range(5)]
    lines = [b"x%b publish --confirm --unique=%b e x" % (each, each) for each in asked_for]
    lab.send("asker", *lines)
    found = keys(lab)
    assert found is not None
    assert not found.is_known
    lab.work()
    lab.send("c", b"r release c --all", b"x set_prefetch c 1")
    lab.work()
    lab.send("d", b"r reject d --all --delay=1")
    lab.wait(2.0)
    told = [line for line in lab.replies if line.startswith(b"x") and b" duplicate " in line]
    assert told == [b"x%b ok duplicate %b" % (each, each) for each in asked_for]
    lab.check()


def test_a_start_that_finds_none_is_the_last_one_that_looks() -> None:
    lab = opened(b"m1 " + PUBLISH % b"", b"m2 publish e x")
    lab.do("c", b"c consume q --manual-ack", b"a ack c m1", b"x delete_consumer c")
    assert lab.broker.queues[b"q"].policy.has_unique
    lab.crash()
    assert asked(lab, b"m3", b",until=acked") == b"ok "
    lab.do("c", b"x purge q", b"m4 publish e x")
    lab.crash()
    assert not lab.broker.queues[b"q"].policy.has_unique or keys(lab) is not None
    assert asked(lab, b"m5") == b"ok "


def test_stats_tell_how_many() -> None:
    lab = opened(b"m1 " + PUBLISH % b"")
    asked(lab, b"m2")
    asked(lab, b"m3", b",on=replace")
    counters = lab.broker.shared.counters
    assert (counters.published, counters.queued) == (3, 2)
    assert (counters.duplicates, counters.replaced) == (1, 1)
    lab.replies.clear()
    lab.do("a", b"t stats queue q")
    assert b'"unique_keys": 1' in lab.replies[0]
