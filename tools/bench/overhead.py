"""Overhead of the store when everything fits in RAM

Two copies of one Flux transformer run in one process, step by step in turns: one as returned by
`from_pretrained`, one with its weights in a store whose budget exceeds the model. The difference is
the cost of acquiring groups, of binding and unbinding their tensors, and of checking for changed
weights. The medium model has 500 MB of bf16 weights. The tiny one computes almost nothing, to
isolate the cost per patched module.

Then resident groups are acquired and released, without any other work.
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
    """Return the number of modules with a patched forward."""
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
        assert store.stats().bytes_read == read, "the model must fit"
    first, second = median(found["usual"]), median(found["ours"])
    found |= {"modules": modules, "ratio": second / first, "each": (second - first) / modules}
    return found | {"equal": torch.equal(*images)}


def acquire_seconds(times: int, scratch: Path) -> list[float]:
    """Time the acquire and release of a resident group, in lots of `GROUPS`."""
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
    return lots[3:]  # the order is learned by then


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
        "Acquiring and releasing a resident group, in microseconds: "
        f"{spread([1e6 * seconds for seconds in lots], 1)}."
    )
    yield Claim("us of an acquire and release", 1e6 * median(lots), at_most=30)
    if ("medium", "block_level") in found:
        ratio = found["medium", "block_level"]["ratio"]
        yield Claim("time of a step / time without a store", ratio, at_most=1.02)
