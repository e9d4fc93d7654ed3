"""Memory maps of files: host views of weights, and detection of weights that are mapped files.

`from_pretrained` at a checkpoint's own dtype leaves every weight as a private, copy-on-write map of
the safetensors file. Linux reports the file and offset (`/proc/self/maps`), and whether a page was
written to since (`/proc/self/pagemap`). A weight without written pages still equals the file's
bytes, and need not be stored again.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.errors import TruncatedFileError
from tierstore.model.groups import Extent
from tierstore.model.sizes import PAGE
from tierstore.system.files import close_quietly, read_fully, transfer_error, transfer_errors
from tierstore.system.mapping import anonymous_file, map_open_file

MAPS, PAGEMAP = "/proc/self/maps", "/proc/self/pagemap"

_PAGEMAP_ENTRY = 8
_NEAR = 1 << 20
_FILE_PAGE = np.uint64(1 << 61)
_PRESENT = np.uint64(1 << 63)
_SWAPPED = np.uint64(1 << 62)


class _ScanRequest(ctypes.Structure):
    """`struct pm_scan_arg` of Linux: the pages to look for, and a buffer for the first matches."""

    _names = (
        "size flags start end walk_end vec vec_len max_pages "
        "category_inverted category_mask category_anyof_mask return_mask"
    )
    _fields_ = [(name, ctypes.c_uint64) for name in _names.split()]


_REGION_WORDS = 3
_SCAN = 0xC0006610 | ctypes.sizeof(_ScanRequest) << 16  # PAGEMAP_SCAN, since Linux 6.7
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of this process's addresses that maps a file."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    path: str


class AddressSpace:
    """The file mappings of this process at the time of construction. Raises TransferError."""

    def __init__(self) -> None:
        with (
            transfer_errors("reading", path=MAPS),
            open(MAPS, encoding="utf-8", errors="surrogateescape") as lines,
        ):
            self._mappings = [mapping for line in lines if (mapping := _parse(line))]
        self._starts = [mapping.start for mapping in self._mappings]

    def extent_at(self, address: int, nbytes: int) -> Extent | None:
        """Return the file extent that memory [address, address + nbytes) maps unchanged, or None.

        The extent's path is the file's name as the system knows it. None for anonymous memory, for
        a file that was removed or replaced since, and for pages that were written to.
        """
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or not nbytes or address + nbytes > self._mappings[at].stop:
            return None
        mapping = self._mappings[at]
        try:
            status = os.stat(mapping.path)
        except OSError:
            return None
        if (status.st_dev, status.st_ino) != (mapping.device, mapping.inode):
            return None
        pages = _written_pages(address, nbytes)
        if pages is None or pages.any():  # unknown counts as written
            return None
        return Extent(mapping.path, mapping.offset + address - mapping.start, nbytes)


def _parse(line: str) -> Mapping | None:
    fields = line.rstrip("\n").split(maxsplit=5)
    if len(fields) < 6 or not fields[5].startswith("/") or fields[1][3] != "p":
        return None
    start, _, stop = fields[0].partition("-")
    major, _, minor = fields[3].partition(":")
    device = os.makedev(int(major, 16), int(minor, 16))
    path = fields[5].replace("\\012", "\n")
    return Mapping(int(start, 16), int(stop, 16), int(fields[2], 16), device, int(fields[4]), path)


def _written_pages(address: int, nbytes: int) -> npt.NDArray[np.bool_] | None:
    """Return for each page of a private file mapping whether it was written to; None if unknown."""
    try:
        with open(PAGEMAP, "rb", buffering=0) as pagemap:
            return _written_pages_in(pagemap.fileno(), address, nbytes)
    except OSError:
        return None


def may_be_written(address: int, nbytes: int) -> bool:
    """Return whether any page of a private file mapping was written to since it was mapped.

    True if the system does not report it.
    """
    try:
        with open(PAGEMAP, "rb", buffering=0) as pagemap:
            if not _any_written(pagemap.fileno(), address, address + nbytes):
                return False
            pages = _written_pages_in(pagemap.fileno(), address, nbytes)
            return pages is None or bool(pages.any())
    except OSError:
        return True


def _written_pages_in(pagemap: int, address: int, nbytes: int) -> npt.NDArray[np.bool_] | None:
    first, last = address // PAGE, (address + nbytes - 1) // PAGE
    wanted = (last - first + 1) * _PAGEMAP_ENTRY
    raw = read_fully(pagemap, wanted, first * _PAGEMAP_ENTRY)
    if len(raw) != wanted:
        return None
    pages = np.frombuffer(raw, dtype=np.uint64)
    own = (pages & (_PRESENT | _FILE_PAGE)) == _PRESENT
    return np.asarray(own | (pages & _SWAPPED != 0))


def _any_written(pagemap: int, start: int, stop: int) -> bool:
    """Return whether private file mappings in [start, stop) may have a written page.

    Where Linux can search for such pages itself (PAGEMAP_SCAN), the answer is exact; otherwise
    True.
    """
    region = (ctypes.c_uint64 * _REGION_WORDS)()
    request = _ScanRequest(
        size=ctypes.sizeof(_ScanRequest),
        start=start // PAGE * PAGE,
        end=-(-stop // PAGE) * PAGE,
        vec=ctypes.addressof(region),
        vec_len=1,
        max_pages=1,
        category_inverted=_IS_FILE,
        category_mask=_IS_FILE,
        category_anyof_mask=_IS_PRESENT | _IS_SWAPPED,
        return_mask=_IS_PRESENT,
    )
    try:
        return bool(fcntl.ioctl(pagemap, _SCAN, request))
    except OSError:
        return True


class _Span:
    """Ranges that lie near each other, checked together; sorted, with their numbers."""

    def __init__(self, ranges: list[tuple[int, int]], numbers: list[int]) -> None:
        self._start = ranges[0][0]
        self._stop = max(address + nbytes for address, nbytes in ranges)
        self._numbers = np.array(numbers)
        here = self._start // PAGE
        self._first = np.array([address // PAGE - here for address, _ in ranges])
        self._last = np.array([(start + nbytes - 1) // PAGE - here for start, nbytes in ranges])

    def written(self, pagemap: int) -> list[int]:
        if not _any_written(pagemap, self._start, self._stop):
            return []
        pages = _written_pages_in(pagemap, self._start, self._stop - self._start)
        if pages is None or not pages.any():
            return []
        before = np.concatenate(([0], np.cumsum(pages)))
        # Memory between the ranges belongs to other code, which may write to it.
        numbers: list[int] = self._numbers[before[self._last + 1] > before[self._first]].tolist()
        return numbers


class WriteWatch:
    """Detects writes to ranges of private file mappings, given as (address, bytes).

    It reads page tables, not bytes: under a millisecond per gigabyte of untouched memory.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        near: list[list[int]] = []
        end = 0
        for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
            start, nbytes = ranges[i]
            if near and start - end < _NEAR:
                near[-1].append(i)
            else:
                near.append([i])
            end = max(end, start + nbytes)
        self._spans = [_Span([ranges[i] for i in numbers], numbers) for numbers in near]

    def written(self) -> list[int]:
        """Return the numbers of the ranges with a page that was written to since it was mapped.

        A page counts for every range that overlaps it. Returns an empty list if the system does not
        support reporting writes. Raises TransferError if a supported query fails, because a write
        must not go unnoticed.
        """
        try:
            with open(PAGEMAP, "rb", buffering=0) as pagemap:
                return [i for span in self._spans for i in span.written(pagemap.fileno())]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
                return []
            raise transfer_error(error, "reading", key=None, path=PAGEMAP) from error


