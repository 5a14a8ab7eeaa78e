"""Texts of large segments, each in a file of its own, in a directory next to the database.

The file `epoch` in it has the epoch of the database that the directory belongs to.

The one rule: a text is durable before its row is committed, and its file is deleted only when no
start and no reader can find the row any more.
"""

import errno
import fcntl
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from mqks.durable import sync
from mqks.errors import DiskFull, InspectionFailed, JournalFailed
from mqks.files import identity, is_dir
from mqks.journal.segment import NewSegment, checksum

READ_BYTES: Final = 1024 * 1024
"""A text that is only checked is read in pieces of this size."""
DELETED_BYTES: Final = 64 * 1024 * 1024
"""One step deletes files until they have this size together."""
RECYCLED_MAX: Final = 64
RECYCLED_BYTES: Final = 64 * 1024 * 1024
"""Number and bytes of files that are kept for new texts, while the journal is busy."""
SLACK: Final = 2
"""A file is cut if it has more than so many times the bytes of its new text."""
MADE_AT_ONCE: Final = 8
"""Empty files that are made for the next texts, with one sync of the directory."""
RETRY_S: Final = 1.0
"""Time until files are tried again that could not be deleted."""
PIECES_MAX: Final = os.sysconf("SC_IOV_MAX")
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
NUMBER: Final = re.compile("[0-9]{16,}")
EPOCH: Final = "epoch"
SET_ASIDE: Final = ".damaged"


class SegmentRow(NamedTuple):
    """A row of `segment`. With `text_bytes`, `body` is only the head."""

    id: int
    crc: int
    body: bytes
    text_bytes: int | None = None
    text_file: int | None = None
    """The number of its file."""


class TextDamaged(Exception):
    """The file of a text does not have it."""


def texts_path(database: Path) -> Path:
    """The directory: next to the file itself, also when `database` is a link."""
    return Path(f"{database.resolve()}-texts")


class TextFile(NamedTuple):
    """A file for texts, which may be longer than the text that is in it."""

    number: int
    bytes: int


def name_of(number: int) -> str:
    return f"{number:016}"


def text_of(directory: Path, number: object, size: object, descriptor: int = -1) -> bytes:
    """A text of `size` bytes, not compared with its checksum. With `descriptor`, the directory may
    have been moved. Raises TextDamaged."""
    return b"".join(_pieces(directory, number, size, descriptor, sys.maxsize))


def _pieces(
    directory: Path, number: object, size: object, descriptor: int, at_once: int
) -> Iterator[bytes]:
    if not isinstance(number, int) or number < 0:
        raise TextDamaged("the number of its text is damaged")
    name = name_of(number)
    place = f"its text {directory.name}/{name}"
    if not isinstance(size, int) or size < 0:
        raise TextDamaged("the length of its text is damaged")
    try:
        with open(
            name if descriptor >= 0 else directory / name,
            "rb",
            buffering=0,
            opener=lambda path, _: os.open(
                path,
                os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                dir_fd=descriptor if descriptor >= 0 else None,
            ),
        ) as file:
            if (there := os.fstat(file.fileno()).st_size) < size:
                raise TextDamaged(f"{place} has {there} bytes instead of {size}")
            while size and (piece := file.read(min(size, at_once))):
                yield piece
                size -= len(piece)
    except OSError as error:
        if descriptor < 0 and not is_dir(directory):
            raise TextDamaged(
                f"its text is missing, with the directory {directory.name}, which belongs next to "
                "the database"
            ) from error
        raise TextDamaged(f"{place} can't be read: {error.strerror}") from error


def size_of(directory: Path) -> int:
    """Bytes of all files."""
    size = 0
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                size += entry.stat(follow_symlinks=False).st_size
    return size


