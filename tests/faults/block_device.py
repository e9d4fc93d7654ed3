"""A disk that records every write and fails some: a file in user space behind a loop device.

`block_server.py` is the process that serves it.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.facilities import unmount, wait_until_mounted

WRITE, FLUSH, MARK = range(3)
HEAD = struct.Struct("<BQI")
"""Header of a log entry: kind, offset, number of bytes that follow."""
PATIENCE = 60.0


@dataclass(frozen=True)
class Entry:
    """One event on a disk: a write at an offset, a flush, or a mark."""

    kind: int
    offset: int
    data: bytes


def read_log(path: Path) -> list[Entry]:
    """Return all entries of a log, in order."""
    raw, at, found = path.read_bytes(), 0, []
    while at < len(raw):
        kind, offset, length = HEAD.unpack_from(raw, at)
        at += HEAD.size
        found.append(Entry(kind, offset, raw[at : at + length]))
        at += length
    return found


@dataclass(frozen=True)
class Device:
    """Control of a served disk from the test process."""

    at: Path

    @property
    def disk(self) -> Path:
        return self.at / "disk"

    @property
    def marks(self) -> Path:
        return self.at / "marks"

    def fail(self, pattern: bytes) -> None:
        """Make writes that contain these bytes fail from now on."""
        self._order(pattern)

    def heal(self) -> None:
        self._order(b" ")

    def _order(self, order: bytes) -> None:
        descriptor = os.open(self.at / "orders", os.O_WRONLY)
        try:
            os.write(descriptor, order)
        finally:
            os.close(descriptor)


@contextmanager
def block_device(image: Path, at: Path, log: Path) -> Iterator[Device]:
    """Serve a disk from another process until the end of the block. Raises Unusable."""
    at.mkdir()
    command = [sys.executable, "-m", "tests.faults.block_server", str(image), str(at), str(log)]
    server = subprocess.Popen(command)
    device = Device(at)
    try:
        wait_until_mounted(device.disk, server, PATIENCE)
        yield device
    finally:
        unmount(at)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
