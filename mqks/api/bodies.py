"""Bodies of requests, which are in memory until they are stored.

The one rule: there is room for a body before it is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def room(self, request: Request) -> Iterator[None]:
        """Bodies are in memory from here until they are stored. Raises HTTPException."""
        is_unknown = "transfer-encoding" in request.headers  # Then a length says nothing.
        size = self.bytes_max if is_unknown else int(request.headers.get("content-length", 0))
        if size > self.bytes_max:
            raise HTTPException(413, self._too_long)
        if self._bytes and self._bytes + size > API_BODIES_BYTES_MAX:
            raise HTTPException(
                503, "too many messages are being published; try again", {"Retry-After": "1"}
            )
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size

    async def read(self, request: Request) -> bytes:
        """Raises HTTPException."""
        body = bytearray()
        try:
            with anyio.fail_after(API_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.bytes_max:
                        raise HTTPException(413, self._too_long)
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {API_BODY_S:g} s") from None
        return bytes(body)
