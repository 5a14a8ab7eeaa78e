"""A client that speaks TLS.

The one rule: nothing stays in this layer. What is read is decrypted at once, so pausing the socket
pauses the client, and the end of the stream comes after all that was sent before. The TLS of event
loops keeps what a paused client has sent, and drops it at the end of the stream.
"""

import asyncio
import ssl
from contextlib import suppress
from struct import Struct
from time import monotonic
from typing import Final, Protocol, cast

from mqks.limits import TLS_EMPTY_RECORDS_MAX, TLS_EMPTY_RECORDS_S, TLS_HANDSHAKE_RECORDS_MAX
from mqks.server.client import ClientOwner, ServerClient
from mqks.server.gate import Peer

HEADER: Final = Struct(">BBxH")
"""Of a record: its kind, version, and length."""
KINDS: Final = range(20, 25)
VERSION: Final = 3
RECORD_BYTES: Final = 16 * 1024
"""Data of the largest record. Buffers of OpenSSL never shrink, so they get one at a time."""
ENCRYPTED_BYTES_MAX: Final = RECORD_BYTES + 2048


class Doorkeeper(Protocol):
    """Who is told of handshakes."""

    def begin_handshake(self, client: "TlsClient") -> None: ...
    def end_handshake(self, client: "TlsClient") -> None: ...
    def fail_tls(self, client: "TlsClient", error: Exception) -> None: ...
    def leave(self, client: "TlsClient") -> None: ...


class TlsClient(ServerClient):
    """Its owner learns of it when the handshake is done."""

    def __init__(
        self,
        door: Doorkeeper,
        context: ssl.SSLContext,
        owner: ClientOwner,
        unread_bytes_max: int,
        peer: Peer,
    ) -> None:
        super().__init__(owner, unread_bytes_max, peer)
        self._door = door
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._shaken = False
        self._tail = b""
        """The beginning of a record."""
        self._empty, self._empty_since_s = 0, -TLS_EMPTY_RECORDS_S
        self._over = False
        """Nothing more is decrypted or encrypted."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.made = True
        self._door.begin_handshake(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return super().get_buffer(sizehint)[: self._owner.reading.tls_piece_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        received = self._tail + self._owner.reading.whole[:nbytes]
        if self._over or self.ended:
            self._ignore(received)
            return
        is_cut = nbytes == len(self.get_buffer(nbytes))
        if self._shaken:
            self._owner.begin_reading()
        data, is_end, failure = list[bytes](), False, None
        try:
            is_end = self._decrypt(received, data)
        except OSError as error:
            # Without the traceback, which holds this frame, and that holds the failure.
            self._over, failure = True, error.with_traceback(None)
        if data:
            self._received(b"".join(data), nbytes, is_cut=is_cut)
        if failure is not None:
            self._fail(failure)
        elif is_end:
            super().eof_received()

    def _decrypt(self, received: bytes, data: list[bytes]) -> bool:
        """Record by record. Returns whether the client has said that it sends no more.

        Raises OSError."""
        view, size, start, is_end = memoryview(received), len(received), 0, False
        while size - start >= HEADER.size and not is_end:
            kind, version, record_bytes = HEADER.unpack_from(view, start)
            end = start + HEADER.size + record_bytes
            if kind not in KINDS or version != VERSION or record_bytes > ENCRYPTED_BYTES_MAX:
                end = size  # OpenSSL tells what is wrong.
            elif end > size:
                break
            self._incoming.write(view[start:end])
            is_end = self._decrypt_record(data)
            start = end
        self._tail = received[start:]
        return is_end

    def _decrypt_record(self, data: list[bytes]) -> bool:
        try:
            if self._shaken:
                data.append(self._tls.read(RECORD_BYTES))
                return not data[-1]
            self._count_empty(TLS_HANDSHAKE_RECORDS_MAX)
            self._tls.do_handshake()
            self._begin()
        except ssl.SSLWantReadError:
            if self._shaken:
                self._count_empty(TLS_EMPTY_RECORDS_MAX)
        finally:
            self._flush()
        return False

    def _count_empty(self, count_max: int) -> None:
        """A record of a handshake, or without data, such as new keys. Raises OSError."""
        now_s = monotonic()
        if now_s - self._empty_since_s > TLS_EMPTY_RECORDS_S:
            self._empty, self._empty_since_s = 0, now_s
        self._empty += 1
        if self._empty > count_max:
            seconds = TLS_EMPTY_RECORDS_S
            told = f"more than {count_max} TLS records without data in {seconds:g} s"
            raise ConnectionAbortedError(told)

    def _begin(self) -> None:
        self._shaken = True
        # Only on the port without TLS the first bytes tell who has taken the wrong one.
        self._is_new, self._empty = False, 0
        self._door.end_handshake(self)
        super().connection_made(self.transport)

    def _fail(self, error: Exception) -> None:
        self._over = True
        if self._shaken:
            self._owner.handle_chunks()  # What came before.
        self.ended = True
        self._door.fail_tls(self, error)

    def _flush(self) -> None:
        """OpenSSL answers by itself, too."""
        if self._outgoing.pending and not self.transport.is_closing():
            (super().send if self._shaken else self.transport.write)(self._outgoing.read())

    def eof_received(self) -> bool:
        if self._shaken:
            return super().eof_received()
        if not self._over:
            self._fail(ConnectionResetError("the client closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        if self._shaken:
            super().connection_lost(exc)
        else:
            self._door.leave(self)

    def send(self, data: bytes) -> None:
        if not self._over:
            view = memoryview(data)
            for start in range(0, len(data), RECORD_BYTES):
                self._tls.write(view[start : start + RECORD_BYTES])
                self._flush()

    def _say_end(self) -> None:
        if not self._over:
            self._over = True
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
