"""What is in a store's directory, found without a lock and without changing anything.

Only regular files that bear the store's own names are opened. Each directory on the way is opened
relative to the one above it and never through a link, so nothing outside the store is looked at,
whatever somebody planted. Files that vanish while we look were removed or replaced by a live store.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tierstore.cli.directories import DIRECTORY, Item, items_below, items_in, look_at, opened_parent
from tierstore.cli.frame import Code, Failure, system_failure
from tierstore.model.errors import CorruptDataError, TierStoreError, TransferError
from tierstore.model.groups import TensorSpec
from tierstore.model.header import KEY
from tierstore.model.objects import StoredObject
from tierstore.system.locking import is_locked
from tierstore.system.objects import (
    LOCK,
    MARKER,
    OBJECT_NAME,
    OBJECTS,
    READ,
    SHARD_NAME,
    TEMPORARY,
    check_key,
    object_name,
    read_marker,
    read_object,
)
from tierstore.tiers.directory import SPILL_NAME, TEMPORARY_NAME

QUARANTINE = "quarantine"
"""The directory into which `verify --repair` moves what is damaged. The store never looks there."""

NOTE_SUFFIX = ".note.json"
"""How the names of the notes end that lie beside what was put away."""

_DIRECTORY_NAME = re.compile(rf"{TEMPORARY}|{OBJECTS}(/{SHARD_NAME.pattern})?")
_FILE_NAME = re.compile(rf"{LOCK}|{OBJECTS}/{SHARD_NAME.pattern}/{OBJECT_NAME.pattern}")
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_SHORTAGES = (
    errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM,
    errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip

_HEAD = 1 << 16


@dataclass(frozen=True)
class Problem:
    """Why an object cannot be used.

    `damaged` is False if it could not be read at all: it may be whole, so it is never pruned. Where
    `passing`, not even that is the file's fault: the machine was short of something.
    """

    reason: str
    damaged: bool
    expected: str | None = None
    found: str | None = None
    tensor: str | None = None
    passing: bool = False


@dataclass(frozen=True)
class Group:
    """An object file and what its header says: `stored`, or else a `problem`."""

    item: Item
    key: str | None
    stored: StoredObject | None
    problem: Problem | None

    @property
    def state(self) -> str:
        """In one word, whether the group can be used (as far as its header tells)."""
        if self.problem is None:
            return "ok"
        return "damaged" if self.problem.damaged else "unreadable"

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Its tensors; none if the header cannot be believed."""
        blocks = self.stored.packing.blocks if self.stored else ()
        return tuple(tensor for block in blocks for tensor in block.views)

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of its tensors."""
        return sorted({tensor.dtype for tensor in self.tensors})


@dataclass(frozen=True)
class Contents:
    """Everything in a store's directory. `locked_by` names the live process that uses it.

    `exposed` is what the store keeps for its owner and somebody else may read or change.
    """

    directory: str
    groups: tuple[Group, ...]
    temporary: tuple[Item, ...]
    stray: tuple[Item, ...]
    quarantine: tuple[Item, ...]
    exposed: tuple[Item, ...]
    locked_by: str | None
    free: int

    @property
    def unusable(self) -> list[Group]:
        """The objects that cannot be used."""
        return [group for group in self.groups if group.problem is not None]

    @property
    def damaged(self) -> list[Group]:
        """The objects that are known to be worth nothing."""
        return [group for group in self.groups if group.state == "damaged"]

    @property
    def in_the_way(self) -> list[Group]:
        """What lies where only the store's own files and directories can be."""
        found = ((item, _in_the_way(self.directory, item)) for item in self.stray)
        return [Group(item, None, None, problem) for item, problem in found if problem is not None]

    @property
    def put_away(self) -> list[Item]:
        """What is in quarantine, without the notes on it."""
        return [item for item in self.quarantine if not item.name.endswith(NOTE_SUFFIX)]


