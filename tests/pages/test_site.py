"""The documentation as a site, built as `make docs` does."""

import subprocess
import sys
from pathlib import Path

import pytest

import mqks

ROOT = Path(__file__).parents[2]


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-W", "--keep-going", "-c", str(ROOT / "docs/site")]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_has_all_pages_and_each_public_name(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / "docs" / f"{page.stem}.html").exists()
    reference = (tmp_path / "docs/site/python.html").read_text()
    names = {*mqks.__all__} - {"__version__", "blocking"}
    assert [name for name in sorted(names) if f'id="mqks.{name}"' not in reference] == []
    assert "url=docs/index.html" in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_what_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# A\n\n[b](c.md) [d](#e)\n\n```{toctree}\n:captoin: F\n```\n")
    (docs / "orphan.md").write_text("# G\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for wrong in ("'c.md'", "'e'", "captoin", "orphan.md: WARNING: document isn't included"):
        assert wrong in done.stderr, (wrong, done.stderr)


def test_the_table_of_examples_has_all() -> None:
    table = (ROOT / "examples/README.md").read_text()
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert [name for name in sorted(names) if f"]({name}" not in table and name != "cookbook"] == []
