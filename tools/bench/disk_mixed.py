"""The speed of a disk under simultaneous reads and writes.

It bounds a step of an optimizer whose state is on the disk.
"""

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
"""Numbers of groups in flight."""

CONFIGURATIONS = ("psync 16M x4", "libaio 8M q4", "io_uring 4M q4")
"""fio configurations."""


@dataclass(frozen=True)
class Mix:
    """The bytes to move: sizes of groups to read, and bytes to write per byte read."""

    groups: Sequence[int]
    written: float

    @property
    def nbytes(self) -> int:
        """Bytes to move in both directions."""
        return sum(size for _, size in self.order())

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield the groups in the order in which they move, with their bytes.

        A negative number is a write of the group ~number, which was read before.
        """
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
    """The store's engine without a planner: reads some groups while it writes others."""

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
        """Move everything, with `depth` groups in flight."""
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
        """Return the runs at all depths, by name."""
        return {
            f"the store's engine, {depth} groups at once": functools.partial(self.run, depth)
            for depth in DEPTHS
        }

    def close(self) -> None:
        self.entries.clear()
        self.give([self.written])
        super().close()


class ByFio:
    """The same by fio, if it is installed: random reads and writes of an existing file.

    Block sizes are fio's best; the engine also splits larger groups.
    """

    def __init__(self, path: Path, mix: Mix) -> None:
        self._path = path
        self._nbytes = mix.nbytes // (64 << 20) * (64 << 20) or -(-mix.nbytes // PAGE) * PAGE
        self._reads = round(100 / (1 + mix.written))
        self.configurations = CONFIGURATIONS if fio.available() and self._nbytes >= 1 << 28 else ()
        if self.configurations:
            fio.run(path, "psync 16M x4", self._nbytes, "--rw=write", "--fallocate=posix")

    def run(self, configuration: str) -> fio.Rate:
        """Move as many bytes as the engine."""
        mixed = ("--rw=rw", f"--rwmixread={self._reads}", "--overwrite=1")
        return fio.run(self._path, configuration, self._nbytes, *mixed)

    def runs(self) -> dict[str, Callable[[], fio.Rate]]:
        """Return the runs of all fio configurations, by name."""
        return {f"fio {name}": functools.partial(self.run, name) for name in self.configurations}

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
