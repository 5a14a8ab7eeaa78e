"""Request and reply: the caller gets the value that the function of a service returns.

Start a broker first (`mqks serve`), then `python examples/request_reply.py`.
"""

import logging

import anyio

import mqks

app = mqks.App()


@app.consumer("calculator", events=["divide"], concurrency=10, delete_when_unused=60)
async def divide(message: mqks.Message) -> float:
    a, b = message.json()
    return float(a / b)


async def main() -> None:
    logging.getLogger("mqks.app").setLevel(logging.CRITICAL)  # The caller gets the errors.
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks, mqks.connect() as client:
        await client.subscribe("calculator", ["divide"])  # The service may start later.
        tasks.start_soon(app.serve, stop)

        reply = await client.call("divide", [1, 4], timeout_s=10)
        print(f"1 / 4 = {reply.json()}")
        try:
            await client.call("divide", [1, 0], timeout_s=10)
        except mqks.CallFailed as error:
            print(f"1 / 0: {error}")
        try:
            await client.call("multiply", [1, 4])
        except mqks.RequestFailed:
            print("nobody multiplies")
        stop.set()


anyio.run(main)
