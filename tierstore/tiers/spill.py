"""Room on disk for what need not survive: one file without a name.

Nothing is left behind when the process is killed, and nobody else can open it. Offsets are page
multiples, found first-fit.

Overwriting is about twice as fast as writing what was never written before, so blocks are not given
back to the file system just because nobody needs them now: what a step spills and reads back, the
next step spills again. They are kept as long as the file system has as much room free besides.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

from tierstore.model import shares
from tierstore.model.groups import Check, Extent, Segment, Source
from tierstore.model.header import digest
from tierstore.model.locks import RLock, guarded
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.files import WRITE_BLOCK, OpenForWriting, parts, transfer_errors
from tierstore.system.mapping import anonymous_file, map_open_file
from tierstore.tiers.free_runs import FreeRuns
from tierstore.tiers.workers import RunParallel, one_by_one

NAMELESS = "/proc/self/fd/"
"""How the path of a file without a name begins: nobody else can open it, nor change it."""

GROWTH = 64 << 20
"""Bytes by which the file grows at least, where there is room."""


class SpillExtent:
    """Room in the file that stays one group's, as long as anybody has the group or looks at it."""

    def __init__(self, offset: int, nbytes: int, left: deque[tuple[int, int]]) -> None:
        self.offset = offset
        self.nbytes = nbytes
        weakref.finalize(self, left.append, (offset, nbytes)).atexit = False


