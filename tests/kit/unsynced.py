"""A directory as a disk may hold it when the power goes.

What was synced is there. Of what was written, cut, allocated, made, renamed and deleted since, any
part may be there, in any order; of a write any of its sectors. A file's name is there for certain
once its directory was synced, and not because the file was. What a failed sync has not written is
never written, though whoever reads the file sees it until the power goes.

The one rule: nothing but a sync that has ended makes anything certain, and only what came before
it began.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_SECTORS = 512, 4096


class Record(NamedTuple):
    """What a disk was asked for: a write when it was done, a sync when it began and when it ended.
    `kind` tells what the numbers mean; files and directories stand by their inodes.

    P  a server begins: the directory
    C  a file was made: inode, name         W  written: inode, offset, data
    T  truncated: inode, size               A  allocated: inode, offset, length
    D  a directory was made: inode, name
    U  unlinked: name                       R  renamed: old name, a zero byte, new name
    B  a sync begins: inode, thread         E  it has ended, F  it has failed: inode, thread
    """

    kind: str
    who: int
    at: int = 0
    length: int = 0
    data: bytes = b""


class _Unsynced:
    """Changes in order, each with its number; `sync` takes those up to one."""

    def __init__(self) -> None:
        self.changes: deque[Record] = deque()
        self.count = 0

    def add(self, change: Record) -> None:
        self.changes.append(change)
        self.count += 1

    def synced(self, count: int) -> Iterable[Record]:
        while self.changes and self.count - len(self.changes) < count:
            yield self.changes.popleft()


class _File(_Unsynced):
    def __init__(self) -> None:
        super().__init__()
        self.certain = bytearray()


class _Directory(_Unsynced):
    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, _File | _Directory] = {}
        self.certain: dict[str, _File | _Directory] = {}


def _change(content: bytearray, change: Record) -> None:
    size = change.at if change.kind == "T" else change.at + change.length
    if len(content) < size:
        content.extend(bytes(size - len(content)))
    if change.kind == "T":
        del content[size:]
    elif change.kind == "W":
        content[change.at : size] = change.data


def _rename(
    names: dict[str, _File | _Directory], change: Record, made: list[_File | _Directory]
) -> None:
    *gone, name = change.data.decode().split("\0")
    for each in [name, *gone]:
        names.pop(each, None)
    if change.kind != "U":
        names[name] = made[change.who]


Part = Callable[[Record], Iterable[Record]]
"""What is there of a change that nobody can be sure of."""


def nothing(change: Record) -> Iterable[Record]:
    return ()


def everything(change: Record) -> Iterable[Record]:
    return (change,)


def something(rng: random.Random) -> Part:
    """Any part, sectors of writes included."""
    share, torn, sector = rng.random(), rng.random(), rng.choice(_SECTORS)

    def part(change: Record) -> Iterable[Record]:
        if change.kind == "W" and rng.random() < torn:
            start = change.at
            while start < change.at + change.length:
                end = min(start - start % sector + sector, change.at + change.length)
                if rng.random() < share:
                    data = change.data[start - change.at : end - change.at]
                    yield change._replace(at=start, length=end - start, data=data)
                start = end
        elif rng.random() < share:
            yield change

    return part


class Disk:
    """Takes records one by one. Of what a failed sync had to write, `failed` is written."""

    def __init__(self, failed: Part = nothing) -> None:
        self._failed = failed
        self._root = _Directory()
        self._inodes: dict[int, _File | _Directory] = {}
        self._made: list[_File | _Directory] = []
        """All that were ever made: inodes are used again."""
        self._syncs: dict[tuple[int, int], int] = {}

    def take(self, record: Record) -> None:
        kind, inode = record.kind, record.who
        if kind == "P":
            self._inodes[inode] = self._root
            self._syncs.clear()
        elif kind in "CDUR":
            self._rename(record)
        elif kind in "BEF":
            self._sync(record)
        elif kind in "WTA" and inode in self._inodes:
            self._inodes[inode].add(record)

    def _rename(self, record: Record) -> None:
        paths = record.data.decode().split("\0")
        directory, where = self._root, paths[-1].rpartition("/")[0]
        if where:
            inner = self._root.names[where]
            assert isinstance(inner, _Directory)
            directory = inner
        names = [path.removeprefix(f"{where}/") for path in paths]
        record = record._replace(data="\0".join(names).encode())
        if record.kind in "CD":
            made = self._inodes[record.who] = _File() if record.kind == "C" else _Directory()
            self._made.append(made)
            record = record._replace(who=len(self._made) - 1)
        elif record.kind == "R":
            record = record._replace(who=self._made.index(directory.names[names[0]]))
        directory.add(record)
        _rename(directory.names, record, self._made)

    def _sync(self, record: Record) -> None:
        target = self._inodes.get(record.who)
        if target is None:
            return
        if record.kind == "B":
            self._syncs[record.who, record.at] = target.count
            return
        count = self._syncs.pop((record.who, record.at))
        part = everything if record.kind == "E" else self._failed
        for each in chain.from_iterable(map(part, target.synced(count))):
            if isinstance(target, _File):
                _change(target.certain, each)
            else:
                _rename(target.certain, each, self._made)

    def files(self, part: Part) -> dict[str, bytes]:
        """The directory as it may be: of each change that is not certain, `part` is there. A
        directory in it stands as a name that ends with a slash."""
        return self._there(self._root, part)

    def _there(self, directory: _Directory, part: Part) -> dict[str, bytes]:
        names = dict(directory.certain)
        for change in directory.changes:
            for each in part(change):
                _rename(names, each, self._made)
        found: dict[str, bytes] = {}
        for name, file in names.items():
            if isinstance(file, _Directory):
                inner = self._there(file, part)
                found |= {f"{name}/{each}": content for each, content in {"": b"", **inner}.items()}
                continue
            content = bytearray(file.certain)
            for change in file.changes:
                for each in part(change):
                    _change(content, each)
            found[name] = bytes(content)
        return found


def put(files: dict[str, bytes], directory: Path) -> None:
    directory.mkdir()
    for name, content in sorted(files.items()):
        if name.endswith("/"):
            (directory / name).mkdir()
        else:
            (directory / name).write_bytes(content)
