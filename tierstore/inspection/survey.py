"""Surveys a store's directory, without a lock and without changes.

Only regular files with the store's own names are opened. A file that disappears meanwhile was
removed or replaced by a live store.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

from tierstore.errors import CorruptDataError, TransferError
from tierstore.inspection.directories import (
    Item,
    item_of,
    items_below,
    items_in,
    open_below,
    open_parent,
    open_store,
    stat_item,
)
from tierstore.model.groups import TensorSpec
from tierstore.model.header import KEY
from tierstore.model.header_reader import HeaderReader
from tierstore.model.objects import StoredObject
from tierstore.system.collector import paused
from tierstore.system.files import transfer_errors
from tierstore.system.locking import is_locked
from tierstore.system.objects import (
    LOCK,
    MARKER,
    OBJECT_NAME,
    OBJECTS,
    READ,
    SHARD_NAME,
    TEMPORARY,
    FetchedHeader,
    check_key,
    entries_of,
    fetch_header,
    fetch_headers,
    header_threads,
    is_regular,
    object_name,
)
from tierstore.tiers.directory import SPILL_NAME, TEMPORARY_NAME

QUARANTINE = "quarantine"
"""The directory for damaged objects. Stores never read it."""

NOTE_SUFFIX = ".note.json"
"""Suffix of the note beside each object in quarantine."""

_DIRECTORY_NAME = re.compile(rf"{TEMPORARY}|{OBJECTS}(/{SHARD_NAME.pattern})?")
_FILE_NAME = re.compile(rf"{LOCK}|{OBJECTS}/{SHARD_NAME.pattern}/{OBJECT_NAME.pattern}")
_OWN = (
    (OBJECTS, "directory"), (TEMPORARY, "directory"), (QUARANTINE, "directory"),
    (MARKER, "file"), (LOCK, "file"),
)  # fmt: skip
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_SHORTAGES = (
    errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM,
    errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip

_HEAD = 1 << 16


@dataclass(frozen=True)
class Problem:
    """The reason why an object cannot be used.

    `damaged` is False if it could not be read: it may be intact, so it is never pruned. `transient`
    is True if the machine lacked a resource, which implies nothing about the file.
    """

    reason: str
    damaged: bool
    expected: str | None = None
    found: str | None = None
    tensor: str | None = None
    transient: bool = False

    def described(self) -> dict[str, str | None]:
        """Return its fields for a JSON document."""
        return {name: getattr(self, name) for name in ("reason", "tensor", "expected", "found")}


@dataclass(frozen=True)
class Group:
    """An object file, with the contents of its header (`stored`) or a `problem`."""

    item: Item
    key: str | None
    stored: StoredObject | None
    problem: Problem | None

    @property
    def state(self) -> str:
        """Its state according to the header: "ok", "damaged" or "unreadable"."""
        if self.problem is None:
            return "ok"
        return "damaged" if self.problem.damaged else "unreadable"

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors of the group; none if the header is invalid."""
        blocks = self.stored.packing.blocks if self.stored else ()
        return tuple(tensor for block in blocks for tensor in block.views)


@dataclass
class Contents:
    """The contents of a store's directory.

    `foreign` are entries that tierstore did not write. `exposed` are files and directories of the
    store that other users may read or change. `locked_by` names the live process that uses the
    directory. `free` is the number of bytes left on the file system.
    """

    directory: str
    groups: list[Group] = field(default_factory=list)
    temporary: list[Item] = field(default_factory=list)
    foreign: list[Item] = field(default_factory=list)
    quarantine: list[Item] = field(default_factory=list)
    exposed: list[Item] = field(default_factory=list)
    locked_by: str | None = None
    free: int = 0

    @property
    def unusable(self) -> list[Group]:
        """Objects that cannot be used."""
        return [group for group in self.groups if group.problem is not None]

    @property
    def damaged(self) -> list[Group]:
        """Objects that are known to be damaged."""
        return [group for group in self.groups if group.state == "damaged"]

    @property
    def obstructions(self) -> list[Group]:
        """Foreign entries in place of the store's own files and directories."""
        found = ((item, _obstruction(self.directory, item)) for item in self.foreign)
        return [Group(item, None, None, problem) for item, problem in found if problem is not None]

    @property
    def quarantined(self) -> list[Item]:
        """Objects in quarantine, without their notes."""
        return [item for item in self.quarantine if not item.name.endswith(NOTE_SUFFIX)]

    def add_own(self, item: Item) -> None:
        """Note one of the store's own files or directories, in case it is exposed."""
        if item.mode & _OTHERS:
            self.exposed.append(item)

    def classify(self, item: Item, ours: re.Match[str] | None) -> None:
        """Add an entry as temporary if it is a file with one of our names, else as foreign."""
        is_ours = ours is not None and item.kind == "file"
        (self.temporary if is_ours else self.foreign).append(item)


def total(items: Iterable[Item]) -> int:
    """Return the total bytes of some files."""
    return sum(item.nbytes for item in items)


