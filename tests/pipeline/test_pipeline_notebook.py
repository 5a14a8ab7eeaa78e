"""examples/shop.ipynb, executed as it is, with its table in a directory and on a store.

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
from tests.pipeline.test_pipeline_store import local_store

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/shop.ipynb"


def shown(notebook: Path) -> dict[str, dict[str, Any]]:
    """What the cells show that show more than what they print, by their names."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", ())]
    return {name: output["data"] for name, output in outputs if "data" in output}


def executed(directory: Path, **environment: str) -> dict[str, dict[str, Any]]:
    """What it shows, executed in this directory."""
    copy(NOTEBOOK, directory)
    beside = Path(sys.executable).parent
    path = f"{beside}{os.pathsep}{os.environ['PATH']}"
    with BrokerProcess(directory / "mqks.db") as broker:
        done = subprocess.run(
            [beside / "jupyter-execute", "--inplace", directory / NOTEBOOK.name],
            env={**os.environ, **environment, "PATH": path, "MQKS_URL": broker.url},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return shown(directory / NOTEBOOK.name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java", "quick_spark")
@pytest.mark.parametrize("place", ["directory", "store"])
def test_it_shows_what_it_showed(place: str, tmp_path: Path) -> None:
    if place == "directory":
        found = executed(tmp_path)
        assert any((tmp_path / "warehouse").rglob("*.parquet"))
    else:
        with local_store():
            told = {"WAREHOUSE": "s3://bucket/shop", "S3__ENDPOINT": os.environ["AWS_ENDPOINT_URL"]}
            names = {f"PYICEBERG_CATALOG__LAKE__{name}": told[name] for name in told}
            found = executed(tmp_path, **names)
        assert not (tmp_path / "warehouse").exists()
    kept = shown(NOTEBOOK)
    assert found["querying"]["text/plain"] == kept["querying"]["text/plain"]
    assert found["drawing"].keys() == kept["drawing"].keys()


def test_the_page_has_its_picture() -> None:
    picture = (ROOT / "docs/pictures/shop.png").read_bytes()
    assert b64decode(shown(NOTEBOOK)["drawing"]["image/png"]) == picture
