r"""A console: commands as a person types them, what they show, and terminals.

    $ mqks publish e x --id m
    m
    $ printf 'a\n' | mqks publish f - --mandatory
    mqks: the server refused line 1, …: no queue is bound to 'f'
    [65]

After a command come its output, its errors, which are lines that begin with `mqks: ` or, where the
command line was not understood, all, and its exit code if it is not 0. `…` is whatever is there, as
on pages (`tests/kit/typist.py`), and `# ` begins a comment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

from mqks import blocking
from tests.kit import forks
from tests.kit.typist import Block, commands, pattern
from tests.kit.waiting import WAIT_S

MQKS = [sys.executable, "-m", "mqks"]


class Console:
    """Runs commands in a directory, against one server or none."""

    def __init__(self, directory: Path, url: str = "", **environment: str) -> None:
        self.directory, self.url = directory, url
        self.environ = {"TERM": "dumb", "COLUMNS": "200"} | environment
        if url:
            self.environ["MQKS_URL"] = url

    def _all(self) -> Mapping[str, str]:
        return os.environ | self.environ

    def __call__(self, *words: object, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        command = [*MQKS, *map(str, words)]
        return forks.run(command, stdin, self._all(), self.directory)

    def start(self, *words: object, **streams: Any) -> subprocess.Popen[bytes]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        command = [*MQKS, *map(str, words)]
        return subprocess.Popen(command, env=self._all(), cwd=self.directory, **streams)

    def out(self, *words: object, stdin: bytes = b"") -> str:
        """What a command prints that does not fail."""
        code, out, err = self(*words, stdin=stdin)
        assert (code, err) == (0, b"")
        return out.decode(errors="surrogateescape")

    def rows(self, *words: object) -> list[Any]:
        return [*map(json.loads, self.out(*words, "--json").splitlines())]

    def play(self, text: str, **names: object) -> None:
        """Type the commands, and compare what they show; each of `names` stands for its value."""
        for name, value in names.items():
            text = text.replace(name, str(value))
        lines = [line for line in dedent(text).splitlines() if line and not line.startswith("# ")]
        for command, shown in commands(Block("console", "", lines)):
            before, _, line = command.rpartition("mqks ")
            given = shlex.split(before)[1].encode().decode("unicode_escape") if before else ""
            code = 0
            if shown and (wanted := re.fullmatch(r"\[(\d+)\]", shown[-1])):
                code = int(wanted[1])
                shown.pop()
            ended, out, err = self(*shlex.split(line), stdin=given.encode("latin-1"))
            errors = [each for each in shown if each.startswith("mqks: ") or code == os.EX_USAGE]
            output = [each for each in shown if each not in errors]
            assert ended == code, (command, out, err)
            if code == os.EX_USAGE:  # In a box, of which a part is told.
                errors = ["…", f"…{errors[0]}…", "…"] if errors else ["…"]
            for expected, told in ((output, out), (errors, err)):
                assert pattern(expected).fullmatch(told.decode()), (command, expected, told)

    # -- the queue q, as many tests want it

    def subscribe(self) -> None:
        with blocking.connect(self.url) as client:
            client.subscribe("q", ["e"])

    def ready(self, queue: str = "q") -> int:
        with blocking.connect(self.url) as client:
            return int(client.evaluate(f"len(state.queues['{queue}'])"))

    def rest(self, queue: str = "q") -> list[bytes]:
        """The data of all that waits there, taken away."""
        count = self.ready(queue)
        with blocking.connect(self.url) as client, client.consume(queue, auto_ack=True) as consumer:
            return [consumer.receive(WAIT_S).data for _ in range(count)]


class Terminal:
    """A command on a terminal of its own, of 24 lines; its standard input may be another one."""

    def __init__(
        self, *command: str, columns: int = 80, stdin: int | None = None, **environment: str
    ) -> None:
        self._ours, self._theirs = os.openpty()
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, size)
        self.before, self.seen = self.now, b""
        environment = {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "24", **environment}
        streams = self._theirs if stdin is None else stdin, self._theirs, self._theirs
        self.process = forks.Forked(command, {**os.environ, **environment}, streams)

    @property
    def now(self) -> list[object]:
        """How the terminal is set."""
        return termios.tcgetattr(self._theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, wanted: bytes) -> bytes:
        """Read until this pattern has come; what came from here on."""
        start = len(self.seen)
        limit_s = time.monotonic() + WAIT_S
        while not re.search(wanted, self.seen[start:], re.DOTALL):
            left_s = limit_s - time.monotonic()
            assert left_s > 0, f"there is no {wanted!r} in {self.seen[start:]!r}"
            if select.select([self._ours], [], [], left_s)[0]:
                self.seen += os.read(self._ours, 65536)
        return self.seen[start:]

    def end(self) -> int:
        """Read all that it shows; its exit code."""
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            if select.select([self._ours], [], [], 0.05)[0]:
                self.seen += os.read(self._ours, 65536)
        return self.process.wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._ours)
        os.close(self._theirs)
