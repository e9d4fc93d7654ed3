"""Reading while computing: how long a loop stalls when reading could be hidden

    python tools/bench/overlap.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

A loop uses groups of equal size in turn, with room for half of them in RAM, and computes with each:
one thread multiplies matrices for a fixed time, which is 1, 1.5 or 2 times as long as one group
takes to come from the disk. (Measured first, by a loop that computes nothing.) As half of the
groups stay, the disk has between twice and four times as long as it needs. Passes after the second
count. The page cache is not involved: reads are direct.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from safetensors.torch import save_file

from tierstore import TierStore
from tools.bench import machine
from tools.bench.report import Claim, Page

RATIOS = (1.0, 1.5, 2.0)
PASSES_BEFORE = 2


@dataclass(frozen=True)
class Case:
    groups: int
    nbytes: int
    passes: int
    rounds: int


FULL = Case(groups=32, nbytes=32 << 20, passes=6, rounds=5)
SMALL = Case(groups=8, nbytes=4 << 20, passes=2, rounds=1)


@dataclass
class Passes:
    """What the passes that count took, in seconds, and what they read, in bytes."""

    elapsed: float
    stalled: float
    read: int

    @property
    def share(self) -> float:
        return self.stalled / self.elapsed


class Work:
    """Computing for as long as is wanted, on the thread that calls it."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(2, 192, 192).unbind()
        self._out = torch.empty(192, 192)

    def go_on(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.mm(self._left, self._right, out=self._out)


def checkpoint(case: Case, directory: Path) -> Path:
    path = directory / f"groups-{case.groups}-{case.nbytes}.safetensors"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        tensors = {
            f"group.{i:03}": torch.randint(256, (case.nbytes,), generator=generator).to(torch.uint8)
            for i in range(case.groups)
        }
        save_file(tensors, path)
    return path


def loop(case: Case, path: Path, compute: float) -> Passes:
    """Go round the groups, computing for `compute` seconds with each."""
    work = Work()
    budget = case.groups * case.nbytes // 2
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as scratch,
        TierStore(budget, Path(scratch) / "store", device="cpu") as store,
    ):
        keys = sorted(store.register_checkpoint(path))

        def go_round(passes: int) -> None:
            for key in passes * keys:
                with store.acquire(key):
                    work.go_on(compute)

        go_round(PASSES_BEFORE)
        before, started = store.stats(), time.perf_counter()
        go_round(case.passes)
        elapsed, after = time.perf_counter() - started, store.stats()
    stalled = after.stalled_seconds - before.stalled_seconds
    return Passes(elapsed, stalled, after.bytes_read - before.bytes_read)


def read_seconds(case: Case, path: Path) -> float:
    """How long one group takes to come when nothing is computed."""
    passes = loop(case, path, 0.0)
    return passes.elapsed / (passes.read / case.nbytes)


@dataclass
class Round:
    """One round: how long a group takes to come, and a loop for each of `RATIOS`."""

    group: float
    loops: dict[float, Passes]


def one_round(case: Case, path: Path) -> Round:
    group = read_seconds(case, path)
    return Round(group, {ratio: loop(case, path, ratio * group) for ratio in RATIOS})


def rows(case: Case, rounds: list[Round]) -> Iterator[list[str]]:
    for ratio in RATIOS:
        loops = [one.loops[ratio] for one in rounds]
        least = case.passes * case.nbytes * case.groups / 2
        yield [
            f"{ratio:g}",
            machine.spread([100 * passes.share for passes in loops], 1),
            machine.spread([passes.read / least for passes in loops]),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each loop runs")
    parser.add_argument("--dir", type=Path, help="where the file with the groups is kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    case = SMALL if options.small else FULL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = options.dir or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        page = Page(__doc__, place, ("torch",))
        path = checkpoint(case, place)
        run: dict[str, Callable[[], Round]] = {"round": lambda: one_round(case, path)}
        rounds = machine.interleave(run, options.rounds or case.rounds)["round"]
        page.text(
            f"{case.groups} groups of {case.nbytes >> 20} MiB. One comes in "
            f"{machine.spread([1e3 * one.group for one in rounds], 1)} ms."
        )
        columns = ("computing / reading a group", "stalled, % of the time", "read / least possible")
        page.table(columns, rows(case, rounds))
        worst = max(machine.median(one.loops[ratio].share for one in rounds) for ratio in RATIOS)
        page.claims([Claim("at most 8 % of the time is stalled", worst, at_most=0.08)])
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
