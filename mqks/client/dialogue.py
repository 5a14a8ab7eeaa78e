"""A connection for commands, with one request at a time.

It supports replies of many lines. It does not reconnect, since the state that it has read so far
may have changed.

Its lines end with a carriage return and a newline, so that a carriage return before them is data.

The one rule: no wait is longer than `Options.timeout_s`.
"""

from typing import Self

from mqks.client import requests, urls
from mqks.client.errors import ClientError, ConfirmTimeout, ConnectionLost, RequestFailed
from mqks.client.options import Options, named
from mqks.client.wire import Wire, answering
from mqks.errors import reason

ID = b"q"


class Dialogue:
    """A connected context. Raises ConnectionLost, ConfirmTimeout, ProtocolViolation,
    AuthenticationFailed, and RequestFailed with the id of the server's error reply; one that leaves
    the context gets its reason."""

    def __init__(self, url: str | None, options: Options | None = None) -> None:
        self.address = urls.parse(url)
        self._options = named(options or Options(), self.address.client_name)

    def __enter__(self) -> Self:
        try:
            if self.address.others:
                self._wire = answering(self.address, self._options, "the request")
            else:
                self._wire = Wire(self.address, self._options)
        except OSError as error:
            raise ConnectionLost(f"no server at {self.address}: {reason(error)}") from None
        try:
            if self.address.credentials and not self.address.others:
                self._wire.greet(self.address.credentials, "the request")
            self._wire.introduce()
        except OSError as error:
            raise self._lost(error) from None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if isinstance(error, RequestFailed) and error.reason is None:
                error.reason = self.reason(error.error_id)
        finally:
            self._wire.close()

    def reason(self, error_id: str) -> str | None:
        """The reason of an error, or None if the server does not have it."""
        try:
            return requests.reason_told(self.ask(requests.reason(error_id)))
        except ClientError:
            return None

    def ask(self, body: bytes) -> bytes:
        """Send a request; returns the text after `ok` in the one line of the reply."""
        self._send(b"%b %b\r\n" % (ID, body))
        return self._answer()

    def ask_lines(self, body: bytes) -> tuple[list[bytes], bytes]:
        """The same for a reply of several lines: those before the last one, and that, `--end`."""
        self._send(b"%b %b\r\n" % (ID, body))
        lines = []
        while not requests.is_peek_end(text := self._answer()):
            lines.append(text)
        return lines, text

    def ask_many(self, lines: list[bytes]) -> list[tuple[bytes, str]]:
        """Send requests with their own ids, each with a reply of one line; returns the request ids
        and error ids of those that were refused. At most some hundred KiB at a time."""
        self._send(b"".join(line + b"\r\n" for line in lines))
        try:
            replies = [self._wire.reply() for _ in lines]
        except OSError as error:
            raise self._lost(error) from None
        return [(each.request_id, requests.decoded(each.text)) for each in replies if each.is_error]

    def _send(self, lines: bytes) -> None:
        try:
            self._wire.send(lines)
        except OSError as error:
            raise self._lost(error) from None

    def _answer(self) -> bytes:
        try:
            return self._wire.answer(ID)
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> ConnectionLost | ConfirmTimeout:
        if isinstance(error, TimeoutError):
            return ConfirmTimeout(f"{self.address}: no answer in {self._options.timeout_s:g} s")
        return ConnectionLost(f"{self.address}: {reason(error)}")
