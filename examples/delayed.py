"""Delayed jobs: published now, delivered later, cancelled or brought forward meanwhile.

Start a broker first (`mqks serve`), then `python examples/delayed.py`.
"""

from datetime import UTC, datetime, timedelta

import anyio

import mqks


async def main() -> None:
    async with mqks.connect() as client:
        await client.subscribe("reminders", ["remind"])
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        await client.publish("remind", "tomorrow's", confirm=True, id="r1", at=tomorrow)
        await client.publish("remind", "the week's", confirm=True, id="r2", delay_s=7 * 86400)
        await client.cancel("reminders", "r2")
        for scheduled in await client.peek("reminders", scheduled=True):
            print(f"scheduled: {scheduled.text}")

        await client.publish("remind", "the next", confirm=True, id="r3", delay_s=0.1)
        async with client.consume("reminders") as consumer:
            for early in (None, "r1"):
                if early:
                    await client.promote("reminders", early)
                message = await consumer.receive(timeout_s=10)
                async with message.process():
                    print(f"due: {message.text}")
        await client.delete_queue("reminders")


anyio.run(main)
