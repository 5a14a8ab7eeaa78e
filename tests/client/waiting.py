"""Waiting in coroutines, as `tests.kit.waiting` does without, and services that run meanwhile."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from mqks import App
from tests.kit.waiting import WAIT_S


async def until(look: Callable[[], Any], wanted: object = None) -> Any:
    """Look again and again, also at what a coroutine returns, until it is true, or is what is
    wanted; what was seen then."""
    with anyio.fail_after(WAIT_S):
        while True:
            found = look()
            if inspect.isawaitable(found):
                found = await found
            if found if wanted is None else found == wanted:
                return found
            await anyio.sleep(0.01)


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[anyio.Event]:
    """Until the end of the block, or until the event is set."""
    stop = anyio.Event()
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.serve, stop)
            try:
                yield stop
            finally:
                stop.set()
