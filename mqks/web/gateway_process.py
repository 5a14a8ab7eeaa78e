"""The process of a gateway: the HTTP API or SQS, answered on a socket of the broker.

The one rule: it ends with the broker. Its standard input comes from there: first what to do, then
the users whenever they change; its end is the end of the process.
"""

import asyncio
import json
import resource
import signal
import socket
import sys
from typing import Any, Final

import anyio
from starlette.requests import Request
from starlette.responses import Response

from mqks import log
from mqks.api.app import Api, answer
from mqks.limits import HTTP_CONNECTIONS_MAX, SQS_CONNECTIONS_MAX
from mqks.loops import rarely_collect
from mqks.sqs.app import Sqs
from mqks.users import User, Users
from mqks.web import serving
from mqks.web.openings import Openings

CONNECTIONS_MAX: Final = {"api": HTTP_CONNECTIONS_MAX, "sqs": SQS_CONNECTIONS_MAX}
"""At most two thirds of the descriptors that the process may open."""
TOLD_BYTES_MAX: Final = 1 << 30
"""Of a line of input, which has all users."""


async def _failed(request: Request, failure: Exception) -> Response:
    log.error("http_failed", path=request.url.path, exception=failure)
    return answer(500, {"error": "internal error"})


async def _serve(told: asyncio.StreamReader) -> None:
    what: dict[str, Any] = json.loads(await told.readline())
    log.configure(what["log_format"], what["log_level"], what["broker_name"])
    openings = Openings(socket.socket(fileno=what["openings"]))
    users = Users((), b"")
    door: Api | Sqs
    limits = {key: what[key] for key in ("with_users", "line_bytes_max")}
    if what["kind"] == "api":
        door = Api(openings.open, **limits)
    else:
        door = Sqs(openings.open, lambda: users, **limits)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CONNECTIONS_MAX[what["kind"]]
    if open_files != resource.RLIM_INFINITY:
        most = min(most, open_files * 2 // 3)
    sock = socket.socket(fileno=what["sock"])
    rarely_collect()
    async with anyio.create_task_group() as tasks:
        await tasks.start(door.run)
        tasks.start_soon(serving.answer, sock, door.app(_failed), most)
        async for line in told:
            users = Users((User(**each) for each in json.loads(line)), b"")
        tasks.cancel_scope.cancel()


async def _main() -> None:
    told = asyncio.StreamReader(TOLD_BYTES_MAX)
    protocol = asyncio.StreamReaderProtocol(told)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await _serve(told)


if __name__ == "__main__":
    # They come to all processes of a terminal or a service; the broker says when to end.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    anyio.run(_main, backend_options={"use_uvloop": sys.argv[1] == "uvloop"})
