"""Disk space for data that need not survive: one unnamed file.

Nothing stays behind when the process is killed, and no other process can open the file. Offsets are
page multiples, found first-fit.

Overwriting is about twice as fast as writing new blocks, so blocks are not returned to the file
system as soon as they are free: the next step spills as much as this one. They are kept while at
least the same number of bytes is free in the file system.
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
from tierstore.tiers.workers import RunParallel, run_serially

UNNAMED = "/proc/self/fd/"
"""Prefix of the path of an unnamed file, which no other process can open or change."""

GROWTH = 64 << 20
"""Minimum bytes by which the file grows, if the disk has space."""


class SpillExtent:
    """Bytes of the file that belong to one group while the group or a view of them exists."""

    def __init__(self, offset: int, nbytes: int, left: deque[tuple[int, int]]) -> None:
        self.offset = offset
        self.nbytes = nbytes
        weakref.finalize(self, left.append, (offset, nbytes)).atexit = False


class Spill:
    """The file and its free space. Thread-safe.

    Raises DiskFullError or TransferError.
    """

    def __init__(self, directory: str, *, growth: int = GROWTH) -> None:
        self._directory = directory
        self._growth = growth
        self._explained = functools.partial(transfer_errors, "spilling to", path=directory)
        with self._explained():
            descriptor = anonymous_file(directory)
        self._free = FreeRuns()
        self._unused_extents: deque[tuple[int, int]] = deque()  # extents without users
        self._end = 0  # of the last group
        self._size = 0  # of the file, as far as it was extended here
        self._lock = RLock()  # of the accounting: its holder never waits for the disk
        self._sizing = RLock()
        # Readers open it by this path; it has no name.
        self.path = f"{UNNAMED}{descriptor}"
        self._file = OpenForWriting(descriptor, self.path)

    @guarded
    def usage(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the end of the last group, and the free runs before it, as (offset, nbytes)."""
        return self._end, list(self._free)

    def take(self, nbytes: int) -> int:
        """Return the offset of `nbytes` free bytes (rounded up to pages).

        Raises DiskFullError or TransferError.
        """
        nbytes = round_up(nbytes, PAGE)
        while self._unused_extents:
            self.release(*self._unused_extents.popleft())
        offset, is_new = self._find_space(nbytes)
        if not is_new:
            return offset
        try:
            with self._explained(), self._sizing, self._file.in_use():
                self._grow(offset + nbytes)
        except BaseException:
            self._release(offset, nbytes)
            raise
        return offset

    @guarded
    def _find_space(self, nbytes: int) -> tuple[int, bool]:
        """Return an offset, and whether it is past the last group."""
        found = self._free.take(nbytes)
        if found is not None:
            return found, False
        offset, self._end = self._end, self._end + nbytes
        return offset, True

    def _grow(self, size: int) -> None:
        """Extend the file to at least `size` bytes: writes inside it do not serialise."""
        more = size - self._size
        if more <= 0:
            return
        if more < self._growth <= self._spare() // shares.SPILL_GROWTH:
            with contextlib.suppress(OSError):  # a file size limit or a quota may allow less
                self._grow_by(self._growth)
                return
        try:
            self._grow_by(more)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # The file system cannot reserve space: writes extend the file.

    def _grow_by(self, more: int) -> None:
        try:
            os.posix_fallocate(self._file.cached, self._size, more)
        except OSError:
            with contextlib.suppress(OSError):  # some file systems keep a partial allocation
                os.ftruncate(self._file.cached, self._size)
            raise
        self._size += more

    def _spare(self) -> int:
        """Return the free bytes of the file system; 0 if unknown."""
        try:
            status = os.fstatvfs(self._file.cached)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def release(self, offset: int, nbytes: int) -> None:
        """Free `nbytes` bytes at `offset`. Never fails."""
        if self._release(offset, nbytes):
            self._trim(lambda behind: behind > self._spare())

    @guarded
    def _release(self, offset: int, nbytes: int) -> bool:
        """Update the accounting. Returns whether the file could be shortened."""
        self._free.release(offset, round_up(nbytes, PAGE))
        end, self._end = self._end, self._free.cut(self._end)
        return self._end < end and self._size > self._end

    def trim(self) -> int:
        """Return the space past the last group to the file system. Returns the bytes."""
        return self._trim(lambda behind: behind > 0)

    def _trim(self, worth_it: Callable[[int], bool]) -> int:
        # If this fails, the file stays longer than necessary.
        with contextlib.suppress(OSError), self._sizing, self._file.in_use():
            end, _ = self.usage()
            behind = self._size - end
            if worth_it(behind):
                os.ftruncate(self._file.cached, end)
                self._size = end
                return behind
        return 0

    def take_extent(self, nbytes: int) -> SpillExtent:
        """Return an extent for a group that can be mapped while spilled. Raises as `take`."""
        return SpillExtent(self.take(nbytes), nbytes, self._unused_extents)

    def save_in(
        self, extent: SpillExtent, data: memoryview, run_parallel: RunParallel = run_serially
    ) -> Source:
        """Write a group's packed bytes to its extent. Returns the source to read them from.

        There are no checksums, because the extent may be written to through a map. Raises
        DiskFullError or TransferError.
        """
        run_parallel(
            functools.partial(self.write, data[at : at + nbytes], extent.offset + at)
            for at, nbytes in parts(len(data), WRITE_BLOCK)
        )
        return self.source_of(extent)

    def source_of(self, extent: SpillExtent) -> Source:
        """Return the source of the group in an extent."""
        return Source((Segment(Extent(self.path, extent.offset, extent.nbytes), 0),))

    def map_extent(self, extent: SpillExtent) -> memoryview:
        """Map an extent. Writes to the map go to the file.

        It takes no memory except the system's page cache. Raises TransferError where the file
        system does not support such maps.
        """
        file, stop = self._file.cached, extent.offset + extent.nbytes
        with transfer_errors("mapping", path=self._directory), self._file.in_use():
            if os.fstat(file).st_size < stop:  # neither written nor reserved yet
                os.pwrite(file, b"\0", stop - 1)
            return map_open_file(file, extent.offset, extent.nbytes, mmap.MAP_SHARED, extent)

    def save(
        self, data: memoryview, run_parallel: RunParallel = run_serially
    ) -> tuple[int, Source]:
        """Write a group's packed bytes. Returns their offset, and the source to read them from.

        `run_parallel` runs the parts of the work, such as `Workers.run_parallel`. Raises
        DiskFullError or TransferError, after freeing the space.
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
            self.release(start, len(data))
            raise
        segment = Segment(Extent(self.path, start, len(data)), 0)
        return start, Source((segment,), (), tuple(checks[at] for at in sorted(checks)))

    def write(self, data: memoryview, offset: int) -> None:
        """Write (part of) a group's packed bytes at an offset in space from `take`.

        Raises DiskFullError or TransferError.
        """
        with self._explained():
            self._file.write(data, offset)
        if offset + len(data) > self._size:
            with self._sizing:
                self._size = max(self._size, offset + len(data))

    def close(self) -> None:
        """Close the file, which frees its space."""
        with contextlib.suppress(OSError):  # its data is no longer needed
            self._file.close()
