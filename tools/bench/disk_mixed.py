"""The speed of a disk that is read and written at the same time: the most that a step of an
optimizer whose state is on it could get."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.model.groups import GroupId
from tierstore.model.sizes import PAGE
from tierstore.tiers.entry import GroupEntry
from tools.bench import fio, machine
from tools.bench.disk_engine import Engine, one_tensor

DEPTHS = (4, 8, 16)
"""Groups in transit at once."""

CONFIGURATIONS = ("psync 16M x4", "libaio 8M q4", "io_uring 4M q4")
"""Of fio."""


@dataclass(frozen=True)
class Mix:
    """What is moved: groups of these sizes are read, and for each byte so many are written."""

    groups: Sequence[int]
    written: float

    @property
    def nbytes(self) -> int:
        """Bytes, both ways."""
        return sum(size for _, size in self.order())

    def order(self) -> Iterator[tuple[int, int]]:
        """Groups in the order in which they are moved, each with its bytes. Those that are written
        have a number below zero: ~number was read before."""
        owed = 0.0
        saved = itertools.cycle(range(len(self.groups)))
        for number, size in enumerate(self.groups):
            yield number, size
            owed += self.written * size
            while owed >= size:
                other = next(saved)
                yield ~other, self.groups[other]
                owed -= self.groups[other]


class Mixed(Engine):
    """The store's own engine, without a planner: groups are read from their places while others
    are written to theirs."""

    def __init__(self, directory: Path, mix: Mix) -> None:
        super().__init__(directory)
        self._mix = mix
        self.written = self.filled(one_tensor(max(mix.groups))[0], seed=0)
        self.entries: list[GroupEntry] = []
        for number, nbytes in enumerate(mix.groups):
            place = self.spill.take_extent(nbytes)
            source = self.spill.save_in(place, self.written.bytes()[:nbytes])
            spec, group = one_tensor(nbytes)[0], GroupId(str(number), 0)
            self.entries.append(GroupEntry(group, spec, source, mutable=True, spill_extent=place))

    def run(self, depth: int) -> fio.Rate:
        """Move everything, `depth` groups at once."""
        reading = self.reading("never")

        def job(item: tuple[int, int]) -> Callable[[], None]:
            number, _ = item
            if number >= 0:
                return reading(self.entries[number])
            return functools.partial(self._write, self.entries[~number])

        with machine.Stopwatch() as watch:
            self.each(self._mix.order(), job, depth)
        nbytes = self._mix.nbytes
        return fio.Rate(nbytes / watch.seconds, watch.cpu_seconds / nbytes * 1e9)

    def _write(self, entry: GroupEntry) -> None:
        assert entry.spill_extent is not None
        data = self.written.bytes()[: entry.spill_extent.nbytes]
        self.spill.save_in(entry.spill_extent, data, self._workers.run_parallel)

    def runs(self) -> dict[str, Callable[[], fio.Rate]]:
        """Return everything at each of the depths."""
        return {
            f"the store's engine, {depth} groups at once": functools.partial(self.run, depth)
            for depth in DEPTHS
        }

    def close(self) -> None:
        self.entries.clear()
        self.give([self.written])
        super().close()


class ByFio:
    """The same by fio, where it is installed: mixed at random, to a file that was written before.

    Blocks are those that suit fio best: groups that are larger are cut by the engine too.
    """

    def __init__(self, path: Path, mix: Mix) -> None:
        self._path = path
        self._nbytes = mix.nbytes // (64 << 20) * (64 << 20) or -(-mix.nbytes // PAGE) * PAGE
        self._reads = round(100 / (1 + mix.written))
        self.configurations = CONFIGURATIONS if fio.available() and self._nbytes >= 1 << 28 else ()
        if self.configurations:
            fio.run(path, "psync 16M x4", self._nbytes, "--rw=write", "--fallocate=posix")

    def run(self, configuration: str) -> fio.Rate:
        """Move as much as the engine does."""
        mixed = ("--rw=rw", f"--rwmixread={self._reads}", "--overwrite=1")
        return fio.run(self._path, configuration, self._nbytes, *mixed)

    def runs(self) -> dict[str, Callable[[], fio.Rate]]:
        """All of fio's configurations."""
        return {f"fio {name}": functools.partial(self.run, name) for name in self.configurations}

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
