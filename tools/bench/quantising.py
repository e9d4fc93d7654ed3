"""Quantising a model larger than RAM

A Flux transformer of 3.8 GB in bfloat16 (12 double and 24 single blocks of 12 heads), quantised to
torchao's int8, with a budget of 500 MB. Each way is a separate process. The figures are the peak
increase of anonymous memory and the seconds until the model is on the store. Requires the
quantisation libraries (`pip install 'tierstore[quantised]'`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, from_pretrained
from tools.bench import flux
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import apart
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, value

PACKAGES = ("torch", "torchao", "diffusers")
FULL = flux.Shape(heads=12, double=12, single=24)
SMALL = flux.Shape(heads=2, double=2, single=2, shard="100GB")
CONTROL, PLAIN = "diffusers alone: the control", "not quantised"
FIRST, SECOND = "quantised, first start", "quantised, second start"


def loaded(way: str, checkpoint: Path, directory: Path, budget: int) -> Run:
    """Load in one way. Return bytes and seconds."""
    from diffusers import TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig

    named: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if way != PLAIN:
        named["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    torch.nn.Linear(512, 512)(torch.zeros(1, 512))  # starts torch's threads
    with TierStore(budget, directory, device="cpu") as store:
        begun = time.monotonic()
        with AnonymousPeak() as peak:
            if way == CONTROL:
                model: Any = flux.CLASS.from_pretrained(checkpoint, **named)
            else:
                model = from_pretrained(flux.CLASS, checkpoint, store, **named)
            seconds, gained = time.monotonic() - begun, peak.gained
        kinds = {type(weight).__name__ for weight in model.parameters()}
        written = store.stats().bytes_written
    right = ("Int8Tensor" in kinds) == (way != PLAIN)
    largest = max(weight.numel() for weight in model.parameters()) * torch.bfloat16.itemsize
    found = {"seconds": seconds, "gained": gained, "written": written}
    return found | {"right": right, "largest": largest}


def measure(bench: Bench) -> Iterator[Claim]:
    checkpoint = flux.save(SMALL if bench.small else FULL, bench.kept / "checkpoint")
    nbytes = flux.weight_bytes(flux.load(checkpoint))
    budget = 5_000_000 if bench.small else 500_000_000
    ways = (CONTROL, PLAIN, FIRST, SECOND)
    found = {way: apart(loaded, way, checkpoint, bench.scratch / "s", budget) for way in ways}
    bench.page.text(
        f"Weights {nbytes / 1e6:,.0f} MB, budget {budget / 1e6:,.0f} MB. Memory is the increase "
        "of RssAnon, in MB."
    )
    columns = {
        "s": value("seconds", 1),
        "at most": value("gained", scale=1e-6),
        "written": value("written", scale=1e-6),
    }
    bench.page.compare("", found, columns)
    for way in ways:
        yield Claim(f"{way}: the weights have the requested types", found[way]["right"], at_least=1)
    most = (found[FIRST]["gained"] - budget) / found[FIRST]["largest"]
    yield Claim("first start: weights over the budget", most, at_most=2)
    yield Claim("second start: MB written", found[SECOND]["written"] / 1e6, at_most=0)
    ratio = found[SECOND]["seconds"] / found[CONTROL]["seconds"]
    yield Claim("second start: seconds / those of diffusers alone", ratio, at_most=1)
