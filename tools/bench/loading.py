"""Loading a model larger than RAM

A Flux transformer of 3.6 GB in float32 (6 double and 12 single blocks of 12 heads), in a control
group of 1,100 MiB including page cache, with a budget of 500 MB. Each load is a separate process
that starts with a cold page cache and runs three steps. The control loads in the library's usual
way, with a cast, and offloads the result. Seconds are measured from the opening of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, enable_group_offload, from_pretrained, from_single_file
from tools.bench import flux
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import Killed, apart
from tools.bench.memory_group import MemoryGroup
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, value

PACKAGES = ("torch", "diffusers", "safetensors")
FULL = flux.Shape(heads=12, double=6, single=12, dtype="float32")
SMALL = flux.Shape(heads=2, double=2, single=2, dtype="float32")
LIMIT, BUDGET = 1100 << 20, 500_000_000
STEPS = 3
MARGIN = 120
"""Allowed MiB over the budget: two groups while one is cast, and the process's own memory."""

CAST, OWN, SINGLE, USUAL = "bfloat16", "its own dtype", "bfloat16, single file", "the usual way"
AGAIN = {f"{name}, again": name for name in (CAST, OWN, SINGLE)}


def _single_file(checkpoint: Path, store: TierStore) -> Any:
    (file,) = (checkpoint / "single").glob("*.safetensors")
    config = str(checkpoint)
    return from_single_file(flux.CLASS, str(file), store, config=config, torch_dtype=torch.bfloat16)


def _usual(checkpoint: Path, store: TierStore) -> Any:
    model = flux.CLASS.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
    enable_group_offload(model, store)
    return model


LOADS: dict[str, Callable[[Path, TierStore], Any]] = {
    CAST: lambda path, store: from_pretrained(flux.CLASS, path, store, torch_dtype=torch.bfloat16),
    OWN: lambda path, store: from_pretrained(flux.CLASS, path, store, torch_dtype=torch.float32),
    SINGLE: _single_file,
    USUAL: _usual,
}


def load_and_run(name: str, checkpoint: Path, directory: Path) -> Run:
    """Load in one way, and run three steps. Return bytes and seconds."""
    with AnonymousPeak() as peak, TierStore(BUDGET, directory, device="cpu") as store:
        begun = time.monotonic()
        model = LOADS[name](checkpoint, store)
        times, image = [time.monotonic() - begun], torch.empty(0)
        for image in flux.denoise(model, STEPS):  # noqa: B007 - the last one is compared
            times.append(time.monotonic() - begun)
        written = store.stats().bytes_written
        assert torch.isfinite(image.float()).all()
    later = (times[-1] - times[1]) / (STEPS - 1)
    found = {"loaded": times[0], "first": times[1], "later": later, "written": written}
    return found | {"anonymous": peak.gained, "checksum": float(image.double().sum())}


def in_a_group(name: str, checkpoint: Path, directory: Path) -> Run | None:
    """Load with little memory. Return None if the system killed the process."""
    with MemoryGroup(LIMIT) as group:
        try:
            found: Run = apart(load_and_run, name, checkpoint, directory, group=group)
        except Killed:
            return None
    return found


def measure(bench: Bench) -> Iterator[Claim]:
    checkpoint = flux.save(SMALL if bench.small else FULL, bench.kept / "checkpoint")
    model = flux.load(checkpoint)
    if not (checkpoint / "single").exists():
        model.save_pretrained(checkpoint / "single", max_shard_size="100GB")
    nbytes = flux.weight_bytes(model)
    found = {}
    for name in (*LOADS, *AGAIN):
        way = AGAIN.get(name, name)
        bench.drop_cache()
        found[name] = in_a_group(way, checkpoint, bench.scratch / way)
    bench.page.text(
        f"Checkpoint {nbytes / 1e6:,.0f} MB, budget {BUDGET / 1e6:,.0f} MB, control group "
        f"{LIMIT >> 20:,} MiB, page cache included."
    )
    done = {name: run for name, run in found.items() if run is not None}
    columns = {
        "loaded, s": value("loaded", 1),
        "first step, s": value("first", 1),
        "later, s": value("later", 1),
        "RssAnon gained, MB": value("anonymous", scale=1e-6),
        "written, MB": value("written", scale=1e-6),
    }
    bench.page.compare("", done, columns)
    yield Claim("the usual way is killed", float(USUAL not in done), at_least=1)
    for name in (each for each in found if each != USUAL):
        yield Claim(f"{name}: it runs", float(name in done), at_least=1)
        if name in done:
            over = (done[name]["anonymous"] - BUDGET) / 2**20
            yield Claim(f"{name}: anonymous MiB over the budget", over, at_most=MARGIN)
    for name, first in AGAIN.items():
        if {name, first} <= done.keys():
            yield Claim(f"{name}: bytes written", done[name]["written"], at_most=0)
            same = done[name]["checksum"] == done[first]["checksum"]
            yield Claim(f"{name}: the same image", float(same), at_least=1)
    if {f"{CAST}, again", OWN} <= done.keys():
        ratio = done[f"{CAST}, again"]["first"] / done[OWN]["first"]
        yield Claim("first step: time if cast before / time in its own dtype", ratio, at_most=1.2)
