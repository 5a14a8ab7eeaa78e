"""A client that was made before a fork: the child has a connection and ids of its own, and the
parent keeps its own. The programs are real ones, with real forks."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from mqks import PeekedMessage, blocking
from mqks.testing import Broker
from tests.client.programs import ended
from tests.kit.proxy import Proxy

BEGIN = """
import asyncio, multiprocessing, os, sys, threading
import mqks

def wait_for(children):
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""
BY_FORK = """
def work(who, client):
    for n in range(20):
        client.publish("e", f"{who} {n}", confirm=True)

with mqks.blocking.connect() as client:
    client.publish("e", "first", confirm=True)
    client.publish("e", "not sent yet")
    children = []
    for who in range(4):
        if (child := os.fork()) == 0:
            work(who, client)
            sys.exit()  # Through the parent's block.
        children.append(child)
    work("parent", client)
    wait_for(children)
    client.publish("e", "last", confirm=True)
"""
BY_MULTIPROCESSING = """
client = mqks.blocking.connect()
client.publish("e", "first", confirm=True)

def work(who):
    for n in range(20):
        client.publish("e", f"{who} {n}", confirm=n < 10)

fork = multiprocessing.get_context("fork")
children = [fork.Process(target=work, args=(who,)) for who in range(4)]
for child in children:
    child.start()
client.publish("e", "not sent yet")
work("parent")
for child in children:
    child.join()
    assert child.exitcode == 0
client.publish("e", "last", confirm=True)
"""
BY_ASYNC = """
async def work(who, client):
    for n in range(20):
        await client.publish("e", f"{who} {n}", confirm=True)

async def in_child(who, client):
    async with client:
        await work(who, client)

async def main():
    async with mqks.connect() as client:
        await client.publish("e", "first", confirm=True)
        await client.publish("e", "not sent yet")
        children = []
        for who in range(4):
            if (child := os.fork()) == 0:
                asyncio._set_running_loop(None)
                try:
                    await client.publish("e", "of nobody")
                except RuntimeError:
                    asyncio.run(in_child(who, client))
                    os._exit(0)
            children.append(child)
        await work("parent", client)
        await asyncio.to_thread(wait_for, children)
        await client.publish("e", "last", confirm=True)

asyncio.run(main())
"""
WHILE_OTHERS_PUBLISH = """
client = mqks.blocking.connect()
goes_on, counts = True, []

def thread():
    count = 0
    while goes_on:
        client.publish("e", "thread", confirm=count % 2)
        count += 1
    counts.append(count)

threads = [threading.Thread(target=thread) for _ in range(3)]
for each in threads:
    each.start()
children = []
for who in range(25):
    if (child := os.fork()) == 0:
        for n in range(4):
            client.publish("e", f"{who} {n}", confirm=True)
        client.close()
        os._exit(0)
    children.append(child)
wait_for(children)
goes_on = False
for each in threads:
    each.join()
client.close()
print(sum(counts))
"""
CONSUMER = """
with mqks.blocking.connect() as client, client.consume("q") as consumer:
    client.publish_many(("e", n) for n in range(10))
    message = consumer.receive(60)
    if (child := os.fork()) == 0:
        message.ack()
        for use in (consumer.receive, lambda: next(consumer), lambda: next(consumer.batches())):
            try:
                print(use())
            except mqks.ConnectionLost as error:
                assert "start another one" in str(error)
        with client.consume("q") as other:
            client.publish("e", "of the child", confirm=True)
            with other.receive(60).process() as message:
                print(message.text)
        sys.exit()
    wait_for([child])
    message.ack()
    consumer.ack([consumer.receive(60) for n in range(1, 5)])
"""
CLOSED_IN_THE_PARENT = """
client = mqks.blocking.connect(client_name="parent")
client.publish("e", "x", confirm=True)
asking, asked = os.pipe()
if (child := os.fork()) == 0:
    os.close(asked)
    os.read(asking, 1)
    os._exit(0)
client.close()
with mqks.blocking.connect() as other:
    while '"parent"' in other.request("stats", "connections"):
        pass
os.close(asked)
wait_for([child])
"""


def run(program: str, path: Path, url: str, **environment: str) -> str:
    done = ended(path, url, BEGIN + program, "-W", "ignore", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def left(url: str) -> list[PeekedMessage]:
    with blocking.connect(url) as client:
        return client.peek("q", limit=10**6)


@pytest.fixture
def tls(mqks_broker: Broker, tmp_path: Path) -> Iterator[dict[str, str]]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with Proxy(mqks_broker.port, tls=context) as proxy:
        yield {"url": f"mqkss://localhost:{proxy.port}", "SSL_CERT_FILE": str(tmp_path / "ca.pem")}


EVERY = {f"{who} {n}" for who in (*range(4), "parent") for n in range(20)}


@pytest.mark.parametrize("program", [BY_FORK, BY_MULTIPROCESSING, BY_ASYNC])
@pytest.mark.parametrize("is_tls", [False, True])
def test_each_process_publishes_for_itself(
    tmp_path: Path, url: str, tls: dict[str, str], program: str, is_tls: bool
) -> None:
    run(program, tmp_path, **(tls if is_tls else {"url": url}))
    found = left(url)
    assert len({message.id for message in found}) == len(found)
    assert sorted(message.text for message in found) == sorted(
        EVERY | {"first", "not sent yet", "last"}
    )
    prefixes = {message.id.rpartition("-")[0] for message in found}
    assert len(prefixes) == 5


def test_a_fork_while_other_threads_publish(tmp_path: Path, url: str) -> None:
    count = int(run(WHILE_OTHERS_PUBLISH, tmp_path, url))
    found = left(url)
    assert len({message.id for message in found}) == len(found) == count + 100
    assert {message.text for message in found} - {"thread"} == {
        f"{who} {n}" for who in range(25) for n in range(4)
    }


def test_consumers_are_those_of_the_parent(tmp_path: Path, url: str) -> None:
    assert run(CONSUMER, tmp_path, url) == "of the child\n"
    assert [message.text for message in left(url)] == ["5", "6", "7", "8", "9"]


def test_the_child_does_not_keep_the_connection(tmp_path: Path, url: str) -> None:
    run(CLOSED_IN_THE_PARENT, tmp_path, url)
