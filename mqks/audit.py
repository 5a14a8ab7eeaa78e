"""Who did what: records of logins, and of requests that change what exists or remove messages.

The one rule: there is no record of a publish, a delivery or an ack, and none has a secret or a
payload. However much is requested, a second has a bounded number of records: what is beyond it is
counted by who has requested it.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Protocol

from mqks.limits import (
    AUDIT_BEYOND_MAX,
    AUDIT_FAILED_LOGINS_PER_SECOND_MAX,
    AUDIT_PARTY_FAILED_LOGINS_PER_SECOND_MAX,
    AUDIT_PARTY_PER_SECOND_MAX,
    AUDIT_PER_SECOND_MAX,
    AUDIT_TEXT_BYTES_MAX,
    AUDIT_TOLD_MAX,
)

LOGIN, FAILED_LOGIN = "login", "failed_login"
"""Actions of records besides those of requests."""


class Who(NamedTuple):
    """Whose a connection is."""

    connection: str
    """Its address."""
    user: str | None = None
    client: str | None = None
    """The name that the client has given itself."""


class Actor(Protocol):
    """A connection."""

    @property
    def who(self) -> Who: ...
    @property
    def party(self) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What one request has done, or several of one party."""

    id: int
    """Grows by one with each record."""
    time_us: int
    connection: str
    user: str | None
    client: str | None
    action: str
    what: str
    """The beginning of its arguments; of a failed login the name that was tried."""
    count: int | None = None
    """Messages removed or moved, or bindings changed."""
    requests: int = 1
    """Of more than one the last is in `what`."""

    def row(self) -> str:
        """As it is stored: JSON, without its id and what has its default."""
        left_out = {"id": self.id, "user": None, "client": None, "count": None, "requests": 1}
        told = asdict(self).items()
        return json.dumps({key: value for key, value in told if left_out.get(key, key) != value})

    @classmethod
    def parse(cls, record_id: int, row: str) -> "AuditRecord":
        """Raises ValueError for what is no row of one."""
        try:
            return cls(record_id, **{"user": None, "client": None, **json.loads(row)})
        except TypeError as error:
            raise ValueError(str(error)) from None


class Operator:
    """Who sends signals to the process."""

    who, party = Who("-"), b""


class Audit:
    """`tell` is called with each record. `after` calls a function after so many seconds."""

    def __init__(
        self,
        tell: Callable[[AuditRecord], None],
        after: Callable[[float, Callable[[], None]], object],
        now_us: Callable[[], int],
        *,
        kept_max: int,
        is_on: bool,
    ) -> None:
        self._tell = tell
        self._after = after
        self._now_us = now_us
        self.is_on = is_on
        self.last = deque[AuditRecord](maxlen=min(kept_max, AUDIT_TOLD_MAX))
        """The source of `stats audit`."""
        self.next_id = 1
        self.failed_logins = 0
        self.is_counting = False
        """Whether a second is counted."""
        self._told = Counter[Hashable]()
        """Records of this second: of each party, and of all."""
        self._beyond: dict[Hashable, AuditRecord] = {}
        """What is beyond them, by party and action."""

    def restore(self, records: list[AuditRecord]) -> None:
        """Go on behind these, the oldest of which is the first."""
        self.last.extend(records)
        if records:
            self.next_id = records[-1].id + 1

    def failed_login(self, actor: Actor, name: bytes) -> None:
        """Without a name it was a token."""
        self.failed_logins += 1
        self.note(actor, FAILED_LOGIN, name)

    def note(self, actor: Actor, action: str, what: bytes = b"", count: int | None = None) -> None:
        """Record what was done; `count`: of how many messages or bindings."""
        if not self.is_on:
            return
        if not self.is_counting:
            self.is_counting = True
            self._after(1.0, self._end_second)
        # Who guesses passwords must not keep others from being recorded.
        of_all, of_party = AUDIT_PER_SECOND_MAX, AUDIT_PARTY_PER_SECOND_MAX
        if is_failed := action == FAILED_LOGIN:
            of_all = AUDIT_FAILED_LOGINS_PER_SECOND_MAX
            of_party = AUDIT_PARTY_FAILED_LOGINS_PER_SECOND_MAX
        told, party = self._told, (is_failed, actor.party)
        record = AuditRecord(
            *(0, 0, *actor.who, action),
            what[:AUDIT_TEXT_BYTES_MAX].decode("utf-8", "surrogateescape"),
            count,
        )
        if told[is_failed] < of_all and told[party] < of_party:
            told[is_failed] += 1
            told[party] += 1
            self._record(record)
        else:
            self._count(record, (party, action))

    def _count(self, record: AuditRecord, key: Hashable) -> None:
        if key not in self._beyond and len(self._beyond) >= AUDIT_BEYOND_MAX:
            key, record = None, AuditRecord(0, 0, *Who(""), "", "", record.count)
        earlier = self._beyond.get(key)
        if earlier is not None:
            counts = [each.count for each in (earlier, record) if each.count is not None]
            count = sum(counts) if counts else None
            record = replace(record, requests=earlier.requests + 1, count=count)
        self._beyond[key] = record

    def _end_second(self) -> None:
        beyond, self._beyond = self._beyond, {}
        self._told.clear()
        self.is_counting = False
        for record in beyond.values():
            self._record(record)

    def _record(self, record: AuditRecord) -> None:
        record = replace(record, id=self.next_id, time_us=self._now_us())
        self.next_id += 1
        self.last.append(record)
        self._tell(record)
