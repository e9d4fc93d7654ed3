"""Denoising with more weights than RAM: tierstore against what one would otherwise pick.

    python tools/bench/denoise.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

A Flux transformer of 3.8 GB (fp32, 6 double and 12 single blocks, 64 image tokens) denoises in a
control group of 2,000 MiB of RAM, where page cache counts. Each run is a process of its own with a
cold page cache; the contenders take turns. The steps of a run after the second count, by their
median. `--dir` keeps the checkpoint and the peers' folders for a later run (12 GB).

Nobody can be faster than the limit: the longer of the computing of a step (measured with all
weights in RAM, outside of the group) and of the reading of what no cache of that budget can hold
(weights less budget, at the best direct reads of the same files that were measured in between, into
more memory than the processor's caches hold, as that is where weights go). On a small virtual
machine, computing itself takes longer while the disk is read: the host copies what is read with the
same processors and memory. So a second limit has the computing of the run itself, its stalls taken
off.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from tierstore import TierStore, enable_group_offload
from tierstore.model.sizes import parse_size
from tools.bench import fio, flux, machine
from tools.bench.memory_group import MemoryGroup
from tools.bench.report import Claim, Page

FIRST_THAT_COUNTS = 2  # steps before it: the order of use is learned, caches fill
COLUMNS = ("seconds", "cpu", "read", "stalled")
CPU = torch.device("cpu")
CHUNK = 16 << 20


@dataclass(frozen=True)
class Case:
    """What is run: the model, the budget of the store, the RAM of the group, steps, contenders."""

    shape: flux.Shape
    budget: str
    limit: str
    steps: dict[str, int]
    rounds: int
    cold: bool = True


FULL = Case(
    flux.Shape(heads=12, double=6, single=12, dtype="float32"),
    "1000MiB",
    "2000MiB",
    {
        "in memory": 8,
        "tierstore": 20,
        "diffusers": 5,
        "accelerate": 5,
        "accelerate, no copy": 5,
        "plain maps": 5,
    },
    rounds=3,
)
SMALL = Case(
    flux.Shape(heads=4, double=1, single=3, dtype="float32", shard="20MB"),
    "24MiB",
    "2000MiB",
    {"in memory": 4, "tierstore": 4, "diffusers": 4},
    rounds=1,
    cold=False,
)
PEERS = ("diffusers", "accelerate", "accelerate, no copy")


# --- one run, in a process of its own -------------------------------------------------------------


@contextlib.contextmanager
def untouched(model: Any, place: Path, budget: str) -> Iterator[None]:
    """`from_pretrained` and nothing else: weights are maps, which page faults bring in."""
    yield


@contextlib.contextmanager
def on_a_store(model: Any, place: Path, budget: str) -> Iterator[TierStore]:
    with TierStore(budget, place / "store", device=CPU) as store:
        enable_group_offload(model, store)
        yield store


@contextlib.contextmanager
def by_diffusers(model: Any, place: Path, budget: str) -> Iterator[None]:
    """Without streams, which it refuses on a CPU. Leaf by leaf is slower still."""
    model.enable_group_offload(
        onload_device=CPU,
        offload_device=CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(place / "diffusers"),
    )
    yield


@contextlib.contextmanager
def by_accelerate(model: Any, place: Path, budget: str) -> Iterator[None]:
    """Its own format: one file for each tensor, read by numpy."""
    import accelerate

    accelerate.disk_offload(model, place / "accelerate", execution_device=CPU)
    yield


@contextlib.contextmanager
def by_accelerate_without_a_copy(model: Any, place: Path, budget: str) -> Iterator[None]:
    """An index that points into the checkpoint, as transformers writes it."""
    import accelerate

    folder, checkpoint = place / "accelerate-index", place / "checkpoint"
    folder.mkdir(exist_ok=True)
    (index,) = checkpoint.glob("*.safetensors.index.json")
    files = json.loads(index.read_text())["weight_map"]
    entries = {
        name: {
            "safetensors_file": str(checkpoint / file),
            "weight_name": name,
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        for name, file in files.items()
    }
    (folder / "index.json").write_text(json.dumps(entries))
    accelerate.disk_offload(model, folder, execution_device=CPU)
    yield


CONTENDERS: dict[str, Callable[..., contextlib.AbstractContextManager[TierStore | None]]] = {
    "in memory": untouched,
    "tierstore": on_a_store,
    "diffusers": by_diffusers,
    "accelerate": by_accelerate,
    "accelerate, no copy": by_accelerate_without_a_copy,
    "plain maps": untouched,
}


def read_bytes() -> int:
    """Bytes that this process made the disk read so far, by page faults too."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def run_here(name: str, place: Path, budget: str, steps: int) -> dict[str, Any]:
    """Denoise as contender `name`. Gives, for each step, what it took and the image."""
    model = flux.load(place / "checkpoint").eval()
    weights = flux.weight_bytes(model)
    found: dict[str, Any] = {name: [] for name in (*COLUMNS, "images")}
    with CONTENDERS[name](model, place, budget) as store:

        def now() -> tuple[float, float, int, float]:
            stalled = store.stats().stalled_seconds if store else 0.0
            return time.perf_counter(), time.process_time(), read_bytes(), stalled

        before = now()
        for image in flux.denoise(model, steps):
            after = now()
            for column, new, old in zip(COLUMNS, after, before, strict=True):
                found[column].append(new - old)
            found["images"].append(image)
            before = now()
    return {**found, "weights": weights}


