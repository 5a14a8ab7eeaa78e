"""Libraries of tasks, each with the same two tasks on the broker of BROKER.

The one rule: each module has `fill`, which enqueues numbers one after the other, `tell`, which
enqueues one task, and the WORKER that runs them, with two processes.
"""

import os
import sys
from pathlib import Path

URL = os.environ.get("BROKER", "mqks://127.0.0.1")
KIND = URL.partition(":")[0]
NOTED = "%08d\n"
BIN = Path(sys.executable).parent


def note(path: str, number: int) -> None:
    """That it has run."""
    with open(path, "a") as file:
        file.write(NOTED % number)
