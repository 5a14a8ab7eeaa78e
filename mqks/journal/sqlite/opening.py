"""A database file before it is opened for writing.

The one rule: a file that is refused is left as it was found, and so is its WAL.
"""

from contextlib import closing
from pathlib import Path

from mqks.durable import write_again
from mqks.errors import ConfigurationError, JournalDamaged, JournalFailed
from mqks.journal.sqlite import wal
from mqks.journal.sqlite.database_file import State, connect, refuse_newer, wal_path
from mqks.journal.sqlite.structure import header_damage, schema_damage, structure_damage
from mqks.journal.store import Report
from mqks.settings import Settings


def look(path: Path, settings: Settings, report: Report) -> wal.Finding | None:
    """Tell what is wrong with its WAL, and yet can be gone on with. Raises as `SqliteStore.open`,
    and what SQLite raises."""
    its_wal = wal_path(path)
    try:
        refuse_newer(path)
        finding = None
        if its_wal.exists():
            finding = wal.look(its_wal)
            _refuse_wal(its_wal, finding, settings, report)
            # Commits of a server that died before their sync, or of it, are about to be believed.
            write_again(its_wal)
    except OSError as error:
        if error.filename:
            raise ConfigurationError(f"can't open {error.filename}: {error.strerror}") from error
        raise JournalFailed(f"{its_wal} can't be written again: {error.strerror}") from error
    if path.stat().st_size:
        _refuse_structure(path, report)
    return finding


def _refuse_wal(
    its_wal: Path, finding: wal.Finding | None, settings: Settings, report: Report
) -> None:
    """SQLite takes it to end before the first damaged frame."""
    # With less than full, commits in any order are what a power cut may leave.
    if finding is None or finding.is_torn or settings.synchronous != "full":
        return
    if not settings.salvage:
        report(f"{its_wal.name} {finding}")
        raise JournalDamaged(
            f"{its_wal} is damaged: restore a backup, or start with --salvage to go on without "
            f"the commits from frame {finding.frame} on"
        )
    report(f"salvaged without it: {its_wal.name} {finding}")


def _refuse_structure(path: Path, report: Report) -> None:
    """What SQLite can't read, or would write over, can't be salvaged in place."""
    rollback = path.with_name(f"{path.name}-journal")
    if rollback.exists() and rollback.stat().st_size:
        return  # It was only begun, and SQLite begins it again.
    damage = header_damage(path)
    with closing(connect(path, State.of(path))) as db:
        damage += [*schema_damage(db), *structure_damage(db)]
    for place, what in damage:
        report(f"{place}: {what}")
    if damage:
        raise JournalDamaged(
            f"{path} is damaged or no database of MQKS ({len(damage)} places, told above), and "
            "can't be salvaged: restore a backup, or export what can still be read"
        )
