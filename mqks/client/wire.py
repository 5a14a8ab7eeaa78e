"""A blocking connection: requests out, replies in, in their order.

The one rule: after an error, a wire is not used again.
"""

from collections.abc import Sequence
from dataclasses import replace
from io import BufferedReader
from typing import cast

from mqks.client import failures, requests
from mqks.client.blocking_connection import open_socket
from mqks.client.errors import (
    AuthenticationFailed,
    ConnectionLost,
    ProtocolViolation,
    RequestFailed,
)
from mqks.client.options import Options
from mqks.client.urls import Address, told
from mqks.errors import reason

BUFFER_BYTES = 64 * 1024
NAMING = b"name"
"""The id of the request that gives the client a name. An older server refuses that."""


class Wire:
    """Connected when made. Every call may raise OSError; ConnectionLost is one, TimeoutError after
    `Options.timeout_s` another."""

    def __init__(self, address: Address, options: Options) -> None:
        self._name = requests.set_name(options.client_name) if options.client_name else b""
        self._socket = open_socket(address, options)
        self._hint = "" if address.tls else f"; {failures.TLS_HINT}"
        """Until the first answer."""
        self.settimeout = self._socket.settimeout
        self.settimeout(options.timeout_s)
        # Small reads use its buffer; large ones bypass it.
        self._replies = cast(BufferedReader, self._socket.makefile("rb", BUFFER_BYTES))
        self._line_bytes_max = options.reply_bytes_max

    def greet(self, credentials: Sequence[str], asked: str) -> None:
        """Send the first request: the credentials, or a ping. Raises AuthenticationFailed when the
        server refuses it; whatever goes wrong closes the wire."""
        try:
            body = requests.auth(credentials) if credentials else b"ping"
            self.send(requests.line(b"hello", body))
            self.answer(b"hello", asked)
        except RequestFailed as error:
            self.close()
            raise AuthenticationFailed(error.error_id, given=bool(credentials)) from None
        except BaseException:
            self.close()
            raise

    def introduce(self) -> None:
        """Give the client its name, if it has one."""
        if self._name:
            self.send(requests.line(NAMING, self._name))

    def send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # The server may have said why, before it closed the connection.
            while True:
                self.reply()

    def answer(self, request_id: bytes, asked: str = "the request") -> bytes:
        """What follows `ok` in the next reply, which is to this request. Raises RequestFailed,
        which names what was asked."""
        answered, is_error, text = self.reply()
        if answered != request_id:
            raise ProtocolViolation(f"the peer answered {answered[:80]!r}, which did not ask")
        if is_error:
            error_id = requests.decoded(text)
            raise RequestFailed(f"the server refused {asked}, error {error_id}", error_id)
        return text

    def reply(self) -> requests.Reply:
        """The next reply. Raises ConnectionLost for one that concerns the connection."""
        while (reply := requests.Reply.parse(self.line())).request_id == NAMING:
            pass
        if reply.is_error and reply.request_id == b"-":
            raise ConnectionLost(requests.refusal(reply.text))
        return reply

    def line(self) -> bytes:
        """The next line, without its end. Raises ProtocolViolation for one that is too long."""
        line = self._replies.readline(self._line_bytes_max + 1)
        if line.endswith(b"\n"):
            self._hint = ""
            return line[:-1]
        if len(line) > self._line_bytes_max:
            raise ProtocolViolation("the peer sent a line longer than reply_bytes_max")
        raise ConnectionLost(f"the server closed the connection{self._hint}")

    def fill(self, memory: memoryview) -> None:
        """Fill the memory with what comes next, without a copy in between."""
        if self._replies.readinto(memory) < len(memory):
            raise ConnectionLost("the server closed the connection")

    def close(self) -> None:
        self._replies.close()
        self._socket.close()


def answering(address: Address, options: Options, asked: str) -> Wire:
    """A wire to the first of several servers that answers a greeting, each within its share of
    `Options.connect_timeout_s`: one that is suspended accepts connections, too. Raises
    AuthenticationFailed, and ConnectionLost with what each has said."""
    share_s = options.connect_timeout_s / len(address.each)
    failed: list[tuple[Address, str]] = []
    for each in address.each:
        try:
            wire = Wire(each, replace(options, connect_timeout_s=share_s, timeout_s=share_s))
            wire.greet(each.credentials, asked)
        except TimeoutError:
            failed.append((each, f"no answer in {share_s:g} s"))
        except OSError as error:
            failed.append((each, reason(error)))
        else:
            wire.settimeout(options.timeout_s)
            return wire
    raise ConnectionLost(told(failed))
