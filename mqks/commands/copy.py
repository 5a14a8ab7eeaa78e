"""`mqks copy` moves a journal from one database to another; `mqks new-epoch` gives a restored one a
new epoch.

The one rule: no server uses the journals meanwhile.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqks.commands.options import Database, Told, note, progress
from mqks.files import exists
from mqks.settings import Settings, load

if TYPE_CHECKING:
    from mqks.journal.copying import Copied

Replication = Annotated[
    str | None,
    "WORD",
    r"What replicates PostgreSQL's commits: standbys, provider or none. \[default: standbys]",
]


def copy(
    begin: Annotated[str, "FROM", "The path or postgresql:// URL of the journal."],
    to: Annotated[str, "TO", "The path or URL of one that does not exist yet."],
    db_replication: Replication = None,
) -> Told:
    """Move the journal of a stopped server to another database, and verify it.

    TO gets the epoch of the journal, and FROM a new one: programs that read queues continue at TO.
    """
    import anyio

    flags = {"db_replication": db_replication}
    old, new = (load(flags | {"db": place}, os.environ) for place in (begin, to))
    if _is_same(old, new):
        raise typer.BadParameter(f"FROM and TO are the same: {old.db}")
    copied = anyio.run(_copy, old, new)
    return {"from": str(old.db), "to": str(new.db), **copied._asdict()}, (
        f"{new.db}: {copied.queues:,} queues, {copied.segments:,} segments, {copied.bytes:,} "
        f"bytes, verified; {old.db} has a new epoch"
    )


def _is_same(old: Settings, new: Settings) -> bool:
    if isinstance(old.db, Path) and isinstance(new.db, Path):
        return exists(old.db) and exists(new.db) and old.db.samefile(new.db)
    return old.db == new.db


async def _copy(old: Settings, new: Settings) -> "Copied":
    from mqks.journal.copying import copy  # here, so that --help does not load the journal
    from mqks.journal.default_store import existing_store, new_store

    with progress("Copying") as advance:
        async with existing_store(old, note) as source, new_store(new, note) as target:
            return await copy(source, target, advance)


def new_epoch(db: Database = None, db_replication: Replication = None) -> Told:
    """Give the journal of a stopped server a new epoch, after its database was restored.

    Programs that read queues then notice that messages may be missing.
    """
    import anyio

    settings = load({"db": db, "db_replication": db_replication}, os.environ)
    epoch = anyio.run(_new_epoch, settings)
    return {"db": str(settings.db), "epoch": epoch}, f"{settings.db}: epoch {epoch}"


async def _new_epoch(settings: Settings) -> str:
    from mqks.journal.copying import renew_epoch  # here, as above
    from mqks.journal.default_store import existing_store

    async with existing_store(settings, note) as store:
        return await renew_epoch(store)