@contextmanager
def kept(database: Path) -> Iterator[None]:
    """The server deletes no text meanwhile, if there is a directory of texts."""
    path = texts_path(database)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    except OSError as error:
        raise InspectionFailed(f"{path} can't be read: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


class Texts:
    """The directory of a server, which is made for the first large text. Whoever writes uses it
    one step at a time, in threads; `text` may be read meanwhile."""

    def __init__(
        self, database: Path, about: os.stat_result, bytes_min: int, synchronous: str
    ) -> None:
        """`about` the database: the files get its owner and mode."""
        self.path = texts_path(database)
        self.bytes = 0
        """Of all texts whose files are not deleted yet."""
        self.unsynced_bytes = 0
        """Of those that wait until the database has been synced."""
        self._about = about
        self._bytes_min = bytes_min
        self._synchronous = synchronous
        self.epoch = ""
        """Of the database, as it was loaded; empty if it was damaged."""
        self._files: dict[int, TextFile] = {}
        """By segment id."""
        self._last_number = 0
        """No file has a higher one."""
        self._unsynced: list[TextFile] = []
        """Of texts whose rows are deleted, unless a power cut undoes that."""
        self.gone = deque[TextFile]()
        """Of texts whose rows are certain to stay deleted."""
        self.recycles = False
        self._free: list[TextFile] = []
        """Files for the next texts, with texts that are gone, or empty."""
        self._is_held = False
        self._retry_s = 0.0
        self._descriptor = -1
        """Of the directory, once there is one."""
        self._identity = (0, 0)

    @property
    def watched(self) -> list[tuple[Path, str, tuple[int, int]]]:
        """The directory, what it is, and its identity."""
        if self._descriptor < 0:
            return []
        return [(self.path, "the directory of its texts", self._identity)]

    def takes(self, segment: NewSegment) -> bool:
        """Whether the text of a new segment is to be in a file."""
        return 0 < self._bytes_min <= segment.size - len(segment.head)

    # -- starting and stopping

    def damage(
        self, segment_id: int, crc: object, head: bytes, size: object, number: object
    ) -> str:
        """What is wrong with a stored segment that has such a row."""
        self._files[segment_id] = TextFile(number if isinstance(number, int) else 0, 0)
        found = checksum(segment_id, head)
        try:
            for piece in _pieces(self.path, number, size, -1, READ_BYTES):
                found = zlib.crc32(piece, found)
        except TextDamaged as error:
            return str(error)
        return "" if found == crc else "its checksum does not match"

    def foreign(self) -> Path | None:
        """Where to put a directory that belongs to another database than the loaded one."""
        owner = self._owner()
        if self._files or not self._names() or owner == self.epoch:
            return None
        is_epoch = re.fullmatch("[0-9a-f]{16}", owner)
        return self.path.with_name(f"{self.path.name}.{owner if is_epoch else 'unknown'}")

    def _owner(self) -> str:
        """The epoch in the directory; empty if there is none."""
        try:
            return (self.path / EPOCH).read_text("ascii", "replace")
        except OSError:
            return ""

    def set_aside(self, damaged: Iterable[int]) -> None:
        """Keep the texts of these segments, and those without segments, under other names."""
        if self.foreign():
            return
        for segment_id in damaged:
            self._files.pop(segment_id, None)
        self._rename(self._orphans())

    def keep(self, aside: Container[int]) -> None:
        """Keep under other names the files of these numbers, whose segments were set aside before:
        their texts have come back since."""
        if not self.foreign():
            self._rename([name for name in self._orphans() if int(name) in aside])

    def _rename(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).rename(self.path / (name + SET_ASIDE))
        if names:
            sync(self.path)

    def begin(self, epoch: str) -> None:
        """What was loaded is accepted, and has this epoch now: delete what no segment has."""
        aside, self.epoch = self.foreign(), epoch
        if not is_dir(self.path):
            return
        if aside:
            self.path.rename(aside)
            sync(aside.parent)
            return
        self._make()
        with os.scandir(self.path) as entries:
            sizes = {each.name: each.stat(follow_symlinks=False).st_size for each in entries}
        self.gone.extend(TextFile(int(name), sizes.get(name, 0)) for name in self._orphans())
        self._files = {
            segment_id: file._replace(bytes=sizes.get(name_of(file.number), 0))
            for segment_id, file in self._files.items()
        }
        numbers = (int(found[0]) for name in sizes if (found := NUMBER.match(name)))
        self._last_number = max(numbers, default=0)
        self.bytes = sum(sizes.values())
        while self.is_due:
            self.delete()

    def _names(self) -> list[str]:
        """Of the files with texts."""
        try:
            with os.scandir(self.path) as entries:
                names = [each.name for each in entries if not each.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in names if NUMBER.fullmatch(name)]

    def _orphans(self) -> list[str]:
        used = {file.number for file in self._files.values()}
        return [name for name in self._names() if int(name) not in used]

    def _make(self) -> None:
        """Make the directory, unless there is one, and say whose it is. Raises OSError."""
        with suppress(FileExistsError):
            self.path.mkdir(0o700)
            mode = self._about.st_mode & 0o777
            self._give(self.path, mode | (mode & 0o444) >> 2)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(self.path, flags | os.O_NOFOLLOW)
        try:
            if self._owner() != self.epoch:
                (self.path / EPOCH).unlink(missing_ok=True)
                with (self.path / EPOCH).open("x") as file:
                    self._give(file.fileno(), self._about.st_mode & 0o777)
                    file.write(self.epoch)
                    file.flush()
                    self._sync(file.fileno())
            self._sync(descriptor)
            parent = os.open(self.path.parent, flags)
            try:
                self._sync(parent)
            finally:
                os.close(parent)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._identity = descriptor, identity(os.fstat(descriptor))

    def _give(self, file: Path | int, mode: int) -> None:
        """As far as that is possible, as SQLite does with the WAL."""
        with suppress(OSError):
            os.chmod(file, mode)
            if os.geteuid() == 0:
                os.chown(file, self._about.st_uid, self._about.st_gid)

    def _sync(self, descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        """With `normal`, too: a row must not outlive its text."""
        if self._synchronous == "off":
            return
        try:
            sync(descriptor)
        except OSError as error:
            raise JournalFailed(f"{self.path} can't be synced: {error.strerror}") from error

    def close(self, *, is_certain: bool) -> None:
        """Delete what no segment has, if it `is_certain` that the database has been synced."""
        if self._descriptor < 0:
            return
        if is_certain:
            self.synced()
        self.recycles = False
        while self.is_due:
            self.delete()
        with suppress(OSError, JournalFailed):
            self.release(empty=True)
            if not self._files and os.listdir(self.path) == [EPOCH] and self._is_there:
                # Texts that a power cut brought back would be nobody's.
                self._sync(self._descriptor)
                (self.path / EPOCH).unlink()
                self.path.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    # -- writing

    def rows(self, segments: Sequence[NewSegment]) -> list[SegmentRow]:
        """Write the texts that are to be in files; the rows may be committed then. Raises DiskFull,
        and JournalFailed after a failed sync."""
        rows: list[SegmentRow] = []
        try:
            for segment in segments:
                rows.append(self._written(segment))
        except DiskFull:
            self.undo(rows)
            raise
        return rows

    def _written(self, segment: NewSegment) -> SegmentRow:
        """The text is in the row, too, if there can be no file, for whatever reason but space."""
        if not self.takes(segment):
            return SegmentRow(*segment.whole())
        text_bytes = segment.size - len(segment.head)
        try:
            if self._descriptor < 0:
                self._make()
            if not self._is_there:
                return SegmentRow(*segment.whole())
            if not self._free:
                self._make_files(segment.id)
            file = self._free.pop()
            self.bytes -= file.bytes
            path = self.path / name_of(file.number)
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(f"{self.path} can't be written: {error.strerror}") from error
            return SegmentRow(*segment.whole())
        try:
            _write_all(descriptor, segment.texts)
            if file.bytes > SLACK * text_bytes:
                os.ftruncate(descriptor, text_bytes)
            size = os.fstat(descriptor).st_size
            self._sync(descriptor, os.fdatasync)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            if error.errno in FULL:
                raise DiskFull(f"{path} can't be written: {error.strerror}") from error
            raise JournalFailed(f"{path} can't be written: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._files[segment.id] = TextFile(file.number, size)
        self.bytes += size
        crc = checksum(segment.id, segment.head, *segment.texts)
        return SegmentRow(segment.id, crc, segment.head, text_bytes, file.number)

    def _make_files(self, segment_id: int) -> None:
        """Empty files for the text of this segment and the next ones. A file that is there when
        the row is committed costs no sync of the directory: that was done for several at once."""
        first = max(segment_id, self._last_number + 1)
        made: list[TextFile] = []
        for number in range(first, first + MADE_AT_ONCE):
            self._last_number = number  # If it exists, the next try passes over it.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                descriptor = os.open(self.path / name_of(number), flags, 0o600)
            except OSError:
                if not made:
                    raise
                break
            self._give(descriptor, self._about.st_mode & 0o777)
            os.close(descriptor)
            made.append(TextFile(number, 0))
        self._sync(self._descriptor)
        self._free += reversed(made)

    @property
    def _is_there(self) -> bool:
        """Whether the path still leads to the directory. Raises OSError."""
        return identity(self.path.stat()) == self._identity

    def undo(self, rows: Iterable[SegmentRow]) -> None:
        """These rows were not committed."""
        for row in rows:
            if row.text_bytes is not None:
                with suppress(OSError):
                    self._unlink(self._files.pop(row.id))

    def dropped(self, ids: Iterable[int]) -> None:
        """The rows of these segments are deleted."""
        gone = [self._files.pop(each) for each in ids if each in self._files]
        if self._synchronous == "full":
            self.gone.extend(gone)
        else:
            self._unsynced += gone
            self.unsynced_bytes += sum(file.bytes for file in gone)

    def text(self, number: object, size: object) -> bytes:
        """Raises TextDamaged."""
        return text_of(self.path, number, size, self._descriptor)

    # -- deleting

    @property
    def is_due(self) -> bool:
        """Whether there are files to be deleted."""
        return bool(self.gone) and time.monotonic() >= self._retry_s

    def synced(self) -> None:
        """The database has been synced, with all commits."""
        self.gone.extend(self._unsynced)
        self._unsynced.clear()
        self.unsynced_bytes = 0

    def delete(self) -> None:
        """Delete some files, unless another process reads an older state."""
        try:
            if not self._is_there:
                raise FileNotFoundError
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._delete()
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._is_held = bool(self._is_held and self.gone)
        except OSError:
            self._retry_s = time.monotonic() + RETRY_S
            self._is_held = True

    @property
    def held_bytes(self) -> int:
        """Bytes of the files that other processes prevent from being deleted."""
        return sum(file.bytes for file in self.gone) if self._is_held else 0

    def _delete(self) -> None:
        deleted = 0
        while self.gone and deleted < DELETED_BYTES:
            file = self.gone[0]
            if self._is_recycled(file):
                self._free.append(file)
            else:
                self._unlink(file)
            self.gone.popleft()
            deleted += file.bytes

    def _is_recycled(self, file: TextFile) -> bool:
        if self._is_held or not self.recycles or len(self._free) >= RECYCLED_MAX:
            return False
        return file.bytes + sum(each.bytes for each in self._free) <= RECYCLED_BYTES

    def _unlink(self, file: TextFile) -> None:
        (self.path / name_of(file.number)).unlink(missing_ok=True)
        self.bytes -= file.bytes

    @property
    def has_free(self) -> bool:
        """Whether `release` has anything to do."""
        return any(file.bytes for file in self._free)

    def release(self, *, empty: bool = False) -> None:
        """Delete the files that are kept for new texts, those that are `empty` only if told so."""
        with suppress(OSError):
            if self._is_there:
                for file in [each for each in self._free if each.bytes or empty]:
                    self._unlink(file)
                    self._free.remove(file)


def _write_all(descriptor: int, pieces: Sequence[bytes]) -> None:
    """Write pieces one after the other, without joining them."""
    first, at = 0, 0
    while first < len(pieces):
        views = [memoryview(piece) for piece in pieces[first : first + PIECES_MAX]]
        views[0] = views[0][at:]
        at += os.writev(descriptor, views)
        while first < len(pieces) and at >= len(pieces[first]):
            at -= len(pieces[first])
            first += 1
