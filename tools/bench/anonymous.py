"""Anonymous memory of this process: resident RAM that is not page cache."""

from __future__ import annotations

import threading
from pathlib import Path

EVERY = 0.002
"""Seconds between two samples."""


def anonymous_memory() -> int:
    """Bytes now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class AnonymousPeak:
    """The peak of anonymous memory in a `with` block, by sampling; `start` is the value before."""

    def __init__(self) -> None:
        self.start = self.bytes = anonymous_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(EVERY):
            self.bytes = max(self.bytes, anonymous_memory())

    @property
    def gained(self) -> int:
        """Bytes of the peak above the start."""
        return self.bytes - self.start

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_memory())
