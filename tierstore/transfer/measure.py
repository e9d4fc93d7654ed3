"""Measuring a disk: which block and how many threads read it best, and how fast it writes.

Everything goes through the code that a store reads and writes with, into memory like its own, past
the page cache, in a file without a name: whatever happens, nothing is left behind. The settings
take turns, in rounds, so that a disk that is slower for a while is slower for all of them.

What a disk keeps in memory of its own, or a host for its virtual machine, is measured with it. What
the processor keeps is not: reads fill as much memory as those of a store. Into the same few
megabytes again and again, a disk seems faster than it is for anybody who keeps what was read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tierstore.model.sizes import round_up
from tierstore.transfer.disk import DataFile, OpenForWriting
from tierstore.transfer.figures import (
    DEFAULT_BLOCK,
    DEFAULT_THREADS,
    MIB,
    DiskFigures,
    known_figures,
)
from tierstore.transfer.spill import anonymous_file
from tierstore.transfer.workers import Workers

BLOCKS = tuple(n * MIB for n in (4, 8, 16, 32))

THREADS = (DEFAULT_THREADS, 2 * DEFAULT_THREADS)
"""Not fewer: while cores are idle, as here, two may look best. Beside a model that computes on all
of them, a thread whose read is done waits for its turn, and the disk should not wait with it."""

SMALLEST = 64 * MIB
"""Bytes that a file to be measured must have at least."""

ROUNDS = 5
SECONDS = 0.25
"""About how long one setting is tried in one round."""

WORTH_IT = 1.1
"""How much faster than the defaults a setting must be to replace them: less may be chance."""

_HUGE_PAGE = 2 * MIB
_DEFAULT = DEFAULT_BLOCK, DEFAULT_THREADS

Setting = tuple[int, int]
"""(bytes per call, threads)"""

Advance = Callable[[int], object]
"""Is told of every so many bytes that were moved."""

Start = Callable[[str, int], Advance]
"""Is told what is done next, and how many bytes it will move."""


@dataclass(frozen=True)
class Measurement:
    """What was seen, in bytes per second.

    `rounds` are the reads of each setting, round by round. `new` is how fast blocks were written
    that the file had not used before, `again` how fast they were overwritten. `direct` says whether
    the page cache was passed by.
    """

    rounds: dict[Setting, list[float]]
    new: float
    again: float
    direct: bool

    def read(self, setting: Setting) -> float:
        """How fast reads are with a setting: the median."""
        return statistics.median(self.rounds[setting])

    def figures(self) -> DiskFigures:
        """What to remember: the defaults, or what was clearly better, and so in every round."""
        usual = self.rounds[_DEFAULT]
        better = [
            setting
            for setting, rates in self.rounds.items()
            if self.read(setting) >= WORTH_IT * self.read(_DEFAULT)
            and all(one > other for one, other in zip(rates, usual, strict=True))
        ]
        best = max(better, key=self.read, default=_DEFAULT)
        block, threads = best
        return DiskFigures(block, threads, self.read(best), self.again, time.time())


def measured_bandwidth(path: str | os.PathLike[str]) -> float | None:
    """Bytes per second that reads of the file system of `path` reached when it was measured.

    None if nobody has measured it: `tierstore-inspect bench DIR` does.
    """
    known = known_figures(path)
    return None if known is None else known.read


def in_silence(doing: str, nbytes: int) -> Advance:
    """A `Start` that tells nobody."""
    return lambda more: None


def measure(directory: str, nbytes: int, start: Start = in_silence) -> Measurement:
    """Measure the disk of `directory` with a file of `nbytes` bytes (at least SMALLEST).

    Raises OSError.
    """
    descriptor = anonymous_file(directory)
    file = OpenForWriting(descriptor, f"/proc/self/fd/{descriptor}")
    try:
        return _Run(file, nbytes, start).measurement()
    finally:
        file.close()


class _Run:
    """One measurement."""

    def __init__(self, file: OpenForWriting, nbytes: int, start: Start) -> None:
        self._file = file
        self._nbytes = round_up(nbytes, MIB)
        self._start = start
        self._advance: Advance = lambda more: None
        self._memory = _huge_memory(max(BLOCKS) * max(THREADS))
        self._rooms = itertools.count()  # each read goes to the next part of the memory
        self._where = 0

    def measurement(self) -> Measurement:
        os.posix_fallocate(self._file.cached, 0, self._nbytes)
        filler = random.Random(0)
        for at in range(0, len(self._memory), max(BLOCKS)):
            # What repeats itself soon, some file systems would compress.
            room = self._memory[at : at + max(BLOCKS)]
            room[:] = filler.randbytes(MIB) * (len(room) // MIB)
        self._advance = self._start("Writing", 2 * self._nbytes)
        new, again = (self._rate(_DEFAULT, self._nbytes, self._file.write) for _ in range(2))
        os.fsync(self._file.cached)
        os.posix_fadvise(self._file.cached, 0, 0, os.POSIX_FADV_DONTNEED)
        data = DataFile(f"/proc/self/fd/{self._file.cached}", follow_links=True)
        return Measurement(self._read(data), new, again, data.direct)

    def _read(self, data: DataFile) -> dict[Setting, list[float]]:
        def read(room: memoryview, offset: int) -> None:
            data.read_at_least(room, offset, len(room))

        settings = [(block, threads) for block in BLOCKS for threads in THREADS]
        self._advance = in_silence("Trying", SMALLEST)
        guess = self._rate(_DEFAULT, SMALLEST, read)
        each = max(int(guess * SECONDS), SMALLEST)
        self._advance = self._start("Reading", ROUNDS * len(settings) * each)
        seen: dict[Setting, list[float]] = {setting: [] for setting in settings}
        order = random.Random(1)
        for _ in range(ROUNDS):
            for setting in order.sample(settings, len(settings)):
                seen[setting].append(self._rate(setting, each, read))
        return seen

    def _rate(
        self, setting: Setting, nbytes: int, move: Callable[[memoryview, int], None]
    ) -> float:
        """Move about `nbytes` bytes, on from where the last call ended: bytes per second."""
        block, threads = setting
        block = min(block, self._nbytes)
        offsets = [self._next(block) for _ in range(-(-nbytes // block))]

        def one(offset: int) -> None:
            at = next(self._rooms) % (len(self._memory) // block) * block
            move(self._memory[at : at + block], offset)
            self._advance(block)

        workers = Workers(threads, "measure")
        try:
            began = time.perf_counter()
            workers.together(functools.partial(one, offset) for offset in offsets)
            return len(offsets) * block / (time.perf_counter() - began)
        finally:
            workers.stop()

    def _next(self, block: int) -> int:
        if self._where + block > self._nbytes:
            self._where = 0
        here, self._where = self._where, self._where + block
        return here


def _huge_memory(nbytes: int) -> memoryview:
    """Memory in huge pages, as the slots of a store have it."""
    mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without transparent huge pages it is slower, not wrong
        mapped.madvise(mmap.MADV_HUGEPAGE)
    lead = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE
    return memoryview(mapped)[lead : lead + nbytes]
