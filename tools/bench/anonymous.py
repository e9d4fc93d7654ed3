"""Memory of this process that is no file's: what it holds of RAM, and no page cache can give up."""

from __future__ import annotations

import threading
from pathlib import Path

EVERY = 0.002
"""Seconds between two looks."""


def anonymous_memory() -> int:
    """Bytes now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class AnonymousPeak:
    """The most bytes at once in a `with` block, by looking often; `start` is before it."""

    def __init__(self) -> None:
        self.start = self.bytes = anonymous_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(EVERY):
            self.bytes = max(self.bytes, anonymous_memory())

    @property
    def gained(self) -> int:
        """Bytes over the start."""
        return self.bytes - self.start

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_memory())
