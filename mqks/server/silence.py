"""A server whose journal, on another machine, does not commit: another broker may take it over.

The one rule: safety never rests on it. It saves repeats, and sends clients to the next broker.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from mqks import log
from mqks.broker.broker import Broker
from mqks.journal.store import Store
from mqks.limits import FORSAKEN_S, SILENT_S

LOOK_S: Final = 0.25
WHY: Final = "the journal does not answer, and another broker may own it"


class Silence:
    """`forsake` closes all clients and refuses new ones, until it gets an empty reason."""

    def __init__(
        self, broker: Broker, store: Store, forsake: Callable[[str], Awaitable[None]]
    ) -> None:
        self._broker = broker
        self._store = store
        self._forsake = forsake
        self._is_forsaken = False

    async def run(self, flush: Callable[[], None]) -> None:
        """`flush` is called when deliveries may go on."""
        while True:
            await anyio.sleep(LOOK_S)
            silent_s = self._store.silent_s
            if (silent_s > SILENT_S) != self._broker.withholds:
                self._broker.withhold(silent_s > SILENT_S)
                if self._broker.withholds:
                    log.warning("deliveries_paused", reason=self._store.waits or WHY)
                else:
                    log.event("deliveries_go_on")
                    flush()
            if (silent_s > FORSAKEN_S) != self._is_forsaken:
                self._is_forsaken = not self._is_forsaken
                if self._is_forsaken:
                    log.error(
                        "clients_closed",
                        reason=self._store.waits or WHY,
                        silent_s=round(silent_s, 1),
                    )
                    await self._forsake(WHY)
                else:
                    log.event("clients_accepted")
                    await self._forsake("")
