"""Verification of passwords in a thread.

The one rule: one at a time, in order of arrival, however many clients try. Who guesses waits longer
and longer, and nobody else for it.
"""

from collections.abc import Callable
from hashlib import blake2b
from time import monotonic

import anyio
from anyio import to_thread

from mqks.broker.broker import Broker
from mqks.broker.spine.clients.access import Login
from mqks.limits import (
    LOGIN_FORGET_S,
    LOGIN_PAUSE_ADDRESS_S_MAX,
    LOGIN_PAUSE_S_MAX,
    LOGIN_PAUSES_MAX,
    LOGINS_WRONG_MAX,
)
from mqks.users import Known

PAUSE_S = 0.125
"""The first pause."""


class Logins:
    """`outcome` is called with each login and its user, None if the password is wrong."""

    def __init__(self, broker: Broker, outcome: Callable[[Login, Known | None], None]) -> None:
        self._broker = broker
        self._outcome = outcome
        self._wanted = anyio.Event()
        self._wrong: dict[bytes, tuple[int, float]] = {}
        """Wrong passwords of an address, and of a name from there, and the end of their pause; the
        last ones are last."""

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
                now_s = monotonic()
                for login in [each for each in waiting if each.connection.closed]:
                    waiting.remove(login)
                due = [each for each in waiting if self._due_s(each) <= now_s]
                if due:
                    user = await self._verify(due[0])
                    waiting.remove(due[0])
                    self._note(due[0], user)
                    if not due[0].connection.closed:
                        self._outcome(due[0], user)
                elif waiting:
                    with anyio.move_on_after(min(map(self._due_s, waiting)) - now_s):
                        await self._wanted.wait()
                    self._wanted = anyio.Event()

    async def _verify(self, login: Login) -> Known | None:
        while True:
            users = self._broker.access.users
            # Other connections of the same user may have verified the password meanwhile.
            user = users.recall(login.name, login.password) or await to_thread.run_sync(
                users.verify, login.name, login.password
            )
            if users is self._broker.access.users:
                return user

    def _due_s(self, login: Login) -> float:
        return max(self._wrong.get(key, (0, 0.0))[1] for key in _keys(login))

    def _note(self, login: Login, user: Known | None) -> None:
        """Count a wrong password; a right one ends the pauses of its name, not of the address: who
        guesses may have a user of its own."""
        now_s = monotonic()
        address, name = _keys(login)
        if user is not None:
            self._wrong.pop(name, None)
            return
        for key, most_s in ((address, LOGIN_PAUSE_ADDRESS_S_MAX), (name, LOGIN_PAUSE_S_MAX)):
            count, until_s = self._wrong.pop(key, (0, now_s))
            count = 1 if now_s > until_s + LOGIN_FORGET_S else count + 1
            # A power of many thousand would be no float.
            doublings = min(count, 99) - LOGINS_WRONG_MAX - 1
            pause_s = min(most_s, PAUSE_S * 2.0**doublings) if doublings >= 0 else 0.0
            self._wrong[key] = count, now_s + pause_s
        while len(self._wrong) > LOGIN_PAUSES_MAX:
            del self._wrong[next(iter(self._wrong))]


def _keys(login: Login) -> tuple[bytes, bytes]:
    """Of its address, and of its name from there. Names may be long, and need not exist."""
    return login.source, login.source + b" " + blake2b(login.name, digest_size=8).digest()
