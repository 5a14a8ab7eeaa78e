"""Bodies of requests, which are in memory until they are stored.

The one rule: what has come in is counted, not what a request says.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request

from mqks.limits import API_BODIES_BYTES_MAX, API_BODY_S


class Bodies:
    """`too_long` says why a body of more than `bytes_max` is refused."""

    def __init__(self, bytes_max: int, too_long: str) -> None:
        self.bytes_max = bytes_max
        self._too_long = too_long
        self._bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts from its first chunk to the end of the block. Raises
        HTTPException."""
        body, size = bytearray(), 0
        try:
            try:
                self._check(0, int(request.headers.get("content-length", 0)))
                with anyio.fail_after(API_BODY_S):
                    async for chunk in request.stream():
                        size += len(chunk)
                        self._bytes += len(chunk)
                        body += chunk
                        self._check(size, size)
            except TimeoutError:
                raise HTTPException(408, f"the body took more than {API_BODY_S:g} s") from None
            whole = bytes(body)
            body.clear()
            yield whole
        finally:
            self._bytes -= size

    def _check(self, came: int, size: int) -> None:
        """Raise for a body of this size, or if all take too much; `came`: this one's part of it."""
        if size > self.bytes_max:
            raise HTTPException(413, self._too_long)
        if came < self._bytes > API_BODIES_BYTES_MAX:
            reason = "too many messages are being published; try again"
            raise HTTPException(503, reason, {"Retry-After": "1"})
