"""Pytest fixtures for programs that talk to MQKS: a real broker each time, on a temporary database.

Put `pytest_plugins = ["mqks.testing"]` into the topmost conftest.py. `mqks_broker` runs in a thread
of the test's process, `mqks_broker_process` in a process of its own; both are stopped as SIGTERM
would stop them, and can be stopped and started again within a test.

The one rule: nothing here waits without a limit.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from mqks.server.server import serve
from mqks.settings import Settings

WAIT_S = 20.0
_LISTENING = re.compile(r"event=listening .*?address=127\.0\.0\.1:(\d+)")


class Broker:
    """A broker in a thread of this process; a context in which it runs.

    `settings` are those of mqks.toml. Between `stop` and `start` the port stays the same.
    """

    def __init__(self, db: Path, **settings: Any) -> None:
        self.settings = Settings(db=db, **{"port": 0, **settings})

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
            self._ended, port = portal.start_task(serve, self.settings, lambda _: stopping.wait())
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class BrokerProcess:
    """`mqks serve` as a process; a context in which it runs. `flags` go to its command line."""

    def __init__(self, db: Path, *flags: str) -> None:
        self.port = 0
        self.log = db.with_suffix(".log")
        self._command = [sys.executable, "-m", "mqks", "serve", "--db", str(db), *flags]

    @property
    def url(self) -> str:
        return f"mqks://127.0.0.1:{self.port}"

    def start(self) -> None:
        # Settings come from the environment, too, and those of whoever runs the tests must not.
        environ = {key: value for key, value in os.environ.items() if not key.startswith("MQKS_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
            )
        limit_s = time.monotonic() + WAIT_S
        while not (found := _LISTENING.search(self.log.read_text(errors="replace"))):
            if self._process.poll() is not None or time.monotonic() > limit_s:
                self.kill()
                raise RuntimeError(f"the broker does not listen; its log:\n{self.log.read_text()}")
            time.sleep(0.005)
        self.port = int(found[1])

    def stop(self) -> None:
        """SIGTERM, if it runs, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, if it runs, and wait."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(how)
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(WAIT_S)
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


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
