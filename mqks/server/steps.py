"""A work of the broker's, done by a task of the server's."""

from typing import TypeVar

from anyio.lowlevel import checkpoint

from mqks.broker.turns import Work

T = TypeVar("T")


async def done(work: Work[T]) -> T:
    """Do it in turns of the event loop; return what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await checkpoint()
