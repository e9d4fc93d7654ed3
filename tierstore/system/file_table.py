"""The files that a store reads from, and the subset of them that stays open."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from tierstore.errors import StaleCheckpointError
from tierstore.model.locks import RLock, guarded
from tierstore.system.files import DataFile, FileStamp

MAX_OPEN_FILES = 64
MAX_HELD_FILES = 192
"""With `MAX_OPEN_FILES` and two descriptors per file, half of the default descriptor limit."""


@dataclass(eq=False)
class HeldFile:
    """A file with groups, in its state when the first of them was registered.

    While this object exists, `file` stays open, unless the process runs out of descriptors: the
    bytes remain readable after the name is removed or leads to another file. `header_digest` is the
    checksum that its safetensors header must have; None accepts any.
    """

    path: str
    stamp: FileStamp
    header_digest: str | None
    file: DataFile | None = None


class FileTable:
    """The files that are being read; a bounded number of them stays open.

    Files in `own` (the store's directory) are opened without following links. Other files are held
    open because another process may remove or replace them.
    """

    def __init__(self, own: str) -> None:
        self._own = own + os.sep
        self._open: OrderedDict[str, DataFile] = OrderedDict()
        self._held: weakref.WeakValueDictionary[tuple[str, FileStamp, str | None], HeldFile] = (
            weakref.WeakValueDictionary()
        )
        self._age = 0  # number of calls of `forget`
        self._lock = RLock()

    def get(self, path: str) -> DataFile:
        """Return the file, opening it if necessary. A hung disk blocks only this caller."""
        file, age = self._find(path)
        return file or self._cache(path, self._open_file(path), age)

    @guarded
    def _find(self, path: str) -> tuple[DataFile | None, int]:
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
        return file, self._age

    def _open_file(self, path: str) -> DataFile:
        follow_links = not path.startswith(self._own)
        try:
            return DataFile(path, follow_links=follow_links)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._close_reopenable():
                raise
            return DataFile(path, follow_links=follow_links)

    @guarded
    def _cache(self, path: str, file: DataFile, age: int) -> DataFile:
        if age != self._age:
            return file  # opened before `forget`: good for this caller, stale for the next one
        file = self._open.setdefault(path, file)
        while len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)
        return file

    @guarded
    def forget(self, path: str) -> None:
        """Reopen the file on its next use, because its name now leads to another file."""
        self._age += 1
        self._open.pop(path, None)

    def close(self) -> bool:
        """Close every file. Returns whether any was open."""
        return self._close_files(self._held_open())

    def _close_reopenable(self) -> bool:
        """Close the files that can be opened again. Returns whether there were any."""
        return self._close_files([held for held in self._held_open() if _is_unchanged(held)])

    @guarded
    def _held_open(self) -> list[HeldFile]:
        return [held for held in self._held.values() if held.file is not None]

    def _close_files(self, of: list[HeldFile]) -> bool:
        return bool(self._detach_files(of))  # drops the last references outside the lock

    @guarded
    def _detach_files(self, of: list[HeldFile]) -> list[DataFile | None]:
        detached = [*self._open.values(), *(held.file for held in of)]
        self._open.clear()
        for held in of:
            held.file = None
        return detached

    # Files that groups are registered in -------------------------------------------------------

    def hold(self, path: str, stamp: FileStamp, header_digest: str | None = None) -> HeldFile:
        """Open and return the file with this stamp and header. Reading it raises any error."""
        held = self._held_file(path, stamp, header_digest)
        with contextlib.suppress(OSError, StaleCheckpointError):
            self.open(held)
        return held

    @guarded
    def _held_file(self, path: str, stamp: FileStamp, header_digest: str | None) -> HeldFile:
        key = path, stamp, header_digest
        held = self._held.get(key)
        if held is None:
            self._held[key] = held = HeldFile(*key)
        return held

    def open(self, held: HeldFile) -> DataFile:
        """Return the open file. Raises StaleCheckpointError if it has changed."""
        file = held.file
        if file is None:
            file = self._open_again(held)
        self.check(file, held)
        return file

    def check(self, file: DataFile, held: HeldFile) -> None:
        """Raise StaleCheckpointError if an open file has changed since it was registered."""
        if not file.matches(held.stamp):
            raise _stale_error(held.path)

    def _open_again(self, held: HeldFile) -> DataFile:
        path = held.path
        if path.startswith(self._own):
            return self.get(path)
        try:
            file = self._open_file(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StaleCheckpointError(
                f"{path} is gone: it was removed or renamed after it was registered, and was not "
                "held open because too many files were open; restore it, or load the model (or "
                "register the checkpoint) again",
                path=path,
            ) from error
        self.check(file, held)
        if held.header_digest not in (None, file.header_digest()):
            raise _stale_error(path)
        self._store_open(held, file)
        return file

    @guarded
    def _store_open(self, held: HeldFile, file: DataFile) -> None:
        if sum(each.file is not None for each in self._held.values()) < MAX_HELD_FILES:
            held.file = file


def _is_unchanged(held: HeldFile) -> bool:
    try:
        return FileStamp.of(os.stat(held.path)) == held.stamp
    except OSError:
        return False


def _stale_error(path: str) -> StaleCheckpointError:
    """Return the error for a registered file that has changed."""
    return StaleCheckpointError(
        f"{path} was changed after it was registered: its tensors may be gone; register the "
        "checkpoint (or load the pipeline) again",
        path=path,
    )
