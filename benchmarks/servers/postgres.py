"""A broker, and a PostgreSQL server for it with one synchronous standby, as one program:
`python -m benchmarks.servers.postgres ARGUMENT…`.

The one rule: it ends what it has started, also when it is itself ended by SIGTERM.
"""

import signal
import subprocess
import sys

from tests.kit.postgres import Postgres


def serve(*arguments: str) -> int:
    """Returns the broker's status."""
    with (
        Postgres(fsync="on", synchronous_standby_names="standby") as primary,
        Postgres(primary=primary, fsync="on"),
    ):
        command = [sys.executable, "-m", "mqks", "serve", "--db", primary.url(), *arguments]
        with subprocess.Popen(command) as process:
            try:
                return process.wait()
            finally:
                process.terminate()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.exit(serve(*sys.argv[1:]))
