"""Commands as they are typed, and what they show: each file of `stories/` is one, in the format of
`console.py`. Its first line says what it shows.

A second line may tell of its server: `# server: --queues-max 1` with these flags, `# no server`.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.commands.console import Here
from tests.kit.server_process import ServerProcess

STORIES = sorted((Path(__file__).parent / "stories").iterdir())


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_what_commands_show(story: Path, tmp_path: Path) -> None:
    text = story.read_text()
    _, told, *_ = text.splitlines()
    flags = told.removeprefix("# server: ").split() if told.startswith("# server: ") else []
    alone = nullcontext() if told == "# no server" else ServerProcess(tmp_path / "mqks.db", *flags)
    with alone as server:
        Here(tmp_path, server.url if server else "").play(text)
