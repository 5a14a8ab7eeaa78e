"""A disk from a seed, on which the simulated servers have their files.

It is watched what SQLite and the journal ask of it. A kill leaves all that was written, a power cut
what `tests.kit.unsynced` makes of it: what was synced, and of the rest any part. Either comes
between any two calls, or in the middle of a write. Syncs are slow at times, one may fail, and the
disk may be full.

What the journal writes without SQLite, the lock, the ballast and the texts, goes through functions
of `os`, which are replaced. What has been written by other means is seen when it is synced, renamed
or deleted, or when the server ends: until then no part of it is certain anyway.

A bit may be another one when a server starts, until it listens: it must refuse to, or have read
nothing else.

The one rule: each life has a directory of its own. Once its server is dead, nothing is seen of what
is written there.
"""

import asyncio
import errno
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.kit import unsynced
from tests.kit.unsynced import Record
from tests.simulation.loop import Violation, the_loop
from tests.simulation.vfs import Vfs

ENDS: Final = "kill", "kill", "power cut", "power cut", "failed sync"
UNSYNCED: Final = "nothing", "nothing", "something", "something", "everything"
"""What is there after a power cut of what was not synced."""
CALLS: Final = 3, 30
"""A server ends at one of so many next calls, if they come soon."""
SOON_S: Final = 10.0
ENDING_S: Final = 600.0
"""A server that can't trust its disk ends within this time, though it be stopped meanwhile."""
SYNC_S: Final = 0.0003
SLOW: Final = 0.005
"""Share of syncs that take up to SLOW_S."""
SLOW_S: Final = 2.0
SIZE: Final = 1 << 30
PAGE_BYTES: Final = 4096
ROOM_BYTES: Final = 64 * 1024
"""What is left, at most, on a disk that is full."""
FLIPPED: Final = 0.5
"""How often a bit is another one when a server starts."""
UNFLIPPED: Final = ".ballast", ".lock", "-wal"
"""Nobody reads the first two; the last commit of a WAL would look as one that was not finished."""
INDEX: Final = "-shm"
"""Memory that has a name."""


