"""What a flood of strangers costs those who are known: a server that asks for credentials, one
client that has them and publishes with confirms, and a process full of others that have none.

    python -m benchmarks.flood [--seconds 6] [--connections 1500]

The one rule: it ends by itself within a minute, whatever the server does.
"""

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.process import allow_open_files
from mqks import users_file
from mqks.testing import BrokerProcess
from mqks.users import User, hash_password

TOKEN = "a-token-of-this-run"
PER_SECOND = 200
SECONDS_MAX = 8
FLOODS = {
    "none": b"",
    "nothing": b"",
    "garbage": b"x dance\n" * 32,
    "endless lines": b"x" * 65536,
    "pings": b"p ping\n" * 1000,
    "tokens": b"a auth guess\n" * 3,
    "passwords": b"a auth alice guess\n",
}


async def _knock(port: int, data: bytes, until: float, count: list[int]) -> None:
    """One stranger after the other: connect, send, wait until thrown out."""
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        count[0] += 1
        with contextlib.suppress(OSError):
            if data:
                writer.write(data)
            while await reader.read(65536):
                pass
        writer.transport.abort()


async def _flood(port: int, data: bytes, connections: int, seconds: float) -> int:
    count = [0]
    until = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(connections):
                    tasks.create_task(_knock(port, data, until, count))
    return count[0]


def attack(
    port: int, flood: str, connections: int, seconds: float, told: "multiprocessing.Queue[int]"
) -> None:
    allow_open_files()
    told.put(asyncio.run(_flood(port, FLOODS[flood], connections, seconds)))


def measure(port: int, seconds: float) -> list[float]:
    """Seconds from each publish to its confirm, on a connection that is known."""
    times = []
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _ask(sock, b"a auth --confirm %b\n" % TOKEN.encode())
        _ask(sock, b"s subscribe --confirm q e\n")
        _ask(sock, b"w delete_queue --confirm q --when-unused=60\n")
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            _ask(sock, b"m publish --confirm e %b\n" % (b"x" * 100))
            times.append(time.monotonic() - now)
            time.sleep(max(0.0, 1 / PER_SECOND - times[-1]))
    return times


def _ask(sock: socket.socket, line: bytes) -> None:
    sock.sendall(line)
    answer = sock.recv(4096)
    if not answer.endswith(b" ok \n"):
        raise RuntimeError(f"{line[:40]!r} was answered with {answer[:80]!r}")


def newcomer(port: int, seconds: float) -> tuple[list[float], int]:
    """How long others with a token take to come in during the flood, and how many could not."""
    times, refused = [], 0
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        try:
            with socket.create_connection(("127.0.0.1", port), 10) as sock:
                _ask(sock, b"a auth --confirm %b\n" % TOKEN.encode())
            times.append(time.monotonic() - now)
        except (OSError, RuntimeError):
            refused += 1
        time.sleep(0.05)
    return times, refused


@contextlib.contextmanager
def most(value: Callable[[], int]) -> Iterator[list[int]]:
    """The largest value seen while the body runs."""
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen[0] = max(seen[0], value())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def run(server: BrokerProcess, flood: str, connections: int, seconds: float) -> str:
    told: multiprocessing.Queue[int] = multiprocessing.Queue()
    attacker = multiprocessing.Process(
        target=attack, args=(server.port, flood, connections, seconds + 1, told), daemon=True
    )
    came: list[tuple[list[float], int]] = []
    visitor = threading.Thread(target=lambda: came.append(newcomer(server.port, seconds)))
    if flood != "none":
        attacker.start()
        time.sleep(0.5)
    with most(lambda: server.resident_bytes) as resident:
        visitor.start()
        times = sorted(measure(server.port, seconds))
        visitor.join()
    knocks = told.get(timeout=10) if flood != "none" else 0
    if attacker.pid is not None:
        attacker.join(10)
    entered, refused = came[0]
    entered.sort()
    return (
        f"{flood:<14} {knocks / (seconds + 1):>9.0f} {len(times):>9} "
        f"{_ms(times, 0.5)} {_ms(times, 0.99)} {_ms(entered, 0.5)} {_ms(entered, 1)} "
        f"{refused:>8} {resident[0] / 2**20:>8.0f}"
    )


def _ms(ordered: list[float], part: float) -> str:
    return f"{ordered[int((len(ordered) - 1) * part)] * 1000:>9.1f}" if ordered else f"{'-':>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help=f"Of each; {SECONDS_MAX} most.")
    parser.add_argument("--connections", type=int, default=1500)
    parser.add_argument("floods", nargs="*", choices=[[], *FLOODS], help="By default all.")
    given = parser.parse_args()
    allow_open_files()
    seconds = min(given.seconds, SECONDS_MAX, 50 / len(FLOODS) - 1.5)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        users = directory / "users"
        token = hashlib.sha256(TOKEN.encode()).hexdigest()
        password = hash_password("right", b"salt")
        everything = ["**"]
        users_file.write(
            users,
            [
                User("bot", token=token, publish=everything, consume=everything, admin=True),
                User("alice", password=password),
            ],
        )
        flags = ("--users", str(users), "--auth", "always")
        with BrokerProcess(directory / "mqks.db", *flags) as server:
            print(
                f"{'flood':<14} {'knocks/s':>9} {'confirms':>9} {'p50 ms':>9} {'p99 ms':>9} "
                f"{'login ms':>9} {'max ms':>9} {'refused':>8} {'RSS MiB':>8}"
            )
            for flood in given.floods or FLOODS:
                print(run(server, flood, given.connections, seconds), flush=True)


if __name__ == "__main__":
    main()
