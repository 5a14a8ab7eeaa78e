"""Values of an expression of `_eval` that have methods.

The one rule: a view is a plain number, and an expression can call those of its methods that
`expression.py` names, no others.
"""


class Items(int):
    """A number of waiting things, without the things themselves."""

    def __len__(self) -> int:
        return int(self)

    def qsize(self) -> int:
        return int(self)


class BooleanView(int):
    """A boolean."""

    def __repr__(self) -> str:
        return str(bool(self))

    def is_set(self) -> bool:
        return bool(self)