class Disk:
    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(f"disk {seed}")
        self._directory = directory.resolve()
        self._lives = 0
        self._next = self._directory / "life-1"
        self._next.mkdir()
        self._life = ""
        """The directory of the server, while it lives."""
        self._kill: Callable[[], object] = int
        self._model = unsynced.Disk()
        self._ids: dict[str, int] = {}
        """Of all names in the directory."""
        self._sizes = defaultdict[int, int](int)
        """By these ids: a full disk is asked for at each commit."""
        self._number = count(1)
        self._unsynced_names: set[str] = set()
        """Journals whose first sync makes their names certain, too."""
        self._has_begun = False
        self._calls_left: int | None = None
        self._is_power = False
        self._fails_next = False
        self.has_failed = False
        """A sync, in the present life."""
        self._sees_unwritten = False
        """What a failed sync has not written is seen until the power goes."""
        self._size = SIZE
        self.slow = SLOW
        self._bits = random.Random(f"bits {seed}")
        self._flip: tuple[int, int, int] | None = None
        """A bit that is another one now: its file, byte and value there."""
        self.was_flipped = False
        """There was one in the present life."""
        self.power_cuts = self.failed_syncs = self.full = self.flips = 0

    @property
    def is_dead(self) -> bool:
        return not self._life

    # -- lives

    def serve(self, kill: Callable[[], object]) -> Path:
        """A server begins, in this directory. It may end before it listens."""
        self._lives += 1
        self._has_begun = False
        self._life, self._next = f"{self._next}/", self._directory / f"life-{self._lives + 1}"
        self._kill, self.has_failed, self._fails_next = kill, False, False
        self._take("P", 0)
        if self.rng.random() < 0.2:
            self._end_soon(is_power=self.rng.random() < 0.5)
        self.was_flipped = self._bits.random() < FLIPPED and self._flip_one()
        return Path(self._life)

    def begun(self) -> None:
        self._has_begun, self._calls_left = True, None
        self._flip_back()

    def _flip_one(self) -> bool:
        self._look()
        files = sorted(_files(Path(self._life)).items())
        found = {
            name: content for name, content in files if content and not name.endswith(UNFLIPPED)
        }
        if not found:
            return False
        kind = self._bits.choice(sorted({name.partition("/")[0] for name in found}))
        name = self._bits.choice([each for each in found if each.startswith(kind)])
        # Most of a database may be zeros, which nobody reads.
        places = [at for at, byte in enumerate(found[name]) if byte] or [0]
        self._flip = self._ids[name], self._bits.choice(places), 1 << self._bits.randrange(8)
        self.flips += 1
        self._turn_over(name)
        return True

    def _flip_back(self) -> None:
        """If the bit is there, and was not written since."""
        for name, number in self._ids.items():
            if self._flip and self._flip[0] == number:
                self._turn_over(name)
        self._flip = None

    def _turn_over(self, name: str) -> None:
        """Nobody has written it: the model, which power cuts go by, does not know of it."""
        assert self._flip
        _, at, bit = self._flip
        with open(self._life + name, "r+b", buffering=0) as file:
            file.seek(at)
            data = bytes([file.read(1)[0] ^ bit])
            file.seek(at)
            file.write(data)

    @property
    def excuses(self) -> bool:
        """Whether a server may end of itself because of this disk."""
        return self.has_failed or self.was_flipped or (self.is_full and not self._has_begun)

    def _end_soon(self, *, is_power: bool) -> None:
        self._is_power = is_power
        self._calls_left = self.rng.randrange(self.rng.choice(CALLS))

    def rest(self) -> None:
        """Nothing more is done to the server."""
        self._calls_left, self._fails_next, self.slow = None, False, 0.0
        self._flip_back()
        self.empty()

    async def end(self, server: asyncio.Future[None], note: Callable[..., None]) -> None:
        """End the server in one way or another."""
        how = self.rng.choice(ENDS)
        note(how)
        if how == "failed sync":
            self._fails_next = True
            await self._until(server.done, ENDING_S)
            if not (server.done() or self._fails_next):
                raise Violation("a sync has failed, and the server goes on")
        else:
            self._end_soon(is_power=how == "power cut")
            await self._until(lambda: self.is_dead, SOON_S)
        self.ended()
        note("ended")

    def ended(self) -> None:
        """The server has ended, of itself if it was not killed: then the power may go, too."""
        if not self.is_dead:
            if self._calls_left is None:
                self._is_power = self.rng.random() < 0.5
            self._end()

    async def _until(self, is_so: Callable[[], bool], time_s: float) -> None:
        for _ in range(100):
            if not is_so():
                await asyncio.sleep(time_s / 100)

    def _end(self) -> None:
        self._look()
        self._flip_back()
        life, self._life, self._calls_left = self._life, "", None
        self._kill()
        if self._is_power:
            self.power_cuts += 1
            self._cut(life)
        else:
            files = self._model.files(unsynced.everything)
            assert self._sees_unwritten or files == _files(Path(life)), "something was not seen"
            shutil.copytree(life, self._next, ignore=shutil.ignore_patterns(f"*{INDEX}"))

    def _cut(self, life: str) -> None:
        kind = self.rng.choice(UNSYNCED)
        part = unsynced.something(self.rng) if kind == "something" else getattr(unsynced, kind)
        files = self._model.files(part)
        index = {
            f"{name}{INDEX}": self.rng.randbytes(32768) for name in files if name[-3:] == ".db"
        }
        unsynced.put(files | index, self._next)
        self._model = unsynced.Disk(unsynced.something(self.rng))
        self._ids.clear()
        self._sees_unwritten = False
        self._take("P", 0)
        for name, content in sorted(files.items()):
            self._make(name.removesuffix("/"), None if name.endswith("/") else content)
        for name in ["", *self._ids]:
            self._certain(name)

    # -- what is there

    def _take(self, kind: str, who: int, at: int = 0, length: int = 0, data: bytes = b"") -> None:
        self._model.take(Record(kind, who, at, length, data))
        if self._flip and kind in "TW":
            number, place, _ = self._flip
            if who == number and at <= place < (at + length if kind == "W" else SIZE):
                self._flip = None
        if kind == "T":
            self._sizes[who] = at
        elif kind in "WA":
            self._sizes[who] = max(self._sizes[who], at + length)

    def _make(self, name: str, content: bytes | None) -> None:
        """A file, or without a content a directory."""
        number = self._ids[name] = next(self._number)
        self._take("D" if content is None else "C", number, data=name.encode())
        if content:
            self._take("W", number, 0, len(content), content)

    def _certain(self, name: str, end: str = "E") -> None:
        self._take("B", self._ids.get(name, 0))
        self._take(end, self._ids.get(name, 0))

    def _name(self, path: str) -> str | None:
        """In the directory, "" is itself; None if it is elsewhere."""
        if not self._life or not f"{path}/".startswith(self._life) or path.endswith(INDEX):
            return None
        name = path[len(self._life) :]
        if name and name not in self._ids:
            self._name(os.path.dirname(path))
            self._make(name, None if os.path.isdir(path) else Path(path).read_bytes())
        return name

    def _look(self, name: str = "") -> None:
        with os.scandir(self._life + name) as entries:
            for entry in entries:
                inner = self._name(entry.path)
                if inner is not None and entry.is_dir():
                    self._look(inner)

    # -- what is asked of it, by absolute paths: all raises OSError; for SQLite, `real` tells a code

    def _is_last(self) -> bool:
        if self._calls_left is None:
            return False
        self._calls_left -= 1
        return self._calls_left < 0

    def _now(self, path: str) -> str | None:
        """The name, if the server has not ended before this call."""
        name = self._name(path)
        if name is not None and self._is_last():
            self._end()
            return None
        return name

    def _fitting(self, name: str, at: int, length: int) -> int:
        """So many bytes of a write there is room for."""
        if not self.is_full:
            return length
        return max(0, min(length, self._sizes[self._ids[name]] + self.free_bytes - at))

    @property
    def _used_bytes(self) -> int:
        return sum(map(self._sizes.__getitem__, self._ids.values()))

    @property
    def free_bytes(self) -> int:
        return self._size - (self._used_bytes if self._life else 0)

    def opened(self, path: str, *, is_journal: bool) -> None:
        name = self._name(path)
        if name is not None and is_journal:
            self._unsynced_names.add(name)

    def write(self, path: str, at: int, data: bytes, real: Callable[[bytes], int]) -> int:
        name = self._name(path)
        if name is None:
            return real(data)
        part = data[: self._fitting(name, at, len(data))]
        has_room = len(part) == len(data)
        if is_last := self._is_last():  # The system copies page by page.
            whole = range(-at % PAGE_BYTES, len(part) + 1, PAGE_BYTES)
            part = part[: self.rng.choice((0, *whole))]
        result = real(part)
        if part:
            self._take("W", self._ids[name], at, len(part), part)
        if is_last:
            self._end()
            return real(data)
        if not has_room:
            raise _full(path)
        return result

    def truncate(self, path: str, size: int, real: Callable[[], Any]) -> Any:
        name, result = self._now(path), real()
        if name is not None:
            self._take("T", self._ids[name], size)
        return result

    def allocate(self, path: str, at: int, length: int, real: Callable[[], Any]) -> Any:
        name = self._now(path)
        if name is not None:
            if self._fitting(name, at, length) < length:
                raise _full(path)
            self._take("A", self._ids[name], at, length)
        return real()

    def sync(self, path: str) -> None:
        name = self._now(path)
        if name is None:
            return
        if os.path.isdir(path):
            self._look(name)
        is_slow = self.rng.random() < self.slow
        self.pause(self.rng.uniform(0, SLOW_S) if is_slow else self.rng.expovariate(1 / SYNC_S))
        if self._fails_next:
            self._fails_next, self.has_failed, self._sees_unwritten = False, True, True
            self._certain(name, "F")
            self.failed_syncs += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self._certain(name)
        if name in self._unsynced_names:
            self._unsynced_names.remove(name)
            self._certain(os.path.dirname(name))

    def delete(self, path: str, real: Callable[[], Any], *, syncs: bool = False) -> Any:
        name = self._now(path) if os.path.exists(path) else None
        if (result := real()) or name is None:
            return result
        del self._ids[name]
        self._take("U", 0, data=name.encode())
        if syncs:
            self.sync(os.path.dirname(path))
        return result

    def rename(self, path: str, to: str, real: Callable[[], Any]) -> Any:
        name, result = self._now(path), real()
        if name is not None:
            new = to[len(self._life) :]
            self._ids = {
                new + each[len(name) :] if f"{each}/".startswith(f"{name}/") else each: number
                for each, number in self._ids.items()
                if each != new
            }
            self._take("R", 0, data=f"{name}\0{new}".encode())
        return result

    def make_directory(self, path: str, real: Callable[[], Any]) -> Any:
        is_here = self._now(os.path.dirname(path)) is not None
        result = real()
        if is_here:
            self._name(path)
        return result

    def pause(self, time_s: float) -> None:
        the_loop().spend(time_s)

    # -- a full disk

    @property
    def is_full(self) -> bool:
        return self._size < SIZE

    def fill(self) -> None:
        """Others leave nothing, or little."""
        self.full += 1
        self._size -= max(1, self.free_bytes - self.rng.randrange(ROOM_BYTES))

    def empty(self) -> None:
        self._size = SIZE

    # -- those who ask

    def install(self) -> None:
        """Raises ImportError."""
        self._vfs = Vfs(self)
        real = SimpleNamespace(**vars(os))

        def of(descriptor: int) -> str:
            try:
                return str(real.readlink(f"/proc/self/fd/{descriptor}"))
            except OSError:
                return ""

        def pwrite(descriptor: int, data: Any, at: int) -> int:
            return self.write(
                of(descriptor), at, bytes(data), lambda part: int(real.pwrite(descriptor, part, at))
            )

        def writev(descriptor: int, pieces: Sequence[Any]) -> int:
            at = real.lseek(descriptor, 0, os.SEEK_CUR) if (path := of(descriptor)) else 0
            return self.write(
                path, at, b"".join(pieces), lambda part: int(real.write(descriptor, part))
            )

        def posix_fallocate(descriptor: int, at: int, length: int) -> None:
            def longer() -> None:
                real.ftruncate(descriptor, max(real.fstat(descriptor).st_size, at + length))

            self.allocate(of(descriptor), at, length, longer)

        def deleting(call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda path, **how: self.delete(os.fspath(path), lambda: call(path, **how))

        def rename(path: Any, to: Any, **how: Any) -> None:
            self.rename(os.fspath(path), os.fspath(to), lambda: real.rename(path, to, **how))

        def mkdir(path: Any, *mode: int, **how: Any) -> None:
            self.make_directory(os.fspath(path), lambda: real.mkdir(path, *mode, **how))

        def scandir(path: Any = ".") -> Any:
            with real.scandir(path) as entries:
                return _Entries(sorted(entries, key=lambda entry: str(entry.name)))

        vars(os).update(
            scandir=scandir,
            pwrite=pwrite,
            writev=writev,
            ftruncate=lambda file, size: self.truncate(
                of(file), size, lambda: real.ftruncate(file, size)
            ),
            posix_fallocate=posix_fallocate,
            fsync=lambda file: self.sync(of(file)),
            fdatasync=lambda file: self.sync(of(file)),
            fstatvfs=lambda file: SimpleNamespace(f_bavail=self.free_bytes, f_frsize=1),
            unlink=deleting(real.unlink),
            rmdir=deleting(real.rmdir),
            rename=rename,
            replace=rename,
            mkdir=mkdir,
        )


class _Entries(list[Any]):
    """In an order that no file system decides."""

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def close(self) -> None:
        pass


def _full(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _files(directory: Path) -> dict[str, bytes]:
    """As `unsynced.Disk` tells them."""
    return {
        f"{path.relative_to(directory)}{'/' * path.is_dir()}": b""
        if path.is_dir()
        else path.read_bytes()
        for path in directory.rglob("*")
        if not path.name.endswith(INDEX)
    }
