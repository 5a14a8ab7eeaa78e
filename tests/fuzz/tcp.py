"""Mutated chunks over TCP against a real server: what only sockets, tasks and a disk can show.

The one rule: the server has to be there at the end, with nothing in its log that tells of a fault,
and answer whoever asks.
"""

import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from mqks.users import User, hash_token
from tests.fuzz import Finding
from tests.fuzz.mutations import Mutator
from tests.fuzz.steps import CORPUS, load
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

MEMORY: Final = "--memory-bytes", "64MiB", "--metadata-bytes-max", "64MiB"
MEMORY_BYTES_MAX: Final = 500 * 1024 * 1024
"""What the server may have resident with these limits, however much comes."""
CONNECTIONS: Final = 8
FAULTS: Final = re.compile(r"internal_error|Traceback|critical|lag_s=[1-9]\d", re.I)
_HEADER = re.compile(rb"[^ \n]+ ok --read epoch=\S+ runs=\d+ rows=\d+ next=\d+ bytes=(\d+)")
_REFUSED = re.compile(rb"- error [0-9a-f]{24}")
_LINE = re.compile(rb"[^ \n]+ (?:ok [^\n]*|error [0-9a-f]{24})")


class Wire:
    """One connection that sends what it is given and reads what it gets."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=60)
        self._socket.setblocking(False)
        self._replies = Replies()

    def send(self, data: bytes) -> int:
        """As much as goes at once; return how many lines, -1 when the server has closed."""
        try:
            return data[: self._socket.send(data)].count(b"\n")
        except BlockingIOError:
            return 0
        except OSError:
            return -1

    def read(self) -> bool:
        try:
            while data := self._socket.recv(1 << 20):
                self._replies.feed(data)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._socket.close()


class Replies:
    """Lines, and the bytes that an answer to `read` announces. Raises Finding for anything else."""

    def __init__(self) -> None:
        self._data = b""
        self._skip = 0

    def feed(self, data: bytes) -> None:
        self._data += data
        for line in self._lines():
            if found := _HEADER.fullmatch(line):
                self._skip = int(found[1])
            elif not _LINE.fullmatch(line):
                raise Finding(f"no reply: {line[:200]!r}")

    def _lines(self) -> Iterator[bytes]:
        while True:
            skipped = min(self._skip, len(self._data))
            self._skip -= skipped
            line, newline, rest = self._data[skipped:].partition(b"\n")
            if self._skip or not newline:
                self._data = self._data[skipped:]
                return
            self._data = rest
            yield line


def fuzz_over_tcp(directory: Path, seconds: float, seed: int) -> tuple[int, list[Exception]]:
    """How many lines were sent, and what was found."""
    chance = random.Random(f"{seed}:tcp")
    users = directory / "users.jsonl"
    users.write_text(
        User("admin", token=hash_token("token-of-admin"), publish=["**"], admin=True).line()
    )
    users.chmod(0o600)
    mutator = Mutator(load(CORPUS / "broker.txt"), chance)
    lines = 0
    with ServerProcess(directory / "mqks.db", "--users", str(users), *MEMORY) as server:
        wires = [Wire(server.address) for _ in range(CONNECTIONS)]
        end_s = monotonic() + seconds
        try:
            while monotonic() < end_s:
                at = chance.randrange(CONNECTIONS)
                chunk = mutator.chunk([mutator.line() for _ in range(1 << chance.randrange(7))])
                chunk = chunk[: chance.randrange(1, 4 * len(chunk))]
                chunk = chunk.replace(b" drain", b" drawn")  # A server that drains lets nobody in.
                sent = wires[at].send(chunk)
                lines += max(0, sent)
                alive = sent >= 0 and (chance.random() < 0.3 or wires[at].read())
                if not alive or chance.random() < 0.01:
                    wires[at].close()
                    wires[at] = Wire(server.address)
            _ask(server)
        except (Finding, OSError, EOFError) as failure:
            failure.add_note(server.log[-5000:])
            return lines, [failure]
        finally:
            for wire in wires:
                with suppress(OSError):
                    wire.close()
        failures: list[Exception] = []
        if server.resident_bytes > MEMORY_BYTES_MAX:
            failures.append(Finding(f"the server has {server.resident_bytes} bytes resident"))
        if server.stop() != 0:
            failures.append(Finding(f"the server ended badly:\n{server.log[-5000:]}"))
        failures += [Finding(line) for line in server.log.splitlines() if FAULTS.search(line)]
    return lines, failures


def _ask(server: ServerProcess) -> None:
    """It answers, once the lines of so many who have left are handled that there is a place."""
    end_s = monotonic() + WAIT_S
    while True:
        with LineClient(server.address) as client:
            answer = client.ask(b"p ping still there")
        if answer == b"p ok still there":
            return
        if not _REFUSED.fullmatch(answer) or monotonic() > end_s:
            raise Finding(f"a ping is answered by {answer!r}")
        sleep(0.5)
