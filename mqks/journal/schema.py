"""The migrations of the databases. The one rule: a version is the number of a file."""

from pathlib import Path


def migrations(place: str = "") -> list[tuple[int, str]]:
    """Version and SQL of each in this part of `migrations/`, in order."""
    package = Path(__file__).parents[1]
    inside = package / "migrations"  # Of the wheel; a checkout has it at its top.
    directory = (inside if inside.is_dir() else package.parent / "migrations") / place
    files = sorted(directory.glob("[0-9]*.sql"))
    if not files:
        raise FileNotFoundError(f"no migrations in {directory}")
    return [(int(file.name[:4]), file.read_text("utf-8")) for file in files]
