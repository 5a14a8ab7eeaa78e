"""The recording in the README is one of real runs, in which nothing was lost."""

import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]

RECORDING = ROOT / "docs/pictures/recording.svg"
SVG = "{http://www.w3.org/2000/svg}"


def commands() -> list[str]:
    told = (ROOT / "docs/pictures/recording.py").read_text().partition("STEPS = (")[2]
    return re.findall(r'^    f?"(.+)",$', told.partition("\n)")[0], re.M)


def test_it_shows_all_commands_and_that_nothing_was_lost() -> None:
    lines = [each.text or "" for each in ElementTree.parse(RECORDING).iter(f"{SVG}text")]
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert shown == [each.replace("{ROOT}", ".") for each in commands()]
    [published, *_] = [line for line in lines if line.endswith(" confirmed")]
    taken = [line for line in lines if line.isdigit()]
    [total] = [line for line in lines if " ready, " in line]
    left = int(published.split()[0]) - len(taken)
    assert taken == ["1", "2", "3"]
    assert f"{left:,} ready, 0 unacked" in total


def test_it_fits_into_a_page_and_asks_nobody() -> None:
    assert RECORDING.stat().st_size < 150_000
    assert not re.search(r"(href|src|url)[=(]\W*http", RECORDING.read_text())
