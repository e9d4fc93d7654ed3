"""What the store costs when everything fits in RAM

Two copies of one Flux transformer run in one process, step by step in turns: one as
`from_pretrained` left it, one with its weights in a store whose budget is above the model. What the
second takes longer is the cost of acquiring groups, of binding their tensors to the modules and
unbinding them, and of looking for changed weights. The medium model is 500 MB of bf16; the tiny
one computes next to nothing, so that the cost of each wrapped module shows.

Then groups that are in RAM are acquired and released, with nothing else going on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, enable_group_offload
from tools.bench import flux
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, interleave, median, spread, value

PACKAGES = ("torch", "diffusers")
ROUNDS = 30
SHAPES = {
    "medium": flux.Shape(heads=6, double=5, single=16, shard="100MB"),
    "tiny": flux.Shape(heads=4, double=3, single=6, head_dim=16),
}
WARM_UP, STEPS_AT_ONCE, GROUPS = 4, 5, 57


def step_seconds(model: Any) -> float:
    started = time.perf_counter()
    for _ in flux.denoise(model, STEPS_AT_ONCE):
        pass
    return (time.perf_counter() - started) / STEPS_AT_ONCE


def wrapped(model: Any) -> int:
    """Count the modules whose forward is replaced."""
    return sum("forward" in vars(module) for module in model.modules())


def pair(name: str, offload_type: str, rounds: int, place: Path) -> Run:
    """Run steps without and with the store, in turns."""
    checkpoint = flux.save(SHAPES[name], place / name)
    usual, ours = flux.load(checkpoint).eval(), flux.load(checkpoint).eval()
    with (
        tempfile.TemporaryDirectory(dir=place) as scratch,
        TierStore(2 * flux.weight_bytes(ours), Path(scratch) / "store", device="cpu") as store,
        enable_group_offload(ours, store, offload_type=offload_type),
    ):
        images = [list(flux.denoise(model, WARM_UP))[-1] for model in (usual, ours)]
        read = store.stats().bytes_read
        sides = {"usual": lambda: step_seconds(usual), "ours": lambda: step_seconds(ours)}
        found: Run = dict(interleave(sides, rounds))
        modules = wrapped(ours)
        assert store.stats().bytes_read == read, "it was to fit"
    first, second = median(found["usual"]), median(found["ours"])
    found |= {"modules": modules, "ratio": second / first, "each": (second - first) / modules}
    return found | {"equal": torch.equal(*images)}


def acquire_seconds(times: int, scratch: Path) -> list[float]:
    """Time the acquire and release of a group that is resident, in lots of `GROUPS`."""
    with TierStore("64MiB", scratch / "store", device="cpu") as store:
        keys = [f"blocks.{i}" for i in range(GROUPS)]
        for key in keys:
            store.put(key, {f"t{i}": torch.zeros(64) for i in range(12)}, durable=False)
        lots = []
        for _ in range(max(times // GROUPS, 5)):
            started = time.perf_counter()
            for key in keys:
                store.acquire(key).release()
            lots.append((time.perf_counter() - started) / GROUPS)
    return lots[3:]  # by then the order is known


def measure(bench: Bench) -> Iterator[Claim]:
    found = {
        (name, offload_type): pair(name, offload_type, bench.rounds, bench.kept)
        for name in (("tiny",) if bench.small else SHAPES)
        for offload_type in ("block_level", "leaf_level")
    }
    columns: dict[str, Callable[[Run], object]] = {
        "modules": value("modules"),
        "usual, ms": lambda run: spread([1e3 * s for s in run["usual"]], 1),
        "tierstore, ms": lambda run: spread([1e3 * s for s in run["ours"]], 1),
        "ratio": value("ratio", 3),
        "us per module": value("each", scale=1e6),
        "image": lambda run: "equal" if run["equal"] else "DIFFERS",
    }
    bench.page.compare(("model", "offload_type"), found, columns)
    lots = acquire_seconds(1_000 if bench.small else 20_000, bench.scratch)
    bench.page.text(
        "Acquiring and releasing a group that is there, in microseconds: "
        f"{spread([1e6 * seconds for seconds in lots], 1)}."
    )
    yield Claim("acquire and release take at most 30 us", 1e6 * median(lots), at_most=30)
    if ("medium", "block_level") in found:
        ratio = found["medium", "block_level"]["ratio"]
        yield Claim("a step costs at most 1.02 of the usual one", ratio, at_most=1.02)
