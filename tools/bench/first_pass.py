"""The first step of a model that is read from disk: how much longer than the disk alone takes

    python tools/bench/first_pass.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

The weights come from one file through page-locked host memory to a device, each for the first
time. So all host memory is made, zeroed and page-locked in this step. Here the device is the
pretend accelerator of the tests, and page-locking and the disk are slowed down: a thread that
page-locks sleeps for as long as a driver would take, and a read ends when a disk of that speed
would have ended it. Both speeds are those of an H100's machine divided by the same number, so that
what this machine has to do beside (two cores) counts as little as it does there.

The model is run with page-locking as it is; with page-locking that takes no time; and with each
slot page-locked in line, before it is read, which is what the store did before.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

import tierstore
from tests.device import pretend
from tierstore import TierStore
from tierstore.system.files import DataFile

DISK, LOCKING = 1.87e9, 5.4e9
"""Bytes per second of the disk, and of page-locking on one thread: measured beside an H100."""
AT_MOST = 1.15
BESIDE, FREE, IN_LINE = "beside the reading", "taking no time", "in line with the reading"


@dataclass(frozen=True)
class Case:
    """Layers of `width` squared float32 weights. Speeds are divided by `slowed`."""

    layers: int
    width: int
    slowed: float
    rounds: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.width**2 * 4


FULL = Case(layers=24, width=4096, slowed=8, rounds=5)
SMALL = Case(layers=6, width=512, slowed=64, rounds=1)


@dataclass
class SlowDisk:
    """A disk of `speed` bytes per second in all, however many read at once."""

    speed: float
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Every read past the page cache goes through it."""
        real = DataFile.read_at_least

        def read(file: DataFile, room: memoryview, offset: int, needed: int) -> int:
            with self._lock:
                self._free_at = max(time.monotonic(), self._free_at) + len(room) / self.speed
                ends = self._free_at
            done = real(file, room, offset, needed)
            time.sleep(max(0.0, ends - time.monotonic()))
            return done

        DataFile.read_at_least = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            DataFile.read_at_least = real  # type: ignore[method-assign]


@contextlib.contextmanager
def page_locking(speed: float) -> Iterator[None]:
    """Page-locking goes at `speed` bytes per second on each thread."""
    real = pretend.Runtime.cudaHostRegister

    def register(address: int, nbytes: int, flags: int) -> int:
        time.sleep(nbytes / speed)
        return real(address, nbytes, flags)

    pretend.Runtime.cudaHostRegister = staticmethod(register)  # type: ignore[method-assign]
    try:
        yield
    finally:
        pretend.Runtime.cudaHostRegister = staticmethod(real)  # type: ignore[method-assign]


def layers(case: Case) -> nn.Sequential:
    each = (nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers))
    return nn.Sequential(*each).requires_grad_(False)


def first_step(case: Case, path: Path, locking: float) -> dict[str, float]:
    with torch.device("meta"):
        model = layers(case)
    x = torch.ones(1, case.width)
    disk = SlowDisk(DISK / case.slowed)
    pretend.reset_counters()
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as scratch,
        page_locking(locking / case.slowed),
        disk.in_use(),
        TierStore(
            int(1.1 * case.nbytes),
            Path(scratch) / "store",
            device="pretend",
            device_budget=case.nbytes // 2,
        ) as store,
    ):
        offloaded = tierstore.load_checkpoint_and_dispatch(model, path, store)
        began = time.perf_counter()
        offloaded(x.to("pretend")).cpu()
        first = time.perf_counter() - began
        read = store.stats().bytes_read
    return {"seconds": first, "read": read, "registrations": pretend.registrations()}
