"""`mqks push`: a service that posts the messages of a queue to a web address.

The one rule: a message is acked after an answer 2xx, and nothing else makes it disappear: it is
rejected, with the policy of its queue. No redirect is followed, so that messages go nowhere else.
"""

import base64
import binascii
import hashlib
import hmac
import os
import signal
import ssl
from contextlib import suppress
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
"""Of an answer; the rest is not read."""
RETRY_AFTER_S_MAX: Final = 3600.0
DEAD: Final = frozenset({400, 413, 415, 422})
"""Answers that say the same to the same message."""
SLOW: Final = frozenset({429, 503})
GONE: Final = 410


class Refused(Exception):
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
    from mqks.client.app import App  # here, so that --help does not load it

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
        elif pause_s is not None:
            message.reject(delay_s=pause_s, reason=f"{target.host} answers {status}")
        else:
            raise Refused(f"{target.host} answers {status}")

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


class Target:
    """A web address. Raises BadParameter if it is none."""

    def __init__(self, url: str, secret: bytes, timeout_s: float, content_type: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise typer.BadParameter("URL must be an address as in https://example.org/hook")
        self.host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: Any = ssl.create_default_context() if parts.scheme == "https" else None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._path = quote(path, safe="/?=&%+,;:@!$'()*~-._")
        self._head = {"host": parts.netloc, "content-type": content_type, "connection": "close"}
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

    async def post(self, queue: str, message: "Message") -> tuple[int, float | None]:
        """The status, and for how long to wait if it says so. Raises Refused without an answer."""
        import anyio  # here, so that --help does not load them
        import h11

        headers = self.headers(queue, message, int(time()))
        http, answer, left = h11.Connection(h11.CLIENT), None, ANSWER_BYTES_MAX
        request = h11.Request(method="POST", target=self._path, headers=list(headers.items()))
        lines = http.send(request), http.send(h11.Data(data=message.data))
        http.send(h11.EndOfMessage())
        try:
            with anyio.fail_after(self._timeout_s):
                connection = await anyio.connect_tcp(
                    self.host, self._port, ssl_context=self._tls, tls_standard_compatible=False
                )
                async with connection as stream:
                    await stream.send(b"".join(filter(None, lines)))
                    # Read to its end, lest a reset overtakes it.
                    while not answer or left > 0:
                        event = http.next_event()
                        if event is h11.NEED_DATA:
                            try:
                                http.receive_data(await stream.receive())
                            except anyio.EndOfStream:
                                http.receive_data(b"")
                        elif isinstance(event, h11.Response):
                            answer = event
                        elif isinstance(event, h11.Data):
                            left -= len(event.data)
                        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                            break
        except TimeoutError:
            raise Refused(f"{self.host} does not answer in {self._timeout_s:g} s") from None
        except (h11.ProtocolError, anyio.BrokenResourceError, OSError) as error:
            raise Refused(f"{self.host} does not answer: {error}") from None
        if answer is None:
            raise Refused(f"{self.host} has closed the connection")
        pause_s = None
        if answer.status_code in SLOW:
            with suppress(ValueError):
                told = float(dict(answer.headers).get(b"retry-after", b""))
                pause_s = min(max(told, 0.0), RETRY_AFTER_S_MAX)
        return answer.status_code, pause_s
