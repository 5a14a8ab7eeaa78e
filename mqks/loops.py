"""What every process of the server sets: its event loop, and the collection of garbage."""

import gc
from importlib.util import find_spec

from mqks.settings import Settings


def uses_uvloop(settings: Settings) -> bool:
    return settings.uvloop and find_spec("uvloop") is not None


def rarely_collect() -> None:
    """Collections of garbage need not visit what is there now. One of the middle generation visits
    6,000 others: 5 ms where they are requests that wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 1, 25_000)
