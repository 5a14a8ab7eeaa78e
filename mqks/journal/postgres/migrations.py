"""Schema versions, forward only.

The one rule: the tables are created under a lock; later changes are applied by the owner of the
journal, so that a program without the claim changes nothing under another one.
"""

import secrets
from typing import Final

from psycopg import sql

from mqks.errors import JournalDamaged, SchemaTooNew
from mqks.journal.postgres.address import PostgresAddress
from mqks.journal.postgres.connection import PostgresConnection
from mqks.journal.schema import migrations as migrations

LOCK: Final = 0x6D716B73
"""Of PostgreSQL's advisory locks: one program at a time creates a schema."""


async def create(connection: PostgresConnection, address: PostgresAddress) -> bool:
    """Create the schema and all tables if they do not exist; return whether they did not. Raises
    psycopg.Error."""
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(%s)", [LOCK])
        if await exists(connection, address):
            return False
        if not await _finds(connection, "select 1 from pg_namespace where nspname = %s", address):
            name = sql.Identifier(address.schema)
            await connection.execute(sql.SQL("create schema {}").format(name))
        known = migrations("postgres")
        for _, statements in known:
            await connection.execute(statements.encode())
        await connection.execute(
            "insert into owner (version, journal, epoch, last, segments, beat, durable,"
            " next_queue_id) values (%s, %s, 0, 0, 0, 0, 0, 1)",
            [known[-1][0], secrets.token_hex(8)],
        )
    return True


async def exists(connection: PostgresConnection, address: PostgresAddress) -> bool:
    """Whether the tables exist."""
    owner = "select 1 from pg_tables where schemaname = %s and tablename = 'owner'"
    return await _finds(connection, owner, address)


async def _finds(connection: PostgresConnection, statement: str, address: PostgresAddress) -> bool:
    cursor = await connection.execute(statement.encode(), [address.schema])
    return await cursor.fetchone() is not None


async def version(connection: PostgresConnection, address: PostgresAddress) -> int:
    """Raises SchemaTooNew; JournalDamaged for a copy that is not complete."""
    ((found, journal),) = await connection.rows("select version, journal from owner")
    check(found, journal, address)
    return int(found)


def check(found: int, journal: str, address: PostgresAddress) -> None:
    """Check a version and a name of a journal that were read."""
    newest = migrations("postgres")[-1][0]
    if found > newest:
        raise SchemaTooNew(
            f"{address.shown} has schema version {found}, this mqks supports versions up to "
            f"{newest}: use a newer mqks"
        )
    if not journal:
        raise JournalDamaged(
            f"{address.shown} has a copy that was not finished: remove it (drop schema "
            f"{address.schema} cascade), and copy again"
        )


async def upgrade(connection: PostgresConnection, old: int) -> int:
    """Apply what is newer, and return the version. Only while the journal is claimed."""
    newer = [each for each in migrations("postgres") if each[0] > old]
    if newer:
        async with connection.transaction():
            for _, statements in newer:
                await connection.execute(statements.encode())
            await connection.execute("update owner set version = %s", [newer[-1][0]])
    return newer[-1][0] if newer else old
