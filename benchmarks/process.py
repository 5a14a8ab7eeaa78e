"""A server's process: started in a directory of its own, timed until it answers, ended by its id.

The one rule: only what was started here is ended, as a process group, so that no child stays.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
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


def spawn(command: list[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """A process of a group of its own. Its Python finds what this one finds; another Python finds
    its own packages, and this checkout."""
    paths = sys.path if command[0] == sys.executable else [""]
    path = os.pathsep.join(p or os.getcwd() for p in paths)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


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
