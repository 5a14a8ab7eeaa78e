r"""A console: commands as a person types them, what they show, and terminals.

    $ mqks publish e x --id m
    m
    $ printf 'a\n' | mqks publish f - --mandatory
    mqks: the server refused line 1, …: no queue is bound to 'f'
    [65]

After a command come its output, its errors, which are lines that begin with `mqks: ` or, where the
command line was not understood, all, and its exit code if it is not 0. `…` is whatever is there, as
on pages (`tests/kit/typist.py`), `\xff` a byte that is no text, and `# ` begins a comment. Commands
without mqks are the shell's. Between them clients speak, as in stories of the protocol: what `bob`
sends is `C bob: p ping x`, and `S bob: p ok x` the next line that he gets.
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
from contextlib import ExitStack, chdir
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import dedent
from typing import IO, Any, Self
from unittest.mock import patch

from mqks import blocking
from mqks.commands import main
from tests.kit import forks
from tests.kit.line_client import LineClient
from tests.kit.typist import Block, commands, pattern
from tests.kit.waiting import WAIT_S

MQKS = [sys.executable, "-m", "mqks"]


class Started:
    """A command that goes on; each of its streams is a pipe, unless it is given."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        directory: Path,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
    ) -> None:
        (its_in, to_it), (from_it, its_out), (told, its_err) = (os.pipe() for _ in range(3))
        reads = stdin.fileno() if stdin else its_in
        writes = stdout.fileno() if stdout else its_out
        self.process = forks.Forked(command, environment, (reads, writes, its_err), directory)
        for end in (its_in, its_out, its_err):
            os.close(end)
        self.stdin = open(to_it, "wb", 0)  # noqa: SIM115
        self.stdout = open(from_it, "rb", 0)  # noqa: SIM115
        self.stderr = open(told, "rb", 0)  # noqa: SIM115
        self.poll, self.wait = self.process.poll, self.process.wait
        self.kill, self.send_signal = self.process.kill, self.process.send_signal

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float = WAIT_S) -> tuple[bytes, bytes]:
        """What it still writes until it ends."""
        told = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if error is not None:
            self.kill()
        self.wait(WAIT_S)
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


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

    def start(self, *words: object, **streams: IO[bytes]) -> Started:
        return Started([*MQKS, *map(str, words)], self._all(), self.directory, **streams)

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
        lines = [f"$ {line}" if line.startswith("C ") else line for line in lines]
        with ExitStack() as stack:
            clients = dict[str, LineClient]()

            def client(name: str) -> LineClient:
                if name not in clients:
                    host, _, port = self.url.rpartition("/")[2].rpartition(":")
                    clients[name] = stack.enter_context(LineClient((host, int(port))))
                return clients[name]

            for command, shown in commands(Block("console", "", lines)):
                replies = [line for line in shown if line.startswith("S ")]
                speaks, _, said = command.partition(": ")
                if speaks.startswith("C "):
                    client(speaks[2:]).send(said.encode() + b"\n")
                else:
                    self._type(command, [line for line in shown if line not in replies])
                for line in replies:
                    name, _, told = line[2:].partition(": ")
                    said = client(name).line().decode(errors="backslashreplace")
                    assert pattern([told]).fullmatch(said + "\n"), (line, said)

    def _type(self, command: str, shown: list[str]) -> None:
        if "mqks " not in command:
            told = subprocess.check_output(["sh", "-c", command], cwd=self.directory, text=True)
            assert pattern(shown).fullmatch(told), (command, shown, told)
            return
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
        for expected, found in ((output, out), (errors, err)):
            told = found.decode(errors="backslashreplace")
            assert pattern(expected).fullmatch(told), (command, expected, told)

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


class Here(Console):
    """Commands run in this process: there are many, and a fork costs more than most of them do."""

    def __call__(self, *words: object, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        with ExitStack() as stack:
            files = [stack.enter_context(TemporaryFile()) for _ in range(3)]
            files[0].write(stdin)
            files[0].seek(0)
            for number, file in enumerate(files):
                stack.callback(os.close, before := os.dup(number))
                stack.callback(os.dup2, before, number)
                os.dup2(file.fileno(), number)
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                mode, errors = ("w", "backslashreplace") if number else ("r", "surrogateescape")
                stream = stack.enter_context(open(number, mode, errors=errors, closefd=False))
                stack.enter_context(patch.object(sys, name, stream))
            stack.enter_context(patch.dict(os.environ, self.environ))
            stack.enter_context(chdir(self.directory))
            code = main([*map(str, words)])
            sys.stdout.flush()
            sys.stderr.flush()
            for file in files:
                file.seek(0)
            return code, files[1].read(), files[2].read()


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
