"""Loads a model with a quantisation config, in each way, and measures memory and time.

    python tools/bench/quantising.py --dir /nvme/scratch

A Flux transformer of 3.8 GB in bfloat16 (12 double and 24 single blocks of 12 heads), quantised to
torchao's int8, with a budget of 500 MB. Each way is a process of its own. What counts is the
largest anonymous memory until the model is on the store, over what the process had before, and the
seconds until then. Needs the libraries that quantise (`pip install 'tierstore[quantised]'`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from diffusers import FluxTransformer2DModel, TorchAoConfig
from torchao.quantization import Int8WeightOnlyConfig

from tierstore import TierStore, from_pretrained
from tools.bench import flux
from tools.bench.anonymous import AnonymousPeak
from tools.bench.own_process import answer, start
from tools.bench.report import Claim, Page

SHAPE = flux.Shape(heads=12, double=12, single=24, dtype="bfloat16", shard="1GB")
SMALL = flux.Shape(heads=2, double=2, single=2, dtype="bfloat16", shard="100GB")
BUDGET, SMALL_BUDGET = 500_000_000, 5_000_000

CONTROL, PLAIN = "diffusers alone: the control", "not quantised"
FIRST, SECOND = "quantised, first start", "quantised, second start"
WAYS = (CONTROL, PLAIN, FIRST, SECOND)


def loaded(way: str, place: Path, budget: int) -> dict[str, float]:
    """In a process of its own. Bytes and seconds."""
    named: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if way != PLAIN:
        named["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    checkpoint = place / "checkpoint"
    torch.nn.Linear(512, 512)(torch.zeros(1, 512))  # what torch sets up once
    with TierStore(budget, place / "store", device="cpu") as store:
        begun = time.monotonic()
        with AnonymousPeak() as peak:
            if way == CONTROL:
                model: Any = FluxTransformer2DModel.from_pretrained(checkpoint, **named)
            else:
                model = from_pretrained(FluxTransformer2DModel, checkpoint, store, **named)
            seconds, gained = time.monotonic() - begun, peak.gained
        kinds = {type(weight).__name__ for weight in model.parameters()}
        written = store.stats().bytes_written
    quantised = ("Int8Tensor" in kinds) == (way != PLAIN)
    largest = max(weight.numel() for weight in model.parameters()) * torch.bfloat16.itemsize
    return {
        "seconds": seconds,
        "gained": gained,
        "written": written,
        "right": quantised,
        "largest": largest,
    }


def run(way: str, place: Path, budget: int) -> dict[str, float]:
    """One way, in a process of its own."""
    return answer(way, start(__file__, way, place, budget))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="for the model and the store")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--markdown", type=Path, help="a page of Markdown to write")
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help="bytes")
    given = parser.parse_args()
    budget = given.budget or (SMALL_BUDGET if given.small else BUDGET)
    if given.run:
        print(json.dumps(loaded(given.run, given.dir, budget)))
        return 0
    place = given.dir / ("small" if given.small else "large")
    place.mkdir(parents=True, exist_ok=True)
    checkpoint = flux.save(SMALL if given.small else SHAPE, place / "checkpoint")
    nbytes = flux.weight_bytes(flux.load(checkpoint))
    shutil.rmtree(place / "store", ignore_errors=True)
    found = {way: run(way, place, budget) for way in WAYS}
    shutil.rmtree(place / "store", ignore_errors=True)
    page = Page("Quantising what does not fit", given.dir, ["torch", "torchao", "diffusers"])
    page.text(
        f"Weights {nbytes / 1e6:,.0f} MB, budget {budget / 1e6:,.0f} MB. Memory is RssAnon over "
        "what it was before, in MB."
    )
    page.table(("", "s", "at most", "written"), [_row(way, found[way]) for way in WAYS])
    claims = _claims(found, budget)
    page.claims(claims)
    page.write(given.markdown)
    return 0 if all(claim.held for claim in claims) or given.small else 1


def _row(way: str, result: Mapping[str, float]) -> list[str]:
    sizes = (result["gained"], result["written"])
    return [way, f"{result['seconds']:.1f}", *(f"{nbytes / 1e6:,.0f}" for nbytes in sizes)]


def _claims(found: Mapping[str, Mapping[str, float]], budget: int) -> list[Claim]:
    most = found[FIRST]["gained"] - budget
    ratio = found[SECOND]["seconds"] / found[CONTROL]["seconds"]
    return [
        *(
            Claim(f"{way}: it is what was asked for", found[way]["right"], at_least=1)
            for way in WAYS
        ),
        Claim("first start: weights over the budget", most / found[FIRST]["largest"], at_most=2),
        Claim("second start: MB written", found[SECOND]["written"] / 1e6, at_most=0),
        Claim("second start: times the seconds of diffusers alone", ratio, at_most=1),
    ]


if __name__ == "__main__":
    sys.exit(main())