# --- all runs -------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run. Medians over the steps that count."""

    weights: int
    seconds: float
    cpu: float
    read: float
    stalled: float
    images: list[torch.Tensor]
    peak: int | None = None

    @property
    def computing(self) -> float:
        """Seconds in which nothing was waited for."""
        return self.seconds - self.stalled

    @classmethod
    def of(cls, found: dict[str, Any]) -> Run:
        columns = [machine.median(found[name][FIRST_THAT_COUNTS:]) for name in COLUMNS]
        return cls(found["weights"], *columns, images=found["images"])


class Runner:
    """Starts runs in processes of their own, in a group with so much RAM if that is possible."""

    def __init__(self, case: Case, place: Path) -> None:
        self.case = case
        self.place = place
        self.why_unlimited = ""
        try:
            with MemoryGroup(parse_size(case.limit)):
                pass
        except OSError as error:
            self.why_unlimited = f"RAM was not limited ({error})"

    def run(self, name: str, steps: int = 0) -> Run:
        if name == "in memory" or self.why_unlimited or steps:
            return self._start(name, steps, lambda words: words)
        with MemoryGroup(parse_size(self.case.limit)) as group:
            run = self._start(name, steps, group.command)
            run.peak = group.peak
        return run

    def _start(self, name: str, steps: int, wrapped: Callable[[list[str]], list[str]]) -> Run:
        words = [sys.executable, str(Path(__file__).resolve()), "--run", name]
        words += ["--dir", str(self.place), "--budget", self.case.budget]
        words += ["--steps", str(steps or self.case.steps[name])]
        done = subprocess.run(wrapped(words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the run of {name!r} failed:\n{done.stderr[-4000:]}")
        return Run.of(torch.load(self.place / "result.pt"))

    def bandwidth(self) -> float:
        """Bytes per second of direct reads of the checkpoint: the best of two passes and of fio.

        All of them fill as much memory as does not stay in the processor's caches.
        """
        files = sorted((self.place / "checkpoint").glob("*.safetensors"))
        rates = [direct_reads(files) for _ in range(2)]
        if fio.available() and self.case.cold:
            largest = max(files, key=lambda file: file.stat().st_size)
            nbytes = largest.stat().st_size // fio.ROOM * fio.ROOM
            if nbytes:
                rates.append(fio.run(largest, fio.ROOMY, nbytes, "--rw=read").speed)
        return max(rates)


def direct_reads(files: list[Path], threads: int = 4) -> float:
    """Bytes per second when all files are read past the page cache, `threads` reads at a time."""
    from tierstore.tiers.pages import fresh_memory

    memory = fresh_memory(fio.ROOM).fill_(0).numpy().data
    share = fio.ROOM // threads
    rooms = [memory[i * share : (i + 1) * share] for i in range(threads)]
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    pieces = [
        (descriptor, at)
        for descriptor in descriptors
        for at in range(0, os.fstat(descriptor).st_size, CHUNK)
    ]

    def read(room: memoryview) -> int:
        nbytes = 0
        parts = itertools.cycle(room[i : i + CHUNK] for i in range(0, share, CHUNK))
        while pieces:
            with contextlib.suppress(IndexError):  # another thread took the last
                descriptor, at = pieces.pop()
                nbytes += os.preadv(descriptor, [next(parts)], at)
        return nbytes

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, rooms))
    seconds = time.perf_counter() - started
    for descriptor in descriptors:
        os.close(descriptor)
    return total / seconds


# --- the page -------------------------------------------------------------------------------------


@dataclass
class Limit:
    """What bounds a step, from the figures of one round."""

    compute: float
    bandwidth: float
    missing: int

    @property
    def seconds(self) -> float:
        return max(self.compute, self.missing / self.bandwidth)

    def with_what_was_read(self, run: Run) -> float:
        return max(self.compute, run.read / self.bandwidth)

    def with_its_own_computing(self, run: Run) -> float:
        return max(run.computing, self.missing / self.bandwidth)


def rows(runs: dict[str, list[Run]]) -> Iterator[list[str]]:
    ours = [run.seconds for run in runs["tierstore"]]
    for name, found in runs.items():
        seconds = [run.seconds for run in found]
        peaks = [run.peak for run in found if run.peak]
        yield [
            name,
            machine.spread(seconds),
            machine.spread(machine.ratios(seconds, ours)),
            f"{machine.median(run.read for run in found) / 1e6:,.0f}",
            f"{machine.median(run.cpu for run in found):.2f}",
            f"{max(peaks) / 2**20:,.0f}" if peaks else "-",
            likeness(found[0], runs["in memory"][0]),
        ]


