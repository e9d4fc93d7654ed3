"""Records every call that changes anything below a directory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.crash_states import (
    ROOT,
    Disk,
    Event,
    Failed,
    Made,
    Named,
    Sized,
    Synced,
    Told,
    Tree,
    Written,
    last,
    whole,
)
from tests.helpers.system_calls import Call, answered


class Recorder:
    """Records this process's calls below `root`, an empty directory, inside the block.

    Calls are serialised, so the record has their true order. Sync number `failing` fails.
    """

    def __init__(self, root: Path, failing: int | None = None) -> None:
        self._root = root
        self._failing = failing
        self._syncs = 0
        self._lock = threading.RLock()
        self._true: dict[str, Callable[..., Any]] = {}
        self._patched = ExitStack()
        self._known = {self._id(os.stat(root)): ROOT}
        self.events: list[Event] = [Made(ROOT, True)]

    def tell(self, *words: Any) -> None:
        with self._lock:
            self.events.append(Told(words))

    def __enter__(self) -> Recorder:
        for name in (
            "open", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "pwrite",
            "posix_fallocate", "ftruncate", "fsync", "fdatasync",
        ):  # fmt: skip
            self._true[name] = getattr(os, name)
        self._patched.enter_context(answered(self._true, self._recorded))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patched.close()
        if error is None:  # every object below `root` was recorded
            disk = Disk()
            for event in self.events:
                if not isinstance(event, Failed):  # unnoticed until a power cut
                    disk.happen(event)
            assert disk.tree(last, whole) == tree_of(self._root)

    def _recorded(self, call: Call) -> Any:
        with self._lock:
            return getattr(self, f"_{call.name}")(*call.args, **call.options)

    @staticmethod
    def _id(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    def _it(self, descriptor: int) -> int | None:
        """Return the number of an open file or directory; None if it is not below `root`."""
        return self._known.get(self._id(os.fstat(descriptor)))

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """Return the directory's number and the name; None if it is not below `root`."""
        folder, name = os.path.split(os.fspath(path))
        if dir_fd is not None:
            assert not folder
            directory = self._it(dir_fd)
        else:
            directory = self._known.get(self._id(os.stat(folder or ".")))
        return None if directory is None else (directory, name)

    def _new(self, place: tuple[int, str], status: os.stat_result, is_directory: bool) -> None:
        it = sum(isinstance(event, Made) for event in self.events)
        self._known[self._id(status)] = it
        self.events += [Made(it, is_directory), Named(*place, it)]

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE or not flags & os.O_CREAT:
            descriptor = self._true["open"](path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_TMPFILE == os.O_TMPFILE:  # the inode may have been another file's
                self._known.pop(self._id(os.fstat(descriptor)), None)
            return descriptor
        place = self._place(path, dir_fd)
        try:
            os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            is_new = False
        except FileNotFoundError:
            is_new = True
        descriptor = self._true["open"](path, flags, mode, dir_fd=dir_fd)
        if place is not None and is_new:
            self._new(place, os.fstat(descriptor), False)
        return descriptor

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._true["mkdir"](path, mode, dir_fd=dir_fd)
        place = self._place(path, dir_fd)
        if place is not None:
            self._new(place, os.stat(path, dir_fd=dir_fd), True)

    def _rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        there, here = self._place(dst, dst_dir_fd), self._place(src, src_dir_fd)
        it = self._known.get(self._id(os.stat(src, dir_fd=src_dir_fd, follow_symlinks=False)))
        self._true["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if here is not None and there is not None:
            self.events += [Named(*there, it), Named(*here, None)]

    _replace = _rename

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._true["unlink"](path, dir_fd=dir_fd)
        place = self._place(path, dir_fd)
        if place is not None:
            self.events.append(Named(*place, None))

    _remove = _unlink

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._true["rmdir"](path, dir_fd=dir_fd)
        place = self._place(path, dir_fd)
        if place is not None:
            self.events.append(Named(*place, None))

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        count: int = self._true["pwrite"](descriptor, data, offset)
        it = self._it(descriptor)
        if it is not None:
            self.events.append(Written(it, offset, bytes(data[:count])))
        return count

    def _sized(self, descriptor: int) -> None:
        it = self._it(descriptor)
        if it is not None:
            self.events.append(Sized(it, os.fstat(descriptor).st_size))

    def _posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        self._true["posix_fallocate"](descriptor, offset, length)
        self._sized(descriptor)

    def _ftruncate(self, descriptor: int, length: int) -> None:
        self._true["ftruncate"](descriptor, length)
        self._sized(descriptor)

    def _fsync(self, descriptor: int) -> None:
        it = self._it(descriptor)
        if it is None:
            self._true["fsync"](descriptor)
            return
        self._syncs += 1
        if self._syncs == self._failing:
            self.events.append(Failed(it))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._true["fsync"](descriptor)
        self.events.append(Synced(it))

    _fdatasync = _fsync


def tree_of(root: Path) -> Tree:
    """Return the contents below a directory."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }
