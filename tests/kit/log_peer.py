"""A peer that answers `range`, `read` and `trim` as a broker would, and can be told to misbehave.

The one rule: it speaks from what it was given; nothing in it knows the code under test.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tests.kit.waiting import WAIT_S

Reply = bytes
ROWS_A_REPLY = 4


class LogPeer:
    """A queue `q` of messages (number, arrival in µs, text) on a port of the loopback interface.

    `cut` gives for the n-th read reply how much of it is sent before the connection breaks.
    """

    def __init__(self, messages: list[tuple[int, int, bytes]], epoch: str = "one") -> None:
        self.messages = {number: (time, text) for number, time, text in messages}
        self.next = max(self.messages, default=0) + 1
        self.epoch = epoch
        self.cut: Callable[[int], int | None] = lambda reply: None
        self.damage: Callable[[bytes], bytes] = lambda text: text
        self.requests: list[bytes] = []
        self.connections = 0
        self.replies = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)

    @property
    def url(self) -> str:
        return f"mqks://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(WAIT_S)  # Then nobody comes any more.
        for sock in self._open:
            with suppress(OSError):  # The other end may have gone before.
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError), sock, sock.makefile("rb") as lines:
            for line in lines:
                self.requests.append(line.rstrip(b"\n"))
                request_id, action, *words = line.split()
                reply, kept = self._reply(request_id, action, words)
                sock.sendall(reply[:kept])
                if kept is not None:
                    return

    def _reply(
        self, request_id: bytes, action: bytes, words: list[bytes]
    ) -> tuple[Reply, int | None]:
        flags = dict(word[2:].decode().split("=") for word in words if b"=" in word)
        if action in (b"ping", b"auth", b"trim"):
            if action == b"trim":
                for number in [n for n in self.messages if n < int(words[-1])]:
                    del self.messages[number]
            return b"%b ok \n" % request_id, None
        if b"q" not in words:
            return b"%b error E1\n" % request_id, None
        if action == b"range":
            first = min(self.messages, default=self.next)
            told = f"epoch={self.epoch} first={first} next={self.next}"
            if "at" in flags:
                later = (n for n, (time, _) in self.messages.items() if time >= int(flags["at"]))
                told += f" at={min(later, default=self.next)}"
            return b"%b ok %b\n" % (request_id, told.encode()), None
        self.replies += 1
        start, end = int(flags["from"]), int(flags.get("to", self.next))
        numbers = sorted(n for n in self.messages if start <= n < end)[:ROWS_A_REPLY]
        texts = [self.messages[n][1] + b"\n" for n in numbers]
        runs = b"".join(
            struct.pack("<4q", n, 1, self.messages[n][0], len(text))
            for n, text in zip(numbers, texts, strict=True)
        )
        after = numbers[-1] + 1 if numbers else min(end, max(start, self.next))
        body = self.damage(runs + b"".join(texts))
        header = f"--read epoch={self.epoch} runs={len(numbers)} rows={len(numbers)}"
        header += f" next={after} bytes={len(body)}"
        reply = b"%b ok %b\n%b" % (request_id, header.encode(), body)
        return reply, self.cut(self.replies)
