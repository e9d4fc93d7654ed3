"""Denoising with more weights than RAM: tierstore against its alternatives.

A Flux transformer of 3.8 GB (fp32, 6 double and 12 single blocks, 64 image tokens) denoises in a
control group of 2,000 MiB of RAM, including page cache. Each run is a separate process with a cold
page cache; the contenders take turns. Figures are medians over the steps after the second. `--dir`
keeps the checkpoint and the peers' folders for a later run (12 GB).

The limit is a lower bound of a step: the longer of its computing (measured with all weights in RAM,
outside the group) and of reading the bytes that no cache of that budget can hold (weights minus
budget, at the best speed of direct reads of the same files, measured in between). On a small
virtual machine, computing itself is slower while the disk is read, because the host copies with the
same processors and memory. So a second limit uses the run's own computing time, without stalls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch

from tierstore import TierStore, enable_group_offload
from tools.bench import fio, flux, machine
from tools.bench.apart import apart, limited, unlimited
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, middle, ranged, ratios, spread

PACKAGES = ("torch", "diffusers", "accelerate")
ROUNDS = 3
FIRST_COUNTED = 2  # earlier steps learn the order of use and fill caches
CPU = torch.device("cpu")
LIMIT = 2000 << 20
IN_MEMORY, OURS, COPIES = "in memory", "tierstore", ("diffusers", "accelerate")
PEERS = (*COPIES, "accelerate, no copy")


@dataclass(frozen=True)
class Case:
    shape: flux.Shape
    budget: int
    steps: dict[str, int]


FULL = Case(
    flux.Shape(heads=12, double=6, single=12, dtype="float32"),
    1000 << 20,
    {IN_MEMORY: 8, OURS: 20, **dict.fromkeys((*PEERS, "plain maps"), 5)},
)
SMALL = Case(
    flux.Shape(heads=4, double=1, single=3, dtype="float32", shard="20MB"),
    24 << 20,
    {IN_MEMORY: 4, OURS: 4, "diffusers": 4},
)

Around = AbstractContextManager[TierStore | None]


def untouched(model: Any, place: Path, budget: int) -> Around:
    """Use only `from_pretrained`: weights are memory maps, read by page faults."""
    return nullcontext()


def on_a_store(model: Any, place: Path, budget: int) -> Around:
    store = TierStore(budget, place / "store", device=CPU)
    enable_group_offload(model, store)
    return store


def by_diffusers(model: Any, place: Path, budget: int) -> Around:
    """Use diffusers without streams, which it rejects on a CPU. Leaf level is even slower."""
    model.enable_group_offload(
        onload_device=CPU,
        offload_device=CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(place / "diffusers"),
    )
    return nullcontext()


def by_accelerate(model: Any, place: Path, budget: int) -> Around:
    """Use accelerate's own format: one file per tensor, read by numpy."""
    accelerate.disk_offload(model, place / "accelerate", execution_device=CPU)
    return nullcontext()


