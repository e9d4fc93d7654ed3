"""A directory that is replaced at once: whoever dies meanwhile leaves the old one or the new one.

The new one is written beside it under another name, and synced; then the two exchange their names,
and the old one is removed. What those leave who are killed is removed by who comes next.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack

from tierstore.model.errors import TransferError
from tierstore.system.files import sync_names, transfer_error
from tierstore.system.locking import try_lock
from tierstore.system.mapping import libc
from tierstore.system.objects import READ
from tierstore.system.private import OWNER_ONLY, READABLE, deny_others_writing

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_ATTEMPTS = 10


class SwappedDirectory:
    """Where a directory is of files whose names match `parts`, and names beside it on the way
    there.

    `.NAME.saving-<16 hex digits>` is a save under way, or the one that it has replaced.
    `.NAME.previous` is what `path` leads to while there is no `path`: for a moment, on file systems
    that cannot exchange two directories.
    """

    def __init__(self, path: str | os.PathLike[str], parts: re.Pattern[str]) -> None:
        self.path = os.path.realpath(path)
        self._parts = parts
        self._parent, self._name = os.path.split(self.path)
        if not self._name:
            raise ValueError(f"{path!s} is no directory that can be replaced: choose another path")
        self._previous = f".{self._name}.previous"
        self._drafts = re.compile(re.escape(f".{self._name}.saving-") + "[0-9a-f]{16}")

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Make the errors of the system those of the library."""
        try:
            yield
        except OSError as error:
            raise transfer_error(error, doing, key=None, path=self.path) from error

    @contextlib.contextmanager
    def draft(self) -> Iterator[str]:
        """The path of a new directory that takes the place of `path` when the block is left without
        error."""
        _make_directories(self._parent)
        with _opened(self._parent) as parent:
            self._tidy(parent)
            self._refuse_others(parent)
            name, folder = self._new_draft(parent)
            mode = stat.S_IMODE(os.fstat(folder).st_mode)
            os.fchmod(folder, OWNER_ONLY)  # as torch writes some files by the umask alone
            try:
                try:
                    yield os.path.join(self._parent, name)
                    self._deny_others_writing(folder)
                    os.fchmod(folder, mode)
                    sync_names(folder)
                    self._refuse_others(parent)
                    old = self._publish(parent, name)
                except BaseException:
                    self._remove(parent, name)
                    raise
                sync_names(parent)
                if old is not None:
                    self._remove(parent, old)
            finally:
                os.close(folder)

    def _new_draft(self, parent: int) -> tuple[str, int]:
        """A directory that is locked, so that nobody takes it for a dead process's."""
        while True:
            name = f".{self._name}.saving-{os.urandom(8).hex()}"
            os.mkdir(name, READABLE, dir_fd=parent)
            # Before it is locked, somebody may look at it, and remove it.
            try:
                folder = os.open(name, READ | os.O_DIRECTORY, dir_fd=parent)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                if _inode(name, parent) == os.fstat(folder).st_ino:
                    return name, folder
            except BaseException:
                os.close(folder)
                raise
            os.close(folder)

    def _deny_others_writing(self, folder: int) -> None:
        """See that others cannot write to any file."""
        for part in self._parts_in(folder):
            descriptor = os.open(part, READ, dir_fd=folder)
            try:
                deny_others_writing(descriptor)
            finally:
                os.close(descriptor)

    def _publish(self, parent: int, draft: str) -> str | None:
        """Let `path` lead to the draft. Returns the name of what it led to before."""
        if _inode(self._name, parent) is None:
            os.rename(draft, self._name, src_dir_fd=parent, dst_dir_fd=parent)
            return None
        if _exchange(parent, draft, self._name):
            return draft
        os.rename(self._name, self._previous, src_dir_fd=parent, dst_dir_fd=parent)
        sync_names(parent)
        try:
            os.rename(draft, self._name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.rename(self._previous, self._name, src_dir_fd=parent, dst_dir_fd=parent)
            raise
        return self._previous

    def _tidy(self, parent: int) -> None:
        """Remove what those left who were killed."""
        if _inode(self._previous, parent) is not None:
            if _inode(self._name, parent) is None:
                os.rename(self._previous, self._name, src_dir_fd=parent, dst_dir_fd=parent)
                sync_names(parent)
            else:
                self._remove(parent, self._previous)
        for name in filter(self._drafts.fullmatch, os.listdir(parent)):
            with contextlib.suppress(OSError), _opened(name, parent) as folder:
                if try_lock(folder):
                    self._remove(parent, name)

    def _refuse_others(self, parent: int) -> None:
        others: list[str] = []
        with contextlib.suppress(FileNotFoundError), _opened(self._name, parent) as folder:
            others = sorted(set(os.listdir(folder)) - set(self._parts_in(folder)))
        if others:
            raise ValueError(
                f"{self.path} has {others[0]!r}, which is no part of a saved training and would "
                "be lost: choose a directory of its own"
            )

    def _parts_in(self, folder: int) -> list[str]:
        return [name for name in os.listdir(folder) if self._parts.fullmatch(name)]

    def _remove(self, parent: int, name: str) -> None:
        """Remove a directory with what was written there, and nothing else. As far as possible."""
        with contextlib.suppress(OSError), _opened(name, parent) as folder:
            for part in self._parts_in(folder):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)
            os.rmdir(name, dir_fd=parent)

    def open(self, stack: ExitStack) -> dict[str, int]:
        """The files of the directory, all of the same save, open until the stack is closed."""
        for _ in range(_ATTEMPTS):
            for path in (self.path, os.path.join(self._parent, self._previous)):
                with contextlib.suppress(FileNotFoundError), _opened(path) as folder:
                    found = self._files_in(folder, path, stack)
                    if found is not None:
                        return found
        raise TransferError(
            f"{self.path} has no saved training: pass the directory that save_training was given",
            path=self.path,
        )

    def _files_in(self, folder: int, path: str, stack: ExitStack) -> dict[str, int] | None:
        files = {}
        for name in self._parts_in(folder):
            with contextlib.suppress(FileNotFoundError):
                files[name] = os.open(name, READ, dir_fd=folder)
                stack.callback(os.close, files[name])
        replaced = os.stat(path).st_ino != os.fstat(folder).st_ino
        return None if replaced else files


@contextlib.contextmanager
def _opened(path: str, parent: int | None = None) -> Iterator[int]:
    folder = os.open(path, READ | os.O_DIRECTORY, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def _inode(name: str, parent: int) -> int | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _make_directories(path: str) -> None:
    """Make a directory, and those it is in, so that they survive a power cut."""
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        _make_directories(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, READABLE)
        with _opened(above) as folder:
            sync_names(folder)


def _exchange(parent: int, one: str, other: str) -> bool:
    """Exchange two names at once. False where the system or the file system cannot."""
    rename = getattr(libc, "renameat2", None)
    if rename is None:
        return False
    if rename(parent, os.fsencode(one), parent, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNKNOWN:
        return False
    raise OSError(code, os.strerror(code), other)
