"""First-fit allocation in a range that groups share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class FreeRuns:
    """Free bytes as ordered runs (offset, bytes), never adjacent. Not thread-safe."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes  # total free bytes
        self.runs = [(0, nbytes)] if nbytes else []
        self.longest = nbytes  # upper bound of the longest run

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.runs)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` bytes in the first run that is long enough, or None."""
        if nbytes > self.longest:
            return None
        for i, (offset, length) in enumerate(self.runs):
            if length >= nbytes:
                self.runs[i : i + 1] = [(offset + nbytes, length - nbytes)] * (length > nbytes)
                self.nbytes -= nbytes
                return offset
        self.longest = max((length for _, length in self.runs), default=0)
        return None

    def release(self, offset: int, nbytes: int) -> None:
        """Free `nbytes` bytes at `offset`."""
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
        """Remove the last run if it ends at `end`. Returns the new end of the range."""
        if self.runs and sum(self.runs[-1]) == end:
            end, nbytes = self.runs.pop()
            self.nbytes -= nbytes
        return end
