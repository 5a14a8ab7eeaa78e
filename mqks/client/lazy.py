"""A client that is connected when it is first needed.

The one rule: a task of its own opens and closes it, since a framework may start its broker in one
task and end it in another.
"""

import asyncio

from mqks.client.async_client import AsyncClient, connect
from mqks.client.options import Options
from mqks.client.urls import Urls


class LazyClient:
    """Raises what `mqks.connect` raises for a wrong URL."""

    def __init__(self, url: Urls | None, options: Options | None) -> None:
        connect(url, options)
        self._arguments = url, options
        self._task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[AsyncClient]
        self._closes: asyncio.Event

    async def get(self) -> AsyncClient:
        """The client, connected. Raises ConnectionLost after `connect_timeout_s`, and
        AuthenticationFailed; the next call tries again."""
        if self._task is None or self._task.done():
            self._opened = asyncio.get_running_loop().create_future()
            self._closes = asyncio.Event()
            self._task = asyncio.create_task(self._hold(self._opened, self._closes))
        return await asyncio.shield(self._opened)

    async def _hold(self, opened: "asyncio.Future[AsyncClient]", closes: asyncio.Event) -> None:
        try:
            async with connect(*self._arguments) as client:
                opened.set_result(client)
                await closes.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def close(self) -> None:
        """Raises ConnectionLost if what was published could not be sent."""
        if self._task is not None and not self._task.done():
            self._closes.set()
            await self._task
