"""The free bytes of a range that is divided among groups, first-fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class FreeRuns:
    """Free bytes as runs (offset, bytes), in order, that never touch. Not for several threads."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes  # free, together
        self._runs = [(0, nbytes)] if nbytes else []
        self._longest = nbytes  # no run is longer

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._runs)

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` bytes in the first run that has as many; None if none has."""
        if nbytes > self._longest:
            return None
        for i, (offset, room) in enumerate(self._runs):
            if room >= nbytes:
                self._runs[i : i + 1] = [(offset + nbytes, room - nbytes)] * (room > nbytes)
                self.nbytes -= nbytes
                return offset
        self._longest = max((room for _, room in self._runs), default=0)
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """These bytes are free from now on."""
        self.nbytes += nbytes
        stop = offset + nbytes
        i = bisect_left(self._runs, (offset, 0))
        if i < len(self._runs) and self._runs[i][0] == stop:
            stop += self._runs.pop(i)[1]
        if i > 0 and sum(self._runs[i - 1]) == offset:
            i -= 1
            offset = self._runs.pop(i)[0]
        self._runs.insert(i, (offset, stop - offset))
        self._longest = max(self._longest, stop - offset)

    def cut(self, end: int) -> int:
        """The range ends at `end`: take the run away that does, too. Returns where the range ends
        then."""
        if self._runs and sum(self._runs[-1]) == end:
            end, nbytes = self._runs.pop()
            self.nbytes -= nbytes
        return end