# Walking a directory ------------------------------------------------------------------------------


def survey(directory: str) -> Contents:
    """Survey a store's directory. Raises TierStoreError."""
    contents = Contents(directory)
    with open_store(directory) as root:
        with transfer_errors("reading", path=directory), paused():
            _walk(contents, root)
            status = os.fstatvfs(root)
        contents.free = status.f_bavail * status.f_frsize
        contents.locked_by = is_locked(directory)
    return contents


def _walk(contents: Contents, root: int) -> None:
    here = stat_item(root, ".", ".")
    if here is not None and here.mode & _OTHERS_WRITE:  # its entries have their own modes
        contents.exposed.append(here)
    for leaf, item in items_in(root, ""):
        if (leaf, item.kind) not in _OWN:
            contents.classify(item, SPILL_NAME.fullmatch(leaf))
            continue
        contents.add_own(item)
        if leaf == OBJECTS:
            _walk_objects(contents, root)
        elif leaf == TEMPORARY:
            for _, name, found in items_below(root, TEMPORARY):
                contents.classify(found, TEMPORARY_NAME.fullmatch(name))
        elif leaf == QUARANTINE:
            contents.quarantine += (found for _, _, found in items_below(root, QUARANTINE))


def _walk_objects(contents: Contents, root: int) -> None:
    reader = HeaderReader()
    with header_threads() as pool:
        for objects, shard, item in items_below(root, OBJECTS):
            if item.kind != "directory" or not SHARD_NAME.fullmatch(shard):
                contents.foreign.append(item)
                continue
            contents.add_own(item)
            with open_below(objects, shard) as descriptor:
                if descriptor is not None:
                    _walk_shard(contents, descriptor, item.name, pool, reader)


def _walk_shard(
    contents: Contents, shard: int, name: str, pool: ThreadPoolExecutor, reader: HeaderReader
) -> None:
    objects = []
    for entry in entries_of(shard):
        if OBJECT_NAME.fullmatch(entry.name) and is_regular(entry):
            objects.append(entry)
        elif item := stat_item(shard, entry.name, f"{name}/{entry.name}"):
            contents.foreign.append(item)
    headers = fetch_headers(shard, os.path.join(contents.directory, name), objects, pool)
    for entry, header in zip(objects, headers, strict=True):
        at, status = f"{name}/{entry.name}", header.status
        item = stat_item(shard, entry.name, at) if status is None else item_of(status, at)
        if item is None:
            continue
        if item.kind != "file":  # it has just replaced a file
            contents.foreign.append(item)
        elif group := _group_in(shard, item, header, reader):
            contents.add_own(item)
            contents.groups.append(group)


def find_group(directory: str, key: str, root: int | None = None) -> Group | None:
    """Find the group of a key, damaged or not; None if its file does not exist.

    `root` is a descriptor of the directory, if it is open already.
    """
    name = _path_of(key)
    with (
        open_store(directory) if root is None else nullcontext(root) as store,
        transfer_errors("reading", path=directory),
        open_parent(store, name) as shard,
    ):
        item = None if shard is None else stat_item(shard, os.path.basename(name), name)
        if shard is None or item is None or item.kind != "file":
            return None
        return _read_group(directory, shard, item)


def _read_group(directory: str, shard: int, item: Item) -> Group | None:
    path = os.path.join(directory, item.name)
    return _group_in(shard, item, fetch_header(path, shard, os.path.basename(path)), HeaderReader())


def _group_in(shard: int, item: Item, header: FetchedHeader, reader: HeaderReader) -> Group | None:
    path = header.path
    try:
        found = header.found(reader)
    except FileNotFoundError:
        return None
    except TransferError as error:
        return Group(item, None, None, _problem(error, item))
    except Exception as error:  # an error in one file must not hide all others
        reason = f"{path} cannot be parsed ({type(error).__name__})"
        problem = Problem(reason, damaged=False, transient=isinstance(error, MemoryError))
        return Group(item, None, None, problem)
    if found.error is None:
        return Group(item, found.stored.key if found.stored else None, found.stored, None)
    key = found.error.key or _claimed_key(shard, item)
    return Group(item, key, None, _problem(found.error, item))


def _claimed_key(shard: int, item: Item) -> str | None:
    """Return the key in an invalid header, if the file's name confirms it."""
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
    return Problem(str(error), damaged, expected, found, transient=is_transient(error.__cause__))


def is_transient(error: BaseException | None) -> bool:
    """Return whether an error is a shortage on this machine, not a fault of the file."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _obstruction(directory: str, item: Item) -> Problem | None:
    if _FILE_NAME.fullmatch(item.name):
        expected = "file"
    elif _DIRECTORY_NAME.fullmatch(item.name):
        expected = "directory"
    else:
        return None
    path = os.path.join(directory, item.name)
    reason = f"{path} is not a {expected}, as it must be in a store: move it away"
    return Problem(reason, damaged=True, expected=expected, found=item.kind)