def map_file(path: str, offset: int, nbytes: int) -> memoryview:
    """Map `nbytes` bytes of a file from byte `offset` on, private and writable.

    The map takes no memory until it is read. It reads as the file's bytes, and writes are visible
    to this process only. Raises TransferError.
    """
    lead = offset % mmap.ALLOCATIONGRANULARITY
    with transfer_errors("mapping", path=path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < offset + nbytes:
                raise TruncatedFileError(
                    f"{path} ends before byte {offset + nbytes:,}, the end of its tensors: "
                    "download or save it again",
                    path=path,
                )
            mapped = map_open_file(descriptor, offset - lead, nbytes + lead, mmap.MAP_PRIVATE)
        finally:
            close_quietly(descriptor)
    return mapped[lead:]


def unnamed_file_memory(directory: str, nbytes: int) -> memoryview:
    """Allocate `nbytes` zero bytes in an unnamed file in `directory`.

    The system may write them to that disk, and frees them with their last view. Raises
    DiskFullError or TransferError.
    """
    with transfer_errors("reserving space in", path=directory):
        descriptor = anonymous_file(directory)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # writing to an unbacked map would kill us
            return map_open_file(descriptor, 0, nbytes, mmap.MAP_SHARED)
        finally:
            close_quietly(descriptor)
