"""Histograms: how long commits take, and how much each contains.

The one rule: an observation costs one search in a short tuple; single values are not stored.
"""

from bisect import bisect_left


class Histogram:
    """`bounds` are the ascending, inclusive upper ends of the buckets; one more bucket counts
    everything above."""

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)
