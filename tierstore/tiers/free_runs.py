"""The free bytes of a range that is divided among groups, first-fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class FreeRuns:
    """Free bytes as runs (offset, bytes), in order, that never touch. Not for several threads."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes  # free, together
        self.runs = [(0, nbytes)] if nbytes else []
        self.longest = nbytes  # no run is longer

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.runs)

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` bytes in the first run that has as many; None if none has."""
        if nbytes > self.longest:
            return None
        for i, (offset, room) in enumerate(self.runs):
            if room >= nbytes:
                self.runs[i : i + 1] = [(offset + nbytes, room - nbytes)] * (room > nbytes)
                self.nbytes -= nbytes
                return offset
        self.longest = max((room for _, room in self.runs), default=0)
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """These bytes are free from now on."""
        self.nbytes += nbytes
        stop = offset + nbytes
        i = bisect_left(self.runs, (offset, 0))
        if i < len(self.runs) and self.runs[i][0] == stop:
            stop += self.runs.pop(i)[1]
        if i > 0 and sum(self.runs[i - 1]) == offset:
            i -= 1
            offset = self.runs.pop(i)[0]
        self.runs.insert(i, (offset, stop - offset))
        self.longest = max(self.longest, stop - offset)

    def cut(self, end: int) -> int:
        """The range ends at `end`: take the run away that does, too. Returns where the range ends
        then."""
        if self.runs and sum(self.runs[-1]) == end:
            end, nbytes = self.runs.pop()
            self.nbytes -= nbytes
        return end
