"""The claim to a journal, and commits that hold only while it is ours.

Each commit is one statement, so one round trip. It updates the owner's row where that row is what
this broker believes, and writes the rest only if it did. After a lost reply the row says whether
the commit exists, since `beat` grows by one with each.

The one rule: a commit is durable when its reply says success, one row, and no warning. If it exists
without such a reply, it is visible but perhaps not on the standby; the next commit with such a
reply makes it durable.

A lock of the database would not do: it ends with its session, also when only the network between
has failed, and then two brokers would write. Here whoever commits proves in the same statement that
nobody has claimed since, so a broker that slept through a take-over can't write, however late.

Nobody's clock is trusted. A broker is dead for a standby when its row has not changed in some looks
and some seconds of the standby's own clock; an idle broker therefore changes it, which is the beat.
If it was only slow, the claim raises the epoch, its next commit updates no row, and it ends.

A commit without a reply is the hard case: the row may be as before, or as after, or belong to
another. So it is read until one of the three is certain. As before: the same statement is sent
again, and can't be doubled, as it asks for the old beat. As after: it exists, but whether the
standby has it nobody knows, so an empty commit follows, whose reply covers both. Another's: the
claim is lost, and those who wait get no confirm.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import anyio
import psycopg
from psycopg import errors
from psycopg.types.numeric import Int8

from mqks.errors import (
    ClaimLost,
    ConfigurationError,
    DatabaseLocked,
    DatabaseUnreachable,
    DiskFull,
    JournalFailed,
    JournalReverted,
)
from mqks.journal.postgres import guards
from mqks.journal.postgres.address import PostgresAddress, line_of
from mqks.journal.postgres.connection import PostgresConnection, Row, ServerPlace
from mqks.journal.postgres.guards import Guards, Replication

BEAT_S: Final = 0.75
"""A beat is due after this time; the writer looks once a second."""
LOOK_S: Final = 0.25
"""Interval of a standby's looks at the owner: so soon it sees a claim that was given up."""
LOOKS: Final = 4
SUSPECT_S = 3.0
"""An owner whose beat has not changed in this many looks and seconds is taken for dead."""
RETRY_S: Final = 0.25
"""Pause after a lost connection."""
LOOK_AGAIN_S = 0.5
"""After a commit that took so long, the server's settings are read: if `synchronous_standby_names`
is emptied while a commit waits, it gets the reply of one that was replicated."""
ASK_S = 10.0
"""After this time without a reply, the server is asked whether it still works on the commit."""
RELEASE_S: Final = 5.0
"""How long a server that ends tries to give up its claim."""

OWNER: Final = "select epoch, holder, last, beat, url, durable, ctid::text from owner"
# While an old transaction is open, no version of the row can be removed. So it is looked for only
# in the page where the last commit has left it, whatever the number of its pages.
IS_OURS: Final = """
    ctid between %(page_begin)t::tid and %(page_end)t::tid
    and epoch = %(epoch)b::bigint and holder is not distinct from %(holder)b::text
    and last = %(last)b::bigint and beat = %(beat)b::bigint"""
NEXT: Final = "beat = beat + 1, durable = %(durable)b::bigint"
"""What every commit sets."""
CLAIM: Final = f"""
update owner set epoch = epoch + 1, holder = %(claimant)b::text, url = null, {NEXT}
where {IS_OURS} returning ctid::text"""
BEAT: Final = f"""
with owned as (
    update owner set {NEXT}, url = %(url)b::text where {IS_OURS} returning ctid::text
)
select {guards.COLUMNS}, owned.ctid from owned"""
RELEASE: Final = f"""
update owner set holder = null, url = null, {NEXT} where {IS_OURS} returning ctid::text"""
LOOK: Final = f"select {guards.COLUMNS}"
RUNS: Final = "select 1 from pg_stat_activity where pid = %(pid)b::integer and state = 'active'"


class OwnerRow(NamedTuple):
    epoch: int
    holder: str | None
    last: int
    """The id of the last segment."""
    beat: int

    def values(self, place: str) -> dict[str, Any]:
        """For `IS_OURS`."""
        epoch, holder, last, beat = self
        page, _, _ = place.partition(",")
        return {
            "page_begin": f"{page},0)",
            "page_end": f"{page},65535)",
            "epoch": Int8(epoch),
            "holder": holder,
            "last": Int8(last),
            "beat": Int8(beat),
        }

    def follows(self, other: "OwnerRow") -> bool:
        """Whether it is the same, or the same with more beats."""
        return self[:3] == other[:3] and self.beat >= other.beat


