"""The HTTP API and SQS, each answered by a process of its own: `mqks.web.gateway_process`.

The one rule: thousands of HTTP requests may begin or end in one moment, and the broker's event loop
sees none of them. A gateway is a client: it opens a connection to the broker for each of its users.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

import anyio
from anyio.abc import TaskStatus

from mqks import log
from mqks.loops import uses_uvloop
from mqks.settings import Settings
from mqks.users import User
from mqks.web import http_port
from mqks.web.openings import Opening, receive

AGAIN_S: Final = 1.0
"""A gateway that has ended is started again after this time."""
STOP_S: Final = 3.0
"""How long a gateway may take to end, and its port is taken after the broker was killed."""


class Gateway:
    """`kind` is `api` or `sqs`, `place` its host and port; `let_in` takes what it opens; `signing`
    returns the users of SQS."""

    def __init__(
        self,
        kind: str,
        place: tuple[str, int],
        settings: Settings,
        let_in: Callable[[socket.socket, Opening], Awaitable[object]],
        signing: Callable[[], Sequence[User]],
    ) -> None:
        self._kind = kind
        self._place = place
        self._settings = settings
        self._let_in = let_in
        self._signing = signing
        self._process: asyncio.subprocess.Process | None = None

    async def serve(self, *, task_status: TaskStatus[str]) -> None:
        """Answer until cancelled. The task status is started with the address."""
        scheme = f"{self._kind}:http"
        await http_port.serve(
            *self._place, self._answer, scheme=scheme, taken_s=STOP_S, task_status=task_status
        )

    async def _answer(self, sock: socket.socket) -> None:
        while True:
            try:
                status = await self._run(sock)
                log.warning("gateway_failed", gateway=self._kind, status=status)
            except OSError as failure:
                log.warning("gateway_failed", gateway=self._kind, error=failure)
            await anyio.sleep(AGAIN_S)

    def tell_users(self) -> None:
        """They have changed. Only SQS checks who has signed: others get no secrets."""
        if self._process is not None and self._kind == "sqs":
            self._tell([asdict(user) for user in self._signing()])

    def _tell(self, what: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def _run(self, sock: socket.socket) -> int:
        """Start the process; return its exit status."""
        settings = self._settings
        # In packets: a request is never in two parts, and its descriptor comes with it.
        openings, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with openings:
            with other:
                self._process = process = await asyncio.create_subprocess_exec(
                    # -P: no file of the working directory is taken for a module.
                    *(sys.executable, "-P", "-m", "mqks.web.gateway_process"),
                    "uvloop" if uses_uvloop(settings) else "asyncio",
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(sock.fileno(), other.fileno()),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
                told: dict[str, Any] = {
                    "kind": self._kind,
                    "sock": sock.fileno(),
                    "openings": other.fileno(),
                    "with_users": settings.users is not None,
                    "line_bytes_max": settings.line_bytes_max,
                    "log_format": settings.log_format,
                    "broker_name": settings.broker_name,
                    "log_level": settings.log_level,
                }
                self._tell(told)
            self.tell_users()
            try:
                await receive(openings, self._let_in)
                return await process.wait()
            finally:
                self._process = None
                with anyio.CancelScope(shield=True):
                    await _end(process)


def gateways(
    settings: Settings,
    let_in: Callable[[socket.socket, Opening], Awaitable[object]],
    signing: Callable[[], Sequence[User]],
) -> list[Gateway]:
    """Those that the settings ask for."""
    ports = (
        ("api", settings.api_host, settings.api_port),
        ("sqs", settings.sqs_host, settings.sqs_port),
    )
    return [
        Gateway(kind, (host, port), settings, let_in, signing)
        for kind, host, port in ports
        if port is not None
    ]


async def _end(process: asyncio.subprocess.Process) -> None:
    """The end of its input tells it to end."""
    assert process.stdin is not None
    process.stdin.close()
    with anyio.move_on_after(STOP_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