class Spill:
    """The file and its free room. Any number of threads may use it at once.

    Raises DiskFullError or TransferError.
    """

    def __init__(self, directory: str, *, growth: int = GROWTH) -> None:
        self._directory = directory
        self._growth = growth
        self._explained = functools.partial(transfer_errors, "spilling to", path=directory)
        with self._explained():
            descriptor = anonymous_file(directory)
        self._free = FreeRuns()
        self._left: deque[tuple[int, int]] = deque()  # places that nobody has any more
        self._end = 0  # of the last group
        self._size = 0  # of the file, as far as we made it
        self._lock = RLock()  # of the books: nobody who has it waits for the disk
        self._sizing = RLock()
        # Readers open it by this name; it has no other.
        self.path = f"{NAMELESS}{descriptor}"
        self._file = OpenForWriting(descriptor, self.path)

    @guarded
    def room(self) -> tuple[int, list[tuple[int, int]]]:
        """Where the last group ends, and what is free before that: (offset, nbytes), by offset."""
        return self._end, list(self._free)

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` bytes of room (rounded up to pages).

        Raises DiskFullError or TransferError.
        """
        nbytes = round_up(nbytes, PAGE)
        while self._left:
            self.give_back(*self._left.popleft())
        offset, is_new = self._find_room(nbytes)
        if not is_new:
            return offset
        try:
            with self._explained(), self._sizing, self._file.in_use():
                self._grow(offset + nbytes)
        except BaseException:
            self._give_back(offset, nbytes)
            raise
        return offset

    @guarded
    def _find_room(self, nbytes: int) -> tuple[int, bool]:
        """An offset, and whether it is behind the last group."""
        found = self._free.take(nbytes)
        if found is not None:
            return found, False
        offset, self._end = self._end, self._end + nbytes
        return offset, True

    def _grow(self, size: int) -> None:
        """See that the file has at least `size` bytes: writes inside it need not wait in line."""
        more = size - self._size
        if more <= 0:
            return
        if more < self._growth <= self._spare() // shares.SPILL_GROWTH:
            with contextlib.suppress(OSError):  # a limit for files or a quota allows less, maybe
                self._grow_by(self._growth)
                return
        try:
            self._grow_by(more)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # The file system cannot reserve room: writes make the file longer.

    def _grow_by(self, more: int) -> None:
        try:
            os.posix_fallocate(self._file.cached, self._size, more)
        except OSError:
            with contextlib.suppress(OSError):  # some file systems keep what they got until then
                os.ftruncate(self._file.cached, self._size)
            raise
        self._size += more

    def _spare(self) -> int:
        """Bytes that the file system has free, as far as it tells."""
        try:
            status = os.fstatvfs(self._file.cached)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def give_back(self, offset: int, nbytes: int) -> None:
        """The room is free again. Never fails."""
        if self._give_back(offset, nbytes):
            self._trim(lambda behind: behind > self._spare())

    @guarded
    def _give_back(self, offset: int, nbytes: int) -> bool:
        """Keep the books. Returns whether the file is now longer than it need be."""
        self._free.give(offset, round_up(nbytes, PAGE))
        end, self._end = self._end, self._free.cut(self._end)
        return self._end < end and self._size > self._end

    def trim(self) -> int:
        """Give the room behind the last group back to the file system. Returns how many bytes."""
        return self._trim(lambda behind: behind > 0)

    def _trim(self, worth_it: Callable[[int], bool]) -> int:
        # If it fails, the file stays longer than it need be.
        with contextlib.suppress(OSError), self._sizing, self._file.in_use():
            end, _ = self.room()
            behind = self._size - end
            if worth_it(behind):
                os.ftruncate(self._file.cached, end)
                self._size = end
                return behind
        return 0

    def take_extent(self, nbytes: int) -> SpillExtent:
        """Room for a group that is shown while it is away. Raises what `take` raises."""
        return SpillExtent(self.take(nbytes), nbytes, self._left)

    def save_in(
        self, extent: SpillExtent, data: memoryview, run_parallel: RunParallel = one_by_one
    ) -> Source:
        """Write a group's packed bytes to its extent. Returns how to read them again.

        There are no checksums: who looks at the place may write to it, too. Raises DiskFullError or
        TransferError.
        """
        run_parallel(
            functools.partial(self.write, data[at : at + nbytes], extent.offset + at)
            for at, nbytes in parts(len(data), WRITE_BLOCK)
        )
        return self.source_of(extent)

    def source_of(self, extent: SpillExtent) -> Source:
        """How to read the group whose place it is."""
        return Source((Segment(Extent(self.path, extent.offset, extent.nbytes), 0),))

    def show(self, extent: SpillExtent) -> memoryview:
        """A map of a extent: it reads as the file does, and what is written to it is in the file.

        It costs no memory but the system's cache of the file. Raises TransferError where the file
        system knows no such maps.
        """
        file, stop = self._file.cached, extent.offset + extent.nbytes
        with transfer_errors("mapping", path=self._directory), self._file.in_use():
            if os.fstat(file).st_size < stop:  # nothing was written there, no room reserved
                os.pwrite(file, b"\0", stop - 1)
            return map_open_file(file, extent.offset, extent.nbytes, mmap.MAP_SHARED, extent)

    def save(self, data: memoryview, run_parallel: RunParallel = one_by_one) -> tuple[int, Source]:
        """Write a group's packed bytes. Returns their offset, and how to read them again.

        `run_parallel` does the parts of the work, such as `Workers.run_parallel`. Raises
        DiskFullError or TransferError; nothing is taken then.
        """
        checks: dict[int, Check] = {}
        start = self.take(len(data))

        def save_part(at: int, nbytes: int) -> None:
            part = data[at : at + nbytes]
            self.write(part, start + at)
            checks[at] = Check("the spilled group", at, nbytes, digest(part))

        try:
            run_parallel(
                functools.partial(save_part, *part) for part in parts(len(data), WRITE_BLOCK)
            )
        except BaseException:
            self.give_back(start, len(data))
            raise
        segment = Segment(Extent(self.path, start, len(data)), 0)
        return start, Source((segment,), (), tuple(checks[at] for at in sorted(checks)))

    def write(self, data: memoryview, offset: int) -> None:
        """Write (part of) a group's packed bytes at its place in what `take` gave.

        Raises DiskFullError or TransferError.
        """
        with self._explained():
            self._file.write(data, offset)
        if offset + len(data) > self._size:
            with self._sizing:
                self._size = max(self._size, offset + len(data))

    def close(self) -> None:
        """Give everything back."""
        with contextlib.suppress(OSError):  # nobody will read what it was to hold
            self._file.close()
