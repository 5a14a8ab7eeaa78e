"""Types the examples of a page in order, as a person would, and compares what the page shows.

All of a page's blocks go to one broker, in one directory and one Python session; terminals that the
page opens stay open. What a block is, its fence says:

    ```sh        commands, one in each line (or more, with a backslash at the end)
    ```console   commands after `$`, and what they print; `^C` in a line of its own is typed, too
    ```python    goes to the Python session, unless its first line names a file: `# mailer.py`,
                 or `# shop/settings.py, at its end`
    ```js        a file that its first line names: `// jobs.mjs`
    ```output    what the last block printed, or now appears in the section's first terminal

All other kinds are not typed. In what is shown, `…` is whatever is there, in a line of its own any
number of lines, and so are error ids and ages.

The one rule: nothing is typed that is not on the page, but for a ping at the end of a dialogue.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from tests.kit.waiting import WAIT_S

HERE = Path(__file__).parent
LONG_S = 5 * WAIT_S
"""A job of Spark on a busy machine."""
NOT_TYPED = "apt ", "make ", "pip ", "python3 -m venv ", ". .venv/", "mqks serve ", "git clone "
"""Beginnings of commands: those that install, and that start the server, which runs already."""
LIVE = {"mqks top"}
"""Ended by Ctrl-C once they show something."""
FENCES = {"sh", "console", "python", "js", "output", "text", "ini", "toml", "mermaid"}
NETCAT = f'#!/bin/sh\nexec {sys.executable} {HERE / "netcat.py"} "$@"\n'
SPARK = re.compile(r"mqks pipeline|mqks\.pipeline|\bspark\b|\"mqks\"|\blake\b")


class Block(NamedTuple):
    fence: str
    section: str
    lines: list[str]

    @property
    def needs_spark(self) -> bool:
        return any(map(SPARK.search, self.lines))


def blocks(text: str) -> Iterator[Block]:
    section, fence, lines = "", "", list[str]()
    for line in text.splitlines():
        if match := re.fullmatch(r" *```(\w*)", line):
            if fence:
                yield Block(fence, section, lines)
                fence, lines = "", []
            else:
                fence = match[1]
                assert fence in FENCES, f"{line!r} says not whether it is typed"
        elif fence:
            lines.append(line)
        elif line.startswith("## "):
            section = line.removeprefix("## ")


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block, and the lines that it shows."""
    command, shown, goes_on = "", list[str](), False
    for line in block.lines:
        if goes_on:
            command += "\n" + line
        elif block.fence == "sh" or line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line.removeprefix("$ "), []
        else:
            shown.append(line)
        goes_on = command.endswith("\\") and not shown
    if command:
        yield command, shown


def pattern(shown: list[str]) -> re.Pattern[str]:
    """What is shown, as a pattern over what is printed."""
    told = ""
    for line in shown:
        if line.strip() == "…":
            told += r"(?:.*\n)*?"
            continue
        line = re.escape(line.rstrip()).replace("…", ".*")
        line = re.sub(r"(?:\\ )+", r"\\s+", line)
        line = re.sub(r"\b[0-9a-f]{24}\b", "[0-9a-f]{24}", line)
        told += line + r"[ \t]*\n"
    return re.compile(told)


