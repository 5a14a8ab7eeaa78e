"""anyio: listeners, connections, signals, drain, and the wiring of broker and journal."""
