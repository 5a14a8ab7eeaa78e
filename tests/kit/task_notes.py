"""What the tasks of the workers that tests start have in common."""

from pathlib import Path


def note(path: str, what: str) -> None:
    """Write a line into a file. One in a hundred fails first."""
    if what.endswith("99") and not (failed := Path(f"{path}.{what}")).exists():
        failed.touch()
        raise RuntimeError("at first")
    with open(path, "a") as file:
        file.write(f"{what}\n")
