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
    found = _mapped(None, nbytes, protection, flags, descriptor, offset)
    return _seen(found, nbytes, keeps)


def map_beginning(
    descriptor: int, nbytes: int, flags: int, protection: int, alignment: int
) -> memoryview:
    """A map, as `map_open_file` makes it, of the first bytes of a file, at an address that is a
    multiple of `alignment`: pages larger than the usual ones can be mapped nowhere else."""
    reserved = nbytes + alignment
    start = _mapped(None, reserved, _NO_ACCESS, _RESERVE, -1, 0)
    address = -(-start // alignment) * alignment
    try:
        _mapped(address, nbytes, protection, flags | _MAP_FIXED, descriptor, 0)
    except BaseException:
        libc.munmap(start, reserved)
        raise
    end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > start:
        libc.munmap(start, address - start)
    if start + reserved > end:
        libc.munmap(end, start + reserved - end)
    return _seen(address, nbytes, None)


def _mapped(
    address: int | None, nbytes: int, protection: int, flags: int, descriptor: int, offset: int
) -> int:
    found = libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if found in (None, FAILED):
        number = ctypes.get_errno() or errno.ENOMEM
        raise OSError(number, os.strerror(number))
    return int(found)


def _seen(address: int, nbytes: int, keeps: object) -> memoryview:
    mapped = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(mapped, _unmap, address, nbytes, keeps).atexit = False
    return memoryview(mapped).cast("B")


def _unmap(address: int, nbytes: int, _: object) -> None:
    libc.munmap(address, nbytes)
