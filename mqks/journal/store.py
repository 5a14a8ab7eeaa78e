"""What is behind the journal: where segments and metadata are kept.

A store is claimed when it is opened, loaded once, and written by one caller, one step at a time.
Its steps may take long, and it may be on another machine: nothing but `commit_now`, which a store
need not offer, holds up the caller's thread.

What goes wrong is told by four errors of `mqks.errors`:

- DiskFull: there is no room. Nothing was written, and that passes.
- JournalFailed: it can't be trusted any more; what was written last may be there or not.
- JournalDamaged: what it holds is not what was written.
- ClaimLost: another process has it now. Any step may find that out, and then nothing was written.

The one rule: a commit is one step. All of it is durable when it returns, or nothing of it is there.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mqks.broker.pending import Entry, ErrorRecord
from mqks.broker.policy import DEFAULT
from mqks.settings import Settings

Report = Callable[[str], None]
"""Called with a line for each thing that is damaged."""


class Damage(NamedTuple):
    place: str
    what: str


def shown(name: bytes) -> str:
    """In messages."""
    return name.decode("utf-8", "backslashreplace")


class QueueRow(NamedTuple):
    """`policy` as `Policy.encode` writes it; `next_seq` and `cursor` are what dropped segments
    knew."""

    id: int
    name: bytes
    policy: str = DEFAULT.encode()
    next_seq: int = 1
    cursor: int = 1


@dataclass(slots=True)
class Metadata:
    """Everything but segments, as far as it is whole."""

    epoch: str = ""
    """Another one for each store that was made, and for each copy; none where it is damaged."""
    queues: dict[int, QueueRow] = field(default_factory=dict)
    bindings: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Queue name and event."""
    once: list[bytes] = field(default_factory=list)
    """Ids that may not be published again, oldest first."""
    errors: list[ErrorRecord] = field(default_factory=list)
    """Oldest first."""
    next_queue_id: int = 1
    """No id from here on was ever used."""
    next_segment: int = 1
    queue_ids_end: int = 1
    """A queue without a row was deleted when its id is below; from here on its row was lost."""
    damage: list[Damage] = field(default_factory=list)
    """What is wrong; `Store.segments` adds what is missing of them."""
    notes: list[Damage] = field(default_factory=list)
    """What is wrong and no reason to refuse a start."""


class Head(NamedTuple):
    """A segment without its text. `size` counts the text, too."""

    id: int
    size: int
    head: bytes
    """What is behind it does not matter: it may be all of the segment. Of a damaged one what can
    still be read."""
    damage: str = ""


class NewSegment(NamedTuple):
    """Ids are consecutive and never used again; the pieces of `texts` follow one another."""

    id: int
    head: bytes
    texts: list[bytes]
    size: int

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join([self.head, *self.texts])


class LastWords(NamedTuple):
    """What a queue's row must tell, because the last segment that told it is dropped."""

    queue_id: int
    next_seq: int
    cursor: int


class Store(Protocol):
    name: str
    """Where it is, for messages."""
    versions: dict[str, str]
    """Of the software it is made of."""
    torn: str
    """What may be the trace of a power cut; nothing that was promised is missing."""
    commit_now: Callable[[NewSegment], None] | None
    """As `commit` for one segment, on the caller's thread: where that takes less time than waiting
    for another one."""

    # -- starting

    async def load(self) -> Metadata:
        """Before anything else, once; then `segments`."""

    def segments(self, metadata: Metadata) -> AsyncIterator[Sequence[Head]]:
        """All of them by rising ids, some at a time; what is missing is added to `metadata`."""

    async def salvage(self, metadata: Metadata, damaged: Sequence[int]) -> None:
        """Write the metadata anew, and set aside what was damaged of it, with these segments."""

    async def begin(self) -> None:
        """What was loaded is believed: it may be written from here on. A store that is closed
        before is left as it was found."""

    def announce(self, url: str) -> None:
        """Let those who know the store find its server."""

    # -- writing

    async def commit(
        self,
        segments: Sequence[NewSegment],
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        last_words: Iterable[LastWords] = (),
    ) -> None:
        """New segments, the metadata of an entry, and segments that go, in one durable step."""

    @property
    def overdue(self) -> bool:
        """Whether `tidy` has something to do that should not wait for a quiet moment."""

    async def tidy(self, *, idle: bool) -> bool:
        """Do one step of what is due; return whether there may be more. It may be called often."""

    # -- reading

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        """Head and text by segment id, of those that are there. Nothing waits for a reading in the
        background but others of these. Raises JournalFailed for a damaged one."""

    def facts(self) -> dict[str, Any]:
        """What `stats` and metrics tell of it, of the keys that they know."""

    # -- room, and looking after it

    async def hold_reserves(self) -> bool:
        """Hold back the room that acks need when there is no other; whether there is so much."""

    async def give_up_reserves(self) -> None:
        """Use it."""

    async def has_room(self) -> bool:
        """Whether there is room for a batch or two beside the reserves."""

    def look(self) -> str:
        """Why nobody may find again what is written; nothing while all is well."""

    def renew_claim(self) -> str:
        """Make again what keeps others away, if it has gone. Tell whether it had: nothing while it
        had not, or else what came of it."""

    async def close(self) -> None: ...


OpenStore = Callable[[Settings, Report], Coroutine[Any, Any, Store]]
"""Claims the store that the settings name. Raises DatabaseLocked, SchemaTooNew, JournalDamaged,
JournalFailed, ConfigurationError."""