def likeness(run: Run, reference: Run) -> str:
    """How the image compares with that of the usual run after as many steps."""
    last = min(len(run.images), len(reference.images)) - 1
    one, other = run.images[last], reference.images[last]
    if torch.equal(one, other):
        return "equal"
    return f"differs by {(one - other).abs().max().item():.1e}"


def limits(case: Case, runs: dict[str, list[Run]], bandwidths: list[float]) -> list[Limit]:
    weights = runs["in memory"][0].weights
    missing = max(weights - parse_size(case.budget), 0)
    return [
        Limit(usual.seconds, bandwidth, missing)
        for usual, bandwidth in zip(runs["in memory"], bandwidths, strict=True)
    ]


def report(
    page: Page, runner: Runner, runs: dict[str, list[Run]], bandwidths: list[float]
) -> list[Claim]:
    case, ours = runner.case, runs["tierstore"]
    found = limits(case, runs, bandwidths)
    seconds = [run.seconds for run in ours]
    page.table(
        ("", "seconds per step", "to tierstore", "MB read", "CPU s", "peak MiB", "image"),
        rows(runs),
    )
    page.text(
        "MB read and CPU seconds are for one step. The peak is that of the group, page cache "
        f"included, of which it may have {case.limit}. {runner.why_unlimited} "
        f"{case.rounds} rounds; medians, and ranges in parentheses."
    )
    page.table(
        ("limit of a step", ""),
        [
            ("computing, s", machine.spread([limit.compute for limit in found])),
            ("direct reads, GB/s", machine.spread([b / 1e9 for b in bandwidths])),
            ("missing at least, MB", f"{found[0].missing / 1e6:,.0f}"),
            ("limit, s", machine.spread([limit.seconds for limit in found])),
            (
                "tierstore to the limit",
                machine.spread(machine.ratios(seconds, [limit.seconds for limit in found])),
            ),
            (
                "... to the limit for what it read",
                machine.spread(
                    [
                        run.seconds / limit.with_what_was_read(run)
                        for run, limit in zip(ours, found, strict=True)
                    ]
                ),
            ),
            ("stalled, s", machine.spread([run.stalled for run in ours])),
            ("computing beside the reads, s", machine.spread([run.computing for run in ours])),
            (
                "tierstore to the limit with that computing",
                machine.spread(
                    [
                        run.seconds / limit.with_its_own_computing(run)
                        for run, limit in zip(ours, found, strict=True)
                    ]
                ),
            ),
        ],
    )
    to_limit = machine.median(machine.ratios(seconds, [limit.seconds for limit in found]))
    claims = [
        Claim(f"{peer} takes at least 3 times as long", times(runs, peer), at_least=3.0)
        for peer in PEERS
        if peer in runs
    ]
    claims.append(Claim("a step takes at most 1.12 of the limit", to_limit, at_most=1.12))
    same = likeness(ours[0], runs["in memory"][0]) == "equal"
    claims.append(Claim("the image is the same bit for bit", float(same), at_least=1.0))
    return claims


def times(runs: dict[str, list[Run]], peer: str) -> float:
    ours = [run.seconds for run in runs["tierstore"]]
    return machine.median(machine.ratios([run.seconds for run in runs[peer]], ours))


def measure(case: Case, place: Path, page: Page) -> list[Claim]:
    flux.save(case.shape, place / "checkpoint")
    runner = Runner(case, place)
    for name in case.steps if case.cold else ():
        if name in PEERS and not (place / name).exists():
            runner.run(name, steps=FIRST_THAT_COUNTS + 1)  # writes its folder
    runs: dict[str, Callable[[], Any]] = {
        name: (lambda name=name: runner.run(name)) for name in case.steps
    }
    runs["disk"] = runner.bandwidth
    before = machine.drop_page_cache if case.cold else lambda: None
    found = machine.interleave(runs, case.rounds, before=before, doing="Denoising")
    bandwidths = found.pop("disk")
    return report(page, runner, found, bandwidths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, once: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--dir", type=Path, help="where checkpoint and folders are kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    parser.add_argument("--run", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        result = run_here(options.run, options.dir, options.budget, options.steps)
        torch.save(result, options.dir / "result.pt")
        return 0
    case = SMALL if options.small else FULL
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = (options.dir or Path(scratch)) / ("small" if options.small else "full")
        place.mkdir(parents=True, exist_ok=True)
        page = Page(__doc__, place, ("torch", "diffusers", "accelerate"))
        if options.rounds:
            case = Case(**{**case.__dict__, "rounds": options.rounds})
        claims = measure(case, place, page)
        page.claims(claims)
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
