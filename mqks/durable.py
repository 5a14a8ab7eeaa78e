"""Makes file contents durable: data that can be read may still be lost in a power cut.

The one rule: after a failed sync a later successful one proves nothing. The system considers the
data written although it is not, so it must be written again.
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


def no_link(path: str, flags: int) -> int:
    """An opener that follows no link to a file of somebody else."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_again(path: Path) -> None:
    """Write the content of a file again and sync it and its name, if it exists. Raises OSError."""
    with (
        suppress(FileNotFoundError),
        open(path, "r+b", buffering=0, opener=no_link) as file,
    ):
        at = 0
        while chunk := os.pread(file.fileno(), CHUNK_BYTES, at):
            at += os.pwrite(file.fileno(), chunk, at)
        os.fsync(file.fileno())
        sync(path.parent)
