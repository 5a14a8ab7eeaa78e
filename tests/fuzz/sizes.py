"""How far the fuzzer goes: it stays below what is known to cost too much.

The one rule: a figure here is lifted when what it keeps away from is mended.
"""

from typing import Final

NAME_BYTES_MAX: Final = 1000
"""Of longer words what is beyond is cut off; a name may have 255 bytes."""

STARS_MAX: Final = 8
"""Of a mask; a mask of many takes long."""

ARGUMENTS_MAX: Final = 300
"""Of one request."""

QUEUES_MAX: Final = 300
"""What is sent to thousands of queues takes longer than a chunk may."""

CALL_S_MAX: Final = 0.1
"""CPU time of one call of the broker; a chunk shall take `limits.CHUNK_S`, a fifth of that."""

EVAL_S_MAX: Final = 0.5
"""The same of one that evaluates: a whole budget of steps takes up to 0.3 s on a busy machine."""
