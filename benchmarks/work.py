"""What a work is: a load on a server, its sizes, and the figures it gives.

The one rule: a figure's name ends with its unit, and a work either gives all its figures or raises.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.messages import Messages
from benchmarks.process import Running

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Size:
    """How many messages, how large, and (where a work has many publishers) from how many."""

    count: int
    payload_bytes: int = 100
    peers: int = 1

    def scaled(self, scale: float) -> "Size":
        """The same with fewer messages, but no fewer than a thousand or all."""
        return replace(self, count=max(int(self.count * scale), min(self.count, 1_000)))

    @property
    def messages(self) -> Messages:
        """The messages of a single publisher."""
        return Messages(self.count, self.payload_bytes)

    @property
    def shared(self) -> Messages:
        """The messages divided among all publishers."""
        return Messages(self.count // self.peers, self.payload_bytes, range(self.peers))


@dataclass(frozen=True, slots=True)
class Work:
    """A load, told in one line, its run against a fresh server, and its two sizes."""

    title: str
    run: Callable[[Running, Size], Figures]
    full: Size
    tiny: Size
    mqks_only: bool = False
    """Whether it speaks MQKS's own lines or looks into its files, whoever the server is."""
