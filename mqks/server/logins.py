"""Verification of passwords in a thread.

The one rule: one at a time, in order of arrival, however many clients try.
"""

from collections.abc import Callable

import anyio
from anyio import to_thread

from mqks.broker.access import Login
from mqks.broker.broker import Broker
from mqks.users import Known


class Logins:
    """`outcome` is called with each login and its user, None if the password is wrong."""

    def __init__(self, broker: Broker, outcome: Callable[[Login, Known | None], None]) -> None:
        self._broker = broker
        self._outcome = outcome
        self._wanted = anyio.Event()

    def wake(self) -> None:
        """Logins may be waiting."""
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
            # Other connections of the same user may have verified the password meanwhile.
            user = users.recall(login.name, login.password) or await to_thread.run_sync(
                users.verify, login.name, login.password
            )
            if users is self._broker.access.users:
                return user
