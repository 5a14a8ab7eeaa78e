"""A library that, loaded before others, makes every sync fail or hang once a file exists, and moves
the wall clock of a process while it runs.

The one rule: without the variables that name the files it changes nothing. The monotonic clock goes
on as it does, as when somebody sets the system's clock.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def compiled(directory: Path) -> Path:
    """The library, for LD_PRELOAD; skips the test where nothing compiles it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    library = directory / "preloaded.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


class Clock:
    """The clock of all processes that have `environment` in theirs."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._file = directory / "ahead_s"
        self.ahead(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(self._file)}

    def ahead(self, seconds: int) -> None:
        """Set it so far ahead of the true time; below 0 it is behind."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("@l", seconds))
