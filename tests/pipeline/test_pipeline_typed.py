"""The pages with Spark typed from top to bottom, each in one session with one broker.

The one rule: what is typed, and what it shows, is on the page. What needs no Spark is typed in
`test_typed_pages.py`, too.
"""

from pathlib import Path

import pytest

from tests.kit.server_process import ServerProcess
from tests.kit.typist import Typist

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("java", "quick_spark")
@pytest.mark.parametrize(("page", "least"), [("docs/spark.md", 8), ("docs/pipeline.md", 8)])
def test_what_the_page_says_of_spark_can_be_typed(page: str, least: int, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "mqks.db") as server,
        Typist(tmp_path, server.url, with_spark=True) as typist,
    ):
        typist.type((ROOT / page).read_text())
    assert typist.typed >= least
