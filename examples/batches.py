"""Many messages at once: published in one call, consumed in batches, each batch acked in one go.

One consumer takes all that there is: `prefetch=0` is the fast way where no others share the queue.

Start a broker first (`mqks serve`), then `python examples/batches.py`.
"""

from time import perf_counter

import anyio

import mqks

COUNT = 20_000


async def main() -> None:
    async with mqks.connect() as client:
        async with client.consume("measurements", events=["reading"], prefetch=0) as consumer:
            began = perf_counter()
            confirmed = await client.publish_many(("reading", {"n": n}) for n in range(COUNT))
            total = handled = 0
            async for batch in consumer.batches(count_max=1000):
                total += sum(message.json()["n"] for message in batch)
                handled += len(batch)
                consumer.ack(batch)
                if handled == COUNT:
                    break
            seconds = perf_counter() - began
        print(f"{confirmed} confirmed, {handled} handled, the sum is {total}")
        print(f"{COUNT / seconds:,.0f} messages per second")
        await client.delete_queue("measurements")


anyio.run(main)
