"""Runs works against servers side by side, prints a table of medians and writes JSON.

The one rule: servers take turns within each run (A B C, A B C, …), since a machine drifts from hour
to hour; so ratios are taken within a run, and their median is told.
"""

import argparse
import json
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.messages import Wrong
from benchmarks.process import Running, spawn
from benchmarks.servers import SERVERS
from benchmarks.servers.base import Server
from benchmarks.servers.mqks import WHICH, Mqks
from benchmarks.servers.sink import Sink
from benchmarks.works import WORKS, Figures, Size, Work

REFERENCE = "redis"
CEILING = "ceiling"
"""Stands for every work the sink can play, against MQKS and the sink."""

FAILURES = (Wrong, OSError, RuntimeError)

Runs = dict[tuple[str, str], list[Figures]]
"""The figures of each run, by work and server."""


def which(server: Mqks) -> str:
    """The version and the place of its mqks, found as its server finds it."""
    with tempfile.TemporaryFile() as output:
        process = spawn([server.program, *server.flags, "-c", WHICH], output)
        failed = process.wait()
        output.seek(0)
        told = output.read().decode().strip()
    if failed:
        sys.exit(f"{server.name} is not importable: {told}")
    return told


def measure(server: Server, work: Work, size: Size) -> Figures:
    """One run of a work against a fresh server in a temporary directory."""
    with (
        tempfile.TemporaryDirectory(prefix="mqks-bench-") as directory,
        Running(server, Path(directory)) as running,
    ):
        before_s = running.cpu_s
        figures = work.run(running, size.scaled(server.scale))
        if not server.is_cluster:
            figures["server_cpu_s"] = running.cpu_s - before_s
            figures["server_peak_bytes"] = running.peak_bytes
        return figures


def measure_all(
    servers: Iterable[Server], runs: int, sizes: dict[str, Size]
) -> tuple[Runs, dict[str, str]]:
    """Every work against every server, `runs` times, the servers taking turns.

    Gives the figures, and by work and server why there are none.
    """
    measured: Runs = {}
    failed: dict[str, str] = {}
    for name, size in sizes.items():
        for run in range(runs):
            for server in servers:
                title = f"{name} {server.name}"
                if name in server.skips or title in failed:
                    continue
                try:
                    figures = measure(server, WORKS[name], size)
                except FAILURES as error:
                    failed[title] = f"{type(error).__name__}: {error}"
                    measured.pop((name, server.name), None)
                    print(f"  {title} failed: {failed[title]}", file=sys.stderr)
                    continue
                measured.setdefault((name, server.name), []).append(figures)
                told = "  ".join(f"{key} {tell(value)}" for key, value in figures.items())
                print(f"  {title} {run + 1}/{runs}: {told}", file=sys.stderr)
    return measured, failed


def tell(value: float) -> str:
    """A figure with three digits or more, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def medians(measured: Runs, to: str) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """By work, figure and server: the median, and the median of its ratios to the reference's."""
    told: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for (work, server), runs in measured.items():
        reference = measured.get((work, to))
        for figure in runs[0]:
            values = [run[figure] for run in runs]
            cell = {"median": statistics.median(values)}
            if reference and server != to:
                pairs = zip(values, [run[figure] for run in reference], strict=True)
                if ratios := [a / b for a, b in pairs if b]:
                    cell["ratio"] = statistics.median(ratios)
            told.setdefault(work, {}).setdefault(figure, {})[server] = cell
    return told


def reference(servers: Sequence[str]) -> str:
    """The server that the others are told in proportion to."""
    return next((name for name in servers if name == REFERENCE), next(iter(servers), REFERENCE))


def table(servers: Sequence[str], measured: Runs) -> str:
    """Works and figures down, servers across; in brackets the ratio to Redis, else the first."""
    lines = [["work", "figure", *servers]]
    for work, figures in medians(measured, reference(servers)).items():
        for figure, cells in figures.items():
            line = [work, figure]
            for server in servers:
                cell = cells.get(server)
                ratio = f" ({cell['ratio']:.2f})" if cell and "ratio" in cell else ""
                line.append(tell(cell["median"]) + ratio if cell else "-")
            lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if at < 2 else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    works = "\n".join(f"  {name:12} {work.title}" for name, work in WORKS.items())
    works += (
        f"\n  {CEILING:12} what the load programs could do: mqks beside a peer that only counts"
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares message servers on this machine.",
        epilog=f"works:\n{works}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("works", nargs="*", metavar="work", help="all when none is named")
    parser.add_argument(
        "--servers", help=f"of {', '.join(SERVERS)}; default: all brokers of one machine"
    )
    parser.add_argument("--runs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--count", type=int, help="messages, instead of the work's own number")
    parser.add_argument("--payload-bytes", type=int, help="instead of the work's own, mostly 100")
    parser.add_argument(
        "--serve-flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="of mqks serve, as one word: --serve-flags='--memory-bytes 64MiB'",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="also measure the mqks that this Python has installed; may be repeated",
    )
    parser.add_argument("--tiny", action="store_true", help="one small run, for correctness alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    chosen = parser.parse_args(argv)
    servers = [name for name in SERVERS if name != "sink" and not SERVERS[name].is_cluster]
    if CEILING in chosen.works:
        servers = ["mqks", "sink"]
        chosen.works = [name for name in WORKS if name not in SERVERS["sink"].skips]
    chosen.works = chosen.works or list(WORKS)
    chosen.servers = chosen.servers.split(",") if chosen.servers else servers
    for kind, names, known in (("work", chosen.works, WORKS), ("server", chosen.servers, SERVERS)):
        for name in names:
            if name not in known:
                parser.error(f"no {kind} {name}; there are {', '.join(known)}")
    return chosen


def size_of(work: Work, chosen: argparse.Namespace) -> Size:
    """The work's size, as changed on the command line."""
    size = work.tiny if chosen.tiny else work.full
    if chosen.payload_bytes:
        size = replace(size, payload_bytes=chosen.payload_bytes)
    return replace(size, count=chosen.count) if chosen.count else size


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    # The servers are ended when a run is ended from outside, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    chosen = arguments(argv)
    skipped = {name: why for name in chosen.servers if (why := SERVERS[name].missing())}
    for name, why in skipped.items():
        print(f"{name} is skipped: {why}", file=sys.stderr)
    mqks = Mqks("mqks", *chosen.serve_flags)
    known = SERVERS | {"mqks": mqks}
    servers = [known[name] for name in chosen.servers if name not in skipped]
    servers += [mqks.run_by(python) for python in chosen.python]
    ours = [each for each in servers if isinstance(each, Mqks) and not isinstance(each, Sink)]
    built = {server.name: which(server) for server in ours}
    sizes = {name: size_of(WORKS[name], chosen) for name in chosen.works}
    measured, failed = measure_all(servers, 1 if chosen.tiny else chosen.runs, sizes)
    names = [server.name for server in servers]
    print(table(names, measured))
    for name, told_by_it in built.items():
        print(f"{name} is {told_by_it}")
    if chosen.json:
        told = {
            "serve_flags": chosen.serve_flags,
            "mqks": built,
            "skipped": skipped,
            "failed": failed,
            "sizes": {name: asdict(size) for name, size in sizes.items()},
            "medians": medians(measured, reference(names)),
            "runs": {f"{work} {server}": runs for (work, server), runs in measured.items()},
        }
        chosen.json.write_text(json.dumps(told, indent=2) + "\n")
    if failed:
        sys.exit("failed: " + ", ".join(failed))