def told_by_state(groups: Iterable[Group]) -> str:
    """How many of some groups are in which state, such as "2 damaged, 1 unreadable"."""
    count = Counter(group.state for group in groups)
    return ", ".join(f"{count[state]:,} {state}" for state in sorted(count))


def total(items: Iterable[Item]) -> int:
    """The bytes of some files."""
    return sum(item.nbytes for item in items)


# Opening -----------------------------------------------------------------------------------------


@contextmanager
def opened_store(directory: str) -> Iterator[int]:
    """A descriptor of a store's directory. Fails if there is none, or if it is no store."""
    try:
        descriptor = os.open(directory, DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Failure(
            f"{directory} is no directory",
            "Give the directory that the store was opened with (its disk_dir).",
            Code.USAGE,
        ) from error
    except OSError as error:
        raise system_failure(error, f"opening {directory}") from error
    try:
        _check_marker(directory)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_marker(directory: str) -> None:
    advice = "Give the directory that the store was opened with (its disk_dir)."
    try:
        marker = read_marker(directory)
    except TierStoreError as error:
        raise Failure(str(error), advice, Code.USAGE) from error
    except PermissionError as error:
        raise system_failure(error, f"reading {directory}/{MARKER}") from error
    except OSError as error:  # a link or a directory has taken its place
        raise Failure(f"{directory}/{MARKER} is no regular file", advice, Code.USAGE) from error
    if marker is None:
        raise Failure(f"{directory} is no store: it has no {MARKER}", advice, Code.USAGE)


# Looking through it ------------------------------------------------------------------------------


class _Finder:
    """Walks through one directory and sorts what it finds."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.groups: list[Group] = []
        self.temporary: list[Item] = []
        self.stray: list[Item] = []
        self.quarantine: list[Item] = []
        self.exposed: list[Item] = []

    def walk(self, root: int) -> None:
        ways = {
            OBJECTS: self._walk_objects,
            TEMPORARY: self._walk_temporary,
            QUARANTINE: self._walk_quarantine,
        }
        here = look_at(root, ".", ".")
        if here is not None and here.mode & _OTHERS_WRITE:  # what is in it has modes of its own
            self.exposed.append(here)
        for leaf, item in items_in(root, ""):
            if leaf in ways and item.kind == "directory":
                self._own(item)
                ways[leaf](root)
            elif leaf in (MARKER, LOCK) and item.kind == "file":
                self._own(item)
            else:
                self._sort(item, SPILL_NAME.fullmatch(leaf))

    def _own(self, item: Item) -> None:
        if item.mode & _OTHERS:
            self.exposed.append(item)

    def _sort(self, item: Item, ours: re.Match[str] | None) -> None:
        is_ours = ours is not None and item.kind == "file"
        (self.temporary if is_ours else self.stray).append(item)

    def _walk_quarantine(self, root: int) -> None:
        self.quarantine += (item for _, _, item in items_below(root, QUARANTINE))

    def _walk_temporary(self, root: int) -> None:
        for _, leaf, item in items_below(root, TEMPORARY):
            self._sort(item, TEMPORARY_NAME.fullmatch(leaf))

    def _walk_objects(self, root: int) -> None:
        for objects, shard, item in items_below(root, OBJECTS):
            if item.kind == "directory" and SHARD_NAME.fullmatch(shard):
                self._own(item)
                for descriptor, leaf, found in items_below(objects, shard, f"{OBJECTS}/"):
                    self._look_at_object(descriptor, leaf, found)
            else:
                self.stray.append(item)

    def _look_at_object(self, shard: int, leaf: str, item: Item) -> None:
        if item.kind != "file" or not OBJECT_NAME.fullmatch(leaf):
            self.stray.append(item)
            return
        group = _read_group(self._directory, shard, item)
        if group is not None:
            self._own(item)
            self.groups.append(group)


def survey(directory: str) -> Contents:
    """Look through a store's directory."""
    with opened_store(directory) as root:
        finder = _Finder(directory)
        try:
            finder.walk(root)
            room = os.fstatvfs(root)
        except OSError as error:
            raise system_failure(error, f"reading {directory}") from error
        return Contents(
            directory,
            tuple(finder.groups),
            tuple(finder.temporary),
            tuple(finder.stray),
            tuple(finder.quarantine),
            tuple(finder.exposed),
            _owner(directory),
            room.f_bavail * room.f_frsize,
        )


def _owner(directory: str) -> str | None:
    try:
        return is_locked(directory)
    except OSError:  # some network file systems know no locks
        return None


def find_group(directory: str, key: str) -> Group | None:
    """The group of a key, or what is left of it; None if no file has the name of that key."""
    with opened_store(directory) as root:
        return find_group_below(directory, root, key)


def find_group_below(directory: str, root: int, key: str) -> Group | None:
    """As `find_group`, in a directory that is open."""
    try:
        return _find_group(directory, root, key)
    except OSError as error:
        raise system_failure(error, f"reading {directory}") from error


def _find_group(directory: str, root: int, key: str) -> Group | None:
    name = _path_of(key)
    with opened_parent(root, name) as shard:
        item = None if shard is None else look_at(shard, os.path.basename(name), name)
        if shard is None or item is None or item.kind != "file":
            return None
        return _read_group(directory, shard, item)


def _read_group(directory: str, shard: int, item: Item) -> Group | None:
    path = os.path.join(directory, item.name)
    try:
        found = read_object(path, shard, os.path.basename(path))
    except FileNotFoundError:
        return None
    except TransferError as error:
        return Group(item, None, None, _problem(error, item))
    except Exception as error:  # one file that trips the reader must not hide all others
        reason = f"{path} cannot be understood ({type(error).__name__})"
        problem = Problem(reason, damaged=False, passing=isinstance(error, MemoryError))
        return Group(item, None, None, problem)
    if found.error is not None:
        key = found.error.key or _claimed_key(shard, item)
        return Group(item, key, None, _problem(found.error, item))
    if found.stored is not None and item.name != _path_of(found.stored.key):
        misplaced = CorruptDataError(f"{path} lies in the wrong directory", key=found.stored.key)
        return Group(item, found.stored.key, None, _problem(misplaced, item))
    return Group(item, found.stored.key if found.stored else None, found.stored, None)


def _claimed_key(shard: int, item: Item) -> str | None:
    """The key in a header that cannot be believed: the file's name tells whether it is right."""
    try:
        descriptor = os.open(os.path.basename(item.name), READ, dir_fd=shard)
        with os.fdopen(descriptor, "rb") as file:
            _, found, rest = file.read(_HEAD).decode(errors="replace").partition(f'"{KEY}":')
        key = check_key(json.JSONDecoder().raw_decode(rest)[0]) if found else ""
    except (OSError, TypeError, ValueError, RecursionError):
        return None
    return key if key and _path_of(key) == item.name else None


def _path_of(key: str) -> str:
    return f"{OBJECTS}/{object_name(key)}"


def _problem(error: TransferError, item: Item) -> Problem:
    damaged = isinstance(error, CorruptDataError)
    expected, found = getattr(error, "expected", None), getattr(error, "found", None)
    if damaged and expected is None and error.key and _path_of(error.key) != item.name:
        expected, found = _path_of(error.key), item.name
    return Problem(str(error), damaged, expected, found, passing=is_passing(error.__cause__))


def is_passing(error: BaseException | None) -> bool:
    """Whether an error says nothing about the file: the machine was short of something."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _in_the_way(directory: str, item: Item) -> Problem | None:
    if _FILE_NAME.fullmatch(item.name):
        expected = "file"
    elif _DIRECTORY_NAME.fullmatch(item.name):
        expected = "directory"
    else:
        return None
    path = os.path.join(directory, item.name)
    reason = f"{path} is no {expected} of the store: move it away"
    return Problem(reason, damaged=True, expected=expected, found=item.kind)
