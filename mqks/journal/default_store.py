"""The stores that settings name: a SQLite file, or PostgreSQL if they have a URL.

The one rule: nothing of PostgreSQL is imported unless it is used.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqks.errors import CannotWrite, ConfigurationError, DiskFull, InspectionFailed
from mqks.files import is_file
from mqks.journal.contents import Contents
from mqks.journal.sqlite.database_file import DatabaseFile, no_file
from mqks.journal.sqlite.new_file import new_file
from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.store import Report, Store
from mqks.settings import DatabaseUrl, Settings

if TYPE_CHECKING:
    from mqks.journal.postgres.store import PostgresStore

ALL: Final = 2**40
"""More ids, errors or records than any journal has."""


async def open_store(settings: Settings, report: Report) -> Store:
    """An `OpenStore`."""
    must_exist = settings.db_must_exist
    try:
        if isinstance(settings.db, DatabaseUrl):
            return await _postgres_store().open(settings, report, must_exist=must_exist)
        if must_exist and not is_file(settings.db):
            raise no_file(settings.db)
    except InspectionFailed as error:
        raise ConfigurationError(f"{error}, and db_must_exist is set") from error
    return await SqliteStore.open(settings, report)


@asynccontextmanager
async def existing_store(settings: Settings, report: Report) -> AsyncIterator[Store]:
    """A store that exists, claimed meanwhile. Raises like `OpenStore`, and InspectionFailed if
    there is none."""
    store: Store
    if isinstance(settings.db, DatabaseUrl):
        store = await _postgres_store().open(settings, report, must_exist=True)
    elif is_file(settings.db):
        store = await SqliteStore.open(settings, report)
    else:
        raise no_file(settings.db)
    async with store:
        await store.claim(wait=False)
        yield store


@asynccontextmanager
async def new_store(settings: Settings, report: Report) -> AsyncIterator[Store]:
    """A store to be filled. A file gets its name when it is complete, at the end of the context.
    Raises like `OpenStore`, and CannotWrite if the file exists, or there is no space."""
    # What is copied is kept, whatever a server with these settings would keep.
    settings = replace(settings, once_ids_max=ALL, errors_kept_max=ALL, audit_kept_max=ALL)
    settings = replace(settings, db_must_exist=False)
    is_file = isinstance(settings.db, Path)
    opened = new_file(settings, report) if is_file else _opened(settings, report)
    try:
        async with opened as store:
            yield store
    except DiskFull as error:
        raise CannotWrite(f"{settings.db}: {error}") from error


@asynccontextmanager
async def _opened(settings: Settings, report: Report) -> AsyncIterator[Store]:
    async with await open_store(settings, report) as store:
        await store.claim(wait=False)
        yield store


def contents(db: Path | DatabaseUrl, *, thorough: bool = False) -> Contents:
    """What a journal contains, before it is read the first time. Raises like `Contents.read`."""
    if isinstance(db, Path):
        return DatabaseFile(db, thorough=thorough)
    _postgres_store()  # Tells what is missing.
    from mqks.journal.postgres.database import Database  # here: psycopg is an extra

    return Database(db, thorough=thorough)


def _postgres_store() -> "type[PostgresStore]":
    try:
        from mqks.journal.postgres.store import PostgresStore  # here: psycopg is an extra
    except ImportError as error:
        raise ConfigurationError(
            f"db: PostgreSQL needs psycopg, which is not installed ({error}): "
            "pip install 'mqks[postgres]'"
        ) from None
    return PostgresStore
