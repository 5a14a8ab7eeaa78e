"""One question at a time: a connection for commands that look and tell.

It knows what the other clients do not need: answers of many lines. It does not come back when it
is lost, since what was told so far may have changed meanwhile.

Its lines end in a carriage return and a newline, so that a carriage return before that is data.

The one rule: nothing is waited for longer than `Options.timeout_s`.
"""

from collections import deque
from collections.abc import Iterator
from typing import Self

from mqks.client import requests, urls
from mqks.client.blocking_connection import CHUNK_BYTES, open_socket
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    ConfirmTimeout,
    ConnectionLost,
    ProtocolViolation,
    RequestFailed,
)
from mqks.client.options import Options
from mqks.protocol.lines import LineSplitter

ID, END = b"q", b"--end"


class Dialogue:
    """A connected context. Raises ConnectionLost, ConfirmTimeout, ProtocolViolation,
    AuthenticationFailed, and RequestFailed with the id of the server's error reply; one that leaves
    the context gets the reason as a note."""

    def __init__(self, url: str | None, options: Options | None = None) -> None:
        self._options = options or Options()
        self.address = urls.parse(url)
        self._splitter = LineSplitter(self._options.reply_bytes_max, is_server=True)
        self._lines: deque[bytes] = deque()

    def __enter__(self) -> Self:
        try:
            self._socket = open_socket(self.address, self._options)
        except OSError as error:
            raise ConnectionLost(f"no server at {self.address}: {_reason(error)}") from None
        self._socket.settimeout(self._options.timeout_s)
        if self.address.credentials:
            try:
                self.ask(requests.auth(self.address.credentials))
            except RequestFailed as error:
                self._socket.close()
                raise AuthenticationFailed(str(error), error.error_id) from None
            except BaseException:
                self._socket.close()
                raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._socket:
            if isinstance(error, RequestFailed) and (reason := self.reason(error.error_id)):
                error.add_note(reason)

    def reason(self, error_id: str) -> str | None:
        """Why the server refused something, if that can be had."""
        try:
            return requests.reason_told(self.ask(requests.reason(error_id)))
        except ClientError:
            return None

    def ask(self, body: bytes) -> bytes:
        """What follows `ok` in the one line of the answer."""
        self._send(body)
        return self._answer()

    def ask_lines(self, body: bytes) -> Iterator[bytes]:
        """The same of each line, up to the one that says `--end`. Take them all before you ask
        again."""
        self._send(body)
        while (text := self._answer()) != END:
            yield text

    def ask_many(self, lines: list[bytes]) -> list[tuple[bytes, str]]:
        """Send requests with ids of their own, each answered with one line; give the request ids
        and error ids of those that were refused. Some hundred KiB at a time."""
        self._send_lines(b"".join(line + b"\r\n" for line in lines))
        refused = []
        for _ in lines:
            request_id, is_error, text = self._reply()
            if is_error:
                refused.append((request_id, requests.decoded(text)))
        return refused

    def _send(self, body: bytes) -> None:
        self._send_lines(b"%b %b\r\n" % (ID, body))

    def _send_lines(self, lines: bytes) -> None:
        try:
            self._socket.sendall(lines)
        except OSError as error:
            raise self._lost(error) from None

    def _answer(self) -> bytes:
        request_id, is_error, text = self._reply()
        if request_id != ID:
            raise ProtocolViolation(f"the peer answered {request_id[:80]!r}, which did not ask")
        if is_error:
            error_id = requests.decoded(text)
            raise RequestFailed(f"the server refused the request, error {error_id}", error_id)
        return text

    def _reply(self) -> requests.Reply:
        """The next reply. Raises ConnectionLost for one that concerns the connection."""
        reply = requests.Reply.parse(self._line())
        if reply.is_error and reply.request_id == b"-":
            error_id = requests.decoded(reply.text)
            raise ConnectionLost(f"{self.address}: refused by the server, error {error_id}")
        return reply

    def _line(self) -> bytes:
        while not self._lines:
            try:
                data = self._socket.recv(CHUNK_BYTES)
            except OSError as error:
                raise self._lost(error) from None
            if not data:
                raise ConnectionLost(f"{self.address}: the server closed the connection")
            self._lines.extend(self._splitter.feed(data))
            if self._splitter.too_long is not None:
                raise ProtocolViolation("the peer sent a line longer than reply_bytes_max")
        return self._lines.popleft()

    def _lost(self, error: OSError) -> ConnectionLost | ConfirmTimeout:
        if isinstance(error, TimeoutError):
            return ConfirmTimeout(f"{self.address}: no answer in {self._options.timeout_s:g} s")
        return ConnectionLost(f"{self.address}: {_reason(error)}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