class Durable:
    """The beat that was durable, by all looks at the owner's row so far. A standby that remembers
    it does not take over a database that has lost it.

    A later owner counts anew: it may have been started to continue without what is lost. It counts
    when something that it committed after the first look is durable: until then its claim may be
    lost itself.
    """

    def __init__(self) -> None:
        self._epoch, self._holder, self._beat = 0, "", 0
        self._first = OwnerRow(0, None, 0, 0)
        """What was found first of the owner that was seen last."""

    def note(self, found: OwnerRow, durable: int) -> None:
        first = self._first
        if found.epoch != first.epoch or found.holder not in (None, first.holder):
            first = self._first = found
        if found.epoch < self._epoch or durable < first.beat:
            return
        if not self._is_known(first):
            self._epoch, self._holder, self._beat = first.epoch, first.holder or "", durable
        self._beat = max(self._beat, durable)

    def _is_known(self, found: OwnerRow) -> bool:
        return found.epoch == self._epoch and found.holder in (None, self._holder)

    def check(self, found: OwnerRow, address: PostgresAddress) -> None:
        """Raises JournalReverted."""
        lacks_commits = self._is_known(found) and found.beat < self._beat
        if lacks_commits or found.epoch < self._epoch:
            raise _reverted(found, self._beat, self._epoch, address)


def _reverted(found: OwnerRow, beat: int, epoch: int, address: PostgresAddress) -> JournalReverted:
    return JournalReverted(
        f"{address.shown} has gone back to an earlier state: it had confirmed commit {beat} of "
        f"epoch {epoch}, and has {found.beat} of {found.epoch}. Nothing was changed. Was it "
        "restored, or a standby promoted that was not synchronous?"
    )


def shown(holder: str) -> str:
    """Its host and process."""
    return holder.rpartition(" ")[0]


