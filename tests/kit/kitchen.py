"""What runs the recipes of docs/cookbook.md: a broker process, and a directory of programs.

The one rule: what runs is taken from the page, or from what it links to, as it stands there.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from mqks import BlockingClient, blocking
from tests.kit import forks
from tests.kit.program import Program, printed
from tests.kit.server_process import ServerProcess

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cookbook.md").read_text()
RECIPES = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.M))


class Kitchen:
    """A broker, and a directory with the programs of the recipe that `take` has read last."""

    def __init__(self, broker: ServerProcess, directory: Path) -> None:
        self.broker = broker
        self._directory = directory
        directory.mkdir()
        self.environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
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

    def begin(self, recipe: str) -> list[str]:
        """Take it, and run its first shell commands."""
        self.take(recipe)
        return self.sh()

    def sh(self) -> list[str]:
        """Run the recipe's next shell commands, up to an empty line; all must succeed. What they
        print."""
        command = ["bash", "-euc", next(self._shell)]
        return printed(command, self.broker.url, self._directory, **self.environment)

    def start(self, name: str, *arguments: str) -> Program:
        command = [sys.executable, "-W", "error", name, *arguments]
        return Program(command, self.broker.url, self._directory, **self.environment)

    def run(self, name: str, *arguments: str) -> list[str]:
        """What a program prints that ends by itself, with 0."""
        command = [sys.executable, "-W", "error", name, *arguments]
        return printed(command, self.broker.url, self._directory, **self.environment)

    def killed(self, line: int, name: str, *arguments: str) -> tuple[str, list[str]]:
        """Run a program and kill it before the so manyth line that it executes; that line, empty
        if it has ended sooner, and what it has printed."""
        path = self.programs[name]
        command = [sys.executable, "-m", "tests.kit.killed_at", str(line), str(path), *arguments]
        environment = os.environ | {"MQKS_URL": self.broker.url} | self.environment
        code, out, err = forks.run(command, b"", environment, self._directory)
        assert code == (-signal.SIGKILL if err else 0), err
        last = path.read_text().splitlines()[int(err) - 1].strip() if err else ""
        return last, out.decode().splitlines()

    def client(self) -> BlockingClient:
        return blocking.connect(self.broker.url)

    def bounce(self) -> None:
        """Kill the broker, and start it again."""
        self.broker.kill()
        self.broker.start()
