"""Returns memory that the C library has freed, but not released, to the system.

glibc keeps freed blocks below a threshold, which it raises to 32 MiB as larger ones are freed:
nearly all weights are smaller. Such blocks rarely fit the next weights. Without this module, a
program that changes or stores a model group by group ends with nearly the whole model in memory
that is free but still resident.
"""

from __future__ import annotations

from tierstore.system.mapping import libc

PORTION = 32 << 20
"""Freed bytes that justify a call to `malloc_trim`, which walks the whole heap."""

_malloc_trim = getattr(libc, "malloc_trim", lambda _: 0)


class FreedMemory:
    """Counts freed bytes, and returns them to the system each time they reach `PORTION`.

    `release` returns the rest. The C library finds whole free pages wherever they lie.
    """

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count `nbytes` bytes that were just freed."""
        self._nbytes += nbytes
        if self._nbytes >= PORTION:
            self.release()

    def release(self) -> None:
        """Return the memory freed since the last call to the system."""
        if self._nbytes:
            self._nbytes = 0
            _malloc_trim(0)
