"""Lists of `stats`, read in pages, so that no reply occupies the server for long."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from mqks.client import requests

PAGE_ROWS = 1000
PAUSE_S_MAX = 0.1
FLAGS = "after", "then", "mask"


def rows(
    ask: Callable[[bytes], bytes | str], what: bytes, *keys: str, after: bytes = b""
) -> Iterator[dict[str, Any]]:
    """All rows of a list, or those behind `after` in its first key, `ask` being told the requests.
    The list is sorted by `keys`, up to three: the next page begins behind what the last row has
    there, where that is not None."""
    after = after and b" --after=" + after
    while True:
        began_s = time.monotonic()
        page = json.loads(ask(b"stats %b --limit=%d%b" % (what, PAGE_ROWS, after)))
        took_s = time.monotonic() - began_s
        yield from page
        if len(page) < PAGE_ROWS:
            return
        # The busier the server is, the longer the pause.
        time.sleep(min(took_s, PAUSE_S_MAX))
        told = {flag: page[-1][key] for flag, key in zip(FLAGS, keys, strict=False)}
        flags = (f" --{flag}={value}" for flag, value in told.items() if value is not None)
        after = requests.encoded("".join(flags))
