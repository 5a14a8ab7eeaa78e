"""What a command has written is there when it is done, though the power goes then.

The server's own database is cut in the simulation.
"""

import json
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mqks.testing import Broker
from tests.kit.program import ROOT, Program
from tests.kit.seeds import printed_seed
from tests.simulation import vfs

BACKUP = ["backup", "--force", "--db", "mqks.db"]
ADD = ["user", "add", "--token"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("copy", [BACKUP, BACKUP]),
        ("users", [[*ADD, "alice", "--users"], [*ADD, "bob", "--users"]]),
    ],
    ids=["backup", "users"],
)
def test_a_file_is_there_when_its_command_is_done(
    name: str, commands: list[list[str]], tmp_path: Path
) -> None:
    """And until then the old one is, or none: never a part of one."""
    try:
        vfs.library()
    except (ImportError, OSError) as error:
        pytest.skip(str(error))
    with Broker(tmp_path / "mqks.db", ballast_bytes=0):
        pass
    words = name, str(printed_seed()), *map(json.dumps, commands)
    command = [sys.executable, "-m", "tests.kit.watched_commands", *words]
    with Program(command, "", tmp_path, PYTHONPATH=str(ROOT)) as watched:
        assert watched.end() == 0


def test_a_database_that_was_only_begun_is_begun_again(db: Path) -> None:
    """Beside it lies SQLite's journal, by which that is seen."""
    begun = db.with_name("begun.db")
    with closing(sqlite3.connect(begun, isolation_level=None)) as making:
        making.executescript("pragma cache_size = 1; begin; create table t (x)")
        making.execute("insert into t values (zeroblob(100000))")
        for end in ("", "-journal"):
            shutil.copy(f"{begun}{end}", f"{db}{end}")
    assert db.stat().st_size
    with Broker(db) as broker:
        assert broker.port
