"""anyio: listeners, connections, signals, drain, and the wiring of broker and journal."""

from mqks.server.running import run

__all__ = ["run"]
