"""Maps of open files that hold no descriptor: there may be as many of them as there are groups. And
files without names, to be mapped."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from ctypes import c_int, c_long, c_size_t, c_void_p

FAILED = c_void_p(-1).value
_NO_ACCESS = 0
_MAP_FIXED = 0x10
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # with MAP_NORESERVE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = c_void_p
libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
libc.munmap.argtypes = [c_void_p, c_size_t]
libc.madvise.argtypes = [c_void_p, c_size_t, c_int]

PRIVATE_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOST_MAPS = "/proc/sys/vm/max_map_count"
_MAPS = "/proc/self/maps"
_MAPS_BY_DEFAULT = 65_530


class TooManyMapsError(OSError):
    """The process has so many memory maps that the others in it need those that are left."""


class MapLimit:
    """Leaves a quarter of the maps that a process may have to whoever else is in it: a process
    without any gets no thread and no memory."""

    def __init__(self, most: int | None = None) -> None:
        self._usable = (_most_maps() if most is None else most) * 3 // 4
        self._unseen = 0  # maps that may be made before somebody looks how many there are

    def count(self, maps: int) -> None:
        """So many maps are about to be made. Raises TooManyMapsError if these are too many."""
        self._unseen -= maps  # not exact where threads meet: half of what is left is a reserve
        if self._unseen >= 0:
            return
        with open(_MAPS, "rb") as lines:
            left = self._usable - sum(1 for _ in lines)
        if left < maps:
            raise TooManyMapsError(
                errno.ENOMEM,
                f"this process has {self._usable - left:,} memory maps, and {_MOST_MAPS} allows "
                "few more: raise it (sysctl vm.max_map_count), or use fewer, larger groups",
            )
        self._unseen = left // 2


def _most_maps() -> int:
    try:
        with open(_MOST_MAPS) as file:
            return int(file.read())
    except (OSError, ValueError):
        return _MAPS_BY_DEFAULT


map_limit = MapLimit()
"""Whoever makes maps, as many as there are groups, counts them here."""


def anonymous_file(directory: str) -> int:
    """A file in `directory` that has no name, open for reading and writing."""
    with contextlib.suppress(OSError):
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path = os.path.join(directory, f".spill-{os.getpid()}-{os.urandom(8).hex()}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_open_file(
    descriptor: int,
    offset: int,
    nbytes: int,
    flags: int,
    keeps: object = None,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> memoryview:
    """A map of whole pages of an open file, which must have them. Raises OSError.

    It goes when nothing looks at it any more; until then it holds what it `keeps`. Python's own
    maps hold a descriptor each: a process would run out of those long before it does of maps.
    Python takes it for writable in any case: who may not write to it by its `protection` must not.
    """
    map_limit.count(1)
    found = map_pages(None, nbytes, protection, flags, descriptor, offset)
    return _seen(found, nbytes, keeps)


def map_beginning(
    descriptor: int, nbytes: int, flags: int, protection: int, alignment: int
) -> memoryview:
    """A map, as `map_open_file` makes it, of the first bytes of a file, at an address that is a
    multiple of `alignment`: pages larger than the usual ones can be mapped nowhere else."""
    reserved = nbytes + alignment
    start = map_pages(None, reserved, _NO_ACCESS, _RESERVE, -1, 0)
    address = -(-start // alignment) * alignment
    try:
        map_pages(address, nbytes, protection, flags | _MAP_FIXED, descriptor, 0)
    except BaseException:
        libc.munmap(start, reserved)
        raise
    end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > start:
        libc.munmap(start, address - start)
    if start + reserved > end:
        libc.munmap(end, start + reserved - end)
    return _seen(address, nbytes, None)


def map_pages(
    address: int | None,
    nbytes: int,
    protection: int,
    flags: int,
    descriptor: int = -1,
    offset: int = 0,
) -> int:
    """Map whole pages, of no file where there is no `descriptor`. Returns the address. Raises
    OSError."""
    found = libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if found in (None, FAILED):
        number = ctypes.get_errno() or errno.ENOMEM
        raise OSError(number, f"{os.strerror(number)}: could not map {nbytes:,} bytes")
    return int(found)


def _seen(address: int, nbytes: int, keeps: object) -> memoryview:
    mapped = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(mapped, _unmap, address, nbytes, keeps).atexit = False
    return memoryview(mapped).cast("B")


def _unmap(address: int, nbytes: int, _: object) -> None:
    libc.munmap(address, nbytes)
