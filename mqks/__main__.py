"""The command `mqks`, also as `python -m mqks`.

The one rule: where only the clients are installed, it says in one line what it lacks.
"""

import os
import sys

SERVER = frozenset(
    {"aiosqlite", "cronsim", "h11", "jinja2", "prometheus_client", "rich", "starlette", "typer"}
)
"""What the extra `server` brings."""


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    try:
        from mqks.commands import main as run  # here, so that it can be missing

        return run()
    except ModuleNotFoundError as error:
        if error.name not in SERVER:
            raise
        print(f"mqks: {error.name} is missing: pip install 'mqks[server]'", file=sys.stderr)
        return os.EX_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
