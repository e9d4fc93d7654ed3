"""What a benchmark asks the system: a cold page cache, CPU seconds, bytes of the disk."""

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
    """Make files cold. Returns False where this process may not."""
    try:
        os.sync()
        DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process has made the disk read (page faults too) and write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def pss(process: int | str = "self") -> int:
    """Return the proportional set size of a process: of a shared page, its share counts."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Stopwatch:
    """Wall-clock and CPU seconds of a `with` block, its finished child processes included."""

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
    """Read all files past the page cache, `threads` pieces at a time. Returns bytes per second.

    The pieces go to 256 MiB, which no processor's cache holds: that is where weights go.
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
            with suppress(IndexError):  # another thread took the last
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
