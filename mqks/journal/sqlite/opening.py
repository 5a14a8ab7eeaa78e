"""Checks of a database file before it is opened for writing.

The one rule: a refused file and its WAL are left unchanged.
"""

from contextlib import closing
from pathlib import Path

from mqks.durable import write_again
from mqks.errors import ConfigurationError, JournalDamaged, JournalFailed
from mqks.files import exists
from mqks.journal.sqlite import wal
from mqks.journal.sqlite.database_file import (
    DatabaseFile,
    FileState,
    connect,
    refuse_newer,
    wal_path,
)
from mqks.journal.sqlite.migrations import NEWEST
from mqks.journal.sqlite.structure import header_damage, schema_damage, structure_damage
from mqks.journal.store import Report, refuse
from mqks.settings import Settings


def check(path: Path, settings: Settings, report: Report) -> wal.Finding | None:
    """Check the file. Return damage of its WAL that does not prevent a start. Raises like
    `SqliteStore.open`, and what SQLite raises."""
    its_wal = wal_path(path)
    try:
        refuse_newer(path)
        finding = None
        if exists(its_wal):
            finding = wal.check(its_wal)
            _refuse_wal(its_wal, finding, settings, report)
            # The WAL may contain commits that a killed server had not synced, or failed to sync.
            write_again(its_wal)
    except OSError as error:
        if error.filename:
            raise ConfigurationError(f"can't open {error.filename}: {error.strerror}") from error
        raise JournalFailed(f"{its_wal} can't be written again: {error.strerror}") from error
    if path.stat().st_size:
        _refuse_structure(path, settings, report)
    return finding


def _refuse_wal(
    its_wal: Path, finding: wal.Finding | None, settings: Settings, report: Report
) -> None:
    """Refuse a WAL with commits after a damaged frame, which SQLite would ignore."""
    # With less than full, a power cut may leave commits in any order.
    if finding is None or finding.is_torn or settings.synchronous != "full":
        return
    if not settings.salvage:
        report(f"{its_wal.name} {finding}")
        raise JournalDamaged(
            f"{its_wal} is damaged: restore a backup, or start with --salvage to continue without "
            f"the commits from frame {finding.frame} on"
        )
    report(f"salvaged without it: {its_wal.name} {finding}")


def _refuse_structure(path: Path, settings: Settings, report: Report) -> None:
    """Refuse a file that SQLite can't read or would overwrite: it can't be salvaged in place."""
    rollback = path.with_name(f"{path.name}-journal")
    if exists(rollback) and rollback.stat().st_size:
        return  # Its creation was not finished, and SQLite starts it again.
    damage = header_damage(path)
    with closing(connect(path, FileState.of(path))) as db:
        damage += [*schema_damage(db), *structure_damage(db)]
        ((version,),) = db.execute("pragma user_version")
    for place, what in damage:
        report(f"{place}: {what}")
    if damage:
        raise JournalDamaged(
            f"{path} is damaged or not an MQKS database ({len(damage)} places, listed above), and "
            "can't be salvaged: restore a backup, or export what can still be read"
        )
    if 0 < version < NEWEST and not settings.salvage:
        with DatabaseFile.open(path) as file:  # A migration would change what is refused later.
            refuse(str(path), file.damage, report)
