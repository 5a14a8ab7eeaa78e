"""The SQS port beside moto, and beside RabbitMQ with a client of its own, in one run.

    python -m benchmarks.sqs [COUNT [SERVER ...]]

Needs `pip install 'moto[server]'` and Debian's `rabbitmq-server`. SQS is asked by boto3, RabbitMQ
by py-amqp with confirms, one message in flight on each connection. moto keeps messages in memory
only. Clients in Python take most of the time, so the server's CPU time per message is told, too.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import amqp
import boto3
from botocore.config import Config

from benchmarks.flow import free_port
from benchmarks.process import cpu_s, peer, resident_bytes
from benchmarks.servers import SERVERS

BODY = "x" * 100
SERVED = "mqks", "moto", "rabbitmq"
CROWD = 50
BATCH = 10
POLLS = 10_000
POLL_S = 20
Works = dict[str, tuple[int, int, Callable[[Any], object]]]
"""By name: connections, messages of a step, and what a step does with a connection."""


def sqs_works(port: int) -> tuple[Callable[[], Any], Works]:
    def connected() -> Any:
        return boto3.client(
            "sqs",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=Config(retries={"max_attempts": 0}),
        )

    url = connected().create_queue(QueueName="q")["QueueUrl"]

    def send(sqs: Any) -> None:
        sqs.send_message(QueueUrl=url, MessageBody=BODY)

    def take(sqs: Any) -> None:
        [message] = sqs.receive_message(QueueUrl=url)["Messages"]
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    def send_ten(sqs: Any) -> None:
        entries = [{"Id": str(n), "MessageBody": BODY} for n in range(BATCH)]
        assert len(sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == BATCH

    def take_ten(sqs: Any) -> None:
        some = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=BATCH)["Messages"]
        entries = [{"Id": e["MessageId"], "ReceiptHandle": e["ReceiptHandle"]} for e in some]
        done = sqs.delete_message_batch(QueueUrl=url, Entries=entries)
        assert len(done["Successful"]) == BATCH

    works: Works = {"send": (1, 1, send), "take": (1, 1, take)}
    works |= {"send, 50": (CROWD, 1, send), "take, 50": (CROWD, 1, take)}
    return connected, works | {
        "send, tens": (1, BATCH, send_ten),
        "take, tens": (1, BATCH, take_ten),
    }


def amqp_works(port: int) -> tuple[Callable[[], Any], Works]:
    def connected() -> Any:
        connection = amqp.Connection(f"127.0.0.1:{port}", confirm_publish=True)
        connection.connect()
        return connection.channel()

    connected().queue_declare("q", durable=True, auto_delete=False)

    def send(channel: Any) -> None:
        channel.basic_publish_confirm(amqp.Message(BODY, delivery_mode=2), routing_key="q")

    def take(channel: Any) -> None:
        channel.basic_ack(channel.basic_get("q").delivery_tag)

    works: Works = {"send": (1, 1, send), "take": (1, 1, take)}
    return connected, works | {"send, 50": (CROWD, 1, send), "take, 50": (CROWD, 1, take)}


def measure(
    root: int, clients: list[Any], step: Callable[[Any], object], count: int, size: int
) -> str:
    """So many steps of so many messages, by all clients together."""
    left = iter(range(count))

    def work(client: Any) -> None:
        for _ in left:
            step(client)

    began_s, before_s = time.perf_counter(), cpu_s(root)
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(work, clients))
    took_s = time.perf_counter() - began_s
    return (
        f"{count * size / took_s:8,.0f}/s {(cpu_s(root) - before_s) / count / size * 1e6:7,.0f} us"
    )


async def idle(port: int, url: str, root: int) -> str:
    """Long polls that get nothing: memory and CPU time of each."""
    body = json.dumps({"QueueUrl": url, "WaitTimeSeconds": POLL_S})
    scope = "Credential=any/20260101/us-east-1/sqs/aws4_request, SignedHeaders=host, Signature=x"
    headers = {
        "Host": f"localhost:{port}",
        "X-Amz-Target": "AmazonSQS.ReceiveMessage",
        "Content-Type": "application/x-amz-json-1.0",
        "Authorization": f"AWS4-HMAC-SHA256 {scope}",
        "Content-Length": str(len(body)),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"POST / HTTP/1.1\r\n{head}\r\n{body}".encode()

    async def poll() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        status = await reader.readline()
        writer.close()
        return int(status.split()[1])

    memory, before_s, began_s = resident_bytes(root), cpu_s(root), time.perf_counter()
    polls = [asyncio.create_task(poll()) for _ in range(POLLS)]
    await asyncio.sleep(POLL_S * 0.9)
    each = (resident_bytes(root) - memory) / POLLS
    answers = await asyncio.gather(*polls, return_exceptions=True)
    took_s, cpu = time.perf_counter() - began_s, cpu_s(root) - before_s
    answered = answers.count(200)
    return (
        f"{answered:,} of {POLLS:,} answered in {took_s:.1f} s, {each:,.0f} bytes each, "
        f"CPU {cpu / POLLS * 1e6:,.0f} us each"
    )


def main(count: int, names: list[str]) -> None:
    for name in names:
        port = free_port()
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "mqks", "serve", "--db", "db", "--port", "0"]
            command += ["--page", "off", "--sqs-port", str(port)]
            if name == "moto":
                command = [sys.executable, "-m", "moto.server", "-p", str(port)]
            elif name == "rabbitmq":
                command = SERVERS[name].command(Path(directory), port)
            with peer(command, Path(directory), port) as server:
                connected, works = (amqp_works if name == "rabbitmq" else sqs_works)(port)
                for work, (connections, size, step) in works.items():
                    clients = [connected() for _ in range(connections)]
                    told = measure(server.pid, clients, step, count // size, size)
                    print(f"{name:9}{work:11} {told}", flush=True)
                if name != "rabbitmq":
                    url = connected().create_queue(QueueName="idle")["QueueUrl"]
                    told = asyncio.run(idle(port, url, server.pid))
                    print(f"{name:9}idle polls  {told}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("count", nargs="?", type=int, default=5000, help="messages")
    options.add_argument("servers", nargs="*", default=[*SERVED], help=", ".join(SERVED))
    given = options.parse_args()
    main(given.count, given.servers)
