"""Durations with units, as people write them: `90s`, `1h30m`, `250ms`, `7d`.

The one rule: the protocol has only numbers of seconds; commands, settings and clients read units.
"""

import re

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_PART = re.compile(r"([\d.]+)(ms|[smhd])")


def in_seconds(text: str) -> str:
    """The number of seconds of a duration as text; other texts unchanged."""
    if not _DURATION.fullmatch(text):
        return text
    return repr(sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))
