"""What it takes to have a group copied to the device, when it is in RAM

    python tools/bench/queueing.py [--small] [--dir DIR] [--markdown FILE]

A copy from page-locked memory to an accelerator is only queued, and the device makes it later.
Groups that lie in RAM are acquired and released in random order, on the pretend accelerator of the
tests, which does nothing before somebody waits for it: so what is timed is Python alone, on one
thread. The device has room for a third of them, so that one has to go for each that comes.

Timed is from the call of `acquire` until the copy is queued, and until `acquire` returns; and then
`release`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from tests.device import pretend
from tierstore import TierStore
from tierstore.tiers.hops import HostToDevice
from tools.bench import machine
from tools.bench.report import Claim, Page

GROUPS = 57
ROOM = 3  # one in so many has room on the device
TENSORS = (1, 12)
NBYTES = 192 << 10
ROUNDS = 40
SMALL_ROUNDS = 5
AT_MOST = 60.0


@dataclass
class Times:
    """Seconds, one for each group that was copied; `elsewhere` counts copies by other threads."""

    queued: list[float] = field(default_factory=list)
    acquired: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)
    elsewhere: int = 0


class Watched:
    """Notes when and where copies to the device are queued."""

    def __init__(self) -> None:
        self.at: list[tuple[float, int]] = []
        self._onload = HostToDevice.copy

    def __enter__(self) -> Watched:
        watched, onload = self, self._onload

        def noting(hop: HostToDevice, *arguments: Any) -> Any:
            copied = onload(hop, *arguments)
            watched.at.append((time.perf_counter(), threading.get_ident()))
            return copied

        HostToDevice.copy = noting  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        HostToDevice.copy = self._onload  # type: ignore[method-assign]


def measure(tensors: int, rounds: int, place: Path) -> Times:
    """Acquire groups of so many tensors that are in RAM."""
    budget = {"ram_budget": 2 * GROUPS * NBYTES, "device_budget": GROUPS * NBYTES // ROOM}
    found, here, chosen = Times(), threading.get_ident(), random.Random(0)
    with TierStore(disk_dir=place / str(tensors), device="pretend", **budget) as store:
        keys = [f"blocks.{i}" for i in range(GROUPS)]
        for key in keys:
            parts = {f"t{i}": torch.zeros(NBYTES // 4 // tensors) for i in range(tensors)}
            store.put(key, parts, durable=False)
        for turn in range(rounds + 2):
            if turn == 2:  # by then the device's memory has been made
                found = Times()
            chosen.shuffle(keys)
            for key in keys:
                with Watched() as watched:
                    began = time.perf_counter()
                    lease = store.acquire(key)
                    acquired = time.perf_counter()
                    lease.release()
                    released = time.perf_counter()
                if watched.at:
                    found.queued.append(watched.at[0][0] - began)
                    found.acquired.append(acquired - began)
                    found.released.append(released - acquired)
                found.elsewhere += sum(thread != here for _, thread in watched.at)
            torch.accelerator.synchronize()
    return found


def in_microseconds(seconds: list[float]) -> str:
    return machine.spread([1e6 * s for s in seconds], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--dir", type=Path, help="where the store's files go")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    if reason := pretend.ready():
        print(f"Nothing was measured: {reason}.")
        return 0
    pretend.set_slowness(None)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch",))
        rounds = SMALL_ROUNDS if options.small else ROUNDS
        found = {tensors: measure(tensors, rounds, place) for tensors in TENSORS}
        columns = ("tensors in a group", "copies", "to queued, us", "to leased, us", "release, us")
        rows = [
            [
                tensors,
                len(times.queued),
                *map(in_microseconds, (times.queued, times.acquired, times.released)),
            ]
            for tensors, times in found.items()
        ]
        page.table(columns, rows)
        claims = [
            Claim(
                f"a copy of a group of {tensors} is queued {AT_MOST:.0f} us after `acquire`",
                1e6 * machine.median(times.queued),
                at_most=AT_MOST,
            )
            for tensors, times in found.items()
        ]
        elsewhere = sum(times.elsewhere for times in found.values())
        page.claims([*claims, Claim("copies that another thread queued", elsewhere, at_most=0)])
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
