"""The recording in the README: `python docs/pictures/recording.py`.

The one rule: a real shell, a real broker and a real browser; only waiting is shortened.
"""

import os
import pty
import re
import select
import shutil
import signal
import tempfile
import time
from base64 import b64encode
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = (
    "python3 -m venv mqks && . mqks/bin/activate",
    f"pip install '{ROOT}[server]'",
    "mqks serve --page full &",
    "mqks subscribe jobs job.new",
    "seq 100000 | mqks publish job.new -",
    "mqks consume jobs --count 3",
    "kill -9 %1",
    "mqks serve --page full &",
    "mqks inspect queues",
)
LIMIT_S = 180
SETTLE_S = 2.5
"""What runs in the background has said by then what it says."""
SHOWN_S = {"publish": 0.8, "&": 1.4, "pip": 1.4}
PAUSE_S, READ_S, PAGE_S = 0.7, 1.6, 7.0
"""Before a command's output, after it, and at the end."""
COLUMNS, ROWS, LINE, CHAR = 104, 24, 19, 8.1
WIDTH, HEIGHT = round(COLUMNS * CHAR) + 32, ROWS * LINE + 32
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Shown(NamedTuple):
    at_s: float
    line: str


class Shell:
    """A bash of its own, in a directory that nobody knows."""

    def __init__(self, directory: str) -> None:
        self.pid, self._file = pty.fork()
        if not self.pid:
            os.chdir(directory)
            kept = {name: os.environ[name] for name in ("PATH", "HOME")}
            kept |= {"PS1": "$ ", "TERM": "dumb", "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
            kept |= {"VIRTUAL_ENV_DISABLE_PROMPT": "1", "PIP_QUIET": "2", "MQKS_COMPILED": "0"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], kept)
        self._read(1.0)

    def run(self, command: str) -> list[str]:
        """The lines that appear behind the command."""
        os.write(self._file, command.encode() + b"\n")
        text, until_s = "", time.monotonic() + LIMIT_S
        while "\n$ " not in text and time.monotonic() < until_s:
            text += self._read(0.3)
        text += self._read(SETTLE_S) if command.endswith("&") else ""
        lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
        return [line for line in lines[1:] if line.removeprefix("$ ")]

    def _read(self, quiet_s: float) -> str:
        told = b""
        while select.select([self._file], [], [], quiet_s)[0]:
            with suppress(OSError):
                told += os.read(self._file, 65536)
        return CONTROLS.sub("", told.decode())

    def close(self) -> None:
        os.kill(self.pid, signal.SIGHUP)
        os.waitpid(self.pid, 0)


def recorded(directory: str) -> tuple[list[Shown], bytes]:
    """What is on the screen, and a picture of the page."""
    shell, at_s, shown = Shell(directory), 0.5, list[Shown]()
    try:
        for command in STEPS:
            shown.append(Shown(at_s, f"$ {command.replace(str(ROOT), '.')}"))
            at_s += next((s for word, s in SHOWN_S.items() if word in command), PAUSE_S)
            lines = shell.run(command)
            shown += [Shown(at_s, line.removeprefix("$ ")) for line in lines]
            at_s += READ_S
        return shown, page()
    finally:
        shell.run("kill %1 %2; wait")
        shell.close()


def page() -> bytes:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        view.goto("http://127.0.0.1:25080/queue?name=jobs")
        time.sleep(5)  # The chart has some points.
        return view.screenshot(type="jpeg", quality=72)


def animated(shown: list[Shown], picture: bytes) -> str:
    ends_s = shown[-1].at_s + READ_S
    whole_s = ends_s + PAGE_S

    def steps(name: str, property: str, *values: tuple[float, object]) -> str:
        frames = "".join(f"{at / whole_s:.2%}{{{property}:{value}}}" for at, value in values)
        rule = f"animation:{name} {whole_s:.1f}s step-end infinite"
        return f"@keyframes {name}{{{frames}}}.{name}{{{rule}}}"

    rules = [steps("page", "opacity", (0, 0), (ends_s, 1), (whole_s, 1))]
    scrolls, texts = [(0.0, "none")], list[str]()
    for row, (at_s, line) in enumerate(shown):
        rules.append(steps(f"l{row}", "opacity", (0, 0), (at_s, 1), (whole_s, 1)))
        if row >= ROWS:
            scrolls.append((at_s, f"translateY({(ROWS - 1 - row) * LINE}px)"))
        kind = " c" if line.startswith("$ ") else ""
        cut = line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
        texts.append(
            f'<text class="l{row}{kind}" x="16" y="{30 + row * LINE}">{escape(cut)}</text>'
        )
    rules.append(steps("all", "transform", *scrolls, (whole_s, scrolls[-1][1])))
    image = b64encode(picture).decode()
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
<title>Install, serve, publish 100,000 messages, work, kill -9, and nothing is lost</title>
<!-- Made by docs/pictures/recording.py from real runs. -->
<style>
text{{font:13.5px "DejaVu Sans Mono",Menlo,Consolas,monospace;fill:#c9d1d9;white-space:pre}}
.c{{fill:#7ee787}}
{chr(10).join(rules)}
@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}.page{{opacity:0}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<g class="all">
{chr(10).join(texts)}
</g>
<image class="page" width="{WIDTH}" height="{HEIGHT}" href="data:image/jpeg;base64,{image}"/>
</svg>
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        (HERE / "recording.svg").write_text(animated(*recorded(directory)))


if __name__ == "__main__":
    main()
