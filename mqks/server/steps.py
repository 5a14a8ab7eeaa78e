"""Work of the broker, done by a task of the server."""

from typing import TypeVar

from anyio.lowlevel import checkpoint

from mqks.broker.spine.base.turns import Work

T = TypeVar("T")


async def done(work: Work[T]) -> T:
    """Do the work in several turns of the event loop; return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await checkpoint()
