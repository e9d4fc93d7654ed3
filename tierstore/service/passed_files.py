"""The files whose descriptors a worker passes: taken if they are what it says, and can be read."""

from __future__ import annotations

import fcntl
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from tierstore.service.file_thread import FileThread
from tierstore.system.file_table import HeldFile
from tierstore.system.files import DataFile, FileStamp, close_quietly
from tierstore.wire import messages
from tierstore.wire.framing import NonsenseError

FILES = 4096
"""Files that a worker may have open here, those that its groups lie in among them."""


class PassedFiles:
    """What one worker has passed. `files` has them by number; None for one that it has closed.

    Its file systems may hang: only `thread` calls them, also to close what was passed.
    """

    def __init__(self, thread: FileThread) -> None:
        self._thread = thread
        self.files: list[HeldFile | None] = []
        self._open: weakref.WeakSet[HeldFile] = weakref.WeakSet()
        self._passed: deque[int] = deque()  # descriptors of messages that are not read yet

    def take(self, descriptors: list[int]) -> None:
        """Descriptors have come, with a message that will be looked at later. Raises NonsenseError
        for more than there can be messages for."""
        self._passed += descriptors
        if len(self._passed) > 2 * messages.MAX_DESCRIPTORS:
            raise NonsenseError("it sends descriptors that belong to no message")

    def open(self, message: messages.Open) -> Future[list[HeldFile]]:
        """The files of the next descriptors, once they have been examined: for `add`.

        Raises NonsenseError, and so does the future.
        """
        if len(self._open) + len(message.files) > FILES:
            raise NonsenseError(f"it opens more than {FILES:,} files")
        if len(self._passed) < sum(1 + row.direct for row in message.files):
            raise NonsenseError("a descriptor is missing")
        passed = [
            (row, [self._passed.popleft() for _ in range(1 + row.direct)]) for row in message.files
        ]
        return self._thread.submit(lambda: self._examined(passed))

    def _examined(self, passed: Sequence[tuple[messages.File, list[int]]]) -> list[HeldFile]:
        files: list[HeldFile] = []
        try:
            for row, descriptors in passed:
                files.append(_held(row, descriptors, self._close))
        except (OSError, NonsenseError):
            for _, descriptors in passed[len(files) :]:
                for descriptor in descriptors:
                    close_quietly(descriptor)
            raise NonsenseError("it passed a descriptor that is no open regular file") from None
        return files

    def add(self, files: Sequence[HeldFile]) -> None:
        """From now on, groups may be registered in these files."""
        self.files += files
        self._open.update(files)

    def close(self, message: messages.CloseFile) -> None:
        """The worker registers no more groups in this file."""
        if message.file < len(self.files):
            self.files[message.file] = None

    def forget(self) -> None:
        """The worker is gone. What groups lie in stays open."""
        self.drop(self._passed)
        self._passed.clear()
        self.files.clear()

    def drop(self, descriptors: Iterable[int]) -> None:
        """Close descriptors that belong to no message that will be looked at."""
        for descriptor in descriptors:
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._thread.finish(partial(close_quietly, descriptor))


def _held(row: messages.File, descriptors: list[int], close: Callable[[int], None]) -> HeldFile:
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
    file = DataFile.passed(row.path, cached, direct[0] if direct else None, close)
    return HeldFile(row.path, stamp, row.header_digest, file)
