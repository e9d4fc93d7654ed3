"""Validates the files whose descriptors a worker passes."""

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
from tierstore.wire.framing import ProtocolError

MAX_FILES = 4096
"""Maximum files that a worker may have open here, including those with registered groups."""


class PassedFiles:
    """The files that one worker has passed, by number; None after the worker has closed one.

    Its file systems may hang: only `thread` makes calls to them, including close.
    """

    def __init__(self, thread: FileThread) -> None:
        self._thread = thread
        self.files: list[HeldFile | None] = []
        self._open: weakref.WeakSet[HeldFile] = weakref.WeakSet()
        self._passed: deque[int] = deque()  # descriptors of messages that are not handled yet

    def take(self, descriptors: list[int]) -> None:
        """Queue received descriptors for the `Open` message that they belong to.

        Raises ProtocolError if there are more than pending messages can have.
        """
        self._passed += descriptors
        if len(self._passed) > 2 * messages.MAX_DESCRIPTORS:
            raise ProtocolError("it sent descriptors without a message")

    def open(self, message: messages.Open) -> Future[list[HeldFile]]:
        """Validate the files of the next descriptors. The result is for `add`.

        Raises ProtocolError, and so does the future.
        """
        if len(self._open) + len(message.files) > MAX_FILES:
            raise ProtocolError(f"it opens more than {MAX_FILES:,} files")
        if len(self._passed) < sum(1 + row.direct for row in message.files):
            raise ProtocolError("a descriptor is missing")
        passed = [
            (row, [self._passed.popleft() for _ in range(1 + row.direct)]) for row in message.files
        ]
        return self._thread.submit(lambda: self._examined(passed))

    def _examined(self, passed: Sequence[tuple[messages.File, list[int]]]) -> list[HeldFile]:
        files: list[HeldFile] = []
        try:
            for row, descriptors in passed:
                files.append(_held(row, descriptors, self._close))
        except (OSError, ProtocolError):
            for _, descriptors in passed[len(files) :]:
                for descriptor in descriptors:
                    close_quietly(descriptor)
            raise ProtocolError("a descriptor is not of the regular file described") from None
        return files

    def add(self, files: Sequence[HeldFile]) -> None:
        """Accept files for the registration of groups."""
        self.files += files
        self._open.update(files)

    def close(self, message: messages.CloseFile) -> None:
        """Remove a file from registration."""
        if message.file < len(self.files):
            self.files[message.file] = None

    def forget(self) -> None:
        """Drop all files of a worker that is gone. Files with registered groups stay open."""
        self.drop(self._passed)
        self._passed.clear()
        self.files.clear()

    def drop(self, descriptors: Iterable[int]) -> None:
        """Close descriptors whose message will not be handled."""
        for descriptor in descriptors:
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._thread.finish(partial(close_quietly, descriptor))


def _held(row: messages.File, descriptors: list[int], close: Callable[[int], None]) -> HeldFile:
    """Return the file that a worker passed. Raises ProtocolError unless it matches `row`."""
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
            raise ProtocolError("the descriptor is of another file")
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_PATH:
            raise ProtocolError("the descriptor is not readable")
    cached, *direct = descriptors
    file = DataFile.passed(row.path, cached, direct[0] if direct else None, close)
    return HeldFile(row.path, stamp, row.header_digest, file)
