"""Enumerates the states in which a power cut may leave a directory, from a record of its calls.

A record (`recording.py`) holds every call that changed something below a directory, in order,
together with the promises made in between. The model assumes only what POSIX promises, which is
less than any file system keeps:

- bytes are on the disk once their file was synced; before that each sector may be there or not,
  in any order, and where a file grew, there may be zeros, or foreign bytes;
- a name is on the disk once its directory was synced; before that each name may be its old value
  or any later one, and the two names of a rename are independent.

So each call has many possible states. All extreme ones are generated, and some at random.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tests.faults.promised import Promised

SECTOR = 512

Tree = dict[str, bytes | None]
"""Files by path, with their bytes, and directories (None)."""


@dataclass(frozen=True)
class Made:
    """A new file or directory, not named yet."""

    it: int
    is_directory: bool


@dataclass(frozen=True)
class Named:
    """A directory entry now refers to this; None: to nothing."""

    directory: int
    name: str
    it: int | None


@dataclass(frozen=True)
class Written:
    """Bytes of a file, from an offset on."""

    it: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Sized:
    """A file now has this length."""

    it: int
    size: int


@dataclass(frozen=True)
class Synced:
    """The current state of a file or directory is on the disk."""

    it: int


@dataclass(frozen=True)
class Failed:
    """A failed sync of a file or directory.

    The system then treats the unwritten data of a file as written: no later sync retries it.
    """

    it: int


@dataclass(frozen=True)
class Told:
    """A process reported something."""

    words: tuple[Any, ...]


Event = Made | Named | Written | Sized | Synced | Failed | Told
ROOT = 0


# The model ----------------------------------------------------------------------------------------

Change = Written | Sized
ChooseName = Callable[[Sequence[int | None]], int | None]
"""Values of a name: first the synced one, then later ones that may be on disk."""
ChooseBytes = Callable[[bytes, Sequence[Change]], bytes]
"""Contents of a file: synced bytes, and later changes."""


@dataclass
class File:
    """The synced bytes of a file, and later changes that may be on disk."""

    sure: bytes = b""
    later: list[Change] = field(default_factory=list)


class Disk:
    """The certain and the possible contents of the disk after some events."""

    def __init__(self) -> None:
        self._files: dict[int, File] = {}
        self._directories: dict[int, dict[str, list[int | None]]] = {}

    def happen(self, event: Event) -> None:
        if isinstance(event, Made):
            if event.is_directory:
                self._directories[event.it] = {}
            else:
                self._files[event.it] = File()
        elif isinstance(event, Named):
            self._directories[event.directory].setdefault(event.name, [None]).append(event.it)
        elif isinstance(event, Synced):
            self._sync(event.it)
        elif isinstance(event, Failed) and event.it in self._files:
            self._files[event.it].later.clear()
        elif isinstance(event, Written | Sized):
            self._files[event.it].later.append(event)

    def _sync(self, it: int) -> None:
        if it in self._files:
            file = self._files[it]
            self._files[it] = File(whole(file.sure, file.later))
        else:
            for meanings in self._directories[it].values():
                del meanings[:-1]

    def tree(self, name: ChooseName, data: ChooseBytes) -> Tree:
        """One state that a power cut may leave."""
        found: Tree = {}
        self._walk(ROOT, "", found, name, data)
        return found

    def _walk(
        self, directory: int, path: str, found: Tree, name: ChooseName, data: ChooseBytes
    ) -> None:
        for leaf, meanings in self._directories[directory].items():
            it = name(meanings)
            if it is None:
                continue
            if it in self._files:
                found[path + leaf] = data(self._files[it].sure, self._files[it].later)
            else:
                found[path + leaf] = None
                self._walk(it, f"{path}{leaf}/", found, name, data)


def first(meanings: Sequence[int | None]) -> int | None:
    return meanings[0]


def last(meanings: Sequence[int | None]) -> int | None:
    return meanings[-1]


def nothing(sure: bytes, later: Sequence[Change]) -> bytes:
    return sure


def whole(sure: bytes, later: Sequence[Change]) -> bytes:
    """Apply all changes, in order."""
    data = bytearray(sure)
    for change in later:
        if isinstance(change, Sized):
            _resize(data, change.size)
        else:
            _write(data, change.offset, change.data)
    return bytes(data)


def length(sure: bytes, later: Sequence[Change]) -> bytes:
    """Apply only the new length: the file has grown, but none of the bytes arrived."""
    data = bytearray(sure)
    _resize(data, len(whole(sure, later)))
    return bytes(data)


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _write(data: bytearray, offset: int, written: bytes) -> None:
    if len(data) < offset + len(written):
        _resize(data, offset + len(written))
    data[offset : offset + len(written)] = written


class ByChance:
    """Random choices from a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def name(self, meanings: Sequence[int | None]) -> int | None:
        return self._random.choice(meanings)

    def data(self, sure: bytes, later: Sequence[Change]) -> bytes:
        """Return some written sectors; elsewhere the old bytes, zeros or foreign bytes."""
        if not later:
            return sure
        data = bytearray(self._random.choice((nothing, length))(sure, later))
        if self._random.random() < 0.25:
            data[len(sure) :] = self._random.randbytes(len(data) - len(sure))
        share = self._random.choice((0.2, 0.5, 0.9))
        for change in later:
            if isinstance(change, Written):
                self._write_some(data, change, share)
        return bytes(data)

    def _write_some(self, data: bytearray, change: Written, share: float) -> None:
        for at in range(0, len(change.data), SECTOR):
            if self._random.random() < share:
                _write(data, change.offset + at, change.data[at : at + SECTOR])


# States -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A state that a power cut after an event may leave, and the promises made before it."""

    behind: int
    tree: Tree
    promised: Promised

    def make(self, root: Path) -> None:
        """Write this state to `root`."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(mode=0o700)
        for path, data in self.tree.items():
            if data is None:
                (root / path).mkdir(mode=0o700)
            else:
                (root / path).write_bytes(data)


def states(events: Sequence[Event], seed: int, by_chance: int) -> Iterator[State]:
    """Yield all extreme states after every event, and `by_chance` random ones, each once.

    `promised` of a state is valid until the next state is requested.
    """
    disk, promised = Disk(), Promised()
    seen: set[tuple[int, int]] = set()
    told = 0
    for behind, event in enumerate(events):
        disk.happen(event)
        if isinstance(event, Told):
            promised.told(*event.words)
            told += 1
        for tree in _trees(disk, f"{seed} {behind}", by_chance):
            same = (told, _digest(tree))
            if same not in seen:
                seen.add(same)
                yield State(behind, tree, promised)


def _trees(disk: Disk, seed: str, by_chance: int) -> Iterator[Tree]:
    for name in (first, last):
        for data in (nothing, whole, length):
            yield disk.tree(name, data)
    for number in range(by_chance):
        chance = ByChance(f"{seed} {number}")
        yield disk.tree(chance.name, chance.data)


def _digest(tree: Tree) -> int:
    found = xxhash.xxh3_64()
    for path in sorted(tree):
        data = tree[path]
        found.update(f"{path} {-1 if data is None else len(data)} ".encode())
        found.update(data or b"")
    return found.intdigest()
