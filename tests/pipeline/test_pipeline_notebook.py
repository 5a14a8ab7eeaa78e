"""examples/shop.ipynb, executed as it is.

The one rule: what it shows is what is committed with it.
"""

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from mqks.testing import BrokerProcess

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/shop.ipynb"


def shown(notebook: Path) -> dict[str, dict[str, Any]]:
    """What the cells show that show more than what they print, by their names."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", ())]
    return {name: output["data"] for name, output in outputs if "data" in output}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java", "quick_spark")
def test_it_shows_what_it_showed(tmp_path: Path) -> None:
    """That a table is the same on a store is seen in `test_pipeline_readers.py`."""
    copy(NOTEBOOK, tmp_path)
    beside = Path(sys.executable).parent
    path = f"{beside}{os.pathsep}{os.environ['PATH']}"
    with BrokerProcess(tmp_path / "mqks.db") as broker:
        done = subprocess.run(
            [beside / "jupyter-execute", "--inplace", tmp_path / NOTEBOOK.name],
            env={**os.environ, "PATH": path, "MQKS_URL": broker.url},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "warehouse").rglob("*.parquet"))
    found, kept = shown(tmp_path / NOTEBOOK.name), shown(NOTEBOOK)
    assert found["querying"]["text/plain"] == kept["querying"]["text/plain"]
    assert found["drawing"].keys() == kept["drawing"].keys()


def test_the_page_has_its_picture() -> None:
    picture = (ROOT / "docs/pictures/shop.png").read_bytes()
    assert b64decode(shown(NOTEBOOK)["drawing"]["image/png"]) == picture
