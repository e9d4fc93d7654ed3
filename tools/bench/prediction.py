"""What `tierstore-inspect plan` predicts, and what a run then takes

    python tools/bench/prediction.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

`plan` is told the budget, the seconds that a step takes with all weights in place, and the speed
of the disk that `tierstore-inspect bench` measured just before. It sees the headers of a Flux
transformer's checkpoint and no more: one of 500 MB whose step is short for its bytes, and one of
3.8 GB. Then the transformer denoises in a store of that budget, with
the page cache dropped before. The first half of the steps is left out on both sides. All of it is
done once per round, the budgets in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tierstore import TierStore, enable_group_offload
from tools.bench import flux, machine
from tools.bench.report import Claim, Page


@dataclass(frozen=True)
class Case:
    shape: flux.Shape
    shares: tuple[float, ...]
    steps: int
    rounds: int
    measured: str  # how much `bench` reads and writes


QUICK_STEPS = Case(
    flux.Shape(heads=6, double=5, single=16, shard="100MB"), (0.25, 0.5, 0.75), 16, 5, "512MiB"
)
LONG_STEPS = Case(
    flux.Shape(heads=12, double=6, single=12, dtype="float32"), (0.25, 0.5, 0.75), 16, 2, "1GiB"
)
SMALL = Case(flux.Shape(heads=4, double=3, single=6, head_dim=16), (0.5,), 4, 1, "64MiB")


@dataclass
class Step:
    """Bytes read and seconds of a step: the mean of the steps in the second half."""

    nbytes: float
    seconds: float


def inspect(*words: object) -> dict[str, Any]:
    """What `tierstore-inspect` prints as JSON."""
    command = [sys.executable, "-m", "tierstore.cli", *map(str, words), "--json"]
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as cache:  # what is known of the disk shall stay as it is
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        run = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(run.stdout))


def predicted(case: Case, checkpoint: Path, budget: int, compute: float, disk: float) -> Step:
    options = ("--ram", f"{budget}B", "--compute", compute, "--disk-bandwidth", f"{round(disk)}B/s")
    (plan,) = inspect("plan", checkpoint, *options, "--steps", case.steps)["plans"]
    (step,) = plan["steps"]
    return Step(step["read"], step["seconds"])


def measured(case: Case, checkpoint: Path, budget: int) -> Step:
    model = flux.load(checkpoint).eval()
    machine.drop_page_cache()
    with (
        tempfile.TemporaryDirectory(dir=checkpoint.parent) as scratch,
        TierStore(budget, Path(scratch, "store"), device="cpu") as store,
        enable_group_offload(model, store),
    ):
        marks = [(time.perf_counter(), store.stats().bytes_read)]
        for _ in flux.denoise(model, case.steps):
            marks.append((time.perf_counter(), store.stats().bytes_read))
    (start, before), (end, after) = marks[case.steps // 2], marks[-1]
    steps = case.steps - case.steps // 2
    return Step((after - before) / steps, (end - start) / steps)


def in_place(case: Case, checkpoint: Path) -> float:
    """Seconds of a step when all weights are in place."""
    model = flux.load(checkpoint).eval()
    marks = [time.perf_counter() for _ in flux.denoise(model, case.steps)]
    half = case.steps // 2
    return (marks[-1] - marks[half - 1]) / (case.steps - half)


@dataclass
class Round:
    """What one round found, by the share of the weights that the budget has room for."""

    compute: float
    disk: float
    told: dict[float, Step]
    came: dict[float, Step]


def one_round(case: Case, checkpoint: Path, budgets: dict[float, int]) -> Round:
    disk = inspect("bench", checkpoint.parent, "--size", case.measured)["read"]
    compute = in_place(case, checkpoint)
    came = {share: measured(case, checkpoint, budget) for share, budget in budgets.items()}
    told = {
        share: predicted(case, checkpoint, budget, compute, disk)
        for share, budget in budgets.items()
    }
    return Round(compute, disk, told, came)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often everything is done")
    parser.add_argument("--dir", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    cases = (SMALL,) if options.small else (QUICK_STEPS, LONG_STEPS)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = (options.dir or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        page = Page(__doc__, place, ("torch", "diffusers"))
        for number, case in enumerate(cases):
            checkpoint = flux.save(case.shape, place / f"prediction-{number}")
            weights = flux.weight_bytes(flux.load(checkpoint))
            budgets = {share: int(weights * share) for share in case.shares}
            rounds = []
            for _ in range(options.rounds or case.rounds):
                rounds.append(one_round(case, checkpoint, budgets))
                print(rounds[-1], file=sys.stderr, flush=True)
            tell(page, weights, rounds)
        page.write(options.markdown)
    return 0


def tell(page: Page, weights: int, rounds: list[Round]) -> None:
    rows, claims = [], []
    for share in rounds[0].told:
        told = [one.told[share] for one in rounds]
        came = [one.came[share] for one in rounds]
        nbytes = machine.ratios([s.nbytes for s in told], [s.nbytes for s in came])
        seconds = machine.ratios([s.seconds for s in told], [s.seconds for s in came])
        rows.append(
            (
                f"{share:.0%}",
                machine.spread([s.nbytes / 1e6 for s in told], 1),
                machine.spread([s.nbytes / 1e6 for s in came], 1),
                machine.spread(nbytes, 3),
                machine.spread([s.seconds for s in told], 3),
                machine.spread([s.seconds for s in came], 3),
                machine.spread(seconds, 2),
            )
        )
        off = abs(machine.median(seconds) - 1)
        what = f"seconds within 25 % at {share:.0%} of {weights / 1e6:,.0f} MB"
        claims.append(Claim(what, off, at_most=0.25))
    compute = machine.spread([one.compute for one in rounds], 3)
    disk = machine.spread([one.disk / 1e9 for one in rounds], 2)
    page.text(f"{weights / 1e6:.1f} MB of weights; {compute} s for a step; disk {disk} GB/s")
    page.table(
        (
            "budget / weights",
            "MB read, predicted",
            "MB read",
            "ratio",
            "seconds, predicted",
            "seconds",
            "ratio",
        ),
        rows,
    )
    page.claims(claims)


if __name__ == "__main__":
    sys.exit(main())
