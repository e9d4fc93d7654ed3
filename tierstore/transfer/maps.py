"""Memory maps of files: what a weight shows while it is away, and which file a weight came from.

`from_pretrained` at a checkpoint's own dtype leaves every weight a private, copy-on-write map of
the safetensors file. Linux tells which file and offset (`/proc/self/maps`), and whether a page was
written to since (`/proc/self/pagemap`): a weight that nobody wrote to still is the file's bytes,
and need not be stored again.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.model.groups import Extent
from tierstore.model.sizes import PAGE

_PAGEMAP_ENTRY = 8
_NEAR = 1 << 20
_FILE_PAGE = np.uint64(1 << 61)
_PRESENT = np.uint64(1 << 63)
_SWAPPED = np.uint64(1 << 62)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of this process's addresses that shows a file."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    path: str


class AddressSpace:
    """The file mappings of this process at the moment of construction."""

    def __init__(self) -> None:
        self._mappings: list[Mapping] = []
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                mapping = _parse(line)
                if mapping is not None:
                    self._mappings.append(mapping)
        self._starts = [mapping.start for mapping in self._mappings]

    def extent_at(self, address: int, nbytes: int) -> Extent | None:
        """The file bytes that memory [address, address + nbytes) shows, if it shows any, unchanged.

        The path is the file's name as the system knows it. None for memory of the process itself,
        for a file that was removed or replaced since, and for pages that were written to.
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
        if _written_to(address, nbytes):
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


def _written_to(address: int, nbytes: int) -> bool:
    """Whether any page of a private file mapping was written to (and so left the file)."""
    pages = _written_pages(address, nbytes)
    return True if pages is None else bool(pages.any())  # cannot tell: then it is stored


def _written_pages(address: int, nbytes: int) -> npt.NDArray[np.bool_] | None:
    """For each page of a private file mapping, whether it was written to; None if unknown."""
    first, last = address // PAGE, (address + nbytes - 1) // PAGE
    wanted = (last - first + 1) * _PAGEMAP_ENTRY
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            raw = os.pread(pagemap.fileno(), wanted, first * _PAGEMAP_ENTRY)
    except OSError:
        return None
    if len(raw) != wanted:
        return None
    pages = np.frombuffer(raw, dtype=np.uint64)
    own = (pages & (_PRESENT | _FILE_PAGE)) == _PRESENT
    return np.asarray(own | (pages & _SWAPPED != 0))


class WriteWatch:
    """Notices writes to ranges of private file mappings, given as (address, bytes).

    It looks at page tables, not at bytes: under a millisecond per gigabyte that nobody touched.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = ranges
        self._spans: list[tuple[int, int, list[int]]] = []  # address, end, which ranges
        for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
            start, stop = ranges[i][0], ranges[i][0] + ranges[i][1]
            if self._spans and start - self._spans[-1][1] < _NEAR:
                first, last, members = self._spans[-1]
                self._spans[-1] = (first, max(last, stop), [*members, i])
            else:
                self._spans.append((start, stop, [i]))

    def written(self) -> list[int]:
        """The ranges in which a page was written to since it was mapped, by their number.

        A page counts for every range that has a part of it. Empty where the system does not tell.
        """
        found = []
        for start, stop, members in self._spans:
            pages = _written_pages(start, stop - start)
            if pages is not None and pages.any():
                found += [i for i in members if _written_to(*self._ranges[i])]
        return found


def map_file(path: str, offset: int, nbytes: int) -> memoryview:
    """A private, writable map of `nbytes` bytes of a file from byte `offset` on.

    It costs no memory until it is read, reads as the file's bytes, and a write changes only what
    this process sees.
    """
    lead = offset % mmap.ALLOCATIONGRANULARITY
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mapped = mmap.mmap(
            descriptor,
            nbytes + lead,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset - lead,
        )
    finally:
        os.close(descriptor)
    return memoryview(mapped)[lead:]