class Running:
    """A process with one stream of output, of which nothing is waited for too long."""

    def __init__(self, arguments: list[str], typist: Typist) -> None:
        self._process = subprocess.Popen(
            arguments,
            cwd=typist.directory,
            env=typist.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed = ""
        self._limit_s = typist.limit_s
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.printed += line
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait_for(self, expected: re.Pattern[str]) -> str:
        """Wait until this is what has been printed since the last time; gives it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or expected.fullmatch(self.printed), self._limit_s
            )
            printed, self.printed = self.printed, ""
        assert expected.fullmatch(printed), f"{expected.pattern!r} is shown, not:\n{printed}"
        return printed

    def line(self, expected: re.Pattern[str]) -> None:
        """Wait for one more line, which must be this."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or "\n" in self.printed, WAIT_S)
            first, end, self.printed = self.printed.partition("\n")
        assert expected.fullmatch(first + end), f"{expected.pattern!r} is shown, not {first!r}"

    def wait(self) -> tuple[int, str]:
        """Exit code, and what it printed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_over, self._limit_s), (
                f"it does not end; it has printed:\n{self.printed}"
            )
        return self._process.wait(WAIT_S), self.printed

    def interrupt(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        with suppress(BrokenPipeError):  # What was typed last may not have been read.
            assert self._process.stdin is not None
            self._process.stdin.close()


class Typist:
    """A context in which pages are typed; what they started is killed at its end."""

    def __init__(self, directory: Path, url: str, *, with_spark: bool) -> None:
        self.directory = directory
        self._url, self._with_spark = url, with_spark
        self.limit_s = LONG_S if with_spark else WAIT_S
        programs = directory / "bin"
        programs.mkdir()
        (programs / "nc").write_text(NETCAT)
        (programs / "nc").chmod(0o755)
        path = f"{Path(sys.executable).parent}:{programs}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "MQKS_URL": url, "COLUMNS": "200"}
        self.environment["PYTHONUNBUFFERED"] = "1"  # As in a terminal.
        self._running: list[Running] = []
        self._python: Running | None = None
        self._terminals: dict[str, Running] = {}
        self._printed = ""
        self.typed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for running in self._running:
            running.kill()

    def type(self, text: str) -> None:
        """Type all blocks of a page."""
        is_skipped = False
        for block in blocks(text):
            if block.fence != "output":
                is_skipped = block.needs_spark and not self._with_spark
            if is_skipped:
                continue
            match block.fence:
                case "sh" | "console":
                    for command, shown in commands(block):
                        self._command(command, shown, block)
                case "python" | "js":
                    self._program(block)
                case "output":
                    self._output(block)

    def _here(self, text: str) -> str:
        """With this broker's address in the place of the one on the page."""
        host, port = self._url.removeprefix("mqks://").split(":")
        text = text.replace("localhost 25000", f"{host} {port}")
        return re.sub(r"mqks://(?:localhost|127\.0\.0\.1)(?::25000)?(?=[\"'\s])", self._url, text)

    def _started(self, arguments: list[str]) -> Running:
        running = Running(arguments, self)
        self._running.append(running)
        self.typed += 1
        return running

    def _command(self, command: str, shown: list[str], block: Block) -> None:
        if command.startswith(("#", *NOT_TYPED)) or not command.strip():
            return
        running = self._started(["bash", "-c", self._here(command)])
        if command == "nc localhost 25000":
            self._terminals.setdefault(block.section, running)
            self._dialogue(running, shown)
        elif shown[-1:] == ["^C"]:
            running.wait_for(pattern(shown[:-1]))
            running.interrupt()
            running.wait()
        elif command.partition(" #")[0].strip() in LIVE:
            running.wait_for(re.compile(r"(?:.*\n)+"))
            running.interrupt()
            code, printed = running.wait()
            assert code == 0, printed
        else:
            code, printed = running.wait()
            fails = any(line.startswith("mqks: ") for line in shown)
            assert bool(code) == fails, f"{command}\nended with {code}:\n{printed}"
            if block.fence == "console":
                assert pattern(shown).fullmatch(printed), f"{command}\nprinted:\n{printed}"
            self._printed = printed

    def _dialogue(self, terminal: Running, lines: list[str]) -> None:
        """A line whose second word is `ok` or `error` is the server's, all others are typed."""
        for line in lines:
            if line.split()[1:2] in (["ok"], ["error"]):
                terminal.line(pattern([line]))
            else:
                terminal.type(line)
        terminal.type("typist ping")  # Whoever types takes his time.
        terminal.line(pattern(["typist ok"]))

    def _program(self, block: Block) -> None:
        first, text = block.lines[0], self._here("\n".join(block.lines))
        if match := re.fullmatch(r"(?:#|//) ([\w/]+\.(?:py|mjs))(, at its end)?", first):
            with (self.directory / match[1]).open("a" if match[2] else "w") as file:
                file.write(text + "\n")
            return
        if self._python is None:
            self._python = self._started([sys.executable, str(HERE / "typed_python.py")])
        self.typed += 1
        self._python.type(json.dumps(text))
        printed = self._python.wait_for(re.compile(r"(?:.*\n)*done\n"))
        self._printed = printed.removesuffix("done\n")

    def _output(self, block: Block) -> None:
        if terminal := self._terminals.get(block.section):
            for line in block.lines:
                terminal.line(pattern([line]))
        else:
            assert pattern(block.lines).fullmatch(self._printed), self._printed
