"""A publisher over very many connections: `talk.c`, which is far from its own ceiling where a
program in Python is not.

The one rule: the connections and the bytes are the server's own, so every server can be talked to;
what came back is checked here, as in `load.publish`.
"""

import shutil
import subprocess
import tempfile
from array import array
from pathlib import Path

from benchmarks.flow import Flow, Stalled
from benchmarks.load import Gate, Report
from benchmarks.messages import Messages
from benchmarks.servers.base import Server

COMPILER = "cc"
SOURCE = Path(__file__).with_name("talk.c")


def missing() -> str | None:
    """Why it cannot run here, or None when it can."""
    return None if shutil.which(COMPILER) else f"{COMPILER}, a C compiler, is not installed"


def talk(server: Server, port: int, gate: Gate, messages: Messages, window: int) -> Report:
    """Publishes over one connection per publisher, each with at most `window` unconfirmed."""
    flows = [
        server.publisher(server.connect(port), messages.of(publisher), window)
        for publisher in messages.publishers
    ]
    if any(type(flow) is not Flow for flow in flows):
        raise ValueError(f"the replies of {server.name} are not told by a mark")
    with tempfile.TemporaryDirectory(prefix="mqks-talk-") as name:
        directory = Path(name)
        report, replies = _run(directory, flows, messages, window, gate)
    for publisher, raw in zip(messages.publishers, replies, strict=True):
        server.check_confirms(raw, messages.of(publisher), window)
    return report


def _run(
    directory: Path, flows: list[Flow], messages: Messages, window: int, gate: Gate
) -> tuple[Report, list[bytes]]:
    program, requests = directory / "talk", directory / "requests"
    replies, times = directory / "replies", directory / "times"
    subprocess.run([COMPILER, "-O2", "-o", program, SOURCE], check=True)
    with requests.open("wb") as file:
        for flow in flows:
            file.write(flow.requests)
    first = flows[0]
    room = len(first.raw)
    numbers = window, first.width, messages.count, room, first.marks
    process = subprocess.Popen(
        [
            *(str(program), *map(str, numbers), first.mark.decode()),
            *(str(requests), str(replies), str(times)),
            *(str(flow.sock.fileno()) for flow in flows),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[flow.sock.fileno() for flow in flows],
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        gate()
        told, errors = process.communicate("go\n")
    if process.returncode:
        raise Stalled(f"the load program ended with {process.returncode}: {errors.strip()}")
    began, ended, cpu_s = map(float, told.split())
    seconds = array("d", times.read_bytes())
    data = replies.read_bytes()
    each = [data[n * room : (n + 1) * room].rstrip(b"\0") for n in range(len(flows))]
    return Report(began, ended, cpu_s, list(seconds)), each
