r"""Bytes to lines.

The one rule: only ``\n``, or from a client ``\r\n``, ends a line; any other byte passes untouched.
"""


class LineSplitter:
    """Cuts a stream of chunks into lines, keeping the unfinished tail.

    `line_bytes_max` bounds a line in bytes, its end not counted. A longer one is not kept: its
    beginning stands in `too_long`, and what follows it on the stream is not read any more. A
    server ends its lines by a newline alone, `is_server`: what stands before that are data.
    """

    __slots__ = ("_is_server", "_tail", "_tail_bytes", "has_tab", "line_bytes_max", "too_long")

    def __init__(self, line_bytes_max: int, *, is_server: bool = False) -> None:
        self.line_bytes_max = line_bytes_max
        self._is_server = is_server
        self.has_tab = False
        """Whether the lines last returned may hold a tab."""
        self.too_long: bytes | None = None
        self._tail: list[bytes] = []
        self._tail_bytes = 0

    @property
    def tail_bytes(self) -> int:
        """Bytes of the unfinished line."""
        return self._tail_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Take a chunk, return the lines that it completes, without their ends.

        One `split` over the chunk: 32 ns a line, against 185 ns for searching and cutting.
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
        """The unfinished line, which is not kept any more."""
        tail = b"".join(self._tail)
        self._tail.clear()
        self._tail_bytes = 0
        return tail

    def _keep(self, piece: bytes) -> None:
        """Pieces are joined when the line ends: a line that comes byte by byte costs no more."""
        self._tail.append(piece)
        self._tail_bytes += len(piece)
        # One byte more may be the carriage return of the line's end.
        if self._tail_bytes > self.line_bytes_max + 1:
            self.too_long = b"".join(self._tail)[: self.line_bytes_max]
            self._tail.clear()
            self._tail_bytes = 0
