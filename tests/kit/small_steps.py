"""State machines of a broker whose steps are small, so that few messages make many of them."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import count
from types import ModuleType
from typing import ClassVar
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from mqks.broker.spine.queue.queue import Queue
from tests.kit.lab import Lab

Rate = tuple[int, int] | None
"""Deliveries a second, and the burst."""


class SmallSteps(RuleBasedStateMachine):
    small: ClassVar[Mapping[ModuleType, Mapping[str, int]]]
    """Constants of modules, and their values meanwhile."""
    lab: Lab

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for module, values in self.small.items():
            for name, value in values.items():
                self.patch.setattr(module, name, value)

    def teardown(self) -> None:
        try:
            if hasattr(self, "lab"):
                self.end()
        finally:
            self.patch.undo()

    def end(self) -> None:
        """What holds when all steps are done."""
        raise NotImplementedError


def as_test(machine: type[SmallSteps], share: float = 1, steps: int = 30) -> type[TestCase]:
    """For pytest, with this share of the usual examples."""
    machine.TestCase.settings = settings(
        max_examples=round(share * settings().max_examples),
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase


class Bucket:
    """What is left of the burst of a rate."""

    def __init__(self, rate: Rate = None) -> None:
        self.rate = rate
        self.fill()

    def fill(self) -> None:
        self.tokens = Fraction(self.rate[1] if self.rate else 0)

    def change(self, rate: Rate) -> None:
        """What is left of another burst is left of this one, as far as it goes."""
        before, self.rate = self.rate, rate
        if before is None:
            self.fill()
        elif rate not in (None, before):
            self.tokens = Fraction(min(rate[1], int(self.tokens)))

    def pass_us(self, passed_us: int) -> None:
        if self.rate is not None:
            per_s, burst = self.rate
            self.tokens = min(Fraction(burst), self.tokens + Fraction(passed_us * per_s, 1_000_000))

    def take(self) -> None:
        self.tokens -= 1
        assert self.rate is None or self.tokens >= 0, "too many are delivered"

    @property
    def is_empty(self) -> bool:
        return self.rate is not None and self.tokens < 1


class Holders(SmallSteps):
    """Who holds which message."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = count(1)
        self.waiting: set[str] = set()
        self.held: dict[str, str] = {}
        """Message → its consumer; for one that is leased, the lease."""
        self.heard = 0
        self.at_us = 0
        """When `look` was called last."""

    def came(self) -> Iterator[str]:
        """The messages that were delivered since the last look."""
        for line in self.lab.replies[self.heard :]:
            words = line.decode().split(" ")
            if len(words) > 3 and words[3].startswith("event="):
                message = words[2]
                assert message in self.waiting, f"{message} is delivered twice"
                self.waiting.remove(message)
                lease = [each[6:] for each in words[3].split(",") if each.startswith("lease=")]
                self.held[message] = lease[0] if lease else words[0]
                yield message
        self.heard = len(self.lab.replies)

    def back(self, message: str) -> None:
        del self.held[message]
        self.waiting.add(message)

    @rule(which=st.integers(0, 9), what=st.sampled_from(["ack", "ack", "reject", "release"]))
    def settle(self, which: int, what: str) -> None:
        if self.held:
            self.settle_one(sorted(self.held)[which % len(self.held)], what)

    def settle_one(self, message: str, what: str) -> None:
        holder = self.held[message]
        if what == "ack":
            del self.held[message]
        else:
            self.back(message)
        if "." in holder:
            how = "ack" if what == "ack" else "reject"
            line = f"s lease {self.queue_of(message)} {holder} --{how}"
        else:
            line = f"s {what} {holder} {message}"
        self.lab.send("p", line.encode())
        self.rest()

    def take_all(self) -> None:
        """Deliver and ack whatever there is."""
        for _ in range(300):
            if not (self.held or self.waiting):
                break
            self.consume_all()
            self.tick(20)
            for message in [*self.held]:
                self.settle_one(message, "ack")
        assert not self.waiting, "a message is never delivered"

    def receive_some(self, queue: str, limit: int) -> None:
        self.lab.send("p", f"r receive {queue} --limit={limit} --lease=10".encode())
        self.rest()
        self.tick(1)

    def gone(self, who: str) -> None:
        for message in [each for each, holder in self.held.items() if holder == who]:
            self.back(message)
        self.lab.end(who)
        self.rest()

    @rule(seconds=st.sampled_from([0.02, 0.5, 1, 11]))
    def tick(self, seconds: float) -> None:
        self.lab.now_us += round(seconds * 1_000_000)
        for message, holder in [*self.held.items()]:
            number = holder.split(".")[1] if "." in holder else "0"
            mark = self.queue(self.queue_of(message)).lane.marks.get(int(number))
            if mark is not None and 0 < mark.due_us <= self.lab.wall_us:
                self.back(message)
        self.rest()

    @rule(seconds=st.sampled_from([-3600, 3600]))
    def set_clock(self, seconds: int) -> None:
        # What is held tells its age by the wall clock, and leases go by it after a start.
        if not self.held:
            self.lab.wall_ahead_us += seconds * 1_000_000
        self.rest()

    @rule()
    def crash(self) -> None:
        for message, holder in [*self.held.items()]:
            if "." not in holder:
                self.back(message)
        self.lab.crash()
        self.heard = 0
        self.fill()
        self.rest()

    def queue(self, name: str) -> Queue:
        return self.lab.broker.queues[name.encode()]

    def queue_of(self, message: str) -> str:
        raise NotImplementedError

    def consume_all(self) -> None:
        """From each queue, whatever comes."""
        raise NotImplementedError

    def rest(self) -> None:
        """Let all be done, and look whether it is right."""
        raise NotImplementedError

    def fill(self) -> None:
        """A start begins with whole bursts."""
        raise NotImplementedError