class Claim:
    """`waits` says why a commit takes long; empty if there is no reason. `server` is where
    commits are made."""

    def __init__(self, address: PostgresAddress, replication: Replication) -> None:
        self.waits = ""
        self.server = ServerPlace(0, {})
        self.owner = OwnerRow(0, None, 0, 0)
        """As the last durable commit has left it."""
        self._place = "(0,0)"
        """Where the row was last: page and position in it."""
        self.since_s = 0.0
        """When it was claimed, by the monotonic clock."""
        self.committed_s = 0.0
        """When a commit has succeeded last."""
        self.url: str | None = None
        """Of the broker that has the claim; each beat writes it."""
        self._address = address
        self._replication: Replication = replication
        self._connection: PostgresConnection | None = None
        self._me = f"{socket.gethostname()} pid {os.getpid()} {secrets.token_hex(8)}"
        self._owner_url: str | None = None
        self._durable = Durable()
        self._is_ours = False
        self._is_abandoned = False
        self._beat_due_s = 0.0

    # -- the connection

    async def first_connection(self) -> PostgresConnection:
        """Raises DatabaseUnreachable, ConfigurationError."""
        try:
            connection = await PostgresConnection.to(self._address)
        except psycopg.Error as error:
            raise DatabaseUnreachable(
                f"can't connect to {self._address.shown}: {line_of(error)}"
            ) from None
        self._take(connection)
        if connection.info.server_version < guards.VERSION_MIN * 10_000:
            raise ConfigurationError(
                f"{self._address.shown} is older than PostgreSQL {guards.VERSION_MIN}: upgrade it"
            )
        if mistakes := self._mistakes(connection, await self._guards(connection)):
            raise ConfigurationError(*(f"{self._address.shown}: {each}" for each in mistakes))
        return connection

    def _take(self, connection: PostgresConnection) -> None:
        self._connection = connection
        info = connection.info
        place = {"host": info.host, "hostaddr": info.hostaddr, "port": info.port}
        self.server = ServerPlace(self.server.generation + 1, place)

    @staticmethod
    async def _guards(connection: PostgresConnection) -> Guards:
        return Guards(*(await connection.rows(LOOK))[0])

    def _mistakes(self, connection: PostgresConnection, found: Guards) -> list[str]:
        return found.mistakes(self._replication, connection.pgconn.backend_pid)

    async def connected(self) -> PostgresConnection:
        """The connection, made again if it was lost. Returns when the server's settings are
        safe."""
        if self._connection is None or self._connection.is_lost:
            connection = await PostgresConnection.to(self._address)
            self._take(connection)
            try:
                await self._until_safe(connection)
            except BaseException:
                connection.abort()  # It must not be used without that.
                raise
            return connection
        return self._connection

    async def _until_safe(self, connection: PostgresConnection) -> None:
        """Raises OperationalError for a server that is a standby."""
        while mistakes := self._mistakes(connection, found := await self._guards(connection)):
            self.waits = mistakes[0]
            if found.is_standby:
                # It was demoted, or will be promoted: look for the primary among the hosts.
                await connection.close()
                raise psycopg.OperationalError(mistakes[0])
            await self._pause()

    async def _pause(self) -> None:
        """Before another attempt. Raises JournalFailed if there is to be none."""
        self.check_abandoned()
        await anyio.sleep(RETRY_S)

    def check_abandoned(self) -> None:
        if self._is_abandoned:
            raise JournalFailed(
                f"the server ended before a commit was durable: {self.waits or 'no reply'}"
            )

    def abandon(self) -> None:
        """Do not wait any more: a commit that has no reply fails."""
        self._is_abandoned = True
        if self._connection is not None:
            self._connection.abort()

    # -- claiming

    async def take(self, *, wait: bool) -> None:
        """Claim the journal. While another broker has it, wait; or else raise DatabaseLocked."""
        seen: OwnerRow | None = None
        looks, first_s, generation = 0, 0.0, self.server.generation
        while True:
            try:
                found = await self._read(await self.connected())
            except psycopg.OperationalError as error:
                self.waits = f"{self._address.shown}: {line_of(error)}"
                await self._pause()
                continue
            now_s = time.monotonic()
            if generation != self.server.generation:
                seen = None  # Counted anew after each reconnect.
            if found != seen:
                if not wait and seen is not None and found.holder is not None:
                    raise DatabaseLocked(
                        f"{self._address.shown} (schema {self._address.schema}) is served by "
                        f"another mqks ({shown(found.holder)}): stop it, or name another schema "
                        "with ?schema="
                    )
                seen, looks, first_s = found, 0, now_s
                generation = self.server.generation
            looks += 1
            if found.holder is None or (looks >= LOOKS and now_s - first_s >= SUSPECT_S):
                self._durable.check(found, self._address)
                try:
                    await self._claim(found)
                    return
                except DatabaseLocked:
                    if not wait:
                        raise
            else:
                where = f" ({self._owner_url})" if self._owner_url else ""
                self.waits = f"{shown(found.holder)}{where} owns the journal"
            await anyio.sleep(LOOK_S)

    async def _claim(self, found: OwnerRow) -> None:
        """Raises DatabaseLocked if another broker was first."""
        self.owner = found
        after = OwnerRow(found.epoch + 1, self._me, found.last, found.beat + 1)
        await self._commit(CLAIM, {"claimant": self._me}, after)
        self._is_ours = True
        self.since_s = time.monotonic()

    async def release(self) -> None:
        """Give up the claim, unless a commit has failed, and disconnect."""
        if self._is_ours:
            after = self.owner._replace(holder=None, beat=self.owner.beat + 1)
            with suppress(Exception), anyio.move_on_after(RELEASE_S):
                await self._commit(RELEASE, {}, after)
        if self._connection is not None and not self._connection.is_lost:
            await self._connection.close()

    # -- committing

    @property
    def beat_is_due(self) -> bool:
        return time.monotonic() >= self._beat_due_s

    async def beat(self) -> None:
        """A commit of nothing, which looks at the server's settings."""
        await self.commit(BEAT, {}, self.owner.last)
        self._beat_due_s = time.monotonic() + BEAT_S

    async def commit(self, statement: str, values: dict[str, Any], last: int) -> Row:
        """Execute a statement with the condition `IS_OURS`, which sets `last`, adds one to `beat`,
        and returns the row's new place at the end. Returns the rest of what it returned when it is
        durable; an empty row if the reply was lost.

        Raises DiskFull if nothing was written. Raises ClaimLost, JournalReverted, JournalFailed,
        and after them JournalFailed always.
        """
        if not self._is_ours:
            raise JournalFailed(f"the claim to {self._address.shown} was lost before")
        after = self.owner._replace(last=last, beat=self.owner.beat + 1)
        try:
            return await self._commit(statement, values, after)
        except DiskFull:
            raise
        except BaseException:
            self._is_ours = False
            raise

    async def _commit(self, statement: str, values: dict[str, Any], after: OwnerRow) -> Row:
        """The row is `before` without this commit, and `after` with it. It is read again after each
        reply that leaves open which of the two it is."""
        before = now = self.owner
        result: Row = ()
        is_certain, attempts, failures = True, 0, 0
        while True:
            is_sent = False
            try:
                connection = await self.connected()
                self.check_abandoned()
                if not is_certain:
                    now = self._checked(await self._read(connection), before, after)
                exists = now != before
                is_certain, is_sent = False, True
                attempts += 1
                begun_s = time.monotonic()
                begun = BEAT if exists else statement
                told = {
                    **values,
                    **now.values(self._place),
                    "url": self.url,
                    "durable": Int8(before.beat),
                }
                with self._watched(connection):
                    found = await connection.rows(begun, told)
                if not found:
                    continue  # Another broker's, or an earlier attempt has arrived after all.
                *row, self._place = found[0]
                now = now._replace(beat=now.beat + 1) if exists else after
                result = result if exists else tuple(row)
                if connection.warnings:
                    # It exists, and may not be on the standby.
                    self.waits = "; ".join(connection.warnings)
                    continue
                settings = Guards(*row) if begun is BEAT else None
                if time.monotonic() >= begun_s + LOOK_AGAIN_S:
                    settings = await self._guards(connection)
                if settings and self._mistakes(connection, settings):
                    await self._until_safe(connection)
                    continue
                self.owner, self.waits, self.committed_s = now, "", time.monotonic()
                return result
            except errors.DiskFull as error:
                # An earlier attempt may still arrive: it must not meet another commit.
                if is_sent and attempts == 1:
                    raise DiskFull(f"the journal can't be written: {line_of(error)}") from error
                self.waits = line_of(error)
            except psycopg.OperationalError as error:
                self.waits = f"{self._address.shown}: {line_of(error)}"
            except errors.ReadOnlySqlTransaction as error:
                self.waits = line_of(error)
                if self._connection is not None:
                    self._connection.abort()
            except psycopg.Error as error:
                raise JournalFailed(f"the journal can't be written: {line_of(error)}") from error
            failures += 1
            if failures > 1:  # A connection that was lost is made again at once.
                await self._pause()

    async def _read(self, connection: PostgresConnection) -> OwnerRow:
        rows = await connection.rows(OWNER)
        if not rows:
            raise JournalFailed(f"{self._address.shown} has no row in the table owner")
        *owner, self._owner_url, durable, self._place = rows[0]
        found = OwnerRow(*owner)
        self._durable.note(found, durable)
        return found

    def _checked(self, found: OwnerRow, before: OwnerRow, after: OwnerRow) -> OwnerRow:
        """What was found, if it is `before`, or `after` with any number of beats."""
        if found == before or found.follows(after):
            return found
        if after.holder != self._me or not self._is_ours:
            raise DatabaseLocked(f"another mqks has claimed {self._address.shown} first")
        if found.epoch > after.epoch:
            raise ClaimLost(
                f"another mqks ({shown(found.holder) if found.holder else 'which has ended'}) has "
                f"taken over {self._address.shown}"
            )
        if found.beat < before.beat or found.epoch < before.epoch or found.last < before.last:
            raise _reverted(found, before.beat, before.epoch, self._address)
        raise JournalFailed(
            f"{self._address.shown} was changed by another program: its owner is {found}, and "
            f"{before} was written"
        )

    @contextmanager
    def _watched(self, connection: PostgresConnection) -> Iterator[None]:
        """A commit that gets no reply: if the server does not work on it any more, the reply was
        lost, and the connection is aborted."""
        tasks: list[asyncio.Task[None]] = []

        def ask() -> None:
            tasks.append(asyncio.create_task(self._ask(connection)))

        timer = asyncio.get_running_loop().call_later(ASK_S, ask)
        try:
            yield
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()

    async def _ask(self, connection: PostgresConnection) -> None:
        while await self._works(connection):
            await asyncio.sleep(ASK_S)
        connection.abort()

    async def _works(self, connection: PostgresConnection) -> bool:
        """Whether the server works on the commit, or waits for a standby."""
        try:
            async with await PostgresConnection.to(self._address) as other:
                rows = await other.rows(RUNS, {"pid": connection.pgconn.backend_pid})
        except psycopg.Error:
            return False
        if rows:
            self.waits = "the database server waits with the commit for a standby or a lock"
        return bool(rows)
