"""What runs the recipes of docs/cookbook.md: a broker process, and a directory of programs.

The one rule: what runs is taken from the page, or from what it links to, as it stands there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from mqks import BlockingClient, blocking
from tests.kit import forks
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cookbook.md").read_text()
RECIPES = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.M))


class Program:
    """A process until exit, when it is killed; what it has printed so far are its `lines`."""

    def __init__(self, path: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._name = path.name
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", path.name, *arguments],
            cwd=path.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._threads = [
            threading.Thread(target=target.extend, args=(stream,), daemon=True)
            for target, stream in (
                (self.lines, map(str.rstrip, self.process.stdout)),
                (self.errors, self.process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def end(self, how: signal.Signals | None = None) -> int:
        """The exit code, after a signal or without; everything it has printed is in `lines`."""
        if how is not None:
            self.process.send_signal(how)
        code = self.process.wait(WAIT_S)
        for thread in self._threads:
            thread.join(WAIT_S)
        return code

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.end(signal.SIGKILL)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        if isinstance(error, BaseException):
            error.add_note(f"{self._name} has printed {self.lines} and {''.join(self.errors)}")


class Kitchen:
    """A broker, and a directory with the programs of the recipe that `take` has read last."""

    def __init__(self, broker: ServerProcess, directory: Path) -> None:
        self.broker = broker
        self._directory = directory
        directory.mkdir()
        self.environment = {
            **os.environ,
            "MQKS_URL": broker.url,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._shell: Iterator[str] = iter(())
        self.programs: dict[str, Path] = {}

    def take(self, recipe: str) -> None:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", RECIPES[recipe], re.M | re.S)
        assert {language for language, _ in blocks} <= {"sh", "python"}
        shell = [code for language, code in blocks if language == "sh"]
        self._shell = iter([step for code in shell for step in code.split("\n\n")])
        for code in [code for language, code in blocks if language == "python"]:
            named = re.match(r"# (\w+\.py)\n", code)
            assert named, "a program's first line is its name"
            path = self._directory / named[1]
            path.write_text(code)
            self.programs[named[1]] = path
        for link in re.findall(r"\]\((\S+\.py)\)", RECIPES[recipe]):
            path = self._directory / Path(link).name
            path.write_text((DOCS / link).read_text())
            self.programs[path.name] = path

    def sh(self) -> list[str]:
        """Run the recipe's next shell commands, up to an empty line; all must succeed. What they
        print."""
        done = subprocess.run(
            ["bash", "-euc", next(self._shell)],
            cwd=self._directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert (done.stderr, done.returncode) == ("", 0)
        return done.stdout.splitlines()

    def start(self, name: str, *arguments: str) -> Program:
        return Program(self.programs[name], arguments, self.environment)

    def run(self, name: str, *arguments: str) -> list[str]:
        """What a program prints that ends by itself, with 0."""
        with self.start(name, *arguments) as program:
            assert (program.end(), program.errors) == (0, [])
        return program.lines

    def killed(self, line: int, name: str, *arguments: str) -> tuple[str, list[str]]:
        """Run a program and kill it before the so manyth line that it executes; that line, empty
        if it has ended sooner, and what it has printed."""
        path = self.programs[name]
        command = [sys.executable, "-m", "tests.kit.killed_at", str(line), str(path), *arguments]
        with (
            open(os.devnull) as none,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            streams = none.fileno(), out.fileno(), err.fileno()
            process = forks.Forked(command, self.environment, streams, self._directory)
            try:
                code = process.wait(WAIT_S)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            printed, told = out.read().splitlines(), err.read()
        assert code == (-signal.SIGKILL if told else 0), told
        return (path.read_text().splitlines()[int(told) - 1].strip() if told else ""), printed

    def client(self) -> BlockingClient:
        return blocking.connect(self.broker.url)

    def bounce(self) -> None:
        """Kill the broker, and start it again."""
        self.broker.kill()
        self.broker.start()
