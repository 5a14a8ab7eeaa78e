"""What can be read from a file and yet may be lost when the power goes, made to last.

The one rule: after a failed sync no later one tells the truth. The system takes what it could not
write for written, so it has to be written again.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 1024 * 1024


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_again(path: Path) -> None:
    """Put on the disk what the file says, and its name, if it is there. Raises OSError."""
    with suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
        at = 0
        while chunk := os.pread(file.fileno(), CHUNK_BYTES, at):
            at += os.pwrite(file.fileno(), chunk, at)
        os.fsync(file.fileno())
        sync(path.parent)
