"""A server's process: started in a directory of its own, timed until it answers, ended by its id.

The one rule: only what was started here is ended, as a process group, so that no child stays.
"""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.flow import free_port
from benchmarks.servers.base import Server

START_S = 120.0
POLL_S = 0.001


def allow_open_files() -> None:
    """Lets this process and its children have as many connections as the system grants it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def spawn(
    command: list[str], output: IO[bytes], directory: Path | None = None
) -> "subprocess.Popen[bytes]":
    """A process of a group of its own. Its Python finds what this one finds, unless its flags say
    otherwise."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


@contextmanager
def peer(command: list[str], directory: Path, port: int) -> "Iterator[subprocess.Popen[bytes]]":
    """A program that listens on this port, started in the directory and killed at the end."""
    with (directory / "told").open("ab") as output:
        process = spawn(command, output, directory)
    try:
        until(lambda: accepts(port))
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(look: Callable[[], bool], step_s: float = POLL_S, limit_s: float = 240) -> None:
    ends_s = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > ends_s:
            raise TimeoutError("it does not happen")
        time.sleep(step_s)


def accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> dict[int, float]:
    """The CPU seconds of a process and its descendants, whose children are dead included."""
    children: dict[int, list[int]] = {}
    used = dict[int, float]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(name))
            used[int(name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return {pid: used.get(pid, 0.0) for pid in pids}


def cpu_s(root: int) -> float:
    return sum(tree(root).values())


class Running:
    """A server while it runs; a context that stops it."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.starts = 0
        self._cpu_s_before, self._peak_bytes_before = 0.0, 0
        allow_open_files()
        self.start()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end(signal.SIGTERM)

    def start(self) -> float:
        """Starts it and waits until it answers a ping; gives the seconds that took."""
        began = time.monotonic()
        proposed = free_port()
        self.starts += 1
        log = self.directory / f"log.{self.starts}"
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        with log.open("wb") as output:
            self.process = spawn(self.server.command(data, proposed), output)
        while time.monotonic() < began + START_S:
            if self.process.poll() is not None:
                break
            port = self.server.listening(log, proposed)
            if port is not None and self.answers(port):
                self.port = port
                return time.monotonic() - began
            time.sleep(POLL_S)
        self.end(signal.SIGKILL)
        raise RuntimeError(f"{self.server.name} does not start: {log.read_text()[-2000:]}")

    def answers(self, port: int) -> bool:
        """Whether it takes a connection and answers a ping over it."""
        try:
            with self.server.connect(port) as sock:
                return self.server.answers(sock)
        except OSError:
            return False

    def end(self, how: signal.Signals) -> None:
        """Sends a signal and waits until the process is gone."""
        if self.process.poll() is None:
            self._cpu_s_before, self._peak_bytes_before = self.cpu_s, self.peak_bytes
            os.killpg(self.process.pid, how)
            self.process.wait(timeout=60)

    def declare(self, queues: int = 1, manual_ack: bool = False) -> None:
        """Makes so many queues that all get every message."""
        with self.server.connect(self.port) as sock:
            self.server.declare(sock, queues, manual_ack)

    def written_bytes(self) -> int:
        """What it has had written to disks since it was started."""
        told = Path(f"/proc/{self.process.pid}/io").read_text()
        [found] = re.findall(r"^write_bytes: (\d+)$", told, re.MULTILINE)
        return int(found)

    @property
    def cpu_s(self) -> float:
        """The processor time of all its starts, of the user and of the system."""
        return self._cpu_s_before + self._used()[0]

    @property
    def peak_bytes(self) -> int:
        """The most resident memory of all its starts."""
        return max(self._peak_bytes_before, self._used()[1])

    def _used(self) -> tuple[float, int]:
        place = Path(f"/proc/{self.process.pid}")
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        peak = re.search(r"^VmHWM:\s+(\d+) kB", (place / "status").read_text(), re.MULTILINE)
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK"), int(peak[1]) * 1024 if peak else 0
