"""Any bytes as one line, and back."""

import re
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.spine.base.turns import finish
from mqks.errors import BadRequest
from mqks.limits import ESCAPED_STEP_BYTES
from mqks.protocol.escapes import escape, is_escaped, unescape
from mqks.protocol.requests import ACTIONS
from tests.kit.bare import BareWorld

WORDS = st.lists(
    st.sampled_from([b"\\", b"\n", b"\r", b"\t", b"n", b"r", b"t", b"x", b"\0", b"\xff"])
)
ANY = st.binary() | WORDS.map(b"".join)
VALID = re.compile(rb"(?:[^\\]|\\[\\nrt])*", re.DOTALL)


@given(ANY)
def test_what_is_escaped_comes_back(data: bytes) -> None:
    escaped = escape(data)
    assert not re.search(rb"[\n\r\t]", escaped)
    assert is_escaped(escaped)
    assert unescape(escaped) == data


@given(ANY)
def test_only_the_four_are_escapes(data: bytes) -> None:
    assert is_escaped(data) == (VALID.fullmatch(data) is not None)
    if not is_escaped(data):
        assert unescape(data) == data


FULL = ESCAPED_STEP_BYTES


@pytest.mark.parametrize(
    ("data", "is_valid"),
    [
        (b"\\" * (2 * FULL), True),
        (b"\\" * (2 * FULL + 1), False),
        (b"x" + b"\\" * (2 * FULL), True),
        (b"x" * (FULL - 1) + b"\\n", True),
        (b"x" * (FULL - 1) + b"\\x", False),
        (b"x" * (FULL - 2) + b"\\\\x", True),
        (b"x" * FULL + b"\\", False),
        (b"\\n" * FULL + b"\\\\", True),
    ],
)
def test_long_data_are_checked_in_steps(data: bytes, is_valid: bool) -> None:
    wanted = ACTIONS[b"publish"].parse(b"--escaped e " + data, 0)
    with nullcontext() if is_valid else pytest.raises(BadRequest):
        assert finish(wanted).data == data


def test_long_data_keep_the_order_of_a_connection() -> None:
    world = BareWorld(line_bytes_max=4 * FULL)
    world.send("b", b"c consume q e\n")
    long = b"\\n" * FULL
    lines = (
        b"m1 publish --escaped e x",
        b"m2 publish --confirm --escaped e " + long,
        b"m3 publish --escaped --key=k e y",
        b"m4 publish --escaped e " + long + b"\\",
        b"m5 publish e z",
    )
    world.send("a", b"".join(line + b"\n" for line in lines))
    delivered = [
        line.split(b" ", 4) for line in world.received("b").splitlines() if b" event=" in line
    ]
    assert [(words[2], words[4]) for words in delivered] == [
        (b"m1", b"x"),
        (b"m2", long),
        (b"m3", b"y"),
        (b"m5", b"z"),
    ]
    assert [line[:8] for line in world.received("a").splitlines()] == [b"m4 error", b"m2 ok "]


def test_long_data_are_in_all_queues_before_they_are_confirmed() -> None:
    world = BareWorld(line_bytes_max=4 * FULL)
    world.send("b", b"".join(b"s subscribe q%d e\n" % number for number in range(300)))
    world.broker.turns.chunk_s = -1.0
    line = b"m publish --confirm --escaped e " + b"x" * (2 * FULL) + b"\n"

    world.intake.receive(world.connection("a"), line)
    while not world.broker.pending.waiters:
        world.broker.go_on()

    assert all(queue.ready for queue in world.broker.queues.values())
