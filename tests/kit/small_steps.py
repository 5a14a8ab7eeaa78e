"""State machines of a broker whose steps are small, so that few messages make many of them."""

from collections.abc import Iterator, Mapping
from itertools import count
from types import ModuleType
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.kit.lab import Lab


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
        raise NotImplementedError
