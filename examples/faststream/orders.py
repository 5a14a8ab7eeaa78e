"""Orders on FastStream: a handler that is tried again, one that answers, and dead letters.

Start a broker (`mqks serve`), in this directory `python orders.py`, and in another terminal
`python orders.py send`. It needs `mqks[faststream]`. What failed for good is in `orders.dead`:
`mqks redrive orders.dead` sends it back.
"""

import asyncio
import random
import sys

from faststream import FastStream
from faststream.exceptions import RejectMessage
from pydantic import BaseModel

from mqks.faststream import MqksBroker, MqksResponse

broker = MqksBroker()  # Its URL is in MQKS_URL, or it is on this machine.
app = FastStream(broker)


class Order(BaseModel):
    no: int
    customer: str


# At most ten at a time. The queue keeps the dead letters, and says how long to wait for a retry.
@broker.subscriber(
    "orders",
    ["order.new"],
    max_workers=10,
    policy={"retries": 10, "backoff": (0.05, 1), "dead_letter_queue": "orders.dead"},
)
@broker.publisher("order.paid")
async def charge(order: Order) -> MqksResponse:
    if order.customer == "nobody":
        raise RejectMessage(reason=f"order {order.no} has no customer")
    if random.random() < 0.5:
        raise ConnectionError("the bank is busy")
    return MqksResponse(order, priority=5 if order.customer == "Ann" else 0)


@broker.subscriber("invoices", ["order.paid"])
async def invoice(order: Order) -> None:
    print(f"order {order.no} is paid", flush=True)


@broker.subscriber("prices", ["price.get"])
async def price(name: str) -> float:
    return len(name) / 2


async def send() -> None:
    async with broker:
        reply = await broker.request("tea", "price.get", timeout=60)
        print(f"tea is {await reply.decode()}")
        for no, customer in enumerate(["Ann", "Bob", "nobody"]):
            await broker.publish(Order(no=no, customer=customer), "order.new")
        await broker.publish(Order(no=3, customer="Cid"), "order.new", delay_s=1)
        print("sent")


if __name__ == "__main__":
    asyncio.run(send() if sys.argv[1:] == ["send"] else app.run())
