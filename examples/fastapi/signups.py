"""A web application that publishes in a request and handles the messages in the same process.

Start a broker (`mqks serve`), then `uvicorn --app-dir examples/fastapi signups:web`, and
`curl -X PUT localhost:8000/users/ann`. It needs `pip install fastapi uvicorn`.
"""

import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from urllib.parse import quote

import anyio
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse

import mqks

worker = mqks.App()


@worker.consumer("welcome", concurrency=10)
async def welcome(message: mqks.Message) -> None:
    print("mail to", message.json()["name"], flush=True)


async def work(stop: anyio.Event) -> None:
    try:
        await worker.serve(stop)
    except Exception:
        logging.getLogger("signups").exception("the worker has failed")
        signal.raise_signal(signal.SIGTERM)  # The server ends, and its supervisor starts it again.


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    stop = anyio.Event()
    async with mqks.connect() as client, anyio.create_task_group() as tasks:
        # Before the first request, so that `mandatory` finds the queue.
        await client.subscribe("welcome", ["user.created"])
        web.state.client = client
        tasks.start_soon(work, stop)
        yield
        stop.set()  # The worker finishes what it has begun.


web = FastAPI(lifespan=lifespan)


def client_of(request: Request) -> mqks.AsyncClient:
    client: mqks.AsyncClient = request.app.state.client
    return client


@web.put("/users/{name}", status_code=202)
async def sign_up(
    name: str, client: Annotated[mqks.AsyncClient, Depends(client_of)]
) -> dict[str, str]:
    """The reply comes when the message is on disk. The same name again is the same message."""
    user = {"name": name}
    id = f"user-{quote(name)}"
    await client.publish("user.created", user, id=id, confirm=True, mandatory=True, once=True)
    return user


@web.exception_handler(mqks.ClientError)
async def unavailable(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=503)
