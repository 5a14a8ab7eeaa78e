"""A server between client and broker that changes what the broker answers.

The one rule: it only replaces bytes, so that everything else is the real broker's.
"""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class WrongServer:
    """Listens on `port` of this machine and passes everything on to `address` and back, with the
    bytes `wrong` instead of `right` in each line of the answers."""

    def __init__(self, address: tuple[str, int], right: bytes, wrong: bytes) -> None:
        self._address = address
        self._right, self._wrong = right, wrong
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(self._address)
            for work in (self._pass_on, self._pass_back):
                thread = threading.Thread(target=work, args=(here, there))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        while data := _receive(here):
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)

    def _pass_back(self, here: socket.socket, there: socket.socket) -> None:
        """Whole lines, and those with ends, so that no bytes to replace are ever cut in two."""
        tail = b""
        with here, there:
            while data := _receive(there):
                lines, newline, tail = (tail + data).rpartition(b"\n")
                try:
                    here.sendall((lines + newline).replace(self._right, self._wrong))
                except OSError:
                    return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_CHUNK_BYTES)
    except OSError:
        return b""
