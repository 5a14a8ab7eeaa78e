"""The memory of queues, bindings and consumers, without messages, and the length of names.

The one rule: only new things are checked. An existing name can always be used, whatever its length
and the free memory.
"""

from collections.abc import Iterable
from typing import Final

from mqks.errors import LimitExceeded, ReadOnly
from mqks.settings import Settings

QUEUE_BYTES: Final = 2700
BINDING_BYTES: Final = 320
PART_BYTES: Final = 350
STARRED_BYTES: Final = 450
STAR_BYTES: Final = 50
CONSUMER_BYTES: Final = 560
"""Memory of each besides its names (measured). PART: a part of a mask; STARRED: a part with stars
among other bytes."""


class MetadataBudget:
    """`bytes`: approximate memory of all together."""

    def __init__(self, settings: Settings) -> None:
        self.bytes = 0
        self.read_only = settings.read_only
        """Nothing is added."""
        self.bytes_max = settings.metadata_bytes_max
        self.name_bytes_max = settings.name_bytes_max

    def is_long(self, name: bytes) -> bool:
        return len(name) > self.name_bytes_max

    def check_names(self, what: str, names: Iterable[bytes]) -> None:
        """Raise if one of the names is too long."""
        for name in filter(self.is_long, names):
            reason = f"the {what} has {len(name)} bytes, the limit is {self.name_bytes_max} "
            reason += "(name_bytes_max)"
            raise LimitExceeded("name_bytes_max", reason)

    def check_room(self, size: int, *, for_consumer: bool = False) -> None:
        """Raise if there is no memory for `size` more bytes, or nothing is added. An eighth is
        reserved for consumers, so that a client that invents names does not prevent consuming."""
        if self.read_only and not for_consumer:
            raise ReadOnly
        room = self.bytes_max if for_consumer else self.bytes_max * 7 // 8
        if self.bytes + size > room:
            raise LimitExceeded(
                "metadata_bytes_max",
                f"queues, bindings and consumers use {self.bytes} bytes; {size} more would exceed "
                f"the limit {room} (metadata_bytes_max)",
            )


def queue_bytes(name: bytes) -> int:
    return QUEUE_BYTES + len(name)


def binding_bytes(event: bytes) -> int:
    return BINDING_BYTES + len(event)


def mask_bytes(mask: bytes) -> int:
    """Memory of a mask with the prefix `MASK`."""
    parts = mask[1:].split(b".")
    starred = sum(b"*" in part and len(part) > 1 for part in parts)
    size = PART_BYTES * len(parts) + STARRED_BYTES * starred + STAR_BYTES * mask.count(b"*")
    return BINDING_BYTES + len(mask) + size


def consumer_bytes(consumer_id: bytes) -> int:
    """Memory of a consumer: its id, and two copies of it in the prefixes of deliveries."""
    return CONSUMER_BYTES + 3 * len(consumer_id)
