"""The statements of the store.

The one rule: what changes the journal is one statement, which takes its rows from `owned`: there is
none if another broker has the journal.
"""

from collections.abc import Iterable
from itertools import starmap
from typing import Any, Final

from psycopg.types.numeric import Int8

from mqks.journal.postgres.claim import IS_OURS, NEXT


class Unnested:
    """Rows as parameters: an array for each column, which `sql` makes rows again."""

    def __init__(self, name: str, columns: str) -> None:
        kinds = dict(column.split() for column in columns.split(", "))
        arrays = ", ".join(f"%({name}_{column})b::{kind}[]" for column, kind in kinds.items())
        self.columns = [*kinds]
        self.sql = f"unnest({arrays}) as {name} ({', '.join(kinds)})"
        self._kinds = {f"{name}_{column}": kind for column, kind in kinds.items()}

    def values(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
        arrays = [*zip(*rows, strict=True)] or [()] * len(self._kinds)
        return {
            key: ints(array) if kind == "bigint" else [*array]
            for (key, kind), array in zip(self._kinds.items(), arrays, strict=True)
        }


def ints(numbers: Iterable[int]) -> list[Int8]:
    return [Int8(number) for number in numbers]


NEW_SEGMENTS: Final = Unnested(
    "new_segment", "id bigint, head_crc bigint, text_crc bigint, head bytea, text bytea"
)
NEW_QUEUES: Final = Unnested(
    "new_queue", "id bigint, name bytea, policy text, next_seq bigint, cursor bigint"
)
BOUND: Final = Unnested("bound", "queue bytea, event bytea")
UNBOUND: Final = Unnested("unbound", "queue bytea, event bytea")
NEW_ONCE: Final = Unnested("new_once", "number bigint, count bigint, ids bytea")
NAMED: Final = {
    "schedule": Unnested("new_schedule", "name bytea, row text"),
    "result": Unnested("new_result", "name bytea, row text, data bytea"),
    "batch": Unnested("new_batch", "name bytea, row text"),
}
"""Tables of which each row has a name."""
NEW_ERRORS: Final = Unnested(
    "new_error",
    "id text, time_us bigint, connection bytea, request_id bytea, action bytea, reason bytea",
)
NEW_AUDIT: Final = Unnested("new_audit", "id bigint, row text")

ADD: Final = f"""
with owned as (
    update owner set last = %(new_last)b::bigint, segments = segments + 1, {NEXT}
    where {IS_OURS} returning ctid::text
), new_segment as (
    insert into segment
    select %(new_last)b::bigint, %(head_crc)b::bigint, %(text_crc)b::bigint, %(head)b, %(text)b
    from owned
)
select owned.ctid from owned"""
"""A segment alone."""


def _put_named(table: str, new: Unnested) -> str:
    puts = ", ".join(f"{column} = excluded.{column}" for column in new.columns[1:])
    return f"""deleted_{table} as (
    delete from {table} using owned
    where sha256(name) in (
        select sha256(old.name) from unnest(%(deleted_{table})b::bytea[]) as old (name)
    )
), put_{table} as (
    insert into {table} select new_{table}.* from owned, {new.sql}
    on conflict (sha256(name)) do update set {puts}
)"""


# All parts of a statement see the rows as they were before it.
CHANGE: Final = f"""
with owned as (
    update owner set
        last = %(new_last)b::bigint,
        segments = %(segments)b::bigint,
        next_queue_id = %(next_queue_id)b::bigint,
        {NEXT}
    where {IS_OURS} returning ctid::text
), segments as (
    insert into segment select new_segment.* from owned, {NEW_SEGMENTS.sql}
), dropped as (
    delete from segment using owned where id = any(%(drop)b::bigint[])
    returning id, head_crc, text_crc, head, text
), damaged as (
    insert into damaged_segment select * from dropped where %(salvage)b
), queues as (
    insert into queue select new_queue.* from owned, {NEW_QUEUES.sql}
    on conflict (id) do update set name = excluded.name, policy = excluded.policy,
        next_seq = excluded.next_seq, cursor = excluded.cursor
), deleted_queues as (
    delete from queue using owned where id = any(%(deleted_queues)b::bigint[])
), bindings as (
    insert into binding select bound.* from owned, {BOUND.sql}
    on conflict do nothing
), deleted_bindings as (
    delete from binding using owned, {UNBOUND.sql}
    where sha256(binding.queue) = sha256(unbound.queue)
        and sha256(binding.event) = sha256(unbound.event)
), onces as (
    insert into once select new_once.* from owned, {NEW_ONCE.sql}
), deleted_once as (
    delete from once using owned where number = any(%(deleted_once)b::bigint[])
), {", ".join(starmap(_put_named, NAMED.items()))}, errors as (
    insert into error select new_error.* from owned, {NEW_ERRORS.sql}
    on conflict do nothing
), deleted_errors as (
    delete from error using owned where %(has_errors)b and id <= (
        select id from error order by id desc limit 1 offset %(errors_kept)b::bigint
    )
), audits as (
    insert into audit select new_audit.* from owned, {NEW_AUDIT.sql}
    on conflict do nothing
), deleted_audits as (
    delete from audit using owned where id <= %(audit_end)b::bigint
)
select (select count(*) from dropped), owned.ctid from owned"""
"""Everything else."""

BECOME: Final = f"""
update owner set journal = %(journal)b::text, {NEXT}
where {IS_OURS} returning ctid::text"""
SKIP: Final = f"""
update owner set last = %(new_last)b::bigint, {NEXT},
    next_queue_id = greatest(next_queue_id, %(next_queue_id)b::bigint)
where {IS_OURS} returning ctid::text"""

OWNER: Final = "select journal, segments, next_queue_id from owner"
QUEUES: Final = "select id, name, policy, next_seq, cursor from queue order by id"
BINDINGS: Final = "select queue, event from binding"
ONCE: Final = "select number, count, ids from once order by number"
SCHEDULES: Final = "select name, row from schedule"
RESULTS: Final = "select name, row, data from result"
BATCHES: Final = "select name, row from batch"
ERRORS: Final = "select id, time_us, connection, request_id, action, reason from error order by id"
AUDIT: Final = "select id, row from audit order by id"
HEADS: Final = """
select id, head_crc, head, octet_length(text) from segment
where id > %s order by id limit %s"""
BODIES: Final = "select id, head_crc, head, text_crc, text from segment where id = any(%s)"
EPOCH: Final = "select epoch from owner"

# For readers without the claim.
FACTS: Final = """
select version, journal, holder, segments, next_queue_id,
    (select count(*) from damaged_segment),
    (select sum(pg_total_relation_size(oid))::bigint from pg_class
     where relnamespace = current_schema()::regnamespace and relkind = 'r')
from owner"""
IDS: Final = "select id from segment order by id"
HEADS_OF: Final = "select id, head_crc, head, octet_length(text) from segment where id = any(%s)"
# The text in pieces: libpq and psycopg have several copies of a value at once.
PARTS: Final = """
select head_crc, head, text_crc, octet_length(text), substring(text for %s) from segment
where id = %s"""
PIECE: Final = "select substring(text from %s for %s) from segment where id = %s"
ERRORS_BEFORE: Final = """
select id, time_us, connection, request_id, action, reason from error
where id collate "C" < %s order by id collate "C" desc limit %s"""
HAS_BATCHES: Final = "select to_regclass('batch') is not null"
HAS_RESULTS: Final = "select to_regclass('result') is not null"
HAS_AUDIT: Final = "select to_regclass('audit') is not null"
LAST_AUDIT: Final = "select id, row from audit order by id desc limit %s"
