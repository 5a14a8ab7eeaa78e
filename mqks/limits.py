"""Every fixed maximum, its unit in its name. What an operator may change is in `settings`.

The one rule: a number here bounds something that a peer or a disk could otherwise make grow.
"""

from typing import Final

SEQ_MAX: Final = (1 << 63) - 1
"""The greatest number that a request may name: of a message, or a time in microseconds."""

DELETE_DELAY_S_MAX: Final = 1e9
"""Longest delay of a delete rule."""

MASK_BYTES_MAX: Final = 1024
"""Longest event mask: a mask is turned into a regular expression."""

PAGE_BYTES: Final = 2 * 1024 * 1024
"""One read of a queue's waiting messages from disk, about."""

READ_AHEAD_BYTES: Final = 4 * 1024 * 1024
"""Below this many bytes in memory, a queue that is being consumed asks for its next page."""

DELIVERY_BYTES: Final = 256 * 1024
"""One step of a delivery from a backlog, about: the connection's high-water mark is looked at
between steps."""

SEGMENTS_DROPPED_MAX: Final = 64
"""Segments dropped in one commit, so that no commit takes long."""

SEGMENT_MERGE_COUNT: Final = 512
"""This many small segments are merged into one."""

SEGMENT_SMALL_BYTES: Final = 16 * 1024
"""A segment below this size counts as small."""

READS_WAITING_MAX: Final = 16
"""Reads of the journal that one connection may send ahead."""

READ_ROWS_DEFAULT: Final = 100_000
READ_ROWS_MAX: Final = 1_000_000
"""Messages in one reply to read."""

READ_BYTES: Final = 4 * 1024 * 1024
"""One reply to read, about."""

READ_DISK_BYTES: Final = 64 * 1024 * 1024
"""What one reply to read or peek takes from the disk, about: messages that lie between many of
other queues, and others who wait for theirs."""

PEEK_ROWS_DEFAULT: Final = 10
PEEK_ROWS_MAX: Final = 1000
"""Messages in one reply to peek."""

HTTP_CONNECTIONS_MAX: Final = 64
"""Connections at once to the port of metrics and health; one more is closed."""

STATS_ROWS_DEFAULT: Final = 1000
STATS_ROWS_MAX: Final = 10_000
"""Rows in one reply to stats."""

REASON_CHARACTERS_MAX: Final = 500
"""Longest reason kept with an error."""
