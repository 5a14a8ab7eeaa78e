"""The way of a publish that the documentation quotes is the code that runs."""

import re

import pytest

from tests.sources.test_architecture import PACKAGE, ROOT

LINES_MAX = 60
TEXT = (ROOT / "docs/architecture.md").read_text().partition("## A publish in 60 lines")[2]
BLOCKS = re.findall(r"```py\n(.*?)```", TEXT.partition("\n## ")[0], re.S)
STATIONS = re.findall(r"# (\S+\.py): (\S+)\n((?:(?!# \S+\.py: ).*\n)+)", "".join(BLOCKS))


def test_it_is_short() -> None:
    quoted = [line for *_, code in STATIONS for line in code.splitlines() if line.strip() != "…"]
    assert 40 < len(quoted) <= LINES_MAX


@pytest.mark.parametrize(("file", "name", "code"), STATIONS, ids=[name for _, name, _ in STATIONS])
def test_it_is_quoted(file: str, name: str, code: str) -> None:
    source = (PACKAGE / file).read_text()
    method = name.rpartition(".")[2]
    found = re.search(
        rf"^( *)(?:async )?def {method}\(.*?(?=^\1(?:async )?def |^\1@|\Z)", source, re.M | re.S
    )
    assert found is not None, f"{file} has no {name}"
    lines = iter([line.strip() for line in found[0].splitlines()])
    for line in code.splitlines():
        if line.strip() != "…":
            assert line.strip() in lines, f"{name} has no such line, or in another order: {line}"
