"""Players that block: several threads share a client, or a consumer.

The one rule: their processes are stopped and cut off as those of the others, and judged as they.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import PROCESS, Violation
from tests.simulation.threads import Thread

if TYPE_CHECKING:
    from tests.simulation.world import World

THREADS = 2
BATCH = 5
ROUND = 5
"""Messages until the client is closed, and another one opened."""
CALM = 40
"""Messages of each thread when nothing fails."""
STEP_S, TOGETHER_S = 0.2, 0.004
"""Each publishes one in each step, the threads about at once."""
PROMPT_S = 0.05
"""Then no answer takes so long, and no message: who was not woken waits for the next one."""


def together(*calls: Callable[[], object]) -> None:
    threads = [Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def publish(world: "World", number: int) -> None:
    import mqks

    def some(client: Any, first: int, own: int) -> None:
        for each in range(first + own, min(first + ROUND, world.messages), THREADS):
            terms: dict[str, Any] = {"once": True, **world.terms()}
            names = [f"{number}-{each}"]
            if world.rng.random() < 0.2:
                names = [f"{number}-{each}-{part}" for part in range(1, BATCH + 1)]
            while True:
                try:
                    if len(names) > 1:
                        many = [("e", world.text(name)) for name in names]
                        how = {"id_prefix": f"{number}-{each}", "timeout_s": 1e6}
                        client.publish_many(many, **how, **terms)
                    else:
                        how = {"id": names[0], "confirm": True, "timeout_s": 1e6}
                        client.publish("e", world.text(names[0]), **how, **terms)
                    break
                except mqks.RequestFailed as error:  # There was no room for it.
                    world.note("refused", error)
                    time.sleep(world.rng.expovariate(1 / 2))
            world.has_confirmed("e", *names, **terms)
            time.sleep(world.rng.expovariate(THREADS / 20))

    process, options = PROCESS.get(), mqks.Options(connect_timeout_s=1e6)
    for first in range(0, world.messages, ROUND):
        process.leaves = False
        with mqks.blocking.connect(world.url, options) as client:
            together(*[partial(some, client, first, own) for own in range(THREADS)])
            process.leaves = True


def consume(world: "World", number: int) -> None:
    import mqks

    def each(messages: Any) -> None:
        for message in messages:
            handle([message])

    def batches(messages: Any) -> None:
        while True:
            try:
                for batch in messages.batches(BATCH, timeout_s=world.rng.expovariate(1 / 20)):
                    handle(batch)
            except TimeoutError:
                world.note("nothing for", number)

    def handle(batch: list[Any]) -> None:
        for message in batch:
            world.note("got", number, message.id, message.retry)
        if world.rng.random() < 0.1:
            for message in batch:
                message.reject()
            return
        time.sleep(world.rng.expovariate(1 / 0.5))
        messages.ack(batch)
        world.acked["q"].update(message.id for message in batch)

    with (
        mqks.blocking.connect(world.url, mqks.Options(connect_timeout_s=1e6)) as client,
        client.consume("q", world.names, ack_timeout_s=world.ack_timeout_s) as messages,
    ):
        kind = (each, batches)[number % 2]
        together(*[partial(kind, messages)] * THREADS)


def calm(world: "World") -> None:
    """Publish and consume while nothing fails. One thread consumes: another would wake for it."""
    import mqks

    began_s, acked = dict[str, float](), list[str]()

    def prompt(name: str, what: str) -> None:
        took_s = time.monotonic() - began_s[name]
        world.note(what, name)
        if took_s > PROMPT_S:
            raise Violation(f"nothing fails, and {name} was {what} after {took_s:.3f} s")

    def publish(own: int) -> None:
        for each in range(CALM):
            due_s = start_s + each * STEP_S + world.rng.uniform(0, TOGETHER_S)
            time.sleep(max(0.0, due_s - time.monotonic()))
            began_s[name := f"{own}-{each}"] = time.monotonic()
            client.publish("calm", name, id=name, confirm=True)
            prompt(name, "confirmed")

    def consume() -> None:
        for message in messages:
            prompt(message.text, "delivered")
            if message.retry:
                raise Violation(f"nothing fails, and {message.text} is delivered again")
            message.ack()
            acked.append(message.text)
            if len(acked) == THREADS * CALM:
                messages.stop()

    with mqks.blocking.connect(world.url) as client, client.consume("calm", ["calm"]) as messages:
        start_s = time.monotonic()
        together(*[partial(publish, own) for own in range(THREADS)], consume)
        time.sleep(PROMPT_S)
        if left := client.stats("queue", "calm")["unacked"]:
            raise Violation(f"nothing fails, and {left} acks are not sent")
