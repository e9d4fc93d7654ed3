"""What the C library keeps of freed memory, and giving it back to the system.

glibc keeps freed blocks below a threshold, which it raises to 32 MiB as larger ones are freed: so
nearly all weights. They rarely fit where others were. Without what is here, whoever changes or
stores a model group by group ends with nearly all of it in memory that is free but taken.
"""

from __future__ import annotations

from tierstore.system.mapping import libc

PORTION = 32 << 20
"""Freed bytes that are worth a walk through all that is free."""

_malloc_trim = getattr(libc, "malloc_trim", lambda _: 0)


class FreedMemory:
    """Gives the system what was freed: each time it is a `PORTION`, and the rest when asked to.

    The C library looks for whole pages that are free, wherever they lie.
    """

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """So many bytes were freed just now."""
        self._nbytes += nbytes
        if self._nbytes >= PORTION:
            self.give_back()

    def give_back(self) -> None:
        """Give back what was freed since the last time, if anything was."""
        if self._nbytes:
            self._nbytes = 0
            _malloc_trim(0)
