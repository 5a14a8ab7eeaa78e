r"""Bytes to lines.

The one rule: only ``\n``, or from a client ``\r\n``, ends a line; any other byte passes untouched.
"""


class LineSplitter:
    """Splits a stream of chunks into lines, and stores the unfinished one.

    `line_bytes_max` is the limit of a line in bytes, without its end. A longer line is not stored:
    `too_long` contains its beginning, and the rest of the stream is not read. `is_server`: the
    lines come from a server, which ends them with a newline only; a `\\r` before it is data.
    """

    __slots__ = ("_is_server", "_tail", "_tail_bytes", "has_tab", "line_bytes_max", "too_long")

    def __init__(self, line_bytes_max: int, *, is_server: bool = False) -> None:
        self.line_bytes_max = line_bytes_max
        self._is_server = is_server
        self.has_tab = False
        """Whether the lines last returned can contain a tab."""
        self.too_long: bytes | None = None
        self._tail: list[bytes] = []
        self._tail_bytes = 0

    @property
    def tail_bytes(self) -> int:
        """Bytes of the unfinished line."""
        return self._tail_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Add a chunk, and return the lines that it completes, without their ends.

        One `split` of the chunk: 32 ns per line, compared to 185 ns for searching and slicing.
        """
        if b"\n" not in data:
            self._keep(data)
            return []
        if self._tail:
            self._tail.append(data)
            data = b"".join(self._tail)
            self._tail.clear()
            self._tail_bytes = 0
        self.has_tab = b"\t" in data
        lines = data.split(b"\n")
        tail = lines.pop()
        if b"\r" in data and not self._is_server:
            lines = [line.removesuffix(b"\r") for line in lines]
        if len(data) > self.line_bytes_max:
            for index, line in enumerate(lines):
                if len(line) > self.line_bytes_max:
                    self.too_long = line[: self.line_bytes_max]
                    return lines[:index]
        if tail:
            self._keep(tail)
        return lines

    def take_tail(self) -> bytes:
        """Return the unfinished line, and forget it."""
        tail = b"".join(self._tail)
        self._tail.clear()
        self._tail_bytes = 0
        return tail

    def _keep(self, piece: bytes) -> None:
        """Pieces are joined when the line ends, so single bytes cost no more."""
        self._tail.append(piece)
        self._tail_bytes += len(piece)
        # One byte more may be the carriage return of the line's end.
        if self._tail_bytes > self.line_bytes_max + 1:
            self.too_long = b"".join(self._tail)[: self.line_bytes_max]
            self._tail.clear()
            self._tail_bytes = 0
