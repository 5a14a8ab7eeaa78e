"""Marks of single rows of a table."""

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Rows of a `parametrize` that only the whole check takes; a tuple has several values."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
        for row in rows
    ]
