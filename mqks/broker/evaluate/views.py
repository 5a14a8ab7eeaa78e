"""Values of an expression of `_eval` that have methods.

The one rule: a view holds one plain value, and an expression can call those of its methods that
`expression.py` names, no others.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Items:
    """A number of waiting things, without the things themselves."""

    _count: int

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return str(self._count)

    def qsize(self) -> int:
        return self._count


@dataclass(frozen=True, slots=True, repr=False)
class Flag:
    """A boolean."""

    _value: bool

    def __bool__(self) -> bool:
        return self._value

    def __repr__(self) -> str:
        return str(self._value)

    def is_set(self) -> bool:
        return self._value
