"""SQLite's files pass through a disk of Python.

A VFS of its own, which becomes the default of the library that Python's `_sqlite3` is linked with.
Its files are those of SQLite's "unix" VFS, with some of their methods replaced: reads, locks and
shared memory are as fast as ever. (https://www.sqlite.org/vfs.html)

The one rule: what the disk raises reaches SQLite as a result code.
"""

import _sqlite3
import ctypes
import errno
import os
import sqlite3
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.simulation.disk import Disk

NAME: Final = b"simulated"
FULL: Final = 13
OPEN_DELETES: Final = 0x8
"""SQLITE_OPEN_DELETEONCLOSE: a temporary file."""
CODES: Final = {
    "write": sqlite3.SQLITE_IOERR_WRITE,
    "truncate": sqlite3.SQLITE_IOERR_TRUNCATE,
    "sync": sqlite3.SQLITE_IOERR_FSYNC,
    "delete": sqlite3.SQLITE_IOERR_DELETE,
}


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class _Methods(ctypes.Structure):
    _fields_ = [
        ("iVersion", ctypes.c_int),
        *_pointers(
            "xClose xRead xWrite xTruncate xSync xFileSize xLock xUnlock xCheckReservedLock "
            "xFileControl xSectorSize xDeviceCharacteristics xShmMap xShmLock xShmBarrier "
            "xShmUnmap xFetch xUnfetch"
        ),
    ]


class _File(ctypes.Structure):
    _fields_ = [("pMethods", ctypes.POINTER(_Methods))]


class _Vfs(ctypes.Structure):
    _fields_ = [
        ("iVersion", ctypes.c_int),
        ("szOsFile", ctypes.c_int),
        ("mxPathname", ctypes.c_int),
        ("pNext", ctypes.c_void_p),
        ("zName", ctypes.c_char_p),
        ("pAppData", ctypes.c_void_p),
        *_pointers(
            "xOpen xDelete xAccess xFullPathname xDlOpen xDlError xDlSym xDlClose xRandomness "
            "xSleep xCurrentTime xGetLastError xCurrentTimeInt64 xSetSystemCall xGetSystemCall "
            "xNextSystemCall"
        ),
    ]


_P, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
# Names are pointers: behind one are the parameters of a URI.
_OPEN: Final = ctypes.CFUNCTYPE(_INT, _P, _P, _P, _INT, _P)
_DELETE: Final = ctypes.CFUNCTYPE(_INT, _P, _P, _INT)
_RANDOMNESS: Final = ctypes.CFUNCTYPE(_INT, _P, _INT, _P)
_SLEEP: Final = ctypes.CFUNCTYPE(_INT, _P, _INT)
_WRITE: Final = ctypes.CFUNCTYPE(_INT, _P, _P, _INT, _INT64)
_TRUNCATE: Final = ctypes.CFUNCTYPE(_INT, _P, _INT64)
_SYNC: Final = ctypes.CFUNCTYPE(_INT, _P, _INT)


def library() -> Any:
    """The one that `_sqlite3` is linked with, or contained in. Raises ImportError where its
    functions can't be called."""
    found = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    try:
        found.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
        found.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
        found.sqlite3_vfs_register.argtypes = [ctypes.POINTER(_Vfs), _INT]
    except AttributeError as error:
        raise ImportError(f"Python's SQLite can't be found: {error}") from error
    if not found.sqlite3_vfs_find(b"unix"):
        raise ImportError("Python's SQLite has no VFS called unix")
    return found


def _told(call: str, do: Callable[[], int | None]) -> int:
    try:
        return do() or 0
    except OSError as error:
        return FULL if error.errno == errno.ENOSPC else CODES[call]
    except BaseException:  # Nobody above could learn of it.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


class Vfs:
    """Must be kept while SQLite is used. Its files are used by one thread at a time."""

    def __init__(self, disk: "Disk") -> None:
        self._disk = disk
        self._paths: dict[int, str] = {}
        """By the addresses of open files."""
        self._methods: dict[int, tuple[_Methods, _Methods]] = {}
        """By the addresses of those that a file had: they, and those that it has."""
        sqlite = library()
        self._unix = sqlite.sqlite3_vfs_find(b"unix")
        unix = self._unix.contents
        self._open_unix = _OPEN(unix.xOpen)
        self._delete_unix = _DELETE(unix.xDelete)
        self._callbacks = {
            "xOpen": _OPEN(self._open),
            "xDelete": _DELETE(self._delete),
            "xRandomness": _RANDOMNESS(self._randomness),
            "xSleep": _SLEEP(self._sleep),
        }
        self._vfs = _Vfs.from_buffer_copy(unix)
        self._vfs.zName = NAME
        for name, callback in self._callbacks.items():
            setattr(self._vfs, name, ctypes.cast(callback, _P))
        sqlite.sqlite3_vfs_register(ctypes.byref(self._vfs), 1)

    # -- the file system

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: int) -> int:
        self._paths.pop(file, None)
        if result := self._open_unix(ctypes.addressof(self._unix.contents), name, file, flags, out):
            return int(result)
        if name is None or flags & OPEN_DELETES:
            return 0
        path = self._paths[file] = os.fsdecode(ctypes.string_at(name))
        about = _File.from_address(file)
        where = ctypes.addressof(about.pMethods.contents)
        if where not in self._methods:
            self._methods[where] = self._replaced(about.pMethods.contents)
        about.pMethods = ctypes.pointer(self._methods[where][1])
        is_journal = path.endswith(("-wal", "-journal"))
        return _told("write", lambda: self._disk.opened(path, is_journal=is_journal))

    def _delete(self, vfs: int, name: int, syncs: int) -> int:
        path = os.fsdecode(ctypes.string_at(name))
        real = partial(self._delete_unix, ctypes.addressof(self._unix.contents), name, 0)
        return _told("delete", lambda: self._disk.delete(path, real, syncs=bool(syncs)))

    def _randomness(self, vfs: int, size: int, out: int) -> int:
        ctypes.memmove(out, self._disk.rng.randbytes(size), size)
        return size

    def _sleep(self, vfs: int, time_us: int) -> int:
        self._disk.pause(time_us / 1e6)
        return time_us

    # -- a file

    def _replaced(self, unix: _Methods) -> tuple[_Methods, _Methods]:
        write_unix, truncate_unix = _WRITE(unix.xWrite), _TRUNCATE(unix.xTruncate)

        def write(file: int, data: int, size: int, at: int) -> int:
            def real(part: bytes) -> int:
                return int(write_unix(file, part, len(part), at))

            content = ctypes.string_at(data, size)
            return _told("write", lambda: self._disk.write(self._paths[file], at, content, real))

        def truncate(file: int, size: int) -> int:
            real = partial(truncate_unix, file, size)
            return _told("truncate", lambda: self._disk.truncate(self._paths[file], size, real))

        def sync(file: int, flags: int) -> int:
            return _told("sync", lambda: self._disk.sync(self._paths[file]))

        callbacks = {
            "xWrite": _WRITE(write),
            "xTruncate": _TRUNCATE(truncate),
            "xSync": _SYNC(sync),
        }
        methods = _Methods.from_buffer_copy(unix)
        for name, callback in callbacks.items():
            self._callbacks[f"{name} {ctypes.addressof(unix)}"] = callback
            setattr(methods, name, ctypes.cast(callback, _P))
        return unix, methods
