"""Overlap of reading and computing: stalls of a loop whose reads could be hidden

A loop uses groups of equal size in turn, with RAM for half of them, and computes with each: one
thread multiplies matrices for 1, 1.5 or 2 times as long as the disk takes to read one group
(measured first, by a loop without computing). Since half of the groups stay in RAM, the disk has
two to four times as long as it needs. Passes after the second count. Reads are direct, without the
page cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tierstore import TierStore
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, ranged, spread

PACKAGES, ROUNDS = ("torch",), 5
RATIOS = (1.0, 1.5, 2.0)
PASSES_BEFORE = 2


@dataclass(frozen=True)
class Case:
    groups: int
    nbytes: int
    passes: int


FULL = Case(groups=32, nbytes=32 << 20, passes=6)
SMALL = Case(groups=8, nbytes=4 << 20, passes=2)


def loop(case: Case, path: Path, compute: float) -> Run:
    """Loop over the groups, computing for `compute` seconds with each."""
    left, right = torch.randn(2, 192, 192).unbind()
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as scratch,
        TierStore(case.groups * case.nbytes // 2, Path(scratch) / "store", device="cpu") as store,
    ):
        keys = sorted(store.register_checkpoint(path))

        def go_round(passes: int) -> None:
            for key in passes * keys:
                with store.acquire(key):
                    until = time.perf_counter() + compute
                    while time.perf_counter() < until:
                        torch.mm(left, right)

        go_round(PASSES_BEFORE)
        before, started = store.stats(), time.perf_counter()
        go_round(case.passes)
        elapsed, after = time.perf_counter() - started, store.stats()
    read = after.bytes_read - before.bytes_read
    return {
        "stalled": (after.stalled_seconds - before.stalled_seconds) / elapsed,
        "read": read / (case.passes * case.nbytes * case.groups / 2),
        "group": elapsed / (read / case.nbytes),
    }


def measure(bench: Bench) -> Iterator[Claim]:
    case = SMALL if bench.small else FULL
    torch.set_num_threads(1)
    path = bench.kept / "groups.safetensors"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        size = (case.groups, case.nbytes)
        values = torch.randint(256, size, generator=generator, dtype=torch.uint8)
        save_file({f"group.{i:03}": row.clone() for i, row in enumerate(values)}, path)
    seconds, found = [], dict[float, list[Run]]()
    for _ in range(bench.rounds):
        seconds.append(loop(case, path, 0.0)["group"])
        for ratio in RATIOS:
            found.setdefault(ratio, []).append(loop(case, path, ratio * seconds[-1]))
    bench.page.text(
        f"{case.groups} groups of {case.nbytes >> 20} MiB. Reading one takes "
        f"{spread([1e3 * each for each in seconds], 1)} ms."
    )
    columns = {
        "stalled, % of the time": ranged("stalled", 1, 100),
        "read / least possible": ranged("read"),
    }
    rows = {f"{ratio:g}": runs for ratio, runs in found.items()}
    bench.page.compare("computing / reading a group", rows, columns)
    worst = max(median(column(runs, "stalled")) for runs in found.values())
    yield Claim("share of the time stalled", worst, at_most=0.08)
