"""Predictions of `tierstore-inspect plan`, against measured runs

`plan` gets the budget, the seconds of a step with all weights in memory, and the disk speed that
`tierstore-inspect bench` measured just before. It reads only the headers of a Flux transformer's
checkpoint: one of 500 MB whose step is short for its bytes, and one of 3.8 GB. Then the transformer
denoises in a store with that budget, after the page cache was dropped. The first half of the steps
is excluded on both sides. Everything runs once per round, with the budgets in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore import TierStore, enable_group_offload
from tools.bench import flux, machine
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, ranged, spread

PACKAGES = ("torch", "diffusers")
ROUNDS = 3
STEPS = 16


@dataclass(frozen=True)
class Case:
    shape: flux.Shape
    shares: tuple[float, ...]
    measured: str  # size that `bench` reads and writes


SHARES = (0.25, 0.5, 0.75)
QUICK_STEPS = Case(flux.Shape(heads=6, double=5, single=16, shard="100MB"), SHARES, "512MiB")
LONG_STEPS = Case(flux.Shape(heads=12, double=6, single=12, dtype="float32"), SHARES, "1GiB")
SMALL = Case(flux.Shape(heads=4, double=3, single=6, head_dim=16), (0.5,), "64MiB")


def inspect(*words: object) -> dict[str, Any]:
    """Run `tierstore-inspect` and return its JSON."""
    command = [sys.executable, "-m", "tierstore.cli", *map(str, words), "--json"]
    with tempfile.TemporaryDirectory() as cache:  # leaves the user's measured disk speeds unchanged
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(run.stdout))


def took(checkpoint: Path, budget: int | None, steps: int) -> Run:
    """Denoise, in a store if a budget is given. Return means over the second half of the steps."""
    model = flux.load(checkpoint).eval()
    if steps == STEPS:
        machine.drop_page_cache()
    with ExitStack() as stack:
        store = None
        if budget is not None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=checkpoint.parent))
            store = stack.enter_context(TierStore(budget, Path(scratch, "store"), device="cpu"))
            stack.enter_context(enable_group_offload(model, store))
        marks = [
            (time.perf_counter(), store.stats().bytes_read if store else 0)
            for _ in flux.denoise(model, steps)
        ]
    (start, before), (end, after) = marks[steps // 2 - 1], marks[-1]
    return {"seconds": (end - start) / (steps // 2), "read": (after - before) / (steps // 2)}


def one_round(case: Case, checkpoint: Path, budgets: dict[float, int], steps: int) -> Run:
    """Measure the disk and the computing, run with each budget, and get the predictions."""
    disk = inspect("bench", checkpoint.parent, "--size", case.measured)["read"]
    compute = took(checkpoint, None, steps)["seconds"]
    found: Run = {"disk": disk, "compute": compute}
    for share, budget in budgets.items():
        came = took(checkpoint, budget, steps)
        speeds = ("--compute", compute, "--disk-bandwidth", f"{round(disk)}B/s")
        words = ("plan", checkpoint, "--ram", f"{budget}B", *speeds, "--steps", steps)
        (step,) = inspect(*words)["plans"][0]["steps"]
        told = {f"told_{name}": step[name] for name in ("read", "seconds")}
        ratios = {f"{name}_ratio": step[name] / came[name] for name in ("read", "seconds")}
        found[f"{share:.0%}"] = came | told | ratios
    return found


def measure(bench: Bench) -> Iterator[Claim]:
    cases = (SMALL,) if bench.small else (QUICK_STEPS, LONG_STEPS)
    columns = {
        "MB read, predicted": ranged("told_read", 1, 1e-6),
        "MB read": ranged("read", 1, 1e-6),
        "ratio": ranged("read_ratio", 3),
        "seconds, predicted": ranged("told_seconds", 3),
        "seconds": ranged("seconds", 3),
        "ratio of seconds": ranged("seconds_ratio"),
    }
    for number, case in enumerate(cases):
        checkpoint = flux.save(case.shape, bench.kept / f"prediction-{number}")
        weights = flux.weight_bytes(flux.load(checkpoint))
        budgets = {share: int(weights * share) for share in case.shares}
        steps = 4 if bench.small else STEPS
        rounds = [one_round(case, checkpoint, budgets, steps) for _ in range(bench.rounds)]
        bench.page.text(
            f"{weights / 1e6:.1f} MB of weights; {spread(column(rounds, 'compute'), 3)} s for a "
            f"step; disk {spread([one / 1e9 for one in column(rounds, 'disk')])} GB/s"
        )
        found = {f"{share:.0%}": column(rounds, f"{share:.0%}") for share in case.shares}
        bench.page.compare("budget / weights", found, columns)
        for share, runs in found.items():
            off = abs(median(column(runs, "seconds_ratio")) - 1)
            text = f"error of predicted seconds at {share} of {weights / 1e6:,.0f} MB"
            yield Claim(text, off, at_most=0.25)
