"""What the statements of the journal in PostgreSQL mean, on tables in memory.

The one rule: a statement is known as a whole, as the product has it, but for the condition that it
is the owner's: that is looked for in what was sent. So a commit that comes without it is executed.

It is imported when the world is installed, as it imports the product.
"""

import re
from collections.abc import Callable
from typing import Any

from psycopg import errors

from mqks.journal.postgres import claim, statements
from mqks.journal.postgres.claim import IS_OURS

Row = tuple[Any, ...]
PAGE_ROWS = 20
"""Versions of the owner's row in a page."""


class Tables:
    """What a server has, after its last commit that can be seen."""

    LOOK, RUNS = claim.LOOK, claim.RUNS

    def __init__(self) -> None:
        self.owner: dict[str, Any] = {}
        self.segments: dict[int, Row] = {}
        self.queues: dict[int, Row] = {}
        self.bindings: dict[Row, None] = {}
        self.once: dict[int, Row] = {}
        self.named: dict[str, dict[bytes, Row]] = {table: {} for table in statements.NAMED}
        self.errors: dict[str, Row] = {}
        self.audit: dict[int, Row] = {}

    @property
    def place(self) -> str:
        """The owner's row is in another page from time to time."""
        page, position = divmod(self.owner["beat"], PAGE_ROWS)
        return f"({page},{position + 1})"

    # -- what is read

    def read(self, statement: str, values: Any) -> list[Row]:
        return READS[statement](self, values)

    def of_owner(self, *columns: str) -> list[Row]:
        return [tuple(self.owner[each] for each in columns)] if self.owner else []

    def heads(self, after: int, limit: int) -> list[Row]:
        ids = sorted(each for each in self.segments if each > after)[:limit]
        rows = [self.segments[each] for each in ids]
        return [(number, crc, head, len(text)) for number, crc, _, head, text in rows]

    def bodies(self, ids: list[int]) -> list[Row]:
        rows = [self.segments[each] for each in ids if each in self.segments]
        return [(number, crc, head, text_crc, text) for number, crc, text_crc, head, text in rows]

    # -- what is written

    def deposes(self, statement: str) -> bool:
        """Whether it takes the claim from its owner."""
        is_claim = CHANGES.get(of_anybody(statement)) is Tables.claim
        return is_claim and self.owner["holder"] is not None

    @staticmethod
    def adds(statement: str) -> bool:
        return CHANGES.get(of_anybody(statement)) in (Tables.add, Tables.change)

    def is_met(self, statement: str, values: Any) -> bool:
        """Whether its condition holds. Raises UniqueViolation."""
        if IS_OURS in statement:
            page, _, _ = self.place.partition(",")
            if values["page_begin"] != f"{page},0)" or any(
                self.owner[each] != values[each] for each in ("epoch", "holder", "last", "beat")
            ):
                return False
        if CHANGES.get(of_anybody(statement)) is Tables.add and values["new_last"] in self.segments:
            raise errors.UniqueViolation(f"segment {values['new_last']} exists")
        return True

    def write(self, statement: str, values: Any, settings: Row) -> list[Row]:
        if statement.startswith(CREATION):
            version, journal = values
            zeros = dict.fromkeys(("epoch", "last", "segments", "beat", "durable"), 0)
            texts = dict.fromkeys(("holder", "url"))
            self.owner = {"version": version, "journal": journal, **zeros, **texts}
            self.owner["next_queue_id"] = 1
            return []
        row = CHANGES[of_anybody(statement)](self, values, settings)
        self.owner.update(beat=self.owner["beat"] + 1, durable=values["durable"])
        return [(*row, self.place)]

    def claim(self, values: Any, settings: Row) -> Row:
        self.owner.update(epoch=self.owner["epoch"] + 1, holder=values["claimant"], url=None)
        return ()

    def beat(self, values: Any, settings: Row) -> Row:
        self.owner["url"] = values["url"]
        return settings

    def release(self, values: Any, settings: Row) -> Row:
        self.owner.update(holder=None, url=None)
        return ()

    def add(self, values: Any, settings: Row) -> Row:
        names = "new_last", "head_crc", "text_crc", "head", "text"
        self.segments[values["new_last"]] = tuple(values[each] for each in names)
        self.owner.update(last=values["new_last"], segments=self.owner["segments"] + 1)
        return ()

    def change(self, values: Any, settings: Row) -> Row:
        dropped = remove(self.segments, values["drop"])
        self.segments |= keyed(statements.NEW_SEGMENTS, values)
        remove(self.queues, values["deleted_queues"])
        self.queues |= keyed(statements.NEW_QUEUES, values)
        remove(self.bindings, rows_of(statements.UNBOUND, values))
        self.bindings |= dict.fromkeys(rows_of(statements.BOUND, values))
        remove(self.once, values["deleted_once"])
        self.once |= keyed(statements.NEW_ONCE, values)
        for table, new in statements.NAMED.items():
            remove(self.named[table], values[f"deleted_{table}"])
            self.named[table] |= keyed(new, values)
        if values["has_errors"]:
            remove(self.errors, sorted(self.errors, reverse=True)[values["errors_kept"] :])
        self.errors = keyed(statements.NEW_ERRORS, values) | self.errors
        self.audit |= keyed(statements.NEW_AUDIT, values)
        remove(self.audit, [each for each in self.audit if each <= values["audit_end"]])
        names = {"last": "new_last", "segments": "segments", "next_queue_id": "next_queue_id"}
        self.owner.update({column: values[name] for column, name in names.items()})
        return (dropped,)


