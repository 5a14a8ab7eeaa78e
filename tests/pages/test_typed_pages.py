"""Pages typed from top to bottom, each in one session with one broker.

The one rule: what is typed, and what it shows, is on the page. Blocks that need Spark are typed in
`test_pipeline_typed.py`.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit.server_process import ServerProcess
from tests.kit.typist import Typist, blocks, commands, pattern
from tests.kit.waiting import until

ROOT = Path(__file__).parents[2]


PAGES = {
    "README.md": 8,
    "docs/tutorial.md": 12,
    "docs/client.md": 8,
    "docs/commands.md": 11,
    "docs/spark.md": 4,
    "docs/pipeline.md": 3,
}
"""The least number of things that are typed: where nothing is found, nothing fails."""


@pytest.fixture
def typist(server: ServerProcess, tmp_path: Path) -> Iterator[Typist]:
    with Typist(tmp_path, server.url, with_spark=False) as typist:
        yield typist


@pytest.mark.parametrize(
    ("page", "least"),
    [
        pytest.param(*each, id=each[0], marks=[pytest.mark.slow] * (each[0] != "README.md"))
        for each in PAGES.items()
    ],
)
def test_what_the_page_says_can_be_typed(page: str, least: int, typist: Typist) -> None:
    typist.type((ROOT / page).read_text())
    assert typist.typed >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "count"), [("django", 6), ("dramatiq", 3), ("faststream", 3), ("huey", 3)]
)
def test_the_page_of_a_library_can_be_typed(
    library: str, count: int, server: ServerProcess, typist: Typist
) -> None:
    pytest.importorskip(library, reason=f"the extra {library} is not installed")
    text = (ROOT / f"docs/{library}.md").read_text()
    if library == "django" and find_spec("django.tasks") is None:  # Before 6, as the page says.
        text = text.replace("from django.tasks", "from django_tasks")
    typist.type(text.replace("mqks://localhost", server.url))
    assert typist.typed == count


@pytest.mark.slow
def test_all_pages_are_typed_by_one_reader(server: ServerProcess, tmp_path: Path) -> None:
    """What one page leaves behind is in the way of no other."""
    for number, page in enumerate(PAGES):
        (directory := tmp_path / str(number)).mkdir()
        with Typist(directory, server.url, with_spark=False) as typist:
            typist.type((ROOT / page).read_text())


@pytest.mark.slow
def test_the_page_of_sqs_and_then_its_example(tmp_path: Path) -> None:
    """In one broker: they have queues of their own."""
    pytest.importorskip("boto3")
    with (
        ServerProcess(tmp_path / "mqks.db", "--sqs-port", "0") as server,
        Typist(tmp_path, server.url, with_spark=False) as typist,
    ):
        place = until(lambda: re.search(r"address=sqs:(http://\S+)", server.log))[1]
        typist.type((ROOT / "docs/sqs.md").read_text().replace("http://localhost:9324", place))
        worker = f"AWS_ENDPOINT_URL_SQS={place} python {ROOT}/examples/sqs/worker.py"
        done = "done: mow\ndone: rake\ndone: water"
        typist.type(f"```console\n$ {worker} send\n$ {worker}\n{done}\n```\n")
    assert typist.typed >= 7


PAGE = """
```console
$ echo a \\
  b
a b
$ false
```
"""


def test_commands_are_found() -> None:
    [block] = blocks(PAGE)
    assert list(commands(block)) == [("echo a \\\n  b", ["a b"]), ("false", [])]


def test_what_is_shown_is_compared() -> None:
    shown = pattern(["a 0660dd0a1ce1d04da9454021", "…", "b …"])
    assert shown.fullmatch("a 0123456789abcdef01234567\nb 1\n")
    assert shown.fullmatch("a 0123456789abcdef01234567\nx\ny\nb 1\n")
    assert not shown.fullmatch("a 0123456789abcdef0123456\nb 1\n")
    assert not shown.fullmatch("a 0123456789abcdef01234567\nc 1\n")


@pytest.mark.parametrize(
    "wrong",
    [
        "```console\n$ false\n```",
        "```console\n$ mqks ping\nno\n```",
        "```console\n$ nc localhost 25000\np ping a\np ok a\np ping b\n```\n",
        "```python\nprint(1)\n```\n```output\n2\n```",
        "```python\nawait nothing\n```",
        "```\nmqks ping\n```",
    ],
)
def test_a_page_that_is_wrong_is_noticed(wrong: str, typist: Typist) -> None:
    with pytest.raises(AssertionError):
        typist.type(wrong)
