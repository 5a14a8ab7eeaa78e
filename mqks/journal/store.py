"""The storage behind the journal, which keeps segments and metadata.

A store is opened, claimed, loaded once, and written by one caller, one step at a time.
Its steps may take long, and it may be on another machine: nothing but `commit_now`, which a store
need not offer, blocks the caller's thread.

It raises four errors of `mqks.errors`:

- DiskFull: there is no space. Nothing was written; a later try may succeed.
- JournalFailed: its state is unknown; the last commit may exist or not.
- JournalDamaged: its content is not what was written.
- ClaimLost: another process has it now. Any step may detect this, and has then written nothing.

The one rule: a commit is one step. Either all of it is durable when it returns, or none of it
exists.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from anyio import CancelScope

from mqks.audit import AuditRecord
from mqks.broker.spine.log.pending import Entry, ErrorRecord, QueueState, ResultRow
from mqks.broker.spine.message.policy import DEFAULT, Policy, UnknownField
from mqks.errors import JournalDamaged, SchemaTooNew
from mqks.journal.segment import NewSegment
from mqks.settings import Settings

Report = Callable[[str], None]
"""Called with a line for each damaged place."""


class Damage(NamedTuple):
    place: str
    what: str


def shown(name: bytes) -> str:
    """A name as messages show it."""
    return name.decode("utf-8", "backslashreplace")


class QueueRow(NamedTuple):
    """`policy` as written by `Policy.encode`; `next_seq` and `cursor` from segments that were
    dropped."""

    id: int
    name: bytes
    policy: str = DEFAULT.encode()
    next_seq: int = 1
    cursor: int = 1


NAMED: Final = {"schedules": "schedule", "results": "result", "batches": "batch"}
"""Fields of `Metadata` and `Entry` whose rows have a name, and their tables."""


@dataclass(slots=True)
class Metadata:
    """Everything but segments, as far as it is whole."""

    epoch: str = ""
    """Unique to each store and each copy of one; empty when it is damaged."""
    queues: dict[int, QueueRow] = field(default_factory=dict)
    bindings: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Queue name and event."""
    once: list[bytes] = field(default_factory=list)
    """Ids that may not be published again, oldest first."""
    schedules: dict[bytes, str] = field(default_factory=dict)
    """Name → row, as the broker wrote it."""
    results: dict[bytes, ResultRow] = field(default_factory=dict)
    """Id of a message → what is kept of it."""
    batches: dict[bytes, str] = field(default_factory=dict)
    """Name of a batch that has not ended → row."""
    errors: list[ErrorRecord] = field(default_factory=list)
    """Oldest first."""
    audit: list[AuditRecord] = field(default_factory=list)
    """Oldest first."""
    next_queue_id: int = 1
    """This id and all above were never used."""
    next_segment: int = 1
    queue_ids_end: int = 1
    """A queue without a row was deleted if its id is below this one; otherwise its row was lost."""
    damage: list[Damage] = field(default_factory=list)
    """What is wrong; `Store.segments` adds segments that are missing."""
    notes: list[Damage] = field(default_factory=list)
    """What is wrong without being a reason to refuse a start."""


def check_policy(row: QueueRow) -> None:
    """Raise SchemaTooNew for the policy of a newer version, ValueError for a damaged one."""
    try:
        Policy.decode(row.policy)
    except UnknownField as field:
        raise SchemaTooNew(
            f"queue {shown(row.name)} has a policy that this mqks does not support ({field}): "
            "use a newer mqks"
        ) from None


class Head(NamedTuple):
    """A segment without its text; `size` includes the text."""

    id: int
    size: int
    head: bytes
    """Any bytes may follow it, up to the whole segment. Of a damaged segment, what can still be
    read."""
    damage: str = ""

    @classmethod
    def checked(cls, segment_id: int, size: int, head: bytes, *, is_right: bool) -> Self:
        """With the damage, unless its checksum was right."""
        return cls(segment_id, size, head, "" if is_right else "its checksum does not match")


class LastWords(NamedTuple):
    """Values for a queue's row, since the last segment that has them is dropped."""

    queue_id: int
    next_seq: int
    cursor: int


def refuse(name: str, damage: Sequence[Damage], report: Report) -> None:
    """Raise JournalDamaged if there is any damage."""
    for place, what in damage:
        report(f"{place}: {what}")
    if damage:
        raise JournalDamaged(
            f"{name} is damaged ({len(damage)} places, listed above): restore a backup, or start "
            "with --salvage to continue with what is intact"
        )


