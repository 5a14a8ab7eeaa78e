"""`python -m tests.kit.faulty serve …`: the broker with an error of its own.

`FAULT` in the environment names module, class and method that raise it. If `STOPS` is there too,
the process is asked to stop while it ends.
"""

import os
import signal
import sys
from importlib import import_module
from typing import Any

import anyio

from mqks.commands import main
from mqks.journal.sqlite.store import SqliteStore


def fault(*_: object, **__: object) -> None:
    raise KeyError("a fault of our own")


def stop_while_it_ends() -> None:
    close, run = SqliteStore.close, anyio.run

    async def close_and_stop(store: SqliteStore) -> None:
        signal.raise_signal(signal.SIGTERM)
        await close(store)
        signal.raise_signal(signal.SIGINT)

    def run_and_stop(*arguments: Any, **keywords: Any) -> Any:
        try:
            return run(*arguments, **keywords)
        finally:
            signal.raise_signal(signal.SIGTERM)

    SqliteStore.close = close_and_stop  # type: ignore[assignment,method-assign]
    anyio.run = run_and_stop  # type: ignore[assignment]


if __name__ == "__main__":
    module, kind, method = os.environ["FAULT"].split()
    owner = getattr(import_module(f"mqks.{module}"), kind)
    getattr(owner, method)  # What is not there is not replaced.
    setattr(owner, method, fault)
    if "STOPS" in os.environ:
        stop_while_it_ends()
    sys.exit(main(sys.argv[1:]))
