"""Measures the speed of a disk in the way a store uses it, and remembers it for later processes.

The measurement uses the code that a store reads and writes with, into memory like a store's, past
the page cache, in an unnamed file, which is never left behind. It includes caches of the disk, or
of the host of a virtual machine. It excludes the processor's caches: reads fill as much memory as a
store's do, because a disk seems faster if the same few megabytes are filled repeatedly.

Speeds are remembered in the user's cache directory, readable by the owner only, and are only a
hint: if the file is missing, damaged or from another machine, the speed is unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import math
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.model.sizes import round_up
from tierstore.system.documents import read_document
from tierstore.system.files import DISK_THREADS, READ_BLOCK, DataFile, OpenForWriting
from tierstore.system.mapping import anonymous_file
from tierstore.system.objects import READ
from tierstore.system.private import make_directories
from tierstore.tiers.workers import Workers

MIB = 1 << 20
SMALLEST = 64 * MIB
"""Minimum bytes of a file to measure."""

ROUNDS = 5
"""Number of times the file is read."""

_MEMORY = 256 * MIB
_HUGE_PAGE = 2 * MIB
_LARGEST_FILE = MIB

Advance = Callable[[int], object]
"""Called with the number of bytes of each move."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Creates the progress bar of a phase, from its name and its number of bytes."""


# Measuring ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskSpeed:
    """The result, in bytes per second.

    `read` is the median over the rounds. `new` is the speed of writing blocks that the file had not
    used before, `again` the speed of overwriting them. `direct` is True if the page cache was
    bypassed.
    """

    read: float
    new: float
    again: float
    direct: bool


def _no_progress(doing: str, nbytes: int) -> AbstractContextManager[Advance]:
    return contextlib.nullcontext(lambda more: None)


def measure(directory: str, nbytes: int, progress: Progress = _no_progress) -> DiskSpeed:
    """Measure the disk of `directory` with a file of about `nbytes` bytes (at least SMALLEST).

    Raises OSError.
    """
    descriptor = anonymous_file(directory)
    file = OpenForWriting(descriptor, f"/proc/self/fd/{descriptor}")
    try:
        return _measured(file, round_up(nbytes, READ_BLOCK), progress)
    finally:
        file.close()


def _measured(file: OpenForWriting, nbytes: int, progress: Progress) -> DiskSpeed:
    os.posix_fallocate(file.cached, 0, nbytes)
    memory, filler = _huge_memory(_MEMORY), random.Random(0)
    blocks = [memory[at : at + READ_BLOCK] for at in range(0, _MEMORY, READ_BLOCK)]
    for block in blocks:
        # Repeating content within a short distance would be compressed by some file systems.
        block[:] = filler.randbytes(MIB) * (READ_BLOCK // MIB)
    buffers = itertools.cycle(blocks)
    with progress("Writing", 2 * nbytes) as advance:
        new, again = (_rate(file.write, buffers, nbytes, advance) for _ in range(2))
    os.fsync(file.cached)
    os.posix_fadvise(file.cached, 0, 0, os.POSIX_FADV_DONTNEED)
    data = DataFile(f"/proc/self/fd/{file.cached}", follow_links=True)

    def read(buffer: memoryview, offset: int) -> None:
        data.read_at_least(buffer, offset, len(buffer))

    with progress("Reading", ROUNDS * nbytes) as advance:
        rates = [_rate(read, buffers, nbytes, advance) for _ in range(ROUNDS)]
    return DiskSpeed(statistics.median(rates), new, again, data.direct)


def _rate(
    move: Callable[[memoryview, int], None],
    buffers: Iterator[memoryview],
    nbytes: int,
    advance: Advance,
) -> float:
    """Move every block of the file once. Returns bytes per second."""

    def one(offset: int) -> None:
        move(next(buffers), offset)
        advance(READ_BLOCK)

    workers = Workers(DISK_THREADS, "measure")
    try:
        began = time.perf_counter()
        workers.run_parallel(functools.partial(one, at) for at in range(0, nbytes, READ_BLOCK))
        return nbytes / (time.perf_counter() - began)
    finally:
        workers.stop()


def _huge_memory(nbytes: int) -> memoryview:
    """Allocate memory in huge pages, like a store's slots."""
    mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without transparent huge pages it is slower, not wrong
        mapped.madvise(mmap.MADV_HUGEPAGE)
    lead = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE
    return memoryview(mapped)[lead : lead + nbytes]


# Remembering --------------------------------------------------------------------------------------


def cache_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file with the speeds of disks."""
    wanted = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(wanted) if os.path.isabs(wanted) else Path(os.path.expanduser("~"), ".cache")
    return root / "tierstore" / "disks.json"


def known_speed(path: str | os.PathLike[str]) -> float | None:
    """Return the measured read speed of the file system of `path`, in bytes per second.

    None if it was never measured on this machine: `tierstore-inspect bench DIR` does that.
    """
    try:
        entry = _entries().get(_name_of(path))
    except OSError:
        return None
    speed = entry.get("read") if isinstance(entry, dict) else None
    usable = isinstance(speed, int | float) and speed is not True and 0 < speed < math.inf
    return speed if usable else None


def remember(path: str | os.PathLike[str], speed: float) -> Path:
    """Store the read speed of the file system of `path`. Raises OSError."""
    file = cache_file()
    if not file.is_absolute():
        raise FileNotFoundError("this user has no home directory: set XDG_CACHE_HOME")
    make_directories(str(file.parent))
    entries = {**_entries(), _name_of(path): {"read": speed}}
    temporary = file.with_name(f"{file.name}-{os.urandom(8).hex()}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="ascii") as opened:
            json.dump({"version": 1, "disks": entries}, opened, indent=2)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return file


def _name_of(path: str | os.PathLike[str]) -> str:
    """Return a name of the file system. Device numbers alone may change after a restart."""
    device, identity = os.stat(path).st_dev, os.statvfs(path).f_fsid
    return f"{os.uname().nodename} {device:x} {identity:x}"


def _entries() -> dict[str, Any]:
    """Return the entries of the file by disk; empty if it is not a valid file of ours."""
    document = read_document(cache_file(), _LARGEST_FILE, flags=READ & ~os.O_NOFOLLOW)
    entries = document.get("disks") if document.get("version") == 1 else None
    return entries if isinstance(entries, dict) else {}
