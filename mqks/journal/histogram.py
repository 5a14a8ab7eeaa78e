"""Counts of what was observed, by size: how long commits take, and how much is in one.

The one rule: observing costs one search in a short tuple; nothing is kept of the single value.
"""

from bisect import bisect_left


class Histogram:
    """`bounds` are the upper ends of the buckets, rising, each itself included; one more bucket
    holds what is above them all."""

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
