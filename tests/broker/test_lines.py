"""Lines are the same however the bytes come, and however long they are."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from mqks.protocol.lines import LONG_LINE_BYTES, LineSplitter, split

PIECES = st.one_of(
    st.sampled_from([b"\n", b"\r\n", b"\r", b"\t", b"a b"]),
    st.integers(LONG_LINE_BYTES - 2, LONG_LINE_BYTES + 2).map(lambda size: b"x" * size),
)
STREAMS = st.lists(PIECES, max_size=12).map(b"".join)


@given(STREAMS)
def test_long_lines_are_split_as_short_ones(data: bytes) -> None:
    assert split(data) == data.split(b"\n")


@given(STREAMS, st.lists(st.integers(1, 2 * LONG_LINE_BYTES), max_size=6), st.booleans())
def test_lines_do_not_depend_on_chunks(data: bytes, sizes: list[int], is_server: bool) -> None:
    *expected, tail = data.split(b"\n")
    if not is_server:
        expected = [line.removesuffix(b"\r") for line in expected]
    splitter, found, start = LineSplitter(len(data), is_server=is_server), list[bytes](), 0
    for size in [*sizes, len(data)]:
        lines = splitter.feed(data[start : start + size])
        assert splitter.has_tab or not any(b"\t" in line for line in lines)
        found += lines
        start += size
    assert (found, splitter.take_tail()) == (expected, tail)


@given(STREAMS, st.integers(1, LONG_LINE_BYTES), st.integers(1, 2 * LONG_LINE_BYTES))
def test_a_line_that_is_too_long_ends_the_stream(data: bytes, limit: int, size: int) -> None:
    """What comes before it is handled."""
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")[:-1]]
    before = [*takewhile(lambda line: len(line) <= limit, lines)]
    splitter, found = LineSplitter(limit), list[bytes]()
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
        if splitter.too_long is not None:
            break
    assert found == before
    if len(before) < len(lines):
        assert splitter.too_long == lines[len(before)][:limit]
