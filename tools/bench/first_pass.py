"""The first step of a model that is read from disk: how much longer than the disk alone takes

    python tools/bench/first_pass.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

The weights come from one file through page-locked host memory to a device, each for the first
time. So all host memory is mapped, zeroed and page-locked in this step. The device is the pretend
accelerator of the tests, which works on threads of its own. Page-locking and the disk are slowed
down: a thread that zeroes and page-locks sleeps until a driver would be done, and a read, from the
page cache, until a disk would be. Both are as fast as beside an H100, divided by one number, so
that the work of this machine (two cores that copy and compute) counts for as little as it does
there. A second disk is three times as fast: it reads faster than one thread page-locks.

The model runs with page-locking as it is, with page-locking that takes no time, and with each slot
page-locked before its read begins, one at a time, as the store did before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from safetensors.torch import save_file
from torch import nn

import tierstore
from tests.device import pretend
from tierstore import TierStore
from tierstore.tiers.pinned import RegisteredMemory
from tools.bench import machine
from tools.bench.report import Claim, Page
from tools.bench.slowed import page_locking, slow_disk

DISKS = (1.87e9, 5.61e9)
"""Bytes per second: of the disk beside an H100, and of one three times as fast."""
LOCKING = 5.4e9
"""Bytes per second of zeroing and page-locking on one thread, measured beside an H100."""
BESIDE, FREE, IN_LINE = "beside the reads", "takes no time", "before each read"
AT_MOST = 1.15


@dataclass(frozen=True)
class Case:
    """Layers of `width` squared float32 weights. The disk reads `read` bytes per second here."""

    layers: int
    width: int
    read: float
    rounds: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.width**2 * 4


FULL = Case(layers=16, width=4736, read=0.15e9, rounds=5)
SMALL = Case(layers=6, width=512, read=0.1e9, rounds=1)


@contextlib.contextmanager
def locking_in_line() -> Iterator[None]:
    """Memory is page-locked as soon as it is made, and no two slots are made at once."""
    real = RegisteredMemory.make

    def make(memory: RegisteredMemory, nbytes: int) -> torch.Tensor:
        made = real(memory, nbytes)
        memory.lock(made)
        return made

    with mock.patch.object(RegisteredMemory, "make", make):
        yield


@dataclass
class Steps:
    """Seconds of the first step, less the time of the disk; how often memory was page-locked in it,
    and in the two steps after it."""

    to_disk: float
    locked: int
    locked_later: int


def layers(case: Case) -> nn.Sequential:
    each = (nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers))
    return nn.Sequential(*each).requires_grad_(False)


def checkpoint(case: Case, directory: Path) -> Path:
    path = directory / "layers.safetensors"
    torch.manual_seed(0)
    save_file(
        {name: weight.contiguous() for name, weight in layers(case).state_dict().items()}, path
    )
    return path


def run(case: Case, path: Path, disk: float, locking: str) -> Steps:
    """Three steps, with the device's memory for half of the weights, and RAM for all of them."""
    slowed = disk / case.read
    with torch.device("meta"):
        model = layers(case)
    x = torch.ones(1, case.width)
    pretend.reset_counters()
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as scratch,
        page_locking(float("inf") if locking == FREE else LOCKING / slowed),
        locking_in_line() if locking == IN_LINE else contextlib.nullcontext(),
        slow_disk(case.read),
        pretend.working(),
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
        seconds, locked = time.perf_counter() - began, pretend.registrations()
        assert store.stats().bytes_read == case.nbytes, "all of it, once"
        for _ in range(2):
            offloaded(x.to("pretend")).cpu()
        later = pretend.registrations() - locked
    return Steps(seconds / (case.nbytes / case.read), locked, later)


def measure(case: Case, place: Path, rounds: int) -> dict[tuple[float, str], list[Steps]]:
    """All disks with all ways to page-lock, interleaved."""
    path = checkpoint(case, place)
    chosen = [(DISKS[0], FREE), *((disk, way) for disk in DISKS for way in (BESIDE, IN_LINE))]
    run(case, path, DISKS[0], FREE)  # what the first run of a process has to set up
    runs: dict[str, Callable[[], Steps]] = {
        f"{disk} {way}": functools.partial(run, case, path, disk, way) for disk, way in chosen
    }
    found = machine.interleave(runs, rounds)
    return {(disk, way): found[f"{disk} {way}"] for disk, way in chosen}


def rows(found: dict[tuple[float, str], list[Steps]]) -> Iterator[list[str]]:
    for (disk, way), steps in found.items():
        yield [
            f"{disk / 1e9:.2f}",
            way,
            machine.spread([one.to_disk for one in steps]),
            f"{max(one.locked for one in steps)}",
            f"{max(one.locked_later for one in steps)}",
        ]


def claims(case: Case, found: dict[tuple[float, str], list[Steps]]) -> Iterator[Claim]:
    for disk in DISKS:
        steps = found[disk, BESIDE]
        text = (
            f"{disk / 1e9:.2f} GB/s: the first step takes at most {AT_MOST} times the disk's time"
        )
        yield Claim(text, machine.median(one.to_disk for one in steps), at_most=AT_MOST)
    every = [one for steps in found.values() for one in steps]
    yield Claim(
        "slots that were page-locked twice",
        max(one.locked for one in every) - case.layers,
        at_most=0,
    )
    later = sum(one.locked_later for one in every)
    yield Claim("slots that were page-locked after the first step", later, at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each way runs")
    parser.add_argument("--dir", type=Path, help="where the file with the weights is kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    if reason := pretend.ready():
        print(f"Nothing was measured: {reason}.")
        return 0
    torch.set_num_threads(1)
    case = SMALL if options.small else FULL
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch",))
        found = measure(case, place, options.rounds or case.rounds)
        page.text(
            f"{case.layers} groups of {case.width**2 * 4 / 2**20:.0f} MiB. The disk reads "
            f"{case.read / 1e9:g} GB/s here, and page-locking is slowed down as much: "
            + " or ".join(f"{LOCKING / disk * case.read / 1e9:.3g}" for disk in DISKS)
            + " GB/s on one thread."
        )
        columns = ("disk, GB/s", "page-locking", "first step / disk", "slots locked", "and later")
        page.table(columns, rows(found))
        page.claims(claims(case, found))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
