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
    found = libc.mmap(None, nbytes, protection, flags, descriptor, offset)
    if found in (None, FAILED):
        number = ctypes.get_errno() or errno.ENOMEM
        raise OSError(number, os.strerror(number))
    mapped = (ctypes.c_uint8 * nbytes).from_address(found)
    weakref.finalize(mapped, _unmap, found, nbytes, keeps).atexit = False
    return memoryview(mapped).cast("B")


def _unmap(address: int, nbytes: int, _: object) -> None:
    libc.munmap(address, nbytes)
