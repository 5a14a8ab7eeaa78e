"""What a queue does with its messages and with itself.

The one rule: a policy is plain data. A field that is not set has its default, and is not stored, so
a new field needs no migration.
"""

import json
from dataclasses import dataclass
from typing import Any, Self

from mqks.protocol.requests import DeleteRule


class UnknownField(ValueError):
    """A field that this version does not know."""


@dataclass(frozen=True, slots=True)
class Policy:
    delete_when_unused: DeleteRule | None = None
    """When the queue is deleted because it has no consumer; None: never."""

    def encode(self) -> str:
        """As JSON: an object with the fields that are set."""
        fields: dict[str, Any] = {}
        if self.delete_when_unused is not None:
            fields["delete_when_unused"] = {"delay_s": self.delete_when_unused.delay_s}
        return json.dumps(fields)

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `encode` has written. Raises UnknownField for what a newer version may have written,
        ValueError for anything else."""
        try:
            fields = json.loads(text)
            rule = fields.pop("delete_when_unused", None)
            if fields:
                raise UnknownField(", ".join(map(str, fields)))
            return cls(None if rule is None else DeleteRule(**rule))
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not a policy: {error}") from error


DEFAULT = Policy()
