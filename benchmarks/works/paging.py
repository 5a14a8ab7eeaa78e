"""More messages than the memory budget holds are published, then drained with acks. They go in
blocks, so that the load programs need not hold them all; the clock stands between the blocks."""

import gc
import time

from benchmarks.flow import pump
from benchmarks.flow import run as send
from benchmarks.load import Gate, Report, clocked, part, together
from benchmarks.messages import Messages, Wrong
from benchmarks.process import Running, sampled
from benchmarks.servers.base import Server
from benchmarks.work import Figures, Size, Work

BLOCK = 500_000
ROOM_BYTES = 64 << 20
REST_S = 3.0
"""What a server left alone may use to tidy up."""


def publish_blocks(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Publishes block after block, each until its last message is confirmed."""
    gate()
    times = []
    for first in range(messages.first, messages.end, BLOCK):
        block = messages.part(first, min(BLOCK, messages.end - first))
        with server.connect(port) as sock:
            flow = server.publisher(sock, block)
            with clocked() as report:
                send(flow)
        server.check_confirms(bytes(flow.room[: flow.filled]), block, None)
        times.append(report.took)
        del flow
        gc.collect()
    report.times = times
    return report


def drain_blocks(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Acks and checks everything; what has come is checked whenever the room is full."""
    with server.connect(port) as sock:
        flow = server.consumer(sock, messages, manual_ack=True, room_bytes=ROOM_BYTES)
        gate()
        times = []
        checked = 0
        with clocked() as report:
            flow.open()
        while not flow.done:
            with clocked() as report:
                for _ in pump([flow]):
                    if flow.full:
                        break
            times.append(report.took)
            raw = flow.take()
            server.check_no_refusal(raw)
            payloads = server.payloads(raw, messages.payload_bytes)
            messages.part(checked, len(payloads)).check(payloads)
            checked += len(payloads)
        if checked != messages.count:
            raise Wrong(f"{checked} messages instead of {messages.count}")
    report.times = times
    return report


def run(running: Running, size: Size) -> Figures:
    running.declare(manual_ack=True)
    with sampled(running.wal_bytes) as wal:
        [published] = together(running, part(publish_blocks, size.messages))
        full_bytes = running.resident_bytes()
        full_disk_bytes = running.disk_bytes()
        [drained] = together(running, part(drain_blocks, size.messages))
        drained_disk_bytes = running.disk_bytes()
        time.sleep(REST_S)
    return {
        "in_per_s": size.count / sum(published.times),
        "out_per_s": size.count / sum(drained.times),
        "resident_full_bytes": full_bytes,
        "resident_most_bytes": running.resident_bytes("VmHWM"),
        "disk_full_bytes": full_disk_bytes,
        "disk_drained_bytes": drained_disk_bytes,
        "disk_rested_bytes": running.disk_bytes(),
        "wal_most_bytes": wal.seen,
    }


WORK = Work("paging: more than memory holds", run, Size(10_000_000), Size(1_000))
