"""Waiting in coroutines, as `tests.kit.waiting` does without."""

import inspect
from collections.abc import Callable
from typing import Any

import anyio

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
