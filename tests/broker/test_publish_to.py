"""`publish --to` in a burst does what it does line by line.

The one rule: the lines of a burst differ in everything that decides where a message goes.
"""

import re

from tests.kit.bare import BareWorld

SETUP = b"s1 subscribe a e\ns2 subscribe b e\ns3 set_queue b --messages-max=300 --overflow=drop\n"
FLAGS = (b"--to=a", b"--to=missing", b"--to=b", b"", b"--to=a --priority=2", b"--mandatory --to=b")
LINES = [
    b"m%d publish --confirm %b e%b x%d\n"
    % (number, FLAGS[number % 7 % 6], b"2" * (number % 5 == 0), number)
    for number in range(1, 700)
]


def played(*chunks: bytes) -> tuple[list[bytes], list[bytes]]:
    """What consumers of the queues get then, and the replies."""
    world = BareWorld()
    world.send("alice", SETUP)
    for chunk in chunks:
        world.send("bob", chunk)
    world.send("carol", b"c1 consume a --existing\n")
    world.send("carol", b"c2 consume b --existing\n")
    ids = re.sub(rb"(?m)^(\S+ error) .*$", rb"\1", world.received("bob"))
    return world.received("carol").split(b"\n"), sorted(ids.split(b"\n"))


def test_a_burst_is_as_its_lines() -> None:
    queues, replies = played(b"".join(LINES))
    assert (queues, replies) == played(*LINES)
    assert len(queues) > 400
    assert sum(reply.endswith(b" error") for reply in replies) > 90
