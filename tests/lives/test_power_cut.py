"""What a command has written is there when it is done, though the power goes then.

The server's own database is cut in the simulation.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mqks.testing import Broker
from tests.kit import disk_log, unsynced
from tests.kit.seeds import printed_seed
from tests.kit.server_process import ServerProcess
from tests.kit.unsynced import Disk
from tests.kit.waiting import WAIT_S

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
    log, files, rng = tmp_path / "log", tmp_path / "files", random.Random(printed_seed())
    library = disk_log.compiled(tmp_path)
    files.mkdir()
    with ServerProcess(tmp_path / "mqks.db", "--ballast-bytes", "0") as server:
        assert server.stop() == 0
    environment = os.environ | disk_log.environment(library, log, files)
    contents: list[bytes | None] = [None]
    for command in commands:
        line = [sys.executable, "-m", "mqks", *command, str(files / name)]
        subprocess.run(
            line, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=WAIT_S
        )
        contents.append((files / name).read_bytes())
        disk = Disk()
        for record in disk_log.records(log):
            disk.take(record)
        assert disk.files(unsynced.nothing)[name] == contents[-1]
    assert contents[1] != contents[2]
    disk = Disk()
    for record in disk_log.records(log):
        disk.take(record)
        for _ in range(3):
            assert disk.files(unsynced.something(rng)).get(name) in contents


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
