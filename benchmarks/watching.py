"""What being watched costs: `python -m benchmarks.watching`.

Servers take turns at `mqks bench stream`: one without the port of metrics, one with it, one with a
scrape of both paths each second, one with an open page, one with a hundred that all differ. Then
the share of a core is measured that open pages take with a thousand queues. Then a server with many
queues is scraped, while pings tell how long anybody else has to wait.

The one rule: only what ran in turns within one run is compared.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from mqks.testing import BrokerProcess

PATHS = ("/metrics", "/metrics/queues")
PLAIN, PORT, SCRAPED = "no port", "a port", "a scrape each second"
PAGES = {"an open page": 1, "100 open pages": 100}
WITH_PAGE = ("--http-port", "0", "--page", "read")
WAYS = {
    PLAIN: (),
    PORT: ("--http-port", "0"),
    SCRAPED: ("--http-port", "0"),
    **dict.fromkeys(PAGES, WITH_PAGE),
}
OPEN_S = 20
PAGE_QUEUES = 1_000
SCRAPES = 10
CHUNK_QUEUES = 1_000


def web_of(server: BrokerProcess) -> str:
    found = re.search(r"address=(http://\S+)", server.log)
    assert found, "the server has no port of metrics"
    return found[1]


def scrape(web: str, path: str) -> tuple[float, int]:
    """Seconds and bytes of one scrape."""
    began = time.perf_counter()
    with urllib.request.urlopen(web + path, timeout=60) as answer:
        size = len(answer.read())
    return time.perf_counter() - began, size


@contextmanager
def scraped(web: str) -> Iterator[None]:
    """Scrape each second meanwhile."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            for path in PATHS:
                scrape(web, path)
            done.wait(1.0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def opened(web: str, count: int) -> Iterator[list[int]]:
    """So many open pages meanwhile, each with a view of its own; how often each was renewed."""
    with urllib.request.urlopen(web + "/") as answer:
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
    renewed, done = [0] * count, threading.Event()

    def watch(number: int) -> None:
        url = f"{web}/events?table=queues&filter=a&first={number}"
        request = urllib.request.Request(url, headers={"Cookie": cookie})
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    assert "totals.messages_ready" in json.loads(line[6:])["numbers"]
                    renewed[number] += 1
                if done.is_set():
                    return

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        while not all(renewed):
            time.sleep(0.01)
        yield renewed
    finally:
        done.set()
        for thread in threads:
            thread.join()


def cpu_s(db: Path) -> float:
    """Processor time that the threads of a server have taken."""
    pid = db.with_name(db.name + ".lock").read_text().split()[0]
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def stream(server: BrokerProcess, count: int) -> float:
    """Messages per second."""
    command = [sys.executable, "-m", "mqks", "bench", "stream", "--json", "--count", str(count)]
    done = subprocess.run(
        [*command, "--url", server.url], capture_output=True, check=True, timeout=300
    )
    return float(json.loads(done.stdout)["works"]["stream"]["messages_per_s"])


def compare(directory: Path, count: int, runs: int) -> None:
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    dbs = [directory / f"{number}.db" for number in range(len(WAYS))]
    with ExitStack() as running:
        servers = [
            running.enter_context(BrokerProcess(db, *flags))
            for db, flags in zip(dbs, WAYS.values(), strict=True)
        ]
        turns = list(zip(WAYS, dbs, servers, strict=True))
        for run in range(runs):
            # Each goes first in its turn, as who goes first may be at an advantage.
            first = run % len(turns)
            for way, db, server in turns[first:] + turns[:first]:
                watched: AbstractContextManager[object] = nullcontext()
                if way == SCRAPED:
                    watched = scraped(web_of(server))
                elif way in PAGES:
                    watched = opened(web_of(server), PAGES[way])
                with watched:
                    before_s = cpu_s(db)
                    rates[way].append(stream(server, count))
                    costs[way].append((cpu_s(db) - before_s) / count * 1e9)
    for what, figures in (("messages/s", rates), ("ns of CPU a message", costs)):
        for way, mine in figures.items():
            ratios = [one / plain for one, plain in zip(mine, figures[PLAIN], strict=True)]
            print(
                f"stream, {way}: {statistics.median(mine):,.0f} {what}, ratio "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )


def make_queues(peer: socket.socket, queues: int) -> None:
    with peer.makefile("rb") as replies:
        for start in range(0, queues, CHUNK_QUEUES):
            numbers = range(start, min(queues, start + CHUNK_QUEUES))
            lines = b"".join(b"s subscribe watched-%d e%d\n" % (n, n) for n in numbers)
            peer.sendall(lines + b"p ping\n")
            assert replies.readline() == b"p ok \n"


def open_page(directory: Path, runs: int) -> None:
    """The share of a core that open pages take, in turns with none, of a server that does nothing
    else."""
    db, shares = directory / "page.db", dict[int, list[float]]()
    renewals: dict[int, list[int]] = {}
    with (
        BrokerProcess(db, *WITH_PAGE) as server,
        socket.create_connection(("127.0.0.1", server.port), 60) as peer,
    ):
        make_queues(peer, PAGE_QUEUES)
        for _ in range(runs):
            for count in (0, *PAGES.values()):
                watched = opened(web_of(server), count) if count else nullcontext([0])
                with watched as renewed:
                    before, before_s, began = min(renewed), cpu_s(db), time.monotonic()
                    time.sleep(OPEN_S)
                    share = (cpu_s(db) - before_s) / (time.monotonic() - began)
                    shares.setdefault(count, []).append(share)
                    renewals.setdefault(count, []).append(min(renewed) - before)
    for count, mine in shares.items():
        print(
            f"{count} open pages, {PAGE_QUEUES:,} queues: {statistics.median(mine):.2%} of a core "
            f"({min(mine):.2%} to {max(mine):.2%}), "
            f"renewed {statistics.median(renewals[count]):.0f} times in {OPEN_S} s"
        )


def many_queues(directory: Path, queues: int, runs: int) -> None:
    flags = ("--http-port", "0", "--queues-max", str(queues))
    db = directory / "queues.db"
    with (
        BrokerProcess(db, *flags) as server,
        socket.create_connection(("127.0.0.1", server.port), 60) as peer,
    ):
        make_queues(peer, queues)
        web = web_of(server)
        for path in PATHS:
            told = [pinged_scrape(web, path, peer) for _ in range(runs)]
            seconds, sizes, waits = (statistics.median(each) for each in zip(*told, strict=True))
            print(
                f"{path} with {queues:,} queues: {seconds * 1e3:.1f} ms, "
                f"{cost_s(server, db, path) * 1e3:.1f} of CPU, {sizes / 1e6:.3f} MB, "
                f"longest wait of a ping {waits * 1e3:.1f} ms"
            )


def cost_s(server: BrokerProcess, db: Path, path: str) -> float:
    """Processor time of a scrape."""
    web = web_of(server)
    before_s = cpu_s(db)
    for _ in range(SCRAPES):
        scrape(web, path)
    return (cpu_s(db) - before_s) / SCRAPES


def pinged_scrape(web: str, path: str, peer: socket.socket) -> tuple[float, int, float]:
    """Seconds and bytes of a scrape, and how long a ping meanwhile has waited at most."""
    told: list[tuple[float, int]] = []
    thread = threading.Thread(target=lambda: told.append(scrape(web, path)))
    thread.start()
    longest = 0.0
    while thread.is_alive():
        began = time.perf_counter()
        peer.sendall(b"p ping\n")
        assert peer.recv(64) == b"p ok \n"
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.001)
    thread.join()
    return *told[0], longest


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="messages of a run")
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", choices=("compare", "pages", "queues"), help="only this part")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        if given.only in (None, "compare"):
            compare(Path(directory), given.count, given.runs)
        if given.only in (None, "pages"):
            open_page(Path(directory), min(3, given.runs))
        if given.only in (None, "queues"):
            many_queues(Path(directory), given.queues, given.runs)


if __name__ == "__main__":
    main()
