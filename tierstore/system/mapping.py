"""Maps open files without holding a descriptor per map, and creates unnamed files.

There may be as many maps as there are groups.
"""

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
    """The process has nearly as many memory maps as the system allows."""


class MapLimit:
    """Reserves a quarter of the process's memory maps for other code in it.

    A process without free maps can start no thread and allocate no memory.
    """

    def __init__(self, most: int | None = None) -> None:
        self._usable = (_most_maps() if most is None else most) * 3 // 4
        self._unseen = 0  # maps that may be made before the existing ones are counted again

    def count(self, maps: int) -> None:
        """Account for `maps` maps that the caller is about to make. Raises TooManyMapsError."""
        self._unseen -= maps  # inexact under races: half of the rest stays in reserve
        if self._unseen >= 0:
            return
        with open(_MAPS, "rb") as lines:
            remaining = self._usable - sum(1 for _ in lines)
        if remaining < maps:
            raise TooManyMapsError(
                errno.ENOMEM,
                f"this process has {self._usable - remaining:,} memory maps, and {_MOST_MAPS} "
                "allows few more: raise it (sysctl vm.max_map_count), or use fewer, larger groups",
            )
        self._unseen = remaining // 2


def _most_maps() -> int:
    try:
        with open(_MOST_MAPS) as file:
            return int(file.read())
    except (OSError, ValueError):
        return _MAPS_BY_DEFAULT


map_limit = MapLimit()
"""The limit that counts all maps whose number grows with the number of groups."""


def anonymous_file(directory: str) -> int:
    """Create an unnamed file in `directory`, open for reading and writing."""
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
    owner: object = None,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> memoryview:
    """Map whole pages of an open file, which must contain them. Raises OSError.

    The map is removed with its last view, and keeps a reference to `owner` until then.
    Python's own maps hold a descriptor each: a process would run out of descriptors long before it
    runs out of maps. Python treats the result as writable in any case: do not write to it unless
    `protection` allows that.
    """
    map_limit.count(1)
    found = map_pages(None, nbytes, protection, flags, descriptor, offset)
    return _as_view(found, nbytes, owner)


def map_beginning(
    descriptor: int, nbytes: int, flags: int, protection: int, alignment: int
) -> memoryview:
    """Map the first bytes of a file, at an address that is a multiple of `alignment`.

    Pages larger than the usual ones can be mapped at such addresses only. Otherwise as
    `map_open_file`.
    """
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
    return _as_view(address, nbytes, None)


def map_pages(
    address: int | None,
    nbytes: int,
    protection: int,
    flags: int,
    descriptor: int = -1,
    offset: int = 0,
) -> int:
    """Map whole pages and return their address. Without a `descriptor`, maps no file.

    Raises OSError.
    """
    found = libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if found in (None, FAILED):
        number = ctypes.get_errno() or errno.ENOMEM
        raise OSError(number, f"{os.strerror(number)}: could not map {nbytes:,} bytes")
    return int(found)


def _as_view(address: int, nbytes: int, owner: object) -> memoryview:
    mapped = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(mapped, _unmap, address, nbytes, owner).atexit = False
    return memoryview(mapped).cast("B")


def _unmap(address: int, nbytes: int, _: object) -> None:
    libc.munmap(address, nbytes)
