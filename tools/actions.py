"""Writes the usage of each action, and the permissions that actions need, into docs/protocol.md:
`python -m tools.actions`. What it writes is what `mqks/protocol/requests.py` says."""

import re
from pathlib import Path
from textwrap import wrap

from mqks.protocol.requests import ACTIONS, Action

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
TABLE = re.compile(r"(?<=<!-- python -m tools.actions -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADING = re.compile(r"(?m)^### (\w+)$")
LABELS = {
    "": "",
    "id": "a consumer that it replaces",
    "replace": "`{event}`",
    "source": "`{queue}`",
}
LABELS |= {"words": "except `errors`", "events": "`{event}`", "masks": "`{mask}`"}
LABELS |= {
    "message": "the event of the message `{msg_id}`",
    "name": "what the schedule `{name}` publishes",
}
LABELS |= {"consumer": "the queue of `{consumer_id}`", "to": "`{queue}`"}
OF_ANOTHER = {"consumer": "consume", "schedule": "publish", "batch": "publish", "result": "publish"}
"""Permissions that are those to do what another thing does."""
COLUMNS = 120


def usage(action: Action, request_id: str) -> str:
    """The usage as an indented block of lines."""
    # No line ends inside of brackets.
    told = re.sub(r"\[[^]]+\]", lambda part: part[0].replace(" ", "\0"), action.help)
    indent = " " * (len(request_id) + len(action.name) + 6)
    lines = wrap(
        f"    {request_id} {told}",
        COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def needs(action: Action) -> str:
    """The permissions, each with what it is needed for."""
    words = {flag.field: f"`{word.decode()}`" for word, flag in action.flags.items()}
    told: dict[str, dict[str, None]] = {}
    for field, permission in action.needs.items():
        label = words.get(field) or LABELS.get(field, f"`{{{field}}}`")
        if permission == "batch":
            label = f"{'and ' if 'publish' in told else ''}what follows the batch"
        told.setdefault(OF_ANOTHER.get(permission, permission), {})[label] = None
    return ", ".join(
        f"`{permission}` {' '.join(labels)}".rstrip() for permission, labels in told.items()
    )


def written(page: str) -> str:
    """The page with what the table of actions says."""
    alike: dict[str, list[str]] = {}
    for name, action in _named():
        heading = HEADING.findall(page[: _usage_in(page, name).start()])[-1]
        alike.setdefault(needs(action), []).append(
            f"[{name}](#{heading}){' **[a]**' if action.is_audited else ''}"
        )
    rows = [f"| {', '.join(links)} | {needed or 'nothing'} |" for needed, links in alike.items()]
    table = "\n".join(["| action | needs |", "| --- | --- |", *rows, ""])
    page = TABLE.sub(lambda _: table, page)
    for name, action in _named():
        found = _usage_in(page, name)
        request_id = found[0].split()[0]
        page = page[: found.start()] + usage(action, request_id) + "\n" + page[found.end() :]
    return page


def _usage_in(page: str, name: str) -> re.Match[str]:
    """Where the page has it: behind a heading, alone or with those of its kind."""
    found = re.search(rf"(?m)^    \{{\w+\}} {name}(?: .*)?\n(?:     +.+\n)*", page)
    assert found is not None, f"{name} has no usage"
    return found


def _named() -> list[tuple[str, Action]]:
    return [(action.name, action) for action in ACTIONS.values()]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