class Store:
    """What need not be there does nothing here."""

    name: str
    """Its location, as messages show it."""
    versions: Mapping[str, str] = {}
    """Versions of the software that it uses."""
    torn = ""
    """A possible trace of a power cut; nothing that was confirmed is missing."""
    made = False
    """Whether this start has created the database."""
    upgraded: tuple[int, int] | None = None
    """The old and the new version of the schema, if this start has changed it."""

    @property
    def waits(self) -> str:
        """What a commit waits for, if it is another machine: it takes longer, and nothing is lost.
        Empty if there is nothing."""
        return ""

    @property
    def silent_s(self) -> float:
        """Seconds since a commit of a store on another machine has succeeded; it has one a second.
        0 of others."""
        return 0.0

    commit_now: Callable[[NewSegment, list[bytes]], None] | None = None
    """`commit` of one segment, and of ids of `--once`, on the caller's thread; None where that is
    slower than waiting for another thread."""

    # -- starting

    async def claim(self, *, wait: bool) -> None:
        """Keep other processes away; is called first. While one has the store, wait for its end,
        and say in `waits` who it is; or else raise DatabaseLocked."""

    async def load(self) -> Metadata:
        """Comes next, and then `segments`. Both may be called again, to verify a copy."""
        raise NotImplementedError

    def segments(self, metadata: Metadata) -> AsyncIterator[Sequence[Head]]:
        """All segments in ascending order of ids, some at a time; adds missing ones to
        `metadata.damage`."""
        raise NotImplementedError

    async def salvage(self, metadata: Metadata, damaged: Sequence[int]) -> None:
        """Rewrite the metadata, and set aside its damaged rows and these segments."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Accept what was loaded: from here on the store may be written. A store that is closed
        before this is left as it was found."""

    def announce(self, url: str, far_url: str) -> None:
        """Publish where clients of the server that has this store connect to: those on its machine,
        and those on others."""

    # -- writing

    async def commit(
        self,
        segments: Sequence[NewSegment],
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        last_words: Iterable[LastWords] = (),
    ) -> None:
        """Add segments, apply the metadata of an entry and drop segments, in one durable step."""
        raise NotImplementedError

    async def become(self, epoch: str) -> None:
        """Set the epoch. An empty one marks a copy that is not complete: it can't be served."""
        raise NotImplementedError

    async def skip_to(self, segment_id: int, queue_id: int = 1) -> None:
        """Ids below these are never used. For a copy, whose ids have gaps."""
        raise NotImplementedError

    @property
    def overdue(self) -> bool:
        """Whether `tidy` has work that should not wait until the journal is idle."""
        return False

    async def tidy(self, *, idle: bool) -> bool:
        """Do one step of the work that is due; return whether there may be more. Cheap when there
        is none."""
        return False

    # -- reading

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        """Whole segments by id; those that do not exist are left out. Reads in the background delay
        each other, nothing else. Raises JournalFailed for a damaged segment."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Values for `stats` and metrics, under the keys that they know."""
        return {}

    # -- space and maintenance

    async def hold_reserves(self) -> bool:
        """Reserve the space that acks need when the rest is full; return whether that succeeded."""
        return True

    async def give_up_reserves(self) -> None:
        """Release that space."""

    async def has_room(self) -> bool:
        """Whether there is space for a batch or two in addition to the reserves."""
        return True

    def check_free_space(self) -> None:
        """Raise LowDiskSpace when messages find no room, whatever their size."""

    def check_files(self) -> str:
        """Why written data may be lost; empty if there is no reason."""
        return ""

    def renew_claim(self) -> str:
        """Restore what keeps other processes away, if it is gone. Return the outcome; empty if
        there was nothing to restore."""
        return ""

    def abandon(self) -> None:
        """The server ends: a commit that still waits may fail with JournalFailed."""

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        with CancelScope(shield=True):
            await self.close()


def changed_queues(
    known: Mapping[int, QueueRow],
    last_words: Iterable[LastWords],
    states: Mapping[int, QueueState | None],
) -> dict[int, QueueRow | None]:
    """The rows that a commit changes; None: deleted."""
    rows: dict[int, QueueRow | None] = {
        queue_id: known[queue_id]._replace(next_seq=next_seq, cursor=cursor)
        for queue_id, next_seq, cursor in last_words
    }
    for queue_id, state in states.items():
        old = rows.get(queue_id) or known.get(queue_id) or QueueRow(queue_id, b"")
        rows[queue_id] = None
        if state is not None:
            rows[queue_id] = old._replace(name=state.name, policy=state.policy.encode())
    return rows


def named_rows(entry: Entry) -> dict[str, dict[bytes, tuple[Any, ...] | None]]:
    """The rows that have a name, by table: its other columns, or None for one that goes."""
    return {
        table: {
            name: row if row is None or isinstance(row, tuple) else (row,)
            for name, row in getattr(entry, field).items()
        }
        for field, table in NAMED.items()
    }


def keep_queues(known: dict[int, QueueRow], changed: Mapping[int, QueueRow | None]) -> None:
    """Keep these rows, as they were written."""
    for queue_id, row in changed.items():
        known.pop(queue_id, None)
        if row is not None:
            known[queue_id] = row


OpenStore = Callable[[Settings, Report], Coroutine[Any, Any, Store]]
"""Opens the store that the settings name; a file is claimed by that. Raises DatabaseLocked,
SchemaTooNew, JournalDamaged, JournalFailed, ConfigurationError."""
