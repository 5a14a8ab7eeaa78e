"""Ten queues get every message; each has one consumer, auto-ack. All ten are one load program.

Of large messages it is told beside what the same bytes take from one plain program to another.
"""

import multiprocessing
import socket

from benchmarks.flow import Flow, connect
from benchmarks.flow import run as receive
from benchmarks.load import busiest, clocked, consume, part, publish, rate, together
from benchmarks.messages import MARK
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work

QUEUES = 10


def run(running: Running, size: Size) -> Figures:
    running.declare(queues=QUEUES)
    reports = together(
        running,
        part(consume, size.messages, queues=QUEUES),
        part(publish, size.messages),
    )
    deliveries = rate(size.count * QUEUES, reports)
    return {"deliveries_per_s": deliveries, "load_cores": busiest(reports)}


def run_large(running: Running, size: Size) -> Figures:
    figures = run(running, size)
    return {
        "megabytes_per_s": figures["deliveries_per_s"] * size.payload_bytes / 1e6,
        "loopback_megabytes_per_s": loopback(size),
        "resident_most_bytes": running.resident_bytes("VmHWM"),
        "load_cores": figures["load_cores"],
    }


def loopback(size: Size) -> float:
    """The same without a broker."""
    with socket.create_server(("127.0.0.1", 0), backlog=QUEUES) as listener:
        sending = multiprocessing.get_context("spawn").Process(
            target=send, args=(listener.getsockname()[1], size), daemon=True
        )
        sending.start()
        room_bytes = size.payload_bytes * size.count + ROOM_BYTES
        flows = [
            Flow(listener.accept()[0], mark=MARK, expected=size.count, room_bytes=room_bytes)
            for _ in range(QUEUES)
        ]
        with clocked() as report:
            receive(*flows)
        sending.join()
        for flow in flows:
            flow.sock.close()
    return size.payload_bytes * size.count * QUEUES / report.took / 1e6


ROOM_BYTES = 1 << 20


def send(port: int, size: Size) -> None:
    """To each connection every message."""
    connections = [connect(port) for _ in range(QUEUES)]
    message = b"x" * (size.payload_bytes - len(MARK)) + MARK
    for _ in range(size.count):
        for connection in connections:
            connection.sendall(message)


WORK = Work("fan-out: 10 queues on one event, 10 consumers", run, Size(100_000), Size(200))
WORKS = {
    "fanout_900k": Work(
        "fan-out: 10 queues, 10 consumers, 900 KB",
        run_large,
        Size(60, payload_bytes=900_000),
        Size(3, payload_bytes=900_000),
    )
}
