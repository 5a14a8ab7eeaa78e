"""What was confirmed, what is said to be done, outlives a power cut at any point.

`python -m tests.power_cut` does the same at length.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mqks.testing import Broker
from tests import power_cut
from tests.kit import disk_log, unsynced
from tests.kit.seeds import printed_seed
from tests.kit.server_process import ServerProcess
from tests.kit.unsynced import Disk
from tests.kit.waiting import WAIT_S

STEPS = 600
TEXTS = "--text-file-bytes-min", "500"
"""Of the load, about half of the commits."""


@pytest.fixture(scope="module")
def seed() -> int:
    return printed_seed()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return disk_log.compiled(tmp_path_factory.mktemp("disk-log"))


@pytest.fixture(scope="module")
def log(seed: int, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server under load that is synchronous = full, with texts in files and without."""
    directory = tmp_path_factory.mktemp("load")
    return power_cut.record(directory, library, random.Random(seed), STEPS, *TEXTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cuts", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_what_was_confirmed_outlives_a_power_cut(
    log: Path, seed: int, tmp_path: Path, cuts: int
) -> None:
    figures = power_cut.cut(log, tmp_path, cuts, seed)
    assert figures.damaged == figures.broken == []
    assert figures.cuts.total() == cuts
    assert figures.confirms > STEPS, "hardly any confirms"
    assert figures.sqs > 40, "hardly any answers by SQS"
    assert figures.syncs > 50, "hardly any syncs"
    assert b"-texts/0" in log.read_bytes()


def test_a_disk_that_lies_is_found_out(log: Path, seed: int, tmp_path: Path) -> None:
    """Or the test above could not fail."""
    figures = power_cut.cut(
        log, tmp_path, 200, seed, lies=lambda n: n.endswith("-wal"), synchronous="off"
    )
    assert figures.broken


def test_a_database_that_was_only_begun_is_begun_again(log: Path, tmp_path: Path) -> None:
    """Beside it lies SQLite's journal, by which that is seen."""
    disk, files = Disk(), dict[str, bytes]()
    records = disk_log.records(log)
    while not files.get("mqks.db"):
        disk.take(next(records))
        files = disk.files(unsynced.everything)
    files["mqks.db"] = bytes(512) + files["mqks.db"][512:]
    unsynced.put(files, tmp_path / "cut")
    with Broker(tmp_path / "cut" / "mqks.db") as broker:
        assert broker.port


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "cuts"), [((), 120), (TEXTS, 200)], ids=["rows", "texts"])
def test_with_less_than_full_the_database_stays_whole(
    library: Path, seed: int, tmp_path: Path, texts: tuple[str, ...], cuts: int
) -> None:
    flags = "--synchronous", "normal", *texts
    log = power_cut.record(tmp_path, library, random.Random(seed), STEPS, *flags)
    figures = power_cut.cut(
        log, tmp_path, cuts, seed, at_ends=1.0, broken_max=sys.maxsize, synchronous="normal"
    )
    assert figures.damaged == []
    assert figures.broken, "normal promises as much as full"


@pytest.mark.slow
def test_what_was_confirmed_outlives_a_power_cut_in_the_database_alone(
    library: Path, seed: int, tmp_path: Path
) -> None:
    log = power_cut.record(tmp_path, library, random.Random(seed), STEPS)
    figures = power_cut.cut(log, tmp_path, 150, seed)
    assert figures.damaged == figures.broken == []


BACKUP = ["backup", "--force", "--db", "mqks.db"]
ADD = ["user", "add", "--token"]


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("copy", [BACKUP, BACKUP]),
        ("users", [[*ADD, "alice", "--users"], [*ADD, "bob", "--users"]]),
    ],
    ids=["backup", "users"],
)
def test_a_file_is_there_when_its_command_is_done(
    name: str, commands: list[list[str]], library: Path, tmp_path: Path, seed: int
) -> None:
    """And until then the old one is, or none: never a part of one."""
    log, files, rng = tmp_path / "log", tmp_path / "files", random.Random(seed)
    files.mkdir()
    with ServerProcess(tmp_path / "mqks.db", "--ballast-bytes", "0") as server:
        assert server.stop() == 0
    environment = os.environ | disk_log.environment(library, log, files, Path("never"))
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
