"""Services of the simulated world: functions that fail at times, one of them in threads, and
`mqks push` with an endpoint in memory.

The one rule: a message is handled when its function has returned, or has acked it; one that is
pushed, when its post was answered with 200.
"""

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any, Final, cast

from tests.simulation.loop import GRAVES
from tests.simulation.threads import Thread, finish

if TYPE_CHECKING:
    from tests.simulation.world import World

CONCURRENCY = 3
FAILS, ACKS = 0.1, 0.1
"""So often does a function raise, and settle a message by itself."""
HTTP_PORT = 8080
OK: Final = "200 OK"
ANSWERS: Final = *[OK] * 8, "", "500 Failed", "503 Busy\r\nRetry-After: 9"
"""Of the endpoint; an empty one closes the connection."""


class Failed(Exception):
    pass


async def serve(world: "World") -> None:
    import anyio

    import mqks

    app = mqks.App(world.url, mqks.Options(connect_timeout_s=1e6))
    rng = world.rng

    def begin(message: Any, where: str) -> None:
        world.note("got", where, message.id, message.retry)
        if rng.random() < FAILS:
            raise Failed(message.id)

    @app.consumer("s", world.names, concurrency=CONCURRENCY)
    async def in_loop(message: Any) -> None:
        begin(message, "service")
        await asyncio.sleep(rng.expovariate(1 / 0.5))
        world.acked["s"][message.id] += 1

    @app.consumer("s", world.names, concurrency=CONCURRENCY)
    def in_thread(message: Any) -> None:
        begin(message, "thread of the service")
        time.sleep(rng.expovariate(1 / 0.5))
        if rng.random() < ACKS:
            message.ack()
        world.acked["s"][message.id] += 1

    await app.serve(anyio.Event())


async def push(world: "World") -> None:
    import anyio

    import mqks
    from mqks.client.app import App
    from mqks.commands.push import push

    def run(app: App) -> None:
        finish(app.serve(anyio.Event()))  # Without signals.

    def play() -> None:
        cast(Any, App).run = run
        while True:
            try:
                with mqks.blocking.connect(world.url) as client, client.consume("p", ["pushed"]):
                    pass
                push("p", f"http://127.0.0.1:{HTTP_PORT}/hook", world.url)
            except mqks.ConnectionLost as error:
                world.note("push ends", error)
                time.sleep(1)

    Thread(target=play).start()


class Endpoint(asyncio.Protocol):
    """An HTTP server that answers one request of each connection, not always with 200."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        if end and length and len(body) == int(length[1]):
            rng = self._world.rng
            name = body.decode().partition(" ")[0]
            self._world.note("posted", name)
            asyncio.get_running_loop().call_later(
                rng.expovariate(1 / 0.5), self._answer, rng.choice(ANSWERS), name
            )

    def _answer(self, answer: str, name: str) -> None:
        if answer and not self._transport.is_closing():
            self._transport.write(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode())
            if answer == OK:
                self._world.acked["p"][name] += 1
        self._transport.close()


def listen(world: "World") -> None:
    listener = world.network.create_server(("127.0.0.1", HTTP_PORT))
    loop: Any = asyncio.get_running_loop()

    def accept() -> None:
        sock, _ = listener.accept()
        GRAVES.append(loop.create_task(loop.connect_accepted_socket(lambda: Endpoint(world), sock)))

    loop.add_reader(listener, accept)
