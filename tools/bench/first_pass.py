"""The first step of a model that is read from disk, against the disk alone

The weights move from one file through page-locked host memory to a device, each for the first time.
So all host memory is mapped, zeroed and page-locked in this step. The device is the pretend
accelerator of the tests, which works on separate threads. Page-locking and the disk are slowed down
(see `slowed.py`) to the speeds of an H100 machine divided by one number, so that the work of this
machine (two cores that copy and compute) has as little weight as there. A second disk is three
times as fast: it reads faster than one thread page-locks.

The model runs with normal page-locking, with page-locking that takes no time, and with each slot
page-locked before its read begins, one at a time, as in earlier versions of the store.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

import tierstore
from tests.device import pretend
from tierstore import TierStore
from tierstore.tiers.pinned import RegisteredMemory
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, most, ranged
from tools.bench.slowed import page_locking, slow_disk

PACKAGES, ROUNDS, PRETEND = ("torch",), 5, True
DISKS = (1.87e9, 5.61e9)
"""Bytes per second of an H100 machine's disk, and of one three times as fast."""
LOCKING = 5.4e9
"""Bytes per second of zeroing and page-locking on one thread, measured on an H100 machine."""
BESIDE, FREE, IN_LINE = "beside the reads", "takes no time", "before each read"
AT_MOST = 1.15


@dataclass(frozen=True)
class Case:
    """Layers of `width` x `width` float32 weights. The disk reads `read` bytes per second."""

    layers: int
    width: int
    read: float

    @property
    def nbytes(self) -> int:
        return self.layers * self.width**2 * 4


FULL = Case(layers=16, width=4736, read=0.15e9)
SMALL = Case(layers=6, width=512, read=0.1e9)


@contextlib.contextmanager
def locking_before_reads() -> Iterator[None]:
    """Page-lock memory when it is allocated, so that slots are created one at a time."""
    real = RegisteredMemory.make

    def make(memory: RegisteredMemory, nbytes: int) -> torch.Tensor:
        made = real(memory, nbytes)
        memory.lock(made)
        return made

    with mock.patch.object(RegisteredMemory, "make", make):
        yield


def layers(case: Case) -> nn.Sequential:
    each = (nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers))
    return nn.Sequential(*each).requires_grad_(False)


def run(case: Case, path: Path, disk: float, locking: str) -> Run:
    """Run three steps, with device memory for half of the weights and RAM for all."""
    with torch.device("meta"):
        model = layers(case)
    x, budget = torch.ones(1, case.width), int(1.1 * case.nbytes)
    pretend.reset_counters()
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as place,
        page_locking(float("inf") if locking == FREE else LOCKING / (disk / case.read)),
        locking_before_reads() if locking == IN_LINE else contextlib.nullcontext(),
        slow_disk(case.read),
        pretend.working(),
        TierStore(
            budget, Path(place, "s"), device="pretend", device_budget=case.nbytes // 2
        ) as store,
    ):
        offloaded = tierstore.load_checkpoint_and_dispatch(model, path, store)
        began = time.perf_counter()
        offloaded(x.to("pretend")).cpu()
        seconds, locked = time.perf_counter() - began, pretend.registrations()
        assert store.stats().bytes_read == case.nbytes, "everything is read exactly once"
        for _ in range(2):
            offloaded(x.to("pretend")).cpu()
        later = pretend.registrations() - locked
    return {"to_disk": seconds / (case.nbytes / case.read), "locked": locked, "later": later}


def measure(bench: Bench) -> Iterator[Claim]:
    torch.set_num_threads(1)
    case, path = SMALL if bench.small else FULL, bench.scratch / "layers.safetensors"
    torch.manual_seed(0)
    save_file(
        {name: weight.contiguous() for name, weight in layers(case).state_dict().items()}, path
    )
    ways = [(DISKS[0], FREE), *((disk, way) for disk in DISKS for way in (BESIDE, IN_LINE))]
    run(case, path, *ways[0])  # one-time setup of the process
    found = bench.turns({way: functools.partial(run, case, path, *way) for way in ways})
    speeds = " or ".join(f"{LOCKING / disk * case.read / 1e9:.3g}" for disk in DISKS)
    bench.page.text(
        f"{case.layers} groups of {case.width**2 * 4 / 2**20:.0f} MiB. The disk reads "
        f"{case.read / 1e9:g} GB/s here, and page-locking is slowed down by the same factor: "
        f"{speeds} GB/s on one thread."
    )
    columns = {
        "first step / disk": ranged("to_disk"),
        "slots locked": most("locked"),
        "and later": most("later"),
    }
    rows = {(f"{disk / 1e9:.2f}", way): runs for (disk, way), runs in found.items()}
    bench.page.compare(("disk, GB/s", "page-locking"), rows, columns)
    for disk in DISKS:
        text = f"{disk / 1e9:.2f} GB/s: time of the first step / time of the disk"
        yield Claim(text, median(column(found[disk, BESIDE], "to_disk")), at_most=AT_MOST)
    every = [one for runs in found.values() for one in runs]
    twice = max(column(every, "locked")) - case.layers
    yield Claim("slots that were page-locked twice", twice, at_most=0)
    later = sum(column(every, "later"))
    yield Claim("slots that were page-locked after the first step", later, at_most=0)
