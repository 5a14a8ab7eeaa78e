"""Draws the states of a message into docs/architecture.md: `python -m tools.states`."""

import re
from pathlib import Path

from mqks.broker.spine.message.states import AFTER

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PICTURE = re.compile(r"```mermaid\nstateDiagram-v2\n.*?```\n", re.DOTALL)


def picture() -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in AFTER.items():
        arrows.setdefault((before.value, after.value), []).append(event.value)
    lines = [
        f"    {before} --> {after}: {',<br>'.join(events)}\n"
        for (before, after), events in arrows.items()
    ]
    return "".join(["```mermaid\nstateDiagram-v2\n", *lines, "```\n"])


def drawn(page: str) -> str:
    """The page with the picture as it is now."""
    page, count = PICTURE.subn(lambda _: picture(), page)
    assert count == 1, f"{count} pictures"
    return page


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
