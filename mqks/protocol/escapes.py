r"""Any bytes in one line: ``\\``, ``\n``, ``\r`` and ``\t`` stand for a backslash, a newline, a
carriage return and a tab.

The one rule: nothing else follows a backslash.
"""


def is_escaped(data: bytes) -> bool:
    """Whether each backslash begins one of the four."""
    if b"\\" not in data:
        return True
    single = data.replace(b"\\\\", b"")
    return single.count(b"\\") == sum(map(single.count, (b"\\n", b"\\r", b"\\t")))
