"""The blocking client is the async one in other words."""

import pytest

from tools.unasync import TARGETS, blocking, target


@pytest.mark.parametrize("name", TARGETS)
def test_the_blocking_client_is_written_from_the_async_one(name: str) -> None:
    assert target(name).read_text() == blocking(name), "run: python -m tools.unasync"
