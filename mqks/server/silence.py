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


async def watch(
    broker: Broker,
    store: Store,
    forsake: Callable[[str], Awaitable[None]],
    flush: Callable[[], None],
) -> None:
    """`forsake` closes all clients and refuses new ones, until it gets an empty reason; `flush` is
    called when deliveries may go on."""
    is_forsaken = False
    while True:
        await anyio.sleep(LOOK_S)
        silent_s = store.silent_s
        if (silent_s > SILENT_S) != broker.withholds:
            broker.withhold(silent_s > SILENT_S)
            if broker.withholds:
                log.warning("deliveries_paused", reason=store.waits or WHY)
            else:
                log.event("deliveries_go_on")
                flush()
        if (silent_s > FORSAKEN_S) != is_forsaken:
            is_forsaken = not is_forsaken
            if is_forsaken:
                reason, silent_s = store.waits or WHY, round(silent_s, 1)
                log.error("clients_closed", reason=reason, silent_s=silent_s)
            else:
                log.event("clients_accepted")
            await forsake(WHY if is_forsaken else "")
