"""What a person should know of a queue at a glance: the same words on the page and in commands."""

from collections.abc import Mapping
from typing import Any, Final

PAUSED: Final = {
    "all": "paused",
    "deliveries": "deliveries paused",
    "publishes": "publishes paused",
    "publishes wait": "publishes wait",
    "all, publishes wait": "paused, publishes wait",
}
"""By what is paused."""
DELIVERIES_PAUSED: Final = frozenset({"all", "deliveries", "all, publishes wait"})
"""Of these, those where nothing is delivered."""
STYLES: Final = {
    "ok": "green",
    "grows": "yellow",
    "no consumer": "dark_orange",
    "grows, dead letters": "red",
}
"""Colours of a terminal; those of any other mark are those of a queue at rest."""
AT_REST: Final = "magenta"


def queue_marks(queue: Mapping[str, Any], *, is_dead: bool, grows: bool) -> list[str]:
    """The marks of a row of `stats queues`, or "ok". `is_dead`: others send their dead letters to
    it."""
    held = queue["held_by"]
    told = (
        PAUSED.get(queue["paused"]),
        f"held by {held}" if held and held != "pause" else None,
        "grows" if grows else None,
        "dead letters" if is_dead else None if queue["consumers"] else "no consumer",
    )
    return [each for each in told if each] or ["ok"]
