"""Publish and consume with the async client.

Start a broker first (`mqks serve`), then `python examples/hello.py`.
"""

import anyio

import mqks


async def main() -> None:
    async with mqks.connect() as client:
        events = ["example.hello"]
        async with client.consume("hello-example", events) as consumer:
            await client.publish("example.hello", "world", confirm=True)
            await client.publish("example.hello", {"to": ["everybody", "else"]})
            for _ in range(2):
                message = await consumer.receive(timeout_s=10)
                async with message.process():
                    print(f"{message.event}: {message.text}")
        await client.delete_queue("hello-example")


anyio.run(main)