def by_accelerate_index(model: Any, place: Path, budget: int) -> Around:
    """Use an accelerate index that points into the checkpoint, as transformers writes it."""
    folder, checkpoint = place / "accelerate-index", place / "checkpoint"
    folder.mkdir(exist_ok=True)
    (index,) = checkpoint.glob("*.safetensors.index.json")
    entries = {
        name: {
            "safetensors_file": str(checkpoint / file),
            "weight_name": name,
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        for name, file in json.loads(index.read_text())["weight_map"].items()
    }
    (folder / "index.json").write_text(json.dumps(entries))
    accelerate.disk_offload(model, folder, execution_device=CPU)
    return nullcontext()


CONTENDERS: dict[str, Callable[[Any, Path, int], Around]] = {
    IN_MEMORY: untouched,
    OURS: on_a_store,
    "diffusers": by_diffusers,
    "accelerate": by_accelerate,
    "accelerate, no copy": by_accelerate_index,
    "plain maps": untouched,
}


def denoised(name: str, place: Path, budget: int, steps: int) -> Run:
    """Denoise with a contender. Return medians over the counted steps, and the images."""
    model = flux.load(place / "checkpoint").eval()
    weights, images = flux.weight_bytes(model), []
    with ExitStack() as stack:
        store = stack.enter_context(CONTENDERS[name](model, place, budget))

        def now() -> tuple[float, ...]:
            stalled = store.stats().stalled_seconds if store else 0.0
            return time.perf_counter(), time.process_time(), machine.disk_bytes()[0], stalled

        took, before = [], now()
        for image in flux.denoise(model, steps):
            after = now()
            took.append([new - old for new, old in zip(after, before, strict=True)])
            images.append(image)
            before = now()
    middles = map(median, zip(*took[FIRST_COUNTED:], strict=True))
    run: Run = dict(zip(("seconds", "cpu", "read", "stalled"), middles, strict=True))
    computing = run["seconds"] - run["stalled"]
    return run | {"computing": computing, "images": images, "weights": weights}


def disk_speed(checkpoint: Path) -> float:
    """Return the bandwidth of direct reads in bytes per second: the best of two passes and fio."""
    files = sorted(checkpoint.glob("*.safetensors"))
    rates = [machine.direct_reads(files) for _ in range(2)]
    largest = max(files, key=lambda file: file.stat().st_size)
    nbytes = largest.stat().st_size // fio.ROOM * fio.ROOM
    if fio.available() and nbytes:
        rates.append(fio.run(largest, fio.ROOMY, nbytes, "--rw=read").speed)
    return max(rates)


def likeness(runs: list[Run], reference: Run) -> str:
    """Compare the image to that of the ordinary model after the same number of steps."""
    last = min(len(runs[0]["images"]), len(reference["images"])) - 1
    one, other = runs[0]["images"][last], reference["images"][last]
    if torch.equal(one, other):
        return "equal"
    return f"differs by {(one - other).abs().max().item():.1e}"


def measure(bench: Bench) -> Iterator[Claim]:
    case, place = SMALL if bench.small else FULL, bench.kept
    flux.save(case.shape, place / "checkpoint")
    for name in COPIES if not bench.small else ():
        if not (place / name).exists():  # writes its folder, without a memory limit
            apart(denoised, name, place, case.budget, FIRST_COUNTED + 1)

    def run(name: str) -> Run:
        nbytes = None if name == IN_MEMORY else LIMIT
        found, peak = limited(nbytes, denoised, name, place, case.budget, case.steps[name])
        return dict(found) | {"peak": peak}

    sides: dict[str, Callable[[], Any]] = {n: lambda n=n: run(n) for n in case.steps}
    found = bench.turns(sides | {"disk": lambda: disk_speed(place / "checkpoint")}, cold=True)
    disk = found.pop("disk")
    usual, ours = found[IN_MEMORY], found[OURS]
    seconds = column(ours, "seconds")
    to_ours = {n: ratios(column(runs, "seconds"), seconds) for n, runs in found.items()}
    columns: dict[str, Callable[[Any], object]] = {
        "seconds per step": ranged("seconds"),
        "to tierstore": lambda runs: spread(ratios(column(runs, "seconds"), seconds)),
        "MB read": middle("read", 0, 1e-6),
        "CPU s": middle("cpu"),
        "peak MiB": lambda runs: f"{max(column(runs, 'peak')) / 2**20:,.0f}",
        "image": lambda runs: likeness(runs, usual[0]),
    }
    bench.page.compare("", found, columns)
    bench.page.text(
        "MB read and CPU seconds are per step. The peak is that of the control group including "
        f"page cache, limited to {LIMIT >> 20} MiB. {unlimited(LIMIT)} "
        f"{bench.rounds} rounds; medians, and ranges in parentheses."
    )
    missing = max(usual[0]["weights"] - case.budget, 0)
    compute = column(usual, "seconds")
    limit = [max(c, missing / d) for c, d in zip(compute, disk, strict=True)]
    for_read = [max(c, r / d) for c, r, d in zip(compute, column(ours, "read"), disk, strict=True)]
    own = [max(c, missing / d) for c, d in zip(column(ours, "computing"), disk, strict=True)]
    rows = [
        ("computing, s", spread(compute)),
        ("direct reads, GB/s", spread([d / 1e9 for d in disk])),
        ("least possible misses, MB", f"{missing / 1e6:,.0f}"),
        ("limit, s", spread(limit)),
        ("tierstore / limit", spread(ratios(seconds, limit))),
        ("tierstore / limit for the bytes read", spread(ratios(seconds, for_read))),
        ("stalled, s", spread(column(ours, "stalled"))),
        ("computing beside the reads, s", spread(column(ours, "computing"))),
        ("tierstore / limit with that computing", spread(ratios(seconds, own))),
    ]
    bench.page.table(("limit of a step", ""), rows)
    for peer in (each for each in PEERS if each in found):
        yield Claim(f"time of {peer} / time of tierstore", median(to_ours[peer]), at_least=3.0)
    to_limit = median(ratios(seconds, limit))
    yield Claim("time of a step / limit", to_limit, at_most=1.12)
    same = likeness(ours, usual[0]) == "equal"
    yield Claim("the image is bit-identical", float(same), at_least=1.0)
