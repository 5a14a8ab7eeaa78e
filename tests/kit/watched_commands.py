"""`python -m tests.kit.watched_commands NAME SEED COMMAND…`: commands that write a file NAME, on a
disk of the simulation, whose power may go at any moment.

A COMMAND is a list of words in JSON; the name of the file is added to it.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from mqks.commands import main
from tests.kit import unsynced
from tests.kit.unsynced import Record
from tests.simulation.disk import Disk


class Watched(Disk):
    """A disk that goes on, and keeps the records of what is asked of it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(0, directory)
        self.records: list[Record] = []
        self.place = self.serve(int)
        self.begun()
        self.install()

    def _take(self, *record: Any, **more: Any) -> None:
        self.records.append(Record(*record, **more))
        super()._take(*record, **more)

    def pause(self, time_s: float) -> None:
        pass

    def now(self) -> dict[str, bytes]:
        """What is there if nothing is left of what was not synced."""
        return self._model.files(unsynced.nothing)


def check(name: str, seed: int, commands: list[list[str]]) -> None:
    watched = Watched(Path("disk"))
    file, contents = watched.place / name, list[bytes | None]([None])
    for command in commands:
        assert main([*command, str(file)]) == 0
        contents.append(file.read_bytes())
        assert watched.now()[name] == contents[-1], "it is not there yet"
    assert contents[1] != contents[2]
    disk, chance = unsynced.Disk(), random.Random(seed)
    for record in watched.records:
        disk.take(record)
        for _ in range(3):
            assert disk.files(unsynced.something(chance)).get(name) in contents, "a part is there"


if __name__ == "__main__":
    Path("disk").mkdir()
    check(sys.argv[1], int(sys.argv[2]), [*map(json.loads, sys.argv[3:])])
