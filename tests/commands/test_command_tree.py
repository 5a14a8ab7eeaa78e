"""Every command is told: a line of help, a panel, an example that parses, a row in the docs.

The one rule: the tree is walked as it is, so that a new command is noticed.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from mqks.commands import app
from mqks.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/commands.md").read_text()
SHELL = {"|", "<", ">", "&&", ";"}


class Told(NamedTuple):
    name: str
    panel: str
    command: Any


def commands(group: Any, name: str, panel: str = "") -> Iterator[Told]:
    for word, command in group.commands.items():
        path, its_panel = f"{name} {word}", getattr(command, "rich_help_panel", None) or panel
        if hasattr(command, "commands"):
            yield from commands(command, path, its_panel)
        else:
            yield Told(path, its_panel, command)


TREE = typer.main.get_command(app)
COMMANDS = list(commands(TREE, "mqks"))
each = pytest.mark.parametrize("told", COMMANDS, ids=[told.name for told in COMMANDS])


def example(told: Told) -> str:
    start, _, line = (told.command.epilog or "").partition("Example: ")
    assert (start, line[: len(told.name)]) == ("", told.name), "the epilog is: Example: mqks …"
    return str(line)


def rows(heading: str) -> dict[str, list[str]]:
    """Of the rows under a heading of the table: cells by each command in the first one."""
    section = re.split(r"\n(?:\| \*\*|\n)", PAGE.split(f"\n| **{heading}** |", 1)[1])[0]
    found = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in section.splitlines()]
    return {name: cells for cells in found if cells for name in names(cells[0])}


def names(cell: str) -> list[str]:
    return re.findall(r"`(mqks[^`]*)`", cell)


def test_the_tree_has_commands() -> None:
    assert {"mqks serve", "mqks publish", "mqks inspect error"} <= {told.name for told in COMMANDS}


@each
def test_it_has_a_line_of_help_and_a_panel(told: Told) -> None:
    first, *_ = (told.command.help or "").splitlines() or [""]
    assert re.fullmatch(r"[A-Z].{5,90}\.", first.strip()), first
    panels = {"Run", "Messages", "Queues", "Clients", "Inspect", "Maintenance", "Pipeline"}
    assert told.panel in panels


@each
def test_the_page_tells_it_with_its_example(told: Told) -> None:
    cells = rows(told.panel)[told.name]
    assert len(cells) == 3
    examples = dict(zip(names(cells[0]), names(cells[2].replace("\\|", "|")), strict=True))
    assert examples[told.name] == example(told)


def test_the_page_tells_nothing_else() -> None:
    told_names = [
        name for cell in re.findall(r"^\| (`mqks.*?) \|", PAGE, re.M) for name in names(cell)
    ]
    assert sorted(told_names) == sorted(told.name for told in COMMANDS)


def parsed(name: str, words: list[str]) -> str:
    """The last name of the command that these words are."""
    command, context = TREE, TREE.make_context(name, words)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        word, command, rest = command.resolve_command(context, rest)
        context = command.make_context(word, rest, parent=context)
    return str(command.name)


@each
def test_its_example_parses(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *words = takewhile(lambda word: word not in SHELL, shlex.split(example(told)))
    assert parsed(name, list(words)) == told.name.split()[-1]


NO_DEFAULT = """
    --event --id --id-prefix --delay --at --ttl --count --timeout --queue --older --where --limit
    --to
    --delete-queue-when-unused --when-unused --password-file --schema --start --end --sent-field
    --html --parquet --retries --losses --deliveries --backoff --dead-letters --messages-max
    --bytes-max --overflow --single-consumer --ack-timeout --ordered --fair --paused --labels
    --readers --publishes-paused --paused-until --concurrency --for --file --out --priority --key
    --unique
    --rate --concurrency-per-key --rate-per-key --every --jitter --catalog --keep --user
    --breaker --keep-result --reason --batch --then --on-dead
"""
"""Without them there is nothing that another value could stand for."""


@each
def test_every_default_is_told(told: Told) -> None:
    options = [option for option in told.command.params if option.param_type_name == "option"]
    for option in options:
        if option.multiple or option.is_flag or option.hidden or f" {option.opts[0]}" in NO_DEFAULT:
            continue
        if told.name in ("mqks serve", "mqks check-config") and option.name in SETTINGS:
            assert SETTINGS[option.name].default in ("", None) or "[" in option.help, option.opts
        elif option.default is None:
            assert "default: " in option.help, option.opts
        else:
            assert option.show_default, option.opts


@pytest.mark.parametrize("word", ["version", "--help"])
def test_starting_loads_nothing_heavy(word: str) -> None:
    code = (
        f"import sys, mqks.commands as c; c.main([{word!r}]); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {module.split(".")[0] for module in done.stderr.split()}
    rooms = {module.split(".")[1] for module in done.stderr.split() if module[:5] == "mqks."}
    assert not loaded & {"anyio", "asyncio", "aiosqlite", "uvloop", "numpy", "pandas", "pyspark"}
    assert not rooms & {"bench", "broker", "client", "journal", "pipeline", "server", "transfer"}
    assert word == "--help" or "rich" not in loaded, "typer itself shows its help with it"


def test_a_server_does_not_hold_what_reads_flags(tmp_path: Path) -> None:
    code = (
        "import sys, mqks.commands as c; c.main(['serve', '--db', 'none/mqks.db', '--port=0']);"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert "mqks.server.server" in done.stdout.split(), done.stderr
    assert not {"pydantic", "rich"} & set(done.stdout.split())
