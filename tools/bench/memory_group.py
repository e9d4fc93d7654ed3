"""A Linux control group that limits the memory of processes, including page cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A context manager for a group of processes limited to `limit` bytes of RAM together.

    Their page cache counts, as it would on a machine with that much RAM. Raises OSError if this
    process may not create such a group.
    """

    def __init__(self, limit: int) -> None:
        first = (ROOT / "memory").is_dir()  # version 1, or 1 and 2 side by side
        self.path = (ROOT / "memory" if first else ROOT) / f"tierstore-bench-{os.getpid()}"
        self._limit = "memory.limit_in_bytes" if first else "memory.max"
        self._peak = "memory.max_usage_in_bytes" if first else "memory.peak"
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(limit))
            if not first:
                (self.path / "memory.swap.max").write_text("0")
        except OSError:
            self.path.rmdir()
            raise

    def command(self, words: list[str]) -> list[str]:
        """Return the command that starts `words` in the group."""
        join = 'echo $$ > "$0"; exec "$@"'
        return ["sh", "-c", join, str(self.path / "cgroup.procs"), *words]

    @property
    def peak(self) -> int:
        """Return the peak bytes of the group, including page cache."""
        return int((self.path / self._peak).read_text())

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(50):  # the last process may still be ending
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
