"""The files that a store reads from, and which of them stay open."""

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
"""Together, and with two descriptors each, half of what a process may have open by default."""


@dataclass(eq=False)
class HeldFile:
    """A file that groups lie in, as it was when the first of them was registered.

    As long as there is one of these, `file` stays open, unless descriptors run out: so the bytes
    are there when the name is not any more, or leads to another file. `header_digest` is the
    checksum that its safetensors header must have; None for any.
    """

    path: str
    stamp: FileStamp
    header_digest: str | None
    file: DataFile | None = None


class FileTable:
    """The files that are being read, a bounded number of them held open.

    Files in `own` (the store's directory) are opened without following links. Those of others are
    held open because somebody may remove them, or put others in their place.
    """

    def __init__(self, own: str) -> None:
        self._own = own + os.sep
        self._open: OrderedDict[str, DataFile] = OrderedDict()
        self._held: weakref.WeakValueDictionary[tuple[str, FileStamp, str | None], HeldFile] = (
            weakref.WeakValueDictionary()
        )
        self._age = 0  # counts the names that were said to lead elsewhere
        self._lock = RLock()

    def get(self, path: str) -> DataFile:
        """The file, opened if it is not open. Nobody else waits while a disk does not answer."""
        file, age = self._find(path)
        return file or self._keep_open(path, self._opened(path), age)

    @guarded
    def _find(self, path: str) -> tuple[DataFile | None, int]:
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
        return file, self._age

    def _opened(self, path: str) -> DataFile:
        follow_links = not path.startswith(self._own)
        try:
            return DataFile(path, follow_links=follow_links)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._make_room():
                raise
            return DataFile(path, follow_links=follow_links)

    @guarded
    def _keep_open(self, path: str, file: DataFile, age: int) -> DataFile:
        if age != self._age:
            return file  # it may be what the name led to before: for who asked then, no longer
        file = self._open.setdefault(path, file)
        while len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)
        return file

    @guarded
    def forget(self, path: str) -> None:
        """The name now leads to another file: open it anew next time."""
        self._age += 1
        self._open.pop(path, None)

    def close(self) -> bool:
        """Let go of every file. Returns whether there were any."""
        return self._let_go(self._held_open())

    def _make_room(self) -> bool:
        """Let go of the files that can be opened again. Returns whether there were any."""
        return self._let_go([held for held in self._held_open() if _is_in_its_place(held)])

    @guarded
    def _held_open(self) -> list[HeldFile]:
        return [held for held in self._held.values() if held.file is not None]

    def _let_go(self, of: list[HeldFile]) -> bool:
        return bool(self._forget_all(of))  # here the files are closed, without the lock

    @guarded
    def _forget_all(self, of: list[HeldFile]) -> list[DataFile | None]:
        let_go = [*self._open.values(), *(held.file for held in of)]
        self._open.clear()
        for held in of:
            held.file = None
        return let_go

    # Files that groups are registered in -------------------------------------------------------

    def hold(self, path: str, stamp: FileStamp, header_digest: str | None = None) -> HeldFile:
        """The file with this stamp and header, open. If it is not there, who reads it is told."""
        held = self._the_held(path, stamp, header_digest)
        with contextlib.suppress(OSError, StaleCheckpointError):
            self.open(held)
        return held

    @guarded
    def _the_held(self, path: str, stamp: FileStamp, header_digest: str | None) -> HeldFile:
        key = path, stamp, header_digest
        held = self._held.get(key)
        if held is None:
            self._held[key] = held = HeldFile(*key)
        return held

    def open(self, held: HeldFile) -> DataFile:
        """The file, if it is what it was. Raises StaleCheckpointError if not."""
        file = held.file
        if file is None:
            file = self._open_again(held)
        self.check(file, held)
        return file

    def check(self, file: DataFile, held: HeldFile) -> None:
        """Raise StaleCheckpointError if an open file is not what it was."""
        if not file.is_as(held.stamp):
            raise _stale(held.path)

    def _open_again(self, held: HeldFile) -> DataFile:
        path = held.path
        if path.startswith(self._own):
            return self.get(path)
        try:
            file = self._opened(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StaleCheckpointError(
                f"{path} is gone: it was removed or renamed after it was registered, and too many "
                "files were open for it to be kept; put it back, or load the model (or register "
                "the checkpoint) again",
                path=path,
            ) from error
        self.check(file, held)
        if held.header_digest not in (None, file.header_digest()):
            raise _stale(path)
        self._keep_held(held, file)
        return file

    @guarded
    def _keep_held(self, held: HeldFile, file: DataFile) -> None:
        if sum(each.file is not None for each in self._held.values()) < MAX_HELD_FILES:
            held.file = file


def _is_in_its_place(held: HeldFile) -> bool:
    try:
        return FileStamp.of(os.stat(held.path)) == held.stamp
    except OSError:
        return False


def _stale(path: str) -> StaleCheckpointError:
    """The error for a registered file that is not what it was."""
    return StaleCheckpointError(
        f"{path} was changed after it was registered: the tensors that were promised may be gone; "
        "register the checkpoint (or load the pipeline) again",
        path=path,
    )
