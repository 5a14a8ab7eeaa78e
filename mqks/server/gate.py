"""Limits on connections: in total, per address, and of unauthenticated ones.

The one rule: a new connection is admitted if an unauthenticated one can be closed for it, the
oldest first. So a crowd of silent connections cannot keep out clients that authenticate at once.
"""

import ipaddress
from collections.abc import Callable
from typing import NamedTuple

from mqks.errors import Limit, LimitExceeded
from mqks.settings import Settings, shown


class Peer(NamedTuple):
    address: str
    """Host and port for people."""
    local: bool
    """Whether the client is on this machine."""
    network: bytes
    """What counts as one address: for IPv6 the first 64 bits; empty without an address."""
    files: int = 1
    """Descriptors that its connection takes here."""
    guest: bool = False
    """It is let in while the server drains, to operate it."""
    shared: bool = False
    """What several have asked for at once comes by it."""

    @property
    def source(self) -> bytes:
        """Whose logins count together. All of a Unix socket are one, and all of the page."""
        return self.network or self.address.partition(":")[0].encode()


def peer(name: object) -> Peer:
    """The peer from the address of accept(), also if it has disconnected already."""
    if name is None:
        # The address is unknown, so it must not count as local.
        return Peer("gone", False, b"")
    if not isinstance(name, tuple):
        return Peer("unix", True, b"")
    host, port = name[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    # A socket for both families reports IPv4 addresses as IPv6, all in one network.
    address = getattr(address, "ipv4_mapped", None) or address
    return Peer(shown(host, port), address.is_loopback, address.packed[:8])


class Gate:
    """`reached` counts how often each limit was reached."""

    def __init__(self, settings: Settings, reached: dict[Limit, int]) -> None:
        self._settings = settings
        self._reached = reached
        self.connections = 0
        """Admitted connections that have not left; over TLS from before the handshake."""
        self._files = 0
        self._counts: dict[bytes, int] = {}
        self._strangers: dict[object, Callable[[], None]] = {}

    def enter(self, peer: Peer) -> None:
        """Admit a connection; close an unauthenticated one for it. Raises LimitExceeded."""
        # First, so that one address cannot make the gate close the connections of others.
        count = self._counts.get(peer.network, 0)
        if peer.network and count >= self._settings.connections_per_address_max:
            self._reached["connections_per_address_max"] += 1
            raise LimitExceeded(
                "connections_per_address_max",
                f"this address has {count} connections already",
            )
        if self._files + peer.files > self._settings.connections_max:
            self._reached["connections_max"] += 1
            if not self.make_room():
                raise LimitExceeded(
                    "connections_max",
                    f"the server has {self.connections} connections already",
                )
        self.connections += 1
        self._files += peer.files
        self._counts[peer.network] = count + 1

    def leave(self, peer: Peer) -> None:
        """An admitted connection has ended."""
        self.connections -= 1
        self._files -= peer.files
        self._counts[peer.network] -= 1
        # Kept for those that are here, not for all that ever came.
        if not self._counts[peer.network]:
            del self._counts[peer.network]

    def add_stranger(self, key: object, drop: Callable[[], None]) -> None:
        """Count an unauthenticated connection; `drop` is called to close it for a newer one."""
        while len(self._strangers) >= self._settings.unauthenticated_max:
            self._reached["unauthenticated_max"] += 1
            self.make_room()
        self._strangers[key] = drop

    def make_room(self) -> bool:
        """Close the oldest unauthenticated connection, if there is one."""
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        self._strangers.pop(oldest)()
        return True

    def remove_stranger(self, key: object) -> None:
        """It has authenticated or ended; unknown keys are ignored."""
        self._strangers.pop(key, None)
