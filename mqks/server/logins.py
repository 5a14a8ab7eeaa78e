"""Passwords verified off the event loop.

The one rule: one at a time, in the order they came, however many knock.
"""

from collections.abc import Callable

import anyio
from anyio import to_thread

from mqks.broker.access import Login
from mqks.broker.broker import Broker
from mqks.users import Known


class Logins:
    """`outcome` is called with each login and whose it is, if anybody's."""

    def __init__(self, broker: Broker, outcome: Callable[[Login, Known | None], None]) -> None:
        self._broker = broker
        self._outcome = outcome
        self._wanted = anyio.Event()

    def wake(self) -> None:
        """Some may be waiting."""
        if self._broker.access.logins:
            self._wanted.set()

    async def run(self) -> None:
        waiting = self._broker.access.logins
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            while waiting:
                login = waiting[0]
                user = None if login.connection.closed else await self._verify(login)
                waiting.popleft()
                if not login.connection.closed:
                    self._outcome(login, user)

    async def _verify(self, login: Login) -> Known | None:
        while True:
            users = self._broker.access.users
            # Many connections of one user may have waited for the first of them.
            user = users.recall(login.name, login.password) or await to_thread.run_sync(
                users.verify, login.name, login.password
            )
            if users is self._broker.access.users:
                return user
