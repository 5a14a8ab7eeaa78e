"""`mqks backup`, `verify` and `compact`: operations on a database file.

The one rule: the first two may run at any time, the third only while no server uses the file.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from mqks.commands.options import AsJson, Database, Told, note, progress, table, tell
from mqks.errors import DatabaseLocked, InspectionFailed, JournalDamaged
from mqks.settings import load

PAGE_BYTES = 4096


def backup(
    to: Annotated[Path, "TO", "The file to create."],
    db: Database = None,
    force: Annotated[bool, "Replace TO if it exists."] = False,
) -> Told:
    """Copy a database, also of a running server, and verify the copy.

    The copy has everything that was confirmed before. It gets its name when it is complete.
    """
    from mqks.journal.sqlite.backup import backup  # here, so that --help does not load the journal

    source = load({"db": db}, os.environ).db_file
    pages = source.stat().st_size // PAGE_BYTES if source.is_file() else 0
    copied = 0
    with progress("Copying", pages) as advance:

        def copying(done: int, _: int) -> None:
            nonlocal copied
            advance(done - copied)
            copied = done

        verdict = backup(source, to, force=force, progress=copying)
    told = {
        "file": str(to),
        "bytes": verdict.facts.db_bytes,
        "queues": verdict.queues,
        "messages": verdict.messages,
    }
    return told, (
        f"{to}: {verdict.facts.db_bytes:,} bytes, {verdict.queues:,} queues, "
        f"{verdict.messages:,} messages, verified"
    )


def verify(
    file: Annotated[str, "FILE", "A database file, a backup, a copy by mqks follow, or a URL."],
    as_json: AsJson = False,
) -> None:
    """Check that a database is undamaged; exit code 65 if it is damaged."""
    from mqks.journal.default_store import contents  # here, as above
    from mqks.journal.sqlite.verify import verify
    from mqks.pipeline.objects import CREDENTIALS

    if Path(file).is_dir() or file.partition("://")[0] in CREDENTIALS:
        _verify_copy(file, as_json)
        return
    db = load({"db": file}, os.environ).db
    file = str(db)
    with progress("Verifying"):
        if isinstance(db, Path):
            verdict = verify(db)
        else:
            with contents(db, thorough=True).read() as found:
                verdict = found.verdict()
    if verdict.is_served and isinstance(db, Path):
        note(f"{file} is in use by a server: SQLite's structure was not checked")
    if verdict.torn:
        note(verdict.torn)
    damage = [{"place": place, "what": what} for place, what in verdict.damage]
    if as_json or not damage:
        told = {
            "file": str(file),
            "is_served": verdict.is_served,
            "queues": verdict.queues,
            "messages": verdict.messages,
            "segments": verdict.facts.segments,
            "damage": damage,
        }
        tell(
            told,
            as_json,
            f"{file} is undamaged: {verdict.queues:,} queues, {verdict.messages:,} messages, "
            f"{verdict.facts.segments:,} segments",
        )
    else:
        table(damage, ["place", "what"])
    if damage:
        raise JournalDamaged(f"{file} is damaged: {len(damage)} places")


def _verify_copy(place: str, as_json: bool) -> None:
    from mqks.follow.copies import Copy  # here, as above

    copy = Copy(place)
    if not copy.generations(removed=True):
        what = "is a directory" if Path(place).is_dir() else "has no copy of a database"
        raise InspectionFailed(f"{place}: {what}")
    with progress("Verifying"):
        damage = [{"place": place, "what": what} for what in copy.damage()]
    if as_json or not damage:
        tell({"file": place, "damage": damage}, as_json, f"{place} is undamaged")
    else:
        table(damage, ["what"])
    if damage:
        raise JournalDamaged(f"{place} is damaged: {len(damage)} files")


def compact(db: Database = None) -> Told:
    """Shrink the file of a stopped server to its minimum."""
    import anyio

    from mqks.journal.sqlite.compact import compact  # here, as above

    settings = load({"db": db}, os.environ)
    try:
        before, after = anyio.run(compact, settings, lambda line: typer.echo(line, err=True))
    except DatabaseLocked as error:
        raise DatabaseLocked(
            f"{error}; a running server compacts its file automatically while it is idle"
        ) from None
    sizes = {"db": str(settings.db), "bytes_before": before, "bytes_after": after}
    return sizes, f"{settings.db}: {before:,} bytes before, {after:,} after"
