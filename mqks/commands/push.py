"""`mqks push`: a service that posts the messages of a queue to a web address.

The one rule: a message is acked after an answer 2xx, and nothing else makes it disappear: it is
rejected, with the policy of its queue. No redirect is followed, so that messages go nowhere else.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import signal
import socket
import ssl
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import typer

from mqks.commands.complete import Queue
from mqks.commands.connection import connected, limited
from mqks.commands.existing import check_queue
from mqks.commands.options import Url
from mqks.errors import AddressUnavailable, ConfigurationError

if TYPE_CHECKING:
    from mqks.client.messages import Message

ANSWER_BYTES_MAX: Final = 64 * 1024
"""Of an answer, with what precedes it; the rest is not read."""
READ_BYTES: Final = 4096
"""At a time, as a chunk of one byte takes 10 µs to parse."""
BODY_S: Final = 1.0
"""How long the body of an answer is read, lest its sender notices a reset."""
RETRY_AFTER_S_MAX: Final = 3600.0
HOST: Final = re.compile(r"[a-z0-9_.-]+")
COMPLETE_2XX: Final = re.compile(rb"HTTP/1\.[01] +(2\d\d)\b[^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n")
"""A head of which only the status is understood."""
DEAD: Final = frozenset({400, 413, 415, 422})
"""Answers that say the same to the same message."""
SLOW: Final = frozenset({429, 503})
GONE: Final = 410


class PushRefused(Exception):
    """No answer, or one other than 2xx."""


def push(
    queue: Queue,
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Where to: http:// or https://, with its path.")
    ],
    url: Url = None,
    secret_file: Annotated[
        str | None, "PATH", r"Sign with the secret in this file. \[default: unsigned]"
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="The most posts at a time.")
    ] = 8,
    answer_timeout: Annotated[float, "SECONDS", "How long one post may take, to its answer."] = 30,
    content_type: Annotated[
        str, "TYPE", "What the header Content-Type says."
    ] = "application/octet-stream",
) -> None:
    """Post the messages of a queue to a web address, until Ctrl-C.

    An answer 2xx acks the message. Any other rejects it with the policy of its queue, by default 20
    tries with growing pauses; 400, 413, 415 and 422 make it dead at once, and 410 ends the command.
    """
    if not answer_timeout > 0:
        raise typer.BadParameter("--answer-timeout is a number of seconds above 0")
    target = Target(address, _secret(secret_file), answer_timeout, content_type)
    with connected(url, limited()) as client:
        check_queue(client, queue)
    from mqks.client.app import BACKOFF_S, RETRIES, App  # here, so that --help does not load it

    app, gone = App(url), False

    @app.consumer(queue, concurrency=concurrency)
    async def post(message: "Message") -> None:
        nonlocal gone
        status, pause_s = await target.post(queue, message)
        if 200 <= status < 300:
            return
        if status == GONE:
            gone = True
            message.release()
            signal.raise_signal(signal.SIGTERM)
        elif status in DEAD:
            message.reject(dead=True, reason=f"{target.host} answers {status}")
        # What is told to wait for less than a backoff waits for the backoff of its queue.
        elif pause_s > min(BACKOFF_S[0] * 2.0 ** min(message.retry, 64), BACKOFF_S[1]):
            reason = f"{target.host} answers {status}"
            message.reject(delay_s=pause_s, retries=RETRIES, reason=reason)
        else:
            raise PushRefused(f"{target.host} answers {status}")

    app.run()
    if gone:
        raise AddressUnavailable(f"{target.host} answers 410: it wants no more messages")


def _secret(path: str | None) -> bytes:
    """Raises ConfigurationError, OSError."""
    if path is None:
        return b""
    text = Path(path).read_bytes().strip()
    try:
        secret = base64.b64decode(text[6:], validate=True) if text[:6] == b"whsec_" else text
    except binascii.Error:
        secret = b""
    if not secret:
        raise ConfigurationError(f"{path} has no secret, such as whsec_ and base64")
    return secret


def _host(name: str) -> str:
    """As it is looked up. Raises ValueError and OSError if no host has this name."""
    if ":" in name:
        return str(ip_address(name))
    if not name.isascii():
        import idna  # With which anyio looks names up.

        name = idna.encode(name, uts46=True).decode()
    name.encode("idna")  # Checks the lengths of its labels.
    if not HOST.fullmatch(name):
        raise ValueError(name)
    if name.rpartition(".")[2].isdecimal():
        socket.inet_aton(name)
    return name


class Target:
    """A web address. Raises BadParameter if it is none."""

    def __init__(self, url: str, secret: bytes, timeout_s: float, content_type: str) -> None:
        import h11  # here, so that --help does not load it

        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or "@" in parts.netloc or parts.port == 0:
                raise ValueError
            self.host = _host(parts.hostname or "")
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self._path = quote(path, safe="/?=&%+,;:@!$'()*~-._")
        except (ValueError, OSError):
            text = "URL must be an address as in https://example.org/hook"
            raise typer.BadParameter(text) from None
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: Any = ssl.create_default_context() if parts.scheme == "https" else None
        host = f"[{self.host}]" if ":" in self.host else self.host
        host += f":{parts.port}" if parts.port else ""
        self._head = {"host": host, "content-type": content_type, "connection": "close"}
        try:
            h11.Request(method="POST", target=self._path, headers=[*self._head.items()])
        except (h11.LocalProtocolError, UnicodeError):
            raise typer.BadParameter("--content-type must be a type as in text/plain") from None
        self._secret = secret
        self._timeout_s = timeout_s

    def headers(self, queue: str, message: "Message", now_s: int) -> dict[str, str]:
        """In the form of Standard Webhooks."""
        id_ = quote(os.fsencode(message.id), safe="")
        told = {
            "webhook-id": id_,
            "webhook-timestamp": str(now_s),
            "mqks-queue": quote(os.fsencode(queue)),
            "mqks-event": quote(os.fsencode(message.event)),
            "mqks-retry": str(message.retry),
            "content-length": str(len(message.data)),
        }
        if message.meta:
            told["mqks-meta"] = urlencode(message.meta, errors="surrogateescape")
        if self._secret:
            signed = f"{id_}.{now_s}.".encode() + message.data
            digest = hmac.new(self._secret, signed, hashlib.sha256).digest()
            told["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
        return self._head | told

    async def post(self, queue: str, message: "Message") -> tuple[int, float]:
        """The status, and for how long to wait if it says so. Raises PushRefused without one."""
        import anyio  # here, so that --help does not load them
        import h11

        headers = self.headers(queue, message, int(time()))
        http, answer, read = h11.Connection(h11.CLIENT), None, b""
        request = h11.Request(method="POST", target=self._path, headers=list(headers.items()))
        lines = http.send(request), http.send(h11.Data(data=message.data))
        http.send(h11.EndOfMessage())
        why = "sends much, and does not answer"
        try:
            with anyio.fail_after(self._timeout_s) as scope:
                connection = await anyio.connect_tcp(
                    self.host, self._port, ssl_context=self._tls, tls_standard_compatible=False
                )
                async with connection as stream:
                    with suppress(anyio.BrokenResourceError):  # An answer may have come before.
                        await stream.send(b"".join(filter(None, lines)))
                    while True:
                        event = http.next_event()
                        if isinstance(event, h11.Response):
                            answer = event
                            ends_s = anyio.current_time() + BODY_S
                            scope.deadline = min(scope.deadline, ends_s)
                        elif event is h11.NEED_DATA:
                            if len(read) >= ANSWER_BYTES_MAX:
                                break
                            got = await stream.receive(READ_BYTES)
                            http.receive_data(got)
                            read += got
                        elif not isinstance(event, h11.Data | h11.InformationalResponse):
                            break
        except anyio.EndOfStream:
            why = "has closed the connection"
        except TimeoutError:
            why = f"does not answer in {self._timeout_s:g} s"
        except (h11.ProtocolError, anyio.BrokenResourceError, OSError) as error:
            why = f"does not answer: {error}"
        if answer is None:
            # With a wrong length or encoding of its body, say.
            if complete := COMPLETE_2XX.match(read):
                return int(complete[1]), 0.0
            raise PushRefused(f"{self.host} {why}")
        pause_s = 0.0
        if answer.status_code in SLOW:
            with suppress(ValueError):
                told_s = float(dict(answer.headers).get(b"retry-after", b""))
                pause_s = min(told_s, RETRY_AFTER_S_MAX) if told_s > 0 else 0.0
        return answer.status_code, pause_s
