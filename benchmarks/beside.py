"""What publishing pays for an archive beside it: `python -m benchmarks.pipeline publishing`.

One broker, one program that publishes, one `mqks pipeline archive` with Java and workers. The
archive gets only what the others leave of cores and disk (`chrt --idle`, `ionice`), as if it had
some of its own; in every other turn it is stopped, with nothing to do, and catches up afterwards.

    paced       RATE messages a second, confirmed: how long confirms take from the moment at which
                their message was due
    flat out    as fast as it goes with WINDOW messages on their way

The one rule: only turns of one run are compared, and in the end each message is in the lake once.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds

from benchmarks.flow import CHUNK_BYTES, SILENCE_S, Stalled, connect
from benchmarks.messages import Messages
from benchmarks.process import cpu_s
from mqks.client.blocking import connect_blocking
from mqks.testing import BrokerProcess

RATE = 100_000
WINDOW = 10_000
TICK_S = 0.001
PATIENCE_S = 300.0
LEFT_OVERS = ["chrt", "--idle", "0", "ionice", "--class", "idle"]
ALONE, BESIDE = "alone", "beside an archive"
PACED, FLAT_OUT = f"{RATE:,} a second", "flat out"
Figures = dict[str, float]


def publish(port: int, first: int, count: int, rate: float) -> Figures:
    """Publish messages of 100 bytes over one connection, until the last is confirmed."""
    messages = Messages(count, first=first)
    template = b"# publish --confirm bench " + messages.payload + b"\n"
    requests, width = memoryview(messages.fill(template)), messages.width(template)
    came: list[tuple[int, float]] = []
    sent = confirmed = 0
    with connect(port) as sock:
        began = time.monotonic()
        while confirmed < count:
            if rate == math.inf:
                due = min(count, confirmed + WINDOW)
            else:
                due = min(count, int((time.monotonic() - began) * rate))
            left = requests[sent : due * width][:CHUNK_BYTES]
            wait_s = TICK_S if due < count and rate < math.inf else SILENCE_S
            readable, writable, _ = select.select([sock], [sock] if left else [], [], wait_s)
            if wait_s == SILENCE_S and not (readable or writable):
                raise Stalled(f"silent after {confirmed} confirms")
            if writable:
                sent += sock.send(left, socket.MSG_DONTWAIT)
            if readable:
                replies = sock.recv(CHUNK_BYTES)
                if not replies or b" error " in replies:
                    raise AssertionError(f"{confirmed} confirms, and then {replies[:200]!r}")
                confirmed += replies.count(b"\n")
                came.append((confirmed, time.monotonic() - began))
    counts, times = (np.array(each) for each in zip(*came, strict=True))
    figures = {"messages/s": count / times[-1]}
    if rate < math.inf:
        confirmed_s = times[np.searchsorted(counts, np.arange(count), "right")]
        waited_ms = (confirmed_s - np.arange(count) / rate) * 1e3
        for percent in (50, 99):
            figures[f"p{percent} ms"] = float(np.percentile(waited_ms, percent))
    return figures


class Archiving:
    """`mqks pipeline archive` at the lowest priority; a context that ends it as SIGTERM does."""

    def __init__(self, url: str, lake: Path) -> None:
        self.next = 0
        """Everything below it is in the lake."""
        archive = ["archive", "bench", str(lake), "--url", url, "--interval", "1", "--json"]
        self._process = subprocess.Popen(
            [*LEFT_OVERS, sys.executable, "-m", "mqks", "pipeline", *archive],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.next = json.loads(line)["next"]

    def wait(self, number: int) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while self.next < number:
            if self._process.poll() is not None or time.monotonic() > limit_s:
                raise AssertionError(f"the archive came to {self.next} instead of {number}")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """To Java and the driver; the workers have nothing to do without them."""
        os.killpg(self._process.pid, number)

    def __enter__(self) -> Archiving:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.signal(signal.SIGKILL)
        else:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(PATIENCE_S)
        if kind is None and code:
            raise AssertionError(f"the archive ended with {code}")


def compare(root: Path, lake: Path, seconds: float, rounds: int) -> None:
    """Print each turn, and what it is beside an archive in relation to alone."""
    count = int(RATE * seconds)
    done = 0
    told: dict[tuple[str, str], list[Figures]] = {}
    with BrokerProcess(root / "beside.db") as broker:
        with connect_blocking(broker.url) as client:
            client.subscribe("bench", ["bench"])
        with (
            Archiving(broker.url, lake) as archiving,
            ProcessPoolExecutor(1, get_context("spawn")) as programs,
        ):

            def turn(rate: float) -> Figures:
                nonlocal done
                before = archiving.next
                before_s = cpu_s(broker.pid)
                work = programs.submit(publish, broker.port, done, count, rate)
                figures = work.result(PATIENCE_S)
                figures["CPU s of the broker a million"] = (
                    (cpu_s(broker.pid) - before_s) * 1e6 / count
                )
                figures["archived meanwhile"] = archiving.next - before
                done += count
                return figures

            turn(math.inf)  # Java and the workers get warm.
            archiving.wait(done + 1)
            for number in range(rounds):
                for name, rate in ((PACED, float(RATE)), (FLAT_OUT, math.inf)):
                    for way in (ALONE, BESIDE)[:: 1 if number % 2 else -1]:
                        if way == ALONE:
                            archiving.signal(signal.SIGSTOP)
                        figures = turn(rate)
                        archiving.signal(signal.SIGCONT)
                        archiving.wait(done + 1)
                        told.setdefault((name, way), []).append(figures)
                        print(f"round {number + 1}: {name}, {way}: {_said(figures)}", flush=True)
        _check(lake, done)
    print(f"{done:,} messages published, and each is in the lake once")
    for name in (PACED, FLAT_OUT):
        for what in list(told[name, ALONE][0])[:-1]:
            alone, beside = ([each[what] for each in told[name, way]] for way in (ALONE, BESIDE))
            ratios = [after / before for before, after in zip(alone, beside, strict=True)]
            print(
                f"{name}, {what}: {statistics.median(alone):,.2f} {ALONE},"
                f" {statistics.median(beside):,.2f} {BESIDE}, ratio {statistics.median(ratios):.2f}"
                f" ({min(ratios):.2f} to {max(ratios):.2f})"
            )


def _said(figures: Figures) -> str:
    return ", ".join(f"{value:,.2f} {what}" for what, value in figures.items())


def _check(lake: Path, count: int) -> None:
    table: Any = ds.dataset(lake, partitioning="hive").to_table(columns=["key", "value"])
    found = table.num_rows, pc.count_distinct(table["key"]).as_py()
    if found != (count, count):
        raise AssertionError(f"{count} published, and of rows and ids there are {found}")
