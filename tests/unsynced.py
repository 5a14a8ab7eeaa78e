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

from tests.disk_log import Record

_SECTORS = 512, 4096


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


def _change(content: bytearray, change: Record) -> None:
    size = change.at if change.kind == "T" else change.at + change.length
    if len(content) < size:
        content.extend(bytes(size - len(content)))
    if change.kind == "T":
        del content[size:]
    elif change.kind == "W":
        content[change.at : size] = change.data


def _rename(names: dict[str, _File], change: Record, files: list[_File]) -> None:
    *gone, name = change.data.decode().split("\0")
    for each in [name, *gone]:
        names.pop(each, None)
    if change.kind != "U":
        names[name] = files[change.who]


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
    """Takes records one by one. Of what a failed sync had to write, `failed` is written. A sync of
    a file of which `lies` is true makes nothing certain."""

    def __init__(
        self, failed: Part = nothing, lies: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._failed = failed
        self._lies = lies
        self._directory = 0
        self._inodes: dict[int, _File] = {}
        self._files: list[_File] = []
        """Those that were ever made: inodes are used again."""
        self._names: dict[str, _File] = {}
        self._certain_names: dict[str, _File] = {}
        self._renamed = _Unsynced()
        self._syncs: dict[tuple[int, int], int] = {}
        self.syncs = 0
        self.mapped: set[str] = set()

    def take(self, record: Record) -> None:
        kind, inode = record.kind, record.who
        if kind == "P":
            self._directory = inode
            self._syncs.clear()
        elif kind in "CUR":
            if kind == "C":
                self._inodes[inode] = _File()
                self._files.append(self._inodes[inode])
                record = record._replace(who=len(self._files) - 1)
            elif kind == "R":
                file = self._names[record.data.decode().partition("\0")[0]]
                record = record._replace(who=self._files.index(file))
            self._renamed.add(record)
            _rename(self._names, record, self._files)
        elif kind == "M":
            self.mapped |= {n for n, file in self._names.items() if file is self._inodes.get(inode)}
        elif kind in "BEF":
            self._sync(record)
        elif kind in "WTA" and inode in self._inodes:
            self._inodes[inode].add(record)

    def _sync(self, record: Record) -> None:
        is_directory = record.who == self._directory
        target = self._renamed if is_directory else self._inodes.get(record.who)
        if target is None:
            return
        if record.kind == "B":
            self._syncs[record.who, record.at] = target.count
            return
        count = self._syncs.pop((record.who, record.at))
        if any(self._lies(name) for name, file in self._names.items() if file is target):
            return
        part = everything if record.kind == "E" else self._failed
        for each in chain.from_iterable(map(part, target.synced(count))):
            if isinstance(target, _File):
                _change(target.certain, each)
            else:
                _rename(self._certain_names, each, self._files)
        self.syncs += 1

    def files(self, part: Part) -> dict[str, bytes]:
        """The directory as it may be: of each change that is not certain, `part` is there."""
        names = dict(self._certain_names)
        for change in self._renamed.changes:
            for each in part(change):
                _rename(names, each, self._files)
        found = {}
        for name, file in names.items():
            content = bytearray(file.certain)
            for change in file.changes:
                for each in part(change):
                    _change(content, each)
            found[name] = bytes(content)
        return found


def put(files: dict[str, bytes], directory: Path) -> None:
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
