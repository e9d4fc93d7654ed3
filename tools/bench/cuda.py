"""Denoising on a CUDA GPU with fewer weights on it than the model has

    python tools/bench/cuda.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

A Flux transformer of 3.3 GB (bf16) denoises with a quarter of its weights on the GPU: from a store
with all of them in RAM, and with half of them there; and by diffusers' group offload, on streams,
from RAM and from files. The contenders take turns in one process, each with the model loaded anew.
Peak memory is what torch's allocator held for the steps. Then host memory is copied to the GPU: as
the store's slots are (page-locked), and as ordinary memory is.

Without a CUDA GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from tierstore import TierStore, enable_group_offload
from tierstore.transfer.arena import host_arena
from tools.bench import flux, machine
from tools.bench.report import Claim, Page

FIRST_THAT_COUNTS = 2


@dataclass(frozen=True)
class Case:
    shape: flux.Shape
    steps: int
    rounds: int
    copied: int


FULL = Case(flux.Shape(heads=16, double=6, single=12), steps=8, rounds=3, copied=256 << 20)
SMALL = Case(flux.Shape(heads=4, double=1, single=3, shard="20MB"), 4, 1, copied=8 << 20)


@dataclass
class Run:
    """Medians of the steps that count; the overlap is the store's own figure for all of them."""

    seconds: float
    peak: int
    overlap: float | None
    image: torch.Tensor


Prepared = contextlib.AbstractContextManager[TierStore | None]


@contextlib.contextmanager
def on_the_gpu(model: Any, place: Path) -> Iterator[None]:
    model.to("cuda")
    yield


def on_a_store(in_ram: float) -> Callable[[Any, Path], Prepared]:
    """With a quarter of the weights on the GPU and the share `in_ram` of them in RAM."""

    @contextlib.contextmanager
    def prepare(model: Any, place: Path) -> Iterator[TierStore]:
        weights = flux.weight_bytes(model)
        with (
            tempfile.TemporaryDirectory(dir=place) as scratch,
            TierStore(
                int(in_ram * weights),
                Path(scratch) / "store",
                device="cuda",
                device_budget=weights // 4,
            ) as store,
            enable_group_offload(model, store),
        ):
            yield store

    return prepare


def by_diffusers(folder: str | None) -> Callable[[Any, Path], Prepared]:
    @contextlib.contextmanager
    def prepare(model: Any, place: Path) -> Iterator[None]:
        model.enable_group_offload(
            onload_device=torch.device("cuda"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
            record_stream=True,
            offload_to_disk_path=str(place / folder) if folder else None,
        )
        yield

    return prepare


CONTENDERS: dict[str, Callable[[Any, Path], Prepared]] = {
    "on the GPU": on_the_gpu,
    "tierstore, all in RAM": on_a_store(1.1),
    "tierstore, half in RAM": on_a_store(0.5),
    "diffusers, from RAM": by_diffusers(None),
    "diffusers, from files": by_diffusers("diffusers"),
}


def run(name: str, case: Case, place: Path) -> Run:
    gc.collect()
    torch.cuda.empty_cache()
    model = flux.load(place / "checkpoint").eval()
    with CONTENDERS[name](model, place) as store:
        torch.cuda.reset_peak_memory_stats()
        seconds, images = [], []
        started = time.perf_counter()
        for image in flux.denoise(model, case.steps, "cuda"):
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            images.append(image)
            started = time.perf_counter()
        overlap = store.stats().overlap if store else None
        peak = torch.cuda.max_memory_allocated()
    return Run(machine.median(seconds[FIRST_THAT_COUNTS:]), peak, overlap, images[-1].cpu())


def copy_speed(memory: torch.Tensor) -> float:
    """Bytes per second from host memory to the GPU."""
    target = torch.empty_like(memory, device="cuda")
    target.copy_(memory)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        target.copy_(memory, non_blocking=True)
    torch.cuda.synchronize()
    return 5 * memory.nbytes / (time.perf_counter() - started)


def copies(nbytes: int) -> dict[str, Callable[[], float]]:
    arena = host_arena(None, torch.device("cuda"))
    locked = arena.fill(arena.take(nbytes))
    ordinary = torch.zeros(nbytes, dtype=torch.uint8)
    return {
        "a slot of the store": lambda: copy_speed(locked),
        "ordinary memory": lambda: copy_speed(ordinary),
    }


def rows(runs: dict[str, list[Run]], reference: torch.Tensor) -> Iterator[list[str]]:
    ours = [one.seconds for one in runs["tierstore, all in RAM"]]
    for name, found in runs.items():
        seconds = [one.seconds for one in found]
        overlaps = [one.overlap for one in found if one.overlap is not None]
        yield [
            name,
            machine.spread(seconds, 3),
            machine.spread(machine.ratios(seconds, ours)),
            f"{max(one.peak for one in found) / 1e6:,.0f}",
            machine.spread(overlaps) if overlaps else "-",
            "equal" if torch.equal(found[0].image, reference) else "differs",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, once: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--dir", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here: nothing was measured.")
        return 0
    case = SMALL if options.small else FULL
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = options.dir or Path(scratch)
        flux.save(case.shape, place / "checkpoint")
        page = Page(__doc__, place, ("torch", "diffusers"))
        page.text(f"GPU: {torch.cuda.get_device_name()}")
        rounds = options.rounds or case.rounds
        runs = machine.interleave(
            {name: lambda name=name: run(name, case, place) for name in CONTENDERS}, rounds
        )
        reference = runs["on the GPU"][0].image
        columns = ("", "seconds per step", "to tierstore", "peak MB", "overlap", "image")
        page.table(columns, rows(runs, reference))
        speeds = machine.interleave(copies(case.copied), 5)
        page.table(
            ("copied to the GPU from", "GB/s"),
            [(name, machine.spread([s / 1e9 for s in found], 1)) for name, found in speeds.items()],
        )
        equal = torch.equal(runs["tierstore, half in RAM"][0].image, reference)
        page.claims([Claim("the image is the same bit for bit", float(equal), at_least=1.0)])
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
