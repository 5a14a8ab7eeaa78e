"""A queue that has no message of a kind any more does what one does that never had any."""

from collections import Counter

import pytest

from tests.kit.called import counted_calls
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab

LINGERS_S = 1.1
LEFT = {
    "a delay that was cancelled": "d publish --delay=60 e z, x cancel q d",
    "a delay that is over": "d publish --delay=1 e z, w 1, a ack c d",
    "a TTL that is over": "d publish --ttl=1 e z, w 1, a ack c d",
    "a message with a TTL, acked": "d publish --ttl=60 e z, a ack c d",
    "a lease that was acked": (
        "x delete_consumer c, d publish e z, r receive q --lease=60, a lease --ack q, "
        "c consume q --manual-ack"
    ),
    "a reject with a delay": "d publish e z, r reject --delay=1 c d, w 1, a ack c d",
    "a TTL of the queue": "s set_queue q --ttl=60, s set_queue q --reset",
    "a priority": "d publish --priority=5 e z, a ack c d, "
    + ", ".join(f"d{n} publish e z, a ack c d{n}" for n in range(70)),
    "a unique message": "d publish --unique=k,until=acked e z, a ack c d",
    "a unique message that was replaced": (
        "x pause q --deliveries, f publish --unique=k e z, g publish e z, "
        "d publish --unique=k,on=replace e z, x resume q, a ack c d, a ack c g"
    ),
    "a batch that has ended": (
        "o open_batch b publish none z, d publish --batch=b e z, x close_batch b, a ack c d"
    ),
    "an order by key": (
        "s set_queue q --ordered=key, d publish --key=k e z, a ack c d, s set_queue q --reset"
    ),
    "a backoff": (
        "s set_queue q --backoff=1, d publish e z, r reject c d, w 2, a ack c d, "
        "s set_queue q --reset"
    ),
}


def calls_of(before: str) -> tuple[Counter[str], list[bytes]]:
    """What is called for messages that are published, rejected, and acked, after these lines."""
    lab = Lab(1 << 24)
    lab.do("a", b"c consume q e --manual-ack")
    for line in before.encode().split(b", ") if before else ():
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
@pytest.mark.parametrize("before", LEFT.values(), ids=LEFT)
def test_what_is_left_costs_nothing(before: str) -> None:
    never, replies = calls_of("")
    assert len(replies) == 20

    left, left_replies = calls_of(before)

    assert left_replies == replies
    # Once a message had attributes, each batch is asked for them.
    changed = {name for name in left | never if left[name] != never[name]}
    assert {name for name in changed if not name.startswith("all_plain")} == set()
