"""Pytest fixtures for programs that talk to MQKS: a real broker each time, on a temporary database.

Put `pytest_plugins = ["mqks.testing"]` into the topmost conftest.py. `mqks_broker` runs in a thread
of the test's process, `mqks_broker_process` in a process of its own; both are stopped as SIGTERM
would stop them, and can be stopped and started again within a test.

`Broker` and `BrokerProcess` can be used without pytest: only the fixtures need it.

The one rule: nothing here waits without a limit.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
from anyio.from_thread import start_blocking_portal

from mqks.journal.default_store import open_store
from mqks.server.running import serve
from mqks.settings import DatabaseUrl, Settings

try:
    import pytest
except ModuleNotFoundError:
    pytest = None  # type: ignore[assignment]

WAIT_S = 120.0
LOG_LINES_SHOWN = 40
_LISTENING = re.compile(r"\bevent=listening .*?address=([^\s/]+):(\d+)")


class Broker:
    """A broker in a thread of this process; a context in which it runs.

    `settings` are those of mqks.toml; the web page is off by default. Between `stop` and `start`
    the port stays the same.
    """

    open_store = staticmethod(open_store)

    def __init__(self, db: Path | DatabaseUrl, **settings: Any) -> None:
        self.settings = Settings(db=db, **{"port": 0, "page": "off", **settings})

    @property
    def port(self) -> int:
        return self.settings.port

    @property
    def url(self) -> str:
        return f"mqks://127.0.0.1:{self.port}"

    def start(self) -> None:
        with ExitStack() as starting:
            portal = starting.enter_context(start_blocking_portal("asyncio"))
            stopping = portal.call(anyio.Event)
            start = partial(serve, open_store=self.open_store)
            self._ended, port = portal.start_task(start, self.settings, lambda _: stopping.wait())
            self.settings = replace(self.settings, port=port)
            starting.callback(lambda: self._ended.result(WAIT_S))
            starting.callback(portal.call, stopping.set)
            self._running = starting.pop_all()

    def stop(self) -> None:
        """Stop it, if it runs."""
        self._running.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()


class BrokerProcess:
    """`mqks serve` as a process; a context in which it runs.

    `flags` are added to its command line, `environment` to its environment; the web page is off by
    default. Between `stop` and `start` the port stays the same. An exception that leaves the
    context gets the end of the broker's log as a note.
    """

    def __init__(
        self, db: Path | str, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        # Settings in the environment of the test run must not change this broker.
        inherited = {key: value for key, value in os.environ.items() if key[:5] != "MQKS_"}
        self._environment = inherited | dict(environment or {})
        self._command = [sys.executable, "-m", "mqks", "serve", "--db", str(db)]
        self._flags = "--page", "off", *flags
        self._inherited: list[int] = []
        self._address = "127.0.0.1", 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on; waits until it listens."""
        self._listens_or_ended.wait(WAIT_S)
        if not self._listens:
            self.kill()
            raise RuntimeError(f"the broker does not listen; its log:\n{self.log}")
        return self._address

    @property
    def port(self) -> int:
        return self._address[1]

    @property
    def url(self) -> str:
        return "mqks://{}:{}".format(*self._address)

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Its log since it was started."""
        return "\n".join(self._log)

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process, from Linux."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def launch(self) -> None:
        """Start it, unless it runs, without waiting until it listens."""
        if self.is_running:
            return
        self._log: list[str] = []
        self._listens = False
        self._listens_or_ended = threading.Event()
        self._process = self._spawn([*self._command, "--port", str(self.port), *self._flags])
        self._log_thread = threading.Thread(target=self._read_log, daemon=True)
        self._log_thread.start()

    def _spawn(self, command: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            pass_fds=self._inherited,
            text=True,
            errors="backslashreplace",
        )

    def _read_log(self) -> None:
        assert self._started.stdout is not None
        with self._started.stdout as lines:
            for line in lines:
                self._log.append(line.rstrip("\n"))
                if not self._listens and (found := _LISTENING.search(line)):
                    self._address = found[1], int(found[2])
                    self._listens = True
                    self._listens_or_ended.set()
        self._listens_or_ended.set()

    def start(self) -> None:
        """Start it, unless it runs, and wait until it listens."""
        self.launch()
        _ = self.address

    def stop(self) -> int:
        """Send SIGTERM, if it runs; return the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """Send SIGKILL, if it runs; return the exit code."""
        return self._end(signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; return the exit code. If it does not end in time, kill it and fail."""
        try:
            code = self._started.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._started.kill()
            self._started.wait(WAIT_S)
            raise RuntimeError(f"the broker does not end; its log:\n{self.log}") from None
        self._log_thread.join(WAIT_S)
        return code

    @property
    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the broker was not started")
        return self._process

    def _end(self, how: signal.Signals) -> int:
        self._started.send_signal(how)  # Does nothing to one that has ended.
        return self.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()
        if isinstance(error, BaseException):
            end = "\n".join(self.log.splitlines()[-LOG_LINES_SHOWN:])
            error.add_note(f"end of the broker's log:\n{end}")


if pytest is not None:

    @pytest.fixture
    def mqks_broker(tmp_path: Path) -> Iterator[Broker]:
        """A broker in this process; `mqks_broker.url` is what to connect to."""
        with Broker(tmp_path / "mqks.db") as broker:
            yield broker

    @pytest.fixture
    def mqks_broker_process(tmp_path: Path) -> Iterator[BrokerProcess]:
        """A broker in a process of its own; `mqks_broker_process.url` is what to connect to."""
        with BrokerProcess(tmp_path / "mqks.db") as broker:
            yield broker
