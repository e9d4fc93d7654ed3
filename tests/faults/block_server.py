"""The process behind a `Device`.

    python -m tests.faults.block_server IMAGE AT LOG

`AT/disk` is the file IMAGE. All writes and cache flushes of a file system on it are appended to
LOG, in order. Bytes written to `AT/marks` are logged as marks in between. Bytes written to
`AT/orders` make all later writes that contain them fail; a space ends that.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

import mfusepy

from tests.faults.block_device import FLUSH, HEAD, MARK, WRITE

FILES = ("disk", "marks", "orders")


class Serving(mfusepy.Operations):
    """The three served files."""

    use_ns = True

    def __init__(self, image: str, log: str) -> None:
        self._disk = os.open(image, os.O_RDWR)
        self._size = os.fstat(self._disk).st_size
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._bad = b""

    def _note(self, kind: int, offset: int = 0, data: bytes = b"") -> None:
        os.write(self._log, HEAD.pack(kind, offset, len(data)) + data)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        if path[1:] not in FILES:
            raise mfusepy.FuseOSError(errno.ENOENT)
        size = self._size if path == "/disk" else 0
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *FILES]

    def open(self, path: str, flags: int) -> int:
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(self._disk, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if path == "/marks":
            self._note(MARK, 0, data)
        elif path == "/orders":
            self._bad = data.strip()
        elif self._bad and self._bad in data:
            raise mfusepy.FuseOSError(errno.EIO)
        else:
            os.pwrite(self._disk, data, offset)
            self._note(WRITE, offset, data)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._note(FLUSH)
        return 0


if __name__ == "__main__":
    image, at, log = sys.argv[1:]
    # Large writes only: a loop device treats a write cut short by an error as complete.
    whole = {"big_writes": True, "max_write": 1 << 17} if mfusepy.fuse_version_major == 2 else {}
    mfusepy.FUSE(Serving(image, log), at, foreground=True, nothreads=True, **whole)
