"""`python -m tests.kit.killed_copy N FROM TO …`: `mqks copy`, killed at its N-th step.

A step is a call of either store. A copy that has fewer ends as ever.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from mqks.commands import main
from mqks.journal.postgres.store import PostgresStore
from mqks.journal.sqlite.store import SqliteStore

STEPS = "load", "begin", "commit", "skip_to", "become", "close"


def killed(fatal: int, arguments: list[str]) -> int:
    calls = count(1)

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        async def run(*words: Any, **more: Any) -> Any:
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return await method(*words, **more)

        return run

    for store in (PostgresStore, SqliteStore):
        for name in STEPS:
            setattr(store, name, counted(getattr(store, name)))
    return main(["copy", *arguments])


if __name__ == "__main__":
    sys.exit(killed(int(sys.argv[1]), sys.argv[2:]))
