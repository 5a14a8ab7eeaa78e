"""Messages that are delivered out of the order of their numbers."""

import pytest

from mqks.broker.spine.queue.paging import bring
from mqks.broker.spine.queue.queue import Queue
from tests.kit.lab import Lab


def filled(count: int, memory: int = 1 << 20) -> Lab:
    """A queue `q` with m1, m2 and so on, and a consumer that gets nothing by itself."""
    lab = Lab(memory)
    lab.do("a", b"s subscribe q e", *[b"m%d publish e d" % (each + 1) for each in range(count)])
    return lab


def attached(lab: Lab) -> Queue:
    """The queue, with consumer `c`, whose turn it is only when a test says so."""
    queue = lab.broker.queues[b"q"]
    queue.returning += 1
    lab.send("b", b"c consume q --manual-ack")
    queue.returning -= 1
    return queue


def deliver(lab: Lab, queue: Queue, numbers: list[int], *, to_one: bool) -> list[bytes]:
    lab.replies.clear()
    to = next(iter(queue.ring)) if to_one else None
    assert queue._deliver_out(numbers, queue.lane.pick(numbers)[1], to) == len(numbers)
    lab.hear()
    return [line.split(b" ")[2] for line in lab.replies]


def plays(lab: Lab) -> list[bytes]:
    """What a new consumer gets."""
    lab.replies.clear()
    lab.do("z", b"z consume q --manual-ack")
    return [b" ".join(line.split(b" ")[2:4]) for line in lab.replies if line.startswith(b"z ok m")]


@pytest.mark.parametrize("to_one", [False, True])
def test_what_was_delivered_above_the_cursor_counts_a_retry_after_a_crash(to_one: bool) -> None:
    lab = filled(6)
    queue = attached(lab)
    assert deliver(lab, queue, [3, 5], to_one=to_one) == [b"m3", b"m5"]
    assert (queue.lane.cursor, queue.ready, queue.unacked) == (1, 4, 2)
    assert not queue.hides(3)
    assert deliver(lab, queue, [1, 2], to_one=to_one) == [b"m1", b"m2"]
    assert queue.lane.cursor == 4
    lab.send("b", b"x ack c m5", b"x ack c m1")
    assert queue.hides(5)
    lab.commit()
    lab.crash()
    assert lab.broker.queues[b"q"].ready == 4
    again, new = b"event=e,retry=1", b"event=e"
    assert plays(lab) == [b"m2 " + again, b"m3 " + again, b"m4 " + new, b"m6 " + new]
    lab.check()


def test_what_is_returned_above_the_cursor_has_its_place() -> None:
    lab = filled(5)
    queue = attached(lab)
    deliver(lab, queue, [2, 4], to_one=True)
    lab.end("b")
    lab.rest()
    lab.check()
    again, new = b"event=e,retry=1", b"event=e"
    lab.crash()
    expected = [b"m1 " + new, b"m2 " + again, b"m3 " + new, b"m4 " + again, b"m5 " + new]
    assert plays(lab) == expected
    lab.check()


def test_bodies_come_from_disk() -> None:
    lab = filled(500, memory=0)
    lab.crash()
    queue = attached(lab)
    assert queue.lane.body(300) is None
    queue.returning += 1
    bring(queue, [7, 300])
    lab.rest()
    queue.returning -= 1
    assert deliver(lab, queue, [7, 300], to_one=True) == [b"m7", b"m300"]
    assert queue.lane.cursor == 1
    lab.send("b", b"x ack --confirm c --all")
    queue.deliver()
    lab.rest()
    lab.check()
    assert queue.lane.cursor == 501
