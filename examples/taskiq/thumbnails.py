"""Thumbnails on taskiq: tasks with priorities, retries, results and a schedule of the server.

Start a broker (`mqks serve`), in this directory `taskiq worker thumbnails:broker`, and then
`python thumbnails.py a.png b.png`. It needs `mqks[taskiq]`.
"""

import asyncio
import sys

from taskiq import SmartRetryMiddleware

from mqks.taskiq import MqksBroker, MqksResultBackend, MqksScheduleSource

broker = MqksBroker(
    queue_name="thumbnails",
    # A picture that kills its worker is tried three times, and then kept for people to look at.
    policy={"losses": 3, "dead_letter_queue": "thumbnails.dead"},
)
broker.with_result_backend(MqksResultBackend(expire_s=600))
broker.add_middlewares(SmartRetryMiddleware(default_retry_count=5, default_delay=2))
source = MqksScheduleSource(broker)


@broker.task(retry_on_error=True)
async def thumbnail(name: str) -> str:
    await asyncio.sleep(0.1)
    return f"small-{name}"


@broker.task(priority=-10)
async def sweep() -> None:
    print("old thumbnails are gone", flush=True)


async def main(names: list[str]) -> None:
    await broker.startup()
    try:
        await source.startup()
        # The same at each start; the server runs it, also while this program does not.
        await sweep.kicker().with_schedule_id("sweep").schedule_by_interval(source, 60)
        tasks = await asyncio.gather(*map(thumbnail.kiq, names))
        for task in tasks:
            print((await task.wait_result(timeout=60)).return_value)
    finally:
        await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
