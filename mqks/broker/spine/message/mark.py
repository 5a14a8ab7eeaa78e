"""What is known of a message besides its text.

The one rule: a mark only grows, so of two marks of one message the higher version counts.
"""

from typing import Any, Final, NamedTuple
from zlib import crc32

RELEASE: Final = 1 << 32
"""Added to the version of a mark by a release that counts."""


class Mark(NamedTuple):
    """The state of a message besides its body. Times are microseconds since 1970, 0 for none."""

    version: int = 0
    """Grows with each change: of two marks of one message the higher version counts. The part from
    `RELEASE` on is the number of releases that were counted."""
    retry: int = 0
    """How often it was returned, or leased."""
    rejects: int = 0
    losses: int = 0
    """How often its consumer rejected it, and was lost while holding it."""
    redelivered: bool = False
    """Delivered since it was marked: if it is alive after a crash, a consumer held it."""
    is_dated: bool = False
    """It is due by the wall clock, even when the clock is set; otherwise after a delay."""
    keeps_place: bool = False
    """When due, it returns to its old place instead of the tail."""
    due_us: int = 0
    """It is scheduled until then."""
    expires_us: int = 0
    """Its own TTL ends then."""
    joined_us: int = 0
    """When it joined the queue, if that is not the time of its number."""
    id_crc: int = 0
    """The `id_checksum` of its id, while it is scheduled."""
    batch: int = 0
    """The number of the batch that it is a member of."""

    def changed(self, **changes: Any) -> "Mark":
        """The next version."""
        return self._replace(version=self.version + 1, **changes)

    def delivered(self) -> "Mark":
        """The mark after a delivery."""
        if self is NO_MARK:
            return _DELIVERED
        version, retry, rejects, losses = self[:4]
        return Mark(version + 1, retry, rejects, losses, True, *self[5:])

    def returned(self) -> "Mark":
        """The mark after it was returned once more."""
        return _RETURNED if self is NO_MARK else self._back()

    def released(self) -> "Mark":
        """The mark after a consumer has released it: nothing is counted."""
        return self.changed(redelivered=False)

    def release_counted(self) -> "Mark":
        """The mark where that counts as a delivery."""
        return self._replace(version=self.version + RELEASE)

    @property
    def deliveries(self) -> int:
        """How often it was delivered and has returned; releases only where they were counted."""
        return self.retry + self.version // RELEASE

    def rejected(self) -> "Mark":
        """The mark after it was rejected once more."""
        return _REJECTED if self is NO_MARK else self._back(rejected=1)

    def lost(self) -> "Mark":
        """The mark after its consumer was lost once more."""
        return _LOST if self is NO_MARK else self._back(lost=1)

    def _back(self, rejected: int = 0, lost: int = 0) -> "Mark":
        version, retry, rejects, losses = self[:4]
        return Mark(version + 1, retry + 1, rejects + rejected, losses + lost, False, *self[5:])

    def shifted(self, set_us: int) -> "Mark":
        """The mark after the wall clock was set by so much, which its TTL does not follow."""
        expires_us, joined_us = self.expires_us, self.joined_us
        return self._replace(
            expires_us=expires_us and expires_us + set_us,
            joined_us=joined_us and joined_us + set_us,
        )

    def due(self, now_us: int) -> "Mark":
        """The mark when it is due. If it was never ready before, its TTL starts now."""
        is_new = self.expires_us and not self.version
        return self._replace(
            due_us=0,
            is_dated=False,
            keeps_place=False,
            id_crc=0,
            expires_us=self.expires_us + (now_us - self.due_us if is_new else 0),
        )


NO_MARK = Mark()
_DELIVERED = Mark(1, redelivered=True)
_RETURNED = NO_MARK._back()
_REJECTED = NO_MARK._back(rejected=1)
_LOST = NO_MARK._back(lost=1)
"""The marks of most messages that have one, made once."""


_GROUP: Final = 0xFFFF0000
"""The bits of a checksum that are those of the group."""


def id_checksum(message_id: bytes) -> int:
    """By this a scheduled message is searched: by its id, or by its group."""
    group, has_group, _ = message_id.partition(b"#")
    crc = crc32(message_id)
    return crc32(group) & _GROUP | crc & ~_GROUP if has_group else crc


def id_checksums(pattern: bytes) -> tuple[int, set[int]]:
    """A mask, and what the checksum of a message of this pattern has there: an id, or GROUP#*."""
    if group := group_of(pattern):
        return _GROUP, {id_checksum(group) & _GROUP}
    # Up to 0.2 there were no groups.
    return 0xFFFFFFFF, {id_checksum(pattern), crc32(pattern)}


def group_of(pattern: bytes) -> bytes:
    """What the ids of its group begin with; empty for one id."""
    return pattern[:-1] if pattern.endswith(b"#*") else b""
