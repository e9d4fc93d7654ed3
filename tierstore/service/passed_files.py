"""The files whose descriptors a worker passes: taken if they are what it says, and can be read."""

from __future__ import annotations

import fcntl
import os
import stat
import weakref
from collections import deque

from tierstore.system.file_table import HeldFile
from tierstore.system.files import DataFile, FileStamp, close_quietly
from tierstore.wire import messages
from tierstore.wire.framing import NonsenseError

FILES = 4096
"""Files that a worker may have open here, those that its groups lie in among them."""


class PassedFiles:
    """What one worker has passed. `files` has them by number; None for one that it has closed."""

    def __init__(self) -> None:
        self.files: list[HeldFile | None] = []
        self._open: weakref.WeakSet[HeldFile] = weakref.WeakSet()
        self._passed: deque[int] = deque()  # descriptors of messages that are not read yet

    def take(self, descriptors: list[int]) -> None:
        """Descriptors have come, with a message that will be looked at later. Raises NonsenseError
        for more than there can be messages for."""
        self._passed += descriptors
        if len(self._passed) > 2 * messages.MAX_DESCRIPTORS:
            raise NonsenseError("it sends descriptors that belong to no message")

    def open(self, message: messages.Open) -> None:
        """The files of the next descriptors. Raises NonsenseError."""
        for row in message.files:
            if len(self._open) >= FILES:
                raise NonsenseError(f"it opens more than {FILES:,} files")
            wanted = 1 + row.direct
            if len(self._passed) < wanted:
                raise NonsenseError("a descriptor is missing")
            descriptors = [self._passed.popleft() for _ in range(wanted)]
            try:
                held = _held(row, descriptors)
            except (OSError, NonsenseError):
                for descriptor in descriptors:
                    close_quietly(descriptor)
                raise NonsenseError("it passed a descriptor that is no open regular file") from None
            self.files.append(held)
            self._open.add(held)

    def close(self, message: messages.CloseFile) -> None:
        """The worker registers no more groups in this file."""
        if message.file < len(self.files):
            self.files[message.file] = None

    def forget(self) -> None:
        """The worker is gone. What groups lie in stays open."""
        while self._passed:
            close_quietly(self._passed.popleft())
        self.files.clear()


def _held(row: messages.File, descriptors: list[int]) -> HeldFile:
    """The file that a worker passed, if it is a regular file, and the one that it describes."""
    device, inode, size, modified, changed = row.stamp
    stamp = FileStamp(
        device, inode, size, messages.nanoseconds_of(modified), messages.nanoseconds_of(changed)
    )
    for descriptor in descriptors:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (
            stamp.device,
            stamp.inode,
        ):
            raise NonsenseError("it is another file")
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_PATH:
            raise NonsenseError("it cannot be read")
    cached, *direct = descriptors
    file = DataFile.passed(row.path, cached, direct[0] if direct else None)
    return HeldFile(row.path, stamp, row.header_digest, file)
