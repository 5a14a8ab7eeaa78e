"""Who may come in: so many from one address, and so many who have not said who they are.

The one rule: newcomers find room. Of those who only stand there the oldest goes, so that a crowd of
silent ones cannot keep those out who authenticate at once.
"""

import ipaddress
from collections.abc import Callable
from typing import NamedTuple

from mqks.errors import Limit, LimitExceeded
from mqks.settings import Settings


class Peer(NamedTuple):
    address: str
    """As people write it."""
    local: bool
    """Whether it is on this machine."""
    network: bytes
    """What counts as one address: of IPv6 the first 64 bits; nothing where there is none."""


def shown(host: str, port: int) -> str:
    """An address as people, and URLs, write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer(name: object) -> Peer:
    """Who it is, from what accept() says, also of one that is gone already."""
    if name is None:
        # Nothing tells where it is, and so not that it is on this machine.
        return Peer("gone", False, b"")
    if not isinstance(name, tuple):
        return Peer("unix", True, b"")
    host, port = name[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    # A socket for both families tells IPv4 addresses as IPv6, all in one network.
    address = getattr(address, "ipv4_mapped", None) or address
    return Peer(shown(host, port), address.is_loopback, address.packed[:8])


class Gate:
    """`reached` counts for each limit how often it was."""

    def __init__(self, settings: Settings, reached: dict[Limit, int]) -> None:
        self._settings = settings
        self._reached = reached
        self.connections = 0
        """All that have entered and not left, those over TLS from before their handshake on."""
        self._counts: dict[bytes, int] = {}
        self._strangers: dict[object, Callable[[], None]] = {}

    def enter(self, peer: Peer) -> None:
        """Raises LimitExceeded, unless a stranger makes room for one more connection."""
        count = self._counts.get(peer.network, 0)
        if peer.network and count >= self._settings.connections_per_address_max:
            self._reached["connections_per_address_max"] += 1
            raise LimitExceeded(
                "connections_per_address_max",
                f"{count} connections from this address are open already",
            )
        if self.connections >= self._settings.connections_max:
            self._reached["connections_max"] += 1
            if not self.make_room():
                raise LimitExceeded(
                    "connections_max",
                    f"{self._settings.connections_max} connections are open already",
                )
        self.connections += 1
        self._counts[peer.network] = count + 1

    def leave(self, peer: Peer) -> None:
        """One that entered has gone."""
        self.connections -= 1
        self._counts[peer.network] -= 1
        if not self._counts[peer.network]:
            del self._counts[peer.network]

    def add_stranger(self, key: object, drop: Callable[[], None]) -> None:
        """It has yet to say who it is; `drop` is called when others need its place."""
        while len(self._strangers) >= self._settings.unauthenticated_max:
            self._reached["unauthenticated_max"] += 1
            self.make_room()
        self._strangers[key] = drop

    def make_room(self) -> bool:
        """Drop the stranger that has stood there longest, if there is one."""
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        self._strangers.pop(oldest)()
        return True

    def remove_stranger(self, key: object) -> None:
        """It is known now, or gone; also what is not there."""
        self._strangers.pop(key, None)
