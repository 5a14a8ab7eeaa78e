"""A blocking connection for one request at a time, for commands and the pipeline.

It supports replies of many lines. It is no skin of the session, which exists to connect and send
again: it does not reconnect, since the state that it has read so far may have changed.

The one rule: after an error, a wire is not used again.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, Self, cast

from mqks.client import failures, requests, urls
from mqks.client.blocking_connection import open_socket
from mqks.client.errors import (
    AuthenticationFailed,
    ClientError,
    ConnectionLost,
    ProtocolViolation,
    ReplyTimeout,
    RequestFailed,
)
from mqks.client.options import Options, named
from mqks.errors import reason

BUFFER_BYTES = 64 * 1024
HELLO, NAMING, ID = b"hello", b"name-" + secrets.token_hex(8).encode(), b"q"
"""Ids of the first request, of the one that names the client, which an older server refuses, and of
those of `ask`. A message that is imported must not have the second one by chance."""
PAUSE_S_MAX = 0.1


class Wire:
    """A connection, open within its context or after `open`; with `greets`, a server without
    credentials is asked as well whether it answers.

    `ask`, `ask_lines`, `send_many`, `refused` and `stats` raise ConnectionLost, ReplyTimeout after
    `Options.timeout_s`, ProtocolViolation and RequestFailed; one that leaves the context gets its
    reason. What is below them raises OSError, of which the first two are."""

    def __init__(
        self, url: urls.Urls | None, options: Options | None = None, *, greets: bool = False
    ) -> None:
        self.address = urls.parse(url)
        self._options = named(options or Options(), self.address.client_name)
        self._greets = greets or bool(self.address.credentials or self.address.others)

    def open(self) -> Self:
        """Connect to the first of the servers that answers, each within its share of
        `Options.connect_timeout_s`: one that is suspended accepts connections, too. Raises
        AuthenticationFailed, and ConnectionLost with what each has said."""
        urls.Servers(self.address).first(self._connect)
        return self

    def _connect(self, address: urls.Address) -> None:
        timeout_s = self._options.connect_timeout_s / len(self.address.each)
        try:
            self._begin(address, timeout_s)
        except TimeoutError:
            raise ConnectionLost(f"no answer in {timeout_s:g} s") from None

    def _begin(self, address: urls.Address, timeout_s: float) -> None:
        self._socket = open_socket(address, self._options, timeout_s)
        self._hint = "" if address.tls else f"; {failures.TLS_HINT}"
        """Until the first answer."""
        self.settimeout = self._socket.settimeout
        # Small reads use its buffer; large ones bypass it.
        self._replies = cast(BufferedReader, self._socket.makefile("rb", BUFFER_BYTES))
        try:
            if self._greets:
                self.settimeout(timeout_s)
                self._greet(address)
            if self._options.client_name:
                self.send(requests.line(NAMING, requests.set_name(self._options.client_name)))
        except BaseException:
            self.close()
            raise
        self.settimeout(self._options.timeout_s)

    def _greet(self, address: urls.Address) -> None:
        credentials = address.credentials
        try:
            self.send(requests.line(HELLO, requests.auth(credentials) if credentials else b"ping"))
            self.answer(HELLO)
        except RequestFailed as error:
            raise AuthenticationFailed(error.error_id, given=bool(credentials)) from None

    def __enter__(self) -> Self:
        try:
            return self.open()
        except OSError as error:
            raise ConnectionLost(f"no server at {self.address}: {reason(error)}") from None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if isinstance(error, RequestFailed) and error.reason is None:
                error.reason = self.reason(error.error_id)
        finally:
            self.close()

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    # -- one request after the other

    def ask(self, body: bytes) -> bytes:
        """Send a request; returns the text after `ok` in the one line of the reply."""
        with self._telling():
            self.send(b"%b %b\r\n" % (ID, body))
            return self.answer(ID)

    def ask_lines(self, body: bytes) -> tuple[list[bytes], bytes]:
        """Ask for a reply of several lines: those before the last one, and that, `--end`."""
        self.ask_ahead(body)
        return self.take_lines()

    def ask_ahead(self, body: bytes) -> None:
        """Send a request whose reply of several lines is taken by `take_lines` later, before
        anything else is asked."""
        with self._telling():
            self.send(b"%b %b\r\n" % (ID, body))

    def take_lines(self) -> tuple[list[bytes], bytes]:
        lines, ok = list[bytes](), ID + b" ok "
        with self._telling():
            text = self.answer(ID)
            while not requests.is_peek_end(text):
                lines.append(text)
                line = self.line()
                text = line[len(ok) :] if line.startswith(ok) else told(self._parsed(line), ID)
        return lines, text

    def send_many(self, lines: list[bytes]) -> None:
        """Send requests with their own ids, each with a reply of one line, which `refused` takes.
        At most some hundred KiB before that."""
        with self._telling():
            self.send(b"".join([line + b"\r\n" for line in lines]))

    def refused(self, count: int) -> list[tuple[bytes, str]]:
        """Take the replies to so many requests; returns the request ids and error ids of those that
        were refused."""
        with self._telling():
            replies = [self.reply() for _ in range(min(1, count))]  # Before it that to a name.
            lines = (self.line() for _ in range(count - 1))
            replies += [self._parsed(line) for line in lines if not line.endswith(b" ok ")]
        return [(each.request_id, requests.decoded(each.text)) for each in replies if each.is_error]

    def stats(self, *words: str) -> Any:
        return requests.stats_told(self.ask(requests.request("stats", words)))

    def reason(self, error_id: str) -> str | None:
        """The reason of an error, or None if the server does not have it."""
        try:
            return requests.reason_told(self.ask(requests.reason(error_id)))
        except ClientError:
            return None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            told = f"{self.address}: no answer in {self._options.timeout_s:g} s"
            raise ReplyTimeout(told) from None
        except OSError as error:
            raise ConnectionLost(f"{self.address}: {reason(error)}") from None

    # -- lines

    def send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # The server may have said why, before it closed the connection.
            while True:
                self.reply()
        except BaseException:
            self.close()  # Part of it may be sent, and what is sent next would complete it.
            raise

    def answer(self, request_id: bytes, asked: str = "the request") -> bytes:
        """What follows `ok` in the next reply, which is to this request. Raises RequestFailed,
        which names what was asked."""
        return told(self.reply(), request_id, asked)

    def reply(self) -> requests.Reply:
        """The next reply. Raises ConnectionLost for one that concerns the connection."""
        while (reply := self._parsed(self.line())).request_id == NAMING:
            pass
        return reply

    def _parsed(self, line: bytes) -> requests.Reply:
        reply = requests.Reply.parse(line)
        if reply.is_error and reply.request_id == b"-":
            raise ConnectionLost(requests.refusal(reply.text))
        return reply

    def line(self) -> bytes:
        """The next line, without its end. Raises ProtocolViolation for one that is too long."""
        line_bytes_max = self._options.reply_bytes_max
        line = self._replies.readline(line_bytes_max + 1)
        if line.endswith(b"\n"):
            self._hint = ""
            return line[:-1]
        if len(line) > line_bytes_max:
            raise ProtocolViolation("the peer sent a line longer than reply_bytes_max")
        raise ConnectionLost(f"the server closed the connection{self._hint}")

    def fill(self, memory: memoryview) -> None:
        """Fill the memory with what comes next, without a copy in between."""
        if self._replies.readinto(memory) < len(memory):
            raise ConnectionLost("the server closed the connection")


def told(reply: requests.Reply, request_id: bytes, asked: str = "the request") -> bytes:
    """What follows `ok` in a reply to this request. Raises RequestFailed, ProtocolViolation."""
    answered, is_error, text = reply
    if answered != request_id:
        raise ProtocolViolation(f"the peer answered {answered[:80]!r}, which did not ask")
    if is_error:
        error_id = requests.decoded(text)
        raise RequestFailed(f"the server refused {asked}, error {error_id}", error_id)
    return text


def rows(
    stats: Callable[..., Any], what: str, *keys: str, behind: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """All rows of a list of `stats`, or those behind a row, in pages, so that no reply occupies the
    server for long. `stats` is that of a wire or a client; `keys` are as in `requests.page`."""
    while True:
        began_s = time.monotonic()
        page = stats(*requests.page(what, behind, *keys))
        took_s = time.monotonic() - began_s
        if not page:
            return
        yield from page
        # The busier the server is, the longer the pause.
        time.sleep(min(took_s, PAUSE_S_MAX))
        behind = page[-1]


def queue(stats: Callable[..., Any], name: str) -> dict[str, Any]:
    """What `stats queue` tells, with all of its lists, of which a reply has the first names."""
    row: dict[str, Any] = stats("queue", name)
    keys = ["events", "masks"] if len(row["events"] + row["masks"]) < row["bindings"] else []
    if len(row["consumer_ids"]) < row["consumers"]:  # Otherwise they are not sorted.
        keys.append("consumer_ids")
    while keys := [key for key in keys if row[key]]:
        pages = {key: stats("queue", name, f"--after={row[key][-1]}")[key] for key in keys}
        for key, page in pages.items():
            row[key] += page
        keys = [key for key, page in pages.items() if page]
    return row
