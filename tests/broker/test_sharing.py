"""Work is shared: who comes later gets as much as who was there first.

The one rule: the first worker is at a job until the others have come; from then on each job takes
as long for everybody, so that a busy machine slows them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from mqks import App, Message, blocking, connect
from mqks.testing import Broker, BrokerProcess
from tests.kit.skins import SKINS
from tests.kit.waiting import WAIT_S, until

pytestmark = pytest.mark.anyio

JOBS = 90
JOB_S = 0.005
ALONE = 5
"""Jobs that the first worker has done before the others come."""


class Work:
    """What is done by whom."""

    def __init__(self) -> None:
        self.shares = Counter[str]()
        self.is_alone, self.others_are_there, self.is_done = (anyio.Event() for _ in range(3))

    async def do(self, name: str) -> None:
        if self.shares.total() == ALONE:
            self.is_alone.set()
            await self.others_are_there.wait()
        await anyio.sleep(JOB_S)
        self.shares[name] += 1
        if self.shares.total() == JOBS:
            self.is_done.set()

    async def share(self, url: str, worker: Any) -> None:
        """Three workers of one queue, two of which come later."""
        with anyio.fail_after(WAIT_S):
            async with connect(url) as client, anyio.create_task_group() as tasks:
                await client.subscribe("q", ["e"])
                await client.publish_many(("e", n) for n in range(JOBS))
                tasks.start_soon(worker, "A")
                await self.is_alone.wait()
                tasks.start_soon(worker, "B")
                tasks.start_soon(worker, "C")
                while await client.evaluate("len(state.queues_by_consumer_ids)") != "3":
                    await anyio.sleep(0.01)
                self.others_are_there.set()
        assert_fair(self.shares, workers=3)


def assert_fair(shares: Counter[str], workers: int) -> None:
    assert len(shares) == workers
    assert max(shares.values()) <= 2 * min(shares.values()), shares


@pytest.mark.parametrize("skin", SKINS)
async def test_consumers_share(mqks_broker: Broker, skin: str) -> None:
    work = Work()

    async def worker(name: str) -> None:
        async with (
            SKINS[skin](mqks_broker.url) as client,
            client.consume("q") as consumer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(stop, consumer)
            async for message in consumer:
                await work.do(name)
                message.ack()

    async def stop(consumer: Any) -> None:
        await work.is_done.wait()
        consumer.stop()

    await work.share(mqks_broker.url, worker)


async def test_services_share(mqks_broker: Broker) -> None:
    work = Work()

    async def worker(name: str) -> None:
        app = App(mqks_broker.url)

        @app.consumer("q", concurrency=1)
        async def handle(message: Message) -> None:
            await work.do(name)

        await app.serve(work.is_done)

    await work.share(mqks_broker.url, worker)


async def test_a_service_holds_what_it_works_on(mqks_broker: Broker) -> None:
    app, stop, started = App(mqks_broker.url), anyio.Event(), Counter[str]()

    @app.consumer("three", concurrency=3)
    @app.consumer("seven", concurrency=3, prefetch=7)
    @app.consumer("all", concurrency=3, prefetch=0)
    async def handle(message: Message) -> None:
        started[message.event] += 1
        await stop.wait()

    held = "{q: sum(len(state.messages_by_consumer_ids[c]) for c, of in"
    held += " state.queues_by_consumer_ids.items() if of == q) for q in state.queues}"
    async with connect(mqks_broker.url) as client:
        for queue in ("three", "seven", "all"):
            await client.subscribe(queue, [queue])
            await client.publish_many((queue, n) for n in range(20))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.serve, stop)
            with anyio.fail_after(WAIT_S):
                while started.total() < 9:
                    await anyio.sleep(0.01)
            assert await client.evaluate(held) == '{"three": 3, "seven": 7, "all": 20}'
            stop.set()


SHELL = """
{python} -m mqks consume q | while read -r job; do
    echo "$job"
    until [ -e others ]; do sleep 0.01; done
    sleep 0.01
done > {name}
"""


@contextmanager
def shell(url: str, directory: Path, name: str) -> Iterator[None]:
    process = subprocess.Popen(
        ["/bin/sh", "-c", SHELL.format(python=sys.executable, name=name)],
        env={**os.environ, "MQKS_URL": url},
        cwd=directory,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@pytest.mark.slow
def test_shells_share(mqks_broker_process: BrokerProcess, tmp_path: Path) -> None:
    url, jobs = mqks_broker_process.url, 40

    def done(name: str) -> list[str]:
        path = tmp_path / name
        return path.read_text().splitlines() if path.exists() else []

    with blocking.connect(url) as client:
        client.subscribe("q", ["e"])
        client.publish_many(("e", n) for n in range(jobs))
        with shell(url, tmp_path, "A"):
            until(lambda: done("A"))
            with shell(url, tmp_path, "B"):
                until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "2")
                (tmp_path / "others").touch()
                until(lambda: len(done("A") + done("B")) >= jobs)
    assert sorted(map(int, done("A") + done("B"))) == [*range(jobs)]
    # How fast each shell is depends on the machine.
    assert min(len(done("A")), len(done("B"))) >= jobs // 8
