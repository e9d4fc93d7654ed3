"""Serves a file system in user space that mirrors a directory and fails on command.

    python -m tests.faults.failing_fs_server DIRECTORY MOUNTPOINT ORDERS

ORDERS is a JSON file: {operation: name of an error}. The error "short" reads or writes half of the
requested bytes. Like many such file systems, it supports neither unnamed files nor preallocation.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

import mfusepy

NUMBERS = ("mode", "nlink", "uid", "gid", "size", "ino", "blocks")
TIMES = ("atime", "mtime", "ctime")
ROOM = ("bavail", "bfree", "blocks", "bsize", "frsize", "files", "ffree", "namemax")
CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR


class Serving(mfusepy.Operations):
    """Serves the files of `shown`; orders may make operations fail."""

    use_ns = True

    def __init__(self, shown: str, orders: str) -> None:
        self._shown = shown
        self._orders = orders

    def _is_short(self, operation: str) -> bool:
        """Raise the ordered error of this operation, if any. Returns whether it is "short"."""
        with open(self._orders, encoding="ascii") as file:
            wanted = json.load(file).get(operation)
        if wanted is not None and wanted != "short":
            raise mfusepy.FuseOSError(getattr(errno, wanted))
        return wanted is not None

    def _at(self, path: str, operation: str) -> str:
        self._is_short(operation)
        return self._shown + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        name = self._at(path, "getattr")
        status = os.lstat(name) if fh is None else os.fstat(fh)
        found = {f"st_{name}": getattr(status, f"st_{name}") for name in NUMBERS}
        return found | {f"st_{name}": getattr(status, f"st_{name}_ns") for name in TIMES}

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path, "create"), CREATE, mode)

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            self._is_short("open directly")
        return os.open(self._at(path, "open"), flags & ~os.O_DIRECT)

    def read(self, path: str, length: int, offset: int, fh: int) -> bytes:
        part = -(-length // 2) if self._is_short("read") else length
        return os.pread(fh, part, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        part = -(-len(data) // 2) if self._is_short("write") else len(data)
        return os.pwrite(fh, data[:part], offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        name = self._at(path, "truncate")
        os.truncate(name if fh is None else fh, length)

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path, "readdir"))]

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._at(path, "statfs"))
        return {f"f_{name}": getattr(status, f"f_{name}") for name in ROOM}

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._is_short("fsync")

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._is_short("fsyncdir")

    def flush(self, path: str, fh: int) -> None:
        self._is_short("flush")

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path, "mkdir"), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path, "rmdir"))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path, "unlink"))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old, "rename"), self._shown + new)


if __name__ == "__main__":
    shown, at, orders = sys.argv[1:]
    no_memory = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    mfusepy.FUSE(Serving(shown, orders), at, foreground=True, nothreads=True, **no_memory)
