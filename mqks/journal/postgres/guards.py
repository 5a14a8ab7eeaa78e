"""Settings of the database server on which a confirm relies.

The one rule: they are read on the connection that commits, before its first commit and with each
beat.
"""

from typing import Final, Literal, NamedTuple

Replication = Literal["standbys", "provider", "none"]
VERSION_MIN: Final = 14
COLUMNS: Final = """
    pg_is_in_recovery(),
    pg_backend_pid(),
    current_setting('fsync'),
    current_setting('full_page_writes'),
    current_setting('synchronous_commit'),
    current_setting('statement_timeout'),
    coalesce(current_setting('transaction_timeout', true), '0'),
    current_setting('client_min_messages'),
    current_setting('synchronous_standby_names')"""


class Guards(NamedTuple):
    """What `COLUMNS` returned."""

    is_standby: bool
    backend_pid: int
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    statement_timeout: str
    transaction_timeout: str
    client_min_messages: str
    standby_names: str

    def mistakes(self, replication: Replication, pid: int) -> list[str]:
        """A line for each, with what to change. `pid` is the backend's as the connection was told
        when it was made: a pooler in between tells its own."""
        if self.is_standby:
            return [
                "this server is a standby: connect to the primary. With several hosts, such as "
                "postgresql://a,b/db, it is found automatically"
            ]
        found = []
        if self.backend_pid != pid:
            found.append(
                "a connection pooler is between this broker and the server, and may hide a lost "
                "commit: connect to the server itself"
            )
        for name in ("fsync", "full_page_writes"):
            if getattr(self, name) != "on":
                found.append(f"{name} is off, so a crash loses commits: set {name} = on")
        if self.synchronous_commit not in ("on", "remote_apply"):
            found.append(
                f"synchronous_commit is {self.synchronous_commit}, so a commit is confirmed before "
                "it is durable: set synchronous_commit = on"
            )
        for name in ("statement_timeout", "transaction_timeout"):
            if getattr(self, name) != "0":
                found.append(
                    f"{name} is {getattr(self, name)}, and would end a commit that waits for a "
                    f"standby: set {name} = 0 for this user (alter role … set {name} = 0)"
                )
        if self.client_min_messages not in ("notice", "log", "warning") and (
            not self.client_min_messages.startswith("debug")
        ):
            found.append("client_min_messages hides warnings: set client_min_messages = notice")
        if replication == "standbys" and (not self.standby_names or "*" in self.standby_names):
            found.append(
                f"synchronous_standby_names is {self.standby_names!r}, so "
                + ("any" if self.standby_names else "no")
                + " standby confirms a commit: name them, such as 'ANY 1 (a, b)'; Patroni in "
                "strict mode does that as soon as one is there. If the provider replicates the "
                "storage, or one server is enough, set db_replication to provider or none"
            )
        return found
