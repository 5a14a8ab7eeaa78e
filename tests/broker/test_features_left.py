"""A queue that has no message of a kind any more does what one does that never had any."""

from collections import Counter

import pytest

from tests.kit.called import counted_calls
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab

LINGERS_S = 1.1
LEFT = {
    "a delay that was cancelled": [b"d publish --delay=60 e z", b"x cancel q d"],
    "a delay that is over": [b"d publish --delay=1 e z", b"w 1", b"a ack c d"],
    "a TTL that is over": [b"d publish --ttl=1 e z", b"w 1", b"a ack c d"],
    "a message with a TTL, acked": [b"d publish --ttl=60 e z", b"a ack c d"],
    "a lease that was acked": [
        *(b"x delete_consumer c", b"d publish e z", b"r receive q --lease=60", b"a lease --ack q"),
        b"c consume q --manual-ack",
    ],
    "a reject with a delay": [b"d publish e z", b"r reject --delay=1 c d", b"w 1", b"a ack c d"],
    "a TTL of the queue": [b"s set_queue q --ttl=60", b"s set_queue q --reset"],
    "a priority": [
        *(b"d publish --priority=5 e z", b"a ack c d"),
        *(line % n for n in range(70) for line in (b"d%d publish e z", b"a ack c d%d")),
    ],
    "a unique message": [b"d publish --unique=k,until=acked e z", b"a ack c d"],
    "a unique message that was replaced": [
        *(b"x pause q --deliveries", b"f publish --unique=k e z", b"g publish e z"),
        *(b"d publish --unique=k,on=replace e z", b"x resume q", b"a ack c d", b"a ack c g"),
    ],
    "a batch that has ended": [
        *(b"o open_batch b publish none z", b"d publish --batch=b e z", b"x close_batch b"),
        b"a ack c d",
    ],
    "an order by key": [
        *(b"s set_queue q --ordered=key", b"d publish --key=k e z", b"a ack c d"),
        b"s set_queue q --reset",
    ],
    "a backoff": [
        *(b"s set_queue q --backoff=1", b"d publish e z", b"r reject c d", b"w 2", b"a ack c d"),
        b"s set_queue q --reset",
    ],
}


def calls_of(before: list[bytes]) -> tuple[Counter[str], list[bytes]]:
    """What is called for messages that are published, rejected, and acked, after these lines."""
    lab = Lab(1 << 24)
    lab.do("a", b"c consume q e --manual-ack")
    for line in before:
        verb, _, rest = line.partition(b" ")
        if verb == b"w":
            lab.wait(float(rest) + 0.1 if rest.isdigit() else 0.1)
            continue
        if line == b"a lease --ack q":
            line = b"a lease --ack q " + lab.replies[-2].partition(b"lease=")[2].split(b" ")[0]
        lab.do("a", line)
    lab.do("a", b"y publish e z", b"r reject c y", b"a ack c y")
    lab.wait(LINGERS_S)
    lab.replies.clear()
    with counted_calls() as calls:
        for lines in (
            [b"m%d publish e x" % number for number in range(10)],
            [b"r reject c m%d" % number for number in range(10)],
            [b"a ack c m%d" % number for number in range(10)],
        ):
            lab.send("a", *lines)
            lab.rest()
    [queue] = lab.broker.queues.values()
    assert queue.unacked == queue.ready == 0
    return calls, lab.replies


@patches_modules
@pytest.mark.parametrize("before", LEFT.values(), ids=[*LEFT])
def test_what_is_left_costs_nothing(before: list[bytes]) -> None:
    never, replies = calls_of([])
    assert len(replies) == 20

    left, left_replies = calls_of(before)

    assert left_replies == replies
    # Once a message had attributes, each batch is asked for them.
    changed = {name for name in left | never if left[name] != never[name]}
    assert {name for name in changed if not name.startswith("all_plain")} == set()
