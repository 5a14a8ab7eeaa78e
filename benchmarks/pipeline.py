"""`mqks pipeline archive` as users start it: the time until its first batch, and each batch.

    python -m benchmarks.pipeline [--count N] [--batches N] [--rounds N] [--flag=F ...] [WORK ...]

    parquet, delta, iceberg    into a lake of this kind in a directory
    schema                     plain files, with JSON payloads that are parsed
    upsert, upsert-iceberg     a table of the last values of 10,000 keys
    waited, waited-schema      the first batch of an archive that has waited for messages
    beside                     what an archive leaves of the rate of a publisher at full speed

The one rule: the clock is that of the command's user, and CPU time is told beside it, which another
load on the machine does not change.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM
from statistics import median

from benchmarks.process import cpu_s, tree
from mqks.client.blocking import connect
from mqks.pipeline.wire import ServerAddress, connected
from mqks.testing import BrokerProcess

EVENTS = "page.view", "cart.add", "order.new"
PAYLOADS = 20_000
"""Different ones, so many that compression finds little beyond what hexadecimal text has."""
PAIRS = 9
WAIT_S = 15
KEYS = 10_000
SCHEMA = "--schema", "n bigint, text string"
UPSERT = "--upsert", "ordering_key"
LAKES = {
    "parquet": ("lake",),
    "delta": ("lake", "--format", "delta"),
    "iceberg": ("db.lake", "--catalog", "bench"),
    "schema": ("lake", *SCHEMA),
    "upsert": ("lake", "--format", "delta", *UPSERT),
    "upsert-iceberg": ("db.lake", "--catalog", "bench", *UPSERT),
    "waited": ("lake",),
    "waited-schema": ("lake", *SCHEMA),
}


def messages(count: int, *, keyed: bool) -> list[bytes]:
    """Publishes of 100 bytes, 10,000 at a time, of which the last is confirmed."""
    chance = random.Random(1)
    payloads = [
        b'{"n":%d,"text":"%b"}' % (10**9 + n, chance.randbytes(40).hex().encode())
        for n in range(PAYLOADS)
    ]
    chunks = []
    for first in range(0, count, 10_000):
        lines = [
            b"m-%d publish%b %b %b\n"
            % (
                n,
                b" --key=k%d" % (n * 31 % KEYS) if keyed else b"",
                EVENTS[n % 3].encode(),
                payloads[n * 7919 % PAYLOADS],
            )
            for n in range(first, min(count, first + 10_000))
        ]
        lines[-1] = lines[-1].replace(b"publish", b"publish --confirm", 1)
        chunks.append(b"".join(lines))
    return chunks


def fill(url: str, chunks: list[bytes]) -> float:
    """Publish with two chunks in flight; gives the seconds."""
    wire, began_s = connected(ServerAddress(url=url)), time.perf_counter()
    wire.send(chunks[0])
    for chunk in chunks[1:]:
        wire.send(chunk)
        wire.line()
    wire.line()
    wire.close()
    return time.perf_counter() - began_s


@contextmanager
def archiving(root: Path, url: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, with an Iceberg catalog in its environment."""
    root.mkdir()
    catalog = {"URI": f"sqlite:///{root}/catalog.db", "WAREHOUSE": f"file://{root}/warehouse"}
    command = [sys.executable, "-m", "mqks", "pipeline", "archive", "bench", *flags]
    with subprocess.Popen(
        [*command, "--url", url, "--json"],
        env=os.environ | {f"PYICEBERG_CATALOG__BENCH__{name}": catalog[name] for name in catalog},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process


def batches(root: Path, url: str, batch: int, *flags: str) -> Iterator[str]:
    """The first batch, with and without the start of the command, and the others."""
    began_s, used_s = time.perf_counter(), 0.0
    with archiving(root, url, *flags, "--once", "--no-trim", "--batch", str(batch)) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            told, cpu = json.loads(line), cpu_s(process.pid)
            if not number:
                yield f"first after {time.perf_counter() - began_s:.1f} s ({cpu:.1f} of CPU)"
            seconds = told["seconds"]
            rate = f"{told['messages'] / seconds / 1000:,.0f} k/s, {seconds:.2f} s"
            yield rate + (f" ({cpu - used_s:.1f})" if number else "")
            used_s = cpu
    if process.returncode:
        raise RuntimeError(f"the archive ended with {process.returncode}")


def waited(root: Path, url: str, chunks: list[bytes], *flags: str) -> Iterator[str]:
    """The first messages of an archive that was started before them."""
    with archiving(root, url, *flags, "--interval", "0", "--batch", "1000000") as process:
        assert process.stdout is not None
        time.sleep(WAIT_S)
        for pid in tree(process.pid):
            os.kill(pid, SIGSTOP)
        used_s = cpu_s(process.pid)
        fill(url, chunks)
        for pid in tree(process.pid):
            os.kill(pid, SIGCONT)
        for _ in range(2):
            told = json.loads(process.stdout.readline())
            count, seconds, cpu = told["messages"], told["seconds"], cpu_s(process.pid)
            rate = f"{count / seconds / 1000:,.0f} k/s, {seconds:.2f} s"
            yield f"{count:,}: {rate} ({cpu - used_s:.1f})"
            used_s = cpu
            if count == len(chunks) * 10_000:
                break
        process.send_signal(SIGTERM)


def beside(root: Path, url: str, chunks: list[bytes], flags: Sequence[str]) -> Iterator[str]:
    """Ratios of two rates, one after the other: the archive is at work, and it is stopped."""
    ratios, left = list[float](), len(chunks) * 10_000
    with archiving(root, url, "lake", "--interval", "0", *flags) as process:
        assert process.stdout is not None
        for _ in range(PAIRS):
            seconds = list[float]()
            while left:
                left -= json.loads(process.stdout.readline())["messages"]
            for wanted in (SIGCONT, SIGSTOP, SIGCONT):
                for pid in tree(process.pid):
                    os.kill(pid, wanted)
                if len(seconds) < 2:
                    seconds.append(fill(url, chunks))
                    left += len(chunks) * 10_000
            ratios.append(seconds[1] / seconds[0])
            yield f"{ratios[-1]:.2f} of {len(chunks) * 10 / seconds[1]:,.0f} k/s"
        process.send_signal(SIGTERM)
    yield f"median {median(ratios):.2f}"


def main() -> None:
    options = argparse.ArgumentParser(description="How long archives take.")
    options.add_argument("works", nargs="*", default=[*LAKES])
    options.add_argument("--count", type=int, default=500_000, help="messages of a batch")
    options.add_argument("--batches", type=int, default=3)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--flag", action="append", default=[], help="of the archive: --flag=--by")
    given = options.parse_args()
    flags = given.flag
    for number in range(given.rounds):
        for work in given.works:
            chunks = messages(given.count * given.batches, keyed=work.startswith("upsert"))
            with (
                tempfile.TemporaryDirectory() as directory,
                BrokerProcess(Path(directory) / "mqks.db") as broker,
            ):
                with connect(broker.url) as client:
                    client.subscribe("bench", EVENTS)
                root = Path(directory) / "lakes"
                if work == "beside":
                    fill(broker.url, chunks)
                    told = beside(root, broker.url, chunks, flags)
                elif work.startswith("waited"):
                    told = waited(root, broker.url, chunks, *LAKES[work], *flags)
                else:
                    fill(broker.url, chunks)
                    told = batches(root, broker.url, given.count, *LAKES[work], *flags)
                print(f"round {number + 1}: {work}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
