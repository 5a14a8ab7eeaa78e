"""The blocking client is the async one in other words."""

from tests.unasync import SOURCE, TARGET, blocking


def test_the_blocking_client_is_written_from_the_async_one() -> None:
    assert TARGET.read_text() == blocking(SOURCE.read_text()), "run: python -m tests.unasync"
