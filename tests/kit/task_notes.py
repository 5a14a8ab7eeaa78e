"""What the tasks of the workers that tests start do: lines of a file are their effects."""

import time
from pathlib import Path


def write(path: str, what: str) -> None:
    with open(path, "a") as file:
        file.write(f"{what}\n")


def note(path: str, what: str) -> None:
    """One in a hundred fails first."""
    if what.endswith("99") and not (failed := Path(f"{path}.{what}")).exists():
        failed.touch()
        raise RuntimeError("at first")
    write(path, what)


def hold(path: str, gate: str) -> None:
    """Until there is a file."""
    write(path, "begun")
    while not Path(gate).exists():
        time.sleep(0.01)
    write(path, "done")
