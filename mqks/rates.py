"""How much a user may send in a second, on all connections together.

The one rule: what is above a rate is never refused. It is a debt, which says how long to wait
before more is read.
"""

from typing import Final

PIECE_BYTES_MIN: Final = 256
PUBLISH_BYTES: Final = 32
"""Of a short publish: so much of them is read at once that it is no debt of many seconds."""


class UserRate:
    """0 is no limit. A second's worth may come at once."""

    __slots__ = ("_at_s", "_left", "piece_bytes", "rates")

    def __init__(self, publishes_per_s: float, bytes_per_s: float) -> None:
        self.rates = publishes_per_s, bytes_per_s
        self._left = [publishes_per_s, bytes_per_s]
        """Less than 0: a debt."""
        self._at_s = 0.0
        sizes = publishes_per_s * PUBLISH_BYTES, bytes_per_s / 4
        self.piece_bytes = max(PIECE_BYTES_MIN, int(min(filter(None, sizes), default=0)))
        """How much is read from a connection at once."""

    def take(self, now_s: float, publishes: int, size: int) -> float:
        """So many publishes and bytes have come; return for how many seconds to read no more."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        wait_s = 0.0
        for at, (rate, taken) in enumerate(zip(self.rates, (publishes, size), strict=True)):
            if rate:
                left = min(rate, self._left[at] + passed_s * rate) - taken
                self._left[at] = left
                wait_s = max(wait_s, -left / rate)
        return wait_s

    def is_in_debt(self, now_s: float) -> bool:
        passed_s = now_s - self._at_s
        pairs = zip(self.rates, self._left, strict=True)
        return any(rate and left + passed_s * rate < 0 for rate, left in pairs)
