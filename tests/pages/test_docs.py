"""The documents keep step with the code: what is logged, asked for and shown is told in them.

The one rule: what a page says is read from the page, so that changing the page is what is tested.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mqks
from mqks.broker.requests.state import ATTRIBUTES
from mqks.protocol.requests import ACTIONS
from tools import actions

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second rank."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


# ------------------------------------------------------------------------------- what is logged


def names_of(keyword: ast.keyword) -> set[str]:
    """The field that it gives, or those of a `**{"from": 1}`, as some names are Python's; or those
    of `log.who`."""
    if keyword.arg is None and "who" in ast.unparse(keyword.value):
        return {"connection", "user", "client"}
    if keyword.arg is None and isinstance(keyword.value, ast.Dict):
        return {str(ast.literal_eval(key)) for key in keyword.value.keys if key is not None}
    return {keyword.arg or "**"}


def logged(source: str) -> Iterator[tuple[str, set[str]]]:
    """Name and fields of each event that a module logs."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("log"), "event" | "audit" | "warning" | "error")):
                name, *_ = node.args
                assert isinstance(name, ast.Constant), "an event's name stands where it is logged"
                fields = set().union(*map(names_of, node.keywords))
                if "exception" in fields:
                    fields = fields - {"exception"} | {"traceback"}
                yield str(name.value), fields


EVENTS: dict[str, set[str]] = {}
for module in sorted(Path(mqks.__file__).parent.rglob("*.py")):
    for event, its_fields in logged(module.read_text()):
        EVENTS.setdefault(event, set()).update(its_fields)


def told_events() -> dict[str, set[str]]:
    """Names and fields of each row under "Log lines": | `name`, … | level | `field`, … | … |"""
    told = dict[str, set[str]]()
    for line in section(page("docs/monitoring.md"), "Log lines").splitlines():
        cells = line.split("|")
        if len(cells) > 5:
            fields = re.findall(r"`(\w+)`", cells[3])
            told |= {name: {*fields} for name in re.findall(r"`event=(\w+)`", cells[1])}
    return told


def test_events_are_found() -> None:
    assert dict(logged('log.warning("x", a=1)\nlog.error("y", exception=e)\nother.event("z")')) == {
        "x": {"a"},
        "y": {"traceback"},
    }
    assert {"starting", "request_failed"} <= EVENTS.keys()


def test_the_monitoring_page_has_every_log_line_with_its_fields() -> None:
    assert told_events() == EVENTS


# ----------------------------------------------------------------------- what can be asked for


def test_the_protocol_has_the_usages_and_permissions_of_the_table_of_actions() -> None:
    """If not: python -m tools.actions."""
    assert page("docs/protocol.md") == actions.written(page("docs/protocol.md"))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_protocol_tells_everything_that_an_expression_can_see(name: str) -> None:
    assert f"| `state.{name}` |" in page("docs/protocol.md")


def test_the_flags_that_other_pages_name_exist() -> None:
    usages = " ".join(action.usage for action in ACTIONS.values())
    known = {*re.findall(r"--[a-z-]+", usages), "--confirm", "--db"}
    ours = {
        flag
        for line in page("docs/coming-from.md").splitlines()
        # Of a row's cells the last one is about MQKS.
        for flag in re.findall(r"`[^`]*?(--[a-z-]+)[^`]*`", line.rstrip("|").rpartition("|")[2])
    }
    assert ours
    assert ours <= known


# ---------------------------------------------------------------------------- what clients have

CLIENT = page("docs/client.md")


@pytest.mark.parametrize("option", [field.name for field in fields(mqks.Options)])
def test_every_option_is_told(option: str) -> None:
    assert f"`{option}`" in section(CLIENT, "Limits")


def test_other_names_cannot() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mqks.no_such_name


ERRORS = [
    name
    for name in mqks.__all__
    if isinstance(thing := getattr(mqks, name), type) and issubclass(thing, mqks.MqksError)
]


@pytest.mark.parametrize("error", [name for name in ERRORS if name != "ClientError"])
def test_every_error_is_told(error: str) -> None:
    assert f"`{error}`" in section(CLIENT, "Errors")


@pytest.mark.parametrize("skin", [mqks.AsyncClient, mqks.BlockingClient])
def test_every_method_is_told(skin: type) -> None:
    for name in public(skin):
        is_property = isinstance(vars(skin)[name], property)
        assert (f"`client.{name}`" if is_property else f"client.{name}(") in CLIENT


def test_both_clients_have_the_same_methods() -> None:
    assert public(mqks.AsyncClient) == public(mqks.BlockingClient)
    assert public(mqks.AsyncConsumer) == public(mqks.BlockingConsumer)


def public(skin: type) -> set[str]:
    return {name for name in vars(skin) if not name.startswith("_")}


# ------------------------------------------------- the recording in the README, of real runs

RECORDING = ROOT / "docs/pictures/recording.svg"
SVG = "{http://www.w3.org/2000/svg}"


def recorded() -> list[str]:
    told = (ROOT / "docs/pictures/recording.py").read_text().partition("STEPS = (")[2]
    return re.findall(r'^    f?"(.+)",$', told.partition("\n)")[0], re.M)


def test_the_recording_shows_all_commands_and_that_nothing_was_lost() -> None:
    lines = [each.text or "" for each in ElementTree.parse(RECORDING).iter(f"{SVG}text")]
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert shown == [each.replace("{ROOT}", ".") for each in recorded()]
    [published, *_] = [line for line in lines if line.endswith(" confirmed")]
    taken = [line for line in lines if line.isdigit()]
    [total] = [line for line in lines if " ready, " in line]
    left = int(published.split()[0]) - len(taken)
    assert taken == ["1", "2", "3"]
    assert f"{left:,} ready, 0 unacked" in total


def test_the_recording_fits_into_a_page_and_asks_nobody() -> None:
    assert RECORDING.stat().st_size < 150_000
    assert not re.search(r"(href|src|url)[=(]\W*http", RECORDING.read_text())


# ---------------------------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """What the headings of a page can be linked by."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("source", PAGES, ids=lambda source: str(source.relative_to(ROOT)))
def test_relative_links_lead_somewhere(source: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", source.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = source.parent / name if name else source
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_the_tests_that_a_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page("docs/reliability.md"))
    assert len(named) > 20
    for name, function in named:
        assert f"def {function}(" in page(name), f"{name}::{function}"
