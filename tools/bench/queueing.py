"""CPU cost of queueing a group's copy from RAM to the device

A copy from page-locked memory to an accelerator is only queued; the device runs it later. Groups in
RAM are acquired and released in random order, on the pretend accelerator of the tests, which runs
nothing until a thread waits for it: so only Python is timed, on one thread. The device holds a
third of the groups, so each acquired group evicts another.

The figures are the times from the call of `acquire` until the copy is queued and until `acquire`
returns, and the time of `release`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.device import pretend
from tierstore import TierStore
from tierstore.tiers.hops import HostToDevice
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, ranged

PACKAGES, PRETEND = ("torch",), True
GROUPS, NBYTES = 57, 192 << 10
ROOM = 3  # the device holds 1/ROOM of the groups
AT_MOST = 60.0


def measure_groups(tensors: int, rounds: int, place: Path) -> list[Run]:
    """Acquire groups of `tensors` tensors from RAM. Return the seconds per copied group."""
    budget = {"ram_budget": 2 * GROUPS * NBYTES, "device_budget": GROUPS * NBYTES // ROOM}
    chosen, onload = random.Random(0), HostToDevice.copy
    queued: list[tuple[float, int]] = []

    def noting(hop: HostToDevice, *arguments: Any) -> Any:
        copied = onload(hop, *arguments)
        queued.append((time.perf_counter(), threading.get_ident()))
        return copied

    found: list[Run] = []
    with (
        mock.patch.object(HostToDevice, "copy", noting),
        TierStore(disk_dir=place, device="pretend", **budget) as store,
    ):
        keys = [f"blocks.{i}" for i in range(GROUPS)]
        for key in keys:
            parts = {f"t{i}": torch.zeros(NBYTES // 4 // tensors) for i in range(tensors)}
            store.put(key, parts, durable=False)
        for turn in range(rounds + 2):
            chosen.shuffle(keys)
            for key in keys:
                queued.clear()
                began = time.perf_counter()
                lease = store.acquire(key)
                acquired = time.perf_counter()
                lease.release()
                released = time.perf_counter()
                if queued and turn >= 2:  # the device's memory is allocated by then
                    at, _ = queued[0]
                    run: Run = {"queued": at - began, "acquired": acquired - began}
                    others = sum(thread != threading.get_ident() for _, thread in queued)
                    found.append(run | {"released": released - acquired, "elsewhere": others})
            torch.accelerator.synchronize()
    return found


def measure(bench: Bench) -> Iterator[Claim]:
    pretend.set_slowness(None)
    rounds = 5 if bench.small else 40
    found = {n: measure_groups(n, rounds, bench.scratch / str(n)) for n in (1, 12)}
    columns = {
        "copies": len,
        "to queued, us": ranged("queued", 1, 1e6),
        "to leased, us": ranged("acquired", 1, 1e6),
        "release, us": ranged("released", 1, 1e6),
    }
    bench.page.compare("tensors in a group", found, columns)
    for tensors, runs in found.items():
        text = f"us until a copy of a group of {tensors} is queued"
        yield Claim(text, 1e6 * median(column(runs, "queued")), at_most=AT_MOST)
    elsewhere = sum(run["elsewhere"] for runs in found.values() for run in runs)
    yield Claim("copies that another thread queued", elsewhere, at_most=0)
