"""System measurements for benchmarks: cold page cache, CPU seconds, disk bytes."""

from __future__ import annotations

import itertools
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def drop_page_cache() -> bool:
    """Drop the page cache. Return False if this process is not permitted to."""
    try:
        os.sync()
        DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process made the disk read (including page faults) and write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def pss(process: int | str = "self") -> int:
    """Return the proportional set size of a process in bytes; shared pages count in proportion."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Stopwatch:
    """Wall-clock and CPU seconds of a `with` block, including its finished child processes."""

    seconds = 0.0
    cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._cpu = _cpu_seconds()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.cpu_seconds = _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in used)


def direct_reads(files: list[Path], threads: int = 4, piece: int = 16 << 20) -> float:
    """Read all files with direct I/O, `threads` pieces at a time. Return bytes per second.

    The pieces go to a buffer of 256 MiB, which exceeds CPU caches, as weights do.
    """
    from tierstore.tiers.pages import fresh_memory

    nbytes = 256 << 20
    memory = fresh_memory(nbytes).fill_(0).numpy().data
    share = nbytes // threads
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    pieces = [(d, at) for d in descriptors for at in range(0, os.fstat(d).st_size, piece)]

    def read(thread: int) -> int:
        starts = itertools.cycle(range(thread * share, (thread + 1) * share, piece))
        found = 0
        while pieces:
            with suppress(IndexError):  # another thread took the last piece
                descriptor, at = pieces.pop()
                start = next(starts)
                found += os.preadv(descriptor, [memory[start : start + piece]], at)
        return found

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(threads)))
    seconds = time.perf_counter() - started
    for descriptor in descriptors:
        os.close(descriptor)
    return total / seconds
