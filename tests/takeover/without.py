"""`python -m tests.takeover.without SAFEGUARD,… serve …` is `mqks serve …` without safeguards.

The one rule: they are taken out here, in a process of its own; no setting of MQKS can do that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mqks.commands import main
from mqks.journal.postgres import claim, statements
from mqks.journal.postgres.claim import Claim, OwnerRow
from mqks.journal.postgres.connection import PostgresConnection, Row


def condition() -> None:
    """A commit does not depend on who owns the journal."""
    for module, name in ((claim, "BEAT"), (statements, "ADD"), (statements, "CHANGE")):
        statement = getattr(module, name)
        assert claim.IS_OURS in statement
        setattr(module, name, statement.replace(claim.IS_OURS, "true"))


def warnings() -> None:
    """What the server says besides success is not heard."""
    rows = PostgresConnection.rows

    async def deaf(self: PostgresConnection, *words: Any) -> list[Row]:
        found = await rows(self, *words)
        self.warnings.clear()
        return found

    PostgresConnection.rows = deaf  # type: ignore[assignment, method-assign]


class _Exists(BaseException):
    """A commit was found in the database."""


def beat() -> None:
    """A commit that exists after its reply was lost is taken for durable."""
    checked, commit = Claim._checked, Claim._commit

    def found(self: Claim, found: OwnerRow, before: OwnerRow, after: OwnerRow) -> OwnerRow:
        if checked(self, found, before, after) != before and self._is_ours:
            raise _Exists(found)
        return found

    async def committed(
        self: Claim, statement: str, values: dict[str, Any], after: OwnerRow
    ) -> Row:
        try:
            return await commit(self, statement, values, after)
        except _Exists as exists:
            [self.owner] = exists.args
            self.waits = ""
            return ()

    Claim._checked = found  # type: ignore[method-assign]
    Claim._commit = committed  # type: ignore[method-assign]


def look() -> None:
    """The server's settings are not read after a commit that took long."""
    claim.LOOK_AGAIN_S = 1e9


def beats() -> None:
    """No commits but those of messages: no safeguard, but what is waited for is certain then."""
    claim.BEAT_S = 1e9  # type: ignore[misc]


SAFEGUARDS: dict[str, Callable[[], None]] = {
    "condition": condition,
    "warnings": warnings,
    "beat": beat,
    "look": look,
}

if __name__ == "__main__":
    for safeguard in sys.argv[1].split(","):
        (SAFEGUARDS | {"beats": beats})[safeguard]()
    sys.exit(main(sys.argv[2:]))