CREATION = "insert into owner "
OWNER = "epoch", "holder", "last", "beat", "url", "durable"


def of_anybody(statement: str) -> str:
    return statement.replace(IS_OURS, "true")


def rows_of(unnested: statements.Unnested, values: Any) -> list[Row]:
    return [*zip(*(values[each] for each in re.findall(r"%\((\w+)\)b", unnested.sql)), strict=True)]


def keyed(unnested: statements.Unnested, values: Any) -> dict[Any, Row]:
    return {row[0]: row for row in rows_of(unnested, values)}


def remove(table: dict[Any, Any], keys: Any) -> int:
    """Returns how many were there."""
    there = [each for each in keys if each in table]
    for each in there:
        del table[each]
    return len(there)


def in_order(table: dict[Any, Row]) -> list[Row]:
    return [table[key] for key in sorted(table)]


EXISTS = "select 1 from pg_tables where schemaname = %s and tablename = 'owner'"
READS: dict[str, Callable[[Tables, Any], list[Row]]] = {
    EXISTS: lambda tables, _: [(1,)] if tables.owner else [],
    "select 1 from pg_namespace where nspname = %s": lambda tables, _: [],
    "select version, journal from owner": lambda tables, _: tables.of_owner("version", "journal"),
    claim.OWNER: lambda tables, _: [(*row, tables.place) for row in tables.of_owner(*OWNER)],
    statements.OWNER: lambda tables, _: tables.of_owner("journal", "segments", "next_queue_id"),
    statements.EPOCH: lambda tables, _: tables.of_owner("epoch"),
    statements.QUEUES: lambda tables, _: in_order(tables.queues),
    statements.BINDINGS: lambda tables, _: [*tables.bindings],
    statements.ONCE: lambda tables, _: in_order(tables.once),
    statements.SCHEDULES: lambda tables, _: [*tables.named["schedule"].values()],
    statements.RESULTS: lambda tables, _: [*tables.named["result"].values()],
    statements.BATCHES: lambda tables, _: [*tables.named["batch"].values()],
    statements.ERRORS: lambda tables, _: in_order(tables.errors),
    statements.AUDIT: lambda tables, _: in_order(tables.audit),
    statements.HEADS: lambda tables, values: tables.heads(*values),
    statements.BODIES: lambda tables, values: tables.bodies(*values),
}
CHANGES: dict[str, Callable[[Tables, Any, Row], Row]] = {
    of_anybody(statement): change
    for statement, change in (
        (claim.CLAIM, Tables.claim),
        (claim.BEAT, Tables.beat),
        (claim.RELEASE, Tables.release),
        (statements.ADD, Tables.add),
        (statements.CHANGE, Tables.change),
    )
}
