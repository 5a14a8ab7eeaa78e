"""`--json` of the jobs: each is a process with a JVM of its own."""

from pathlib import Path

import pytest

from tests.commands.test_command_json import SPARK, World, printed

QUICK = "--master local[1] --conf spark.sql.shuffle.partitions=1"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("spark")  # Or where there is none it is skipped.
def test_jobs_are_told_as_json(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.server, world.client:
        assert world.client.ask(b'j publish --confirm e {"n": 1}') == b"j ok "
        for name, words in SPARK.items():
            on_spark = "" if name.endswith(("verify", "vacuum")) else QUICK
            objects = printed(world, name, f"{words} {on_spark}")
            assert objects
            assert all(isinstance(each, dict) and each for each in objects)
