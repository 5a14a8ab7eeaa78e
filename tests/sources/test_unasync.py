"""The blocking client is what `python -m tools.unasync` writes."""

import re

from tools.unasync import TARGET, blocking


def test_the_blocking_client_is_generated() -> None:
    assert TARGET.read_text() == blocking(), "run: python -m tools.unasync"


def test_it_speaks_of_threads() -> None:
    text = TARGET.read_text()
    assert re.findall(r"(?i)\basync(?!_client)|\bawait\b|\btasks?\b|event loop", text) == []
