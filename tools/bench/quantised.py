"""Quantised models on a store, with bit-identical outputs

Each model has 50 million weights for 8-bit kinds and 100 million for 4-bit kinds, so at least 50
MB. Each kind is a separate process. Requires the quantisation libraries (`pip install
'tierstore[quantised]'`) and, for `--device pretend`, a C++ compiler. Outputs are compared to those
of the model without a store.
"""

from __future__ import annotations

import argparse
import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests import pipelines
from tests.device import pretend
from tests.quantised import gguf_files, kinds
from tierstore import TierStore, enable_group_offload, from_single_file
from tierstore.adapters.codecs import weight_bytes
from tools.bench.apart import apart
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, value

LIBRARIES = ("torchao", "bitsandbytes", "gguf", "optimum-quanto")
PACKAGES = ("torch", "diffusers", "transformers", *LIBRARIES)
SHARES = (0.15, 0.4, 1.5)
FOUR_BIT_KINDS = ("bitsandbytes_nf4", "Q4_0", "Q4_K")
KINDS = (*kinds.KINDS, *gguf_files.TYPES)
STEPS = {"flux": 2, "sd3": 2, "wan": 2, "llama": -3}
"""Steps for `pipelines.run`: two, which use both experts of Wan, or two tokens."""
PARTS = {"flux": ("transformer",), "sd3": ("transformer",), "wan": ("transformer", "transformer_2")}
"""Parts of each pipeline to load from GGUF files. transformers dequantises such files."""


def build(model: str, checkpoint: Path, kind: str, store: TierStore | None) -> Any:
    """Return the quantised model.

    Large parts from GGUF files are mapped for a store, and loaded by diffusers without one.
    """
    if kind not in gguf_files.TYPES:
        return kinds.quantised(model, lambda _: checkpoint, kind)
    pipe = pipelines.load(model, checkpoint)
    for name in PARTS[model]:
        part = getattr(pipe, name)
        path = checkpoint / f"{name}-{kind}.gguf"
        if not path.exists():
            gguf_files.write_gguf(part, path, kind, model)
        named: dict[str, Any] = {
            "quantization_config": diffusers.GGUFQuantizationConfig(compute_dtype=pipelines.DTYPE),
            "config": str(checkpoint / name),
            "torch_dtype": pipelines.DTYPE,
        }
        if store is None:
            made = type(part).from_single_file(path, **named)
        else:
            made = from_single_file(type(part), path, store, **named)
        setattr(pipe, name, made)
    return pipelines.quiet(pipe)


def with_budgets(model: str, checkpoint: Path, kind: str, device: str, place: Path) -> Run:
    """Run a model without a store and with each budget."""
    plain = build(model, checkpoint, kind, None)
    if device != "cpu":
        plain.to(device)
    expected = pipelines.run(model, plain, steps=STEPS[model], device=device)
    total = weight_bytes(kinds.weights_of(plain))
    large = [w for part in kinds.large_parts(model, plain) for w in part.parameters()]
    found: Run = {"large": weight_bytes(large), "runs": []}
    del plain, large
    for share in SHARES:
        gc.collect()
        budget = max(int(share * total), kinds.LEAST)
        options = {} if device == "cpu" else {"device_budget": budget}
        with TierStore(budget, place, device=device, **options) as store:
            pipe = build(model, checkpoint, kind, store)
            with enable_group_offload(pipe, store):
                gc.collect()
                outside = kinds.outside(model, pipe)
                output = pipelines.run(model, pipe, steps=STEPS[model], device=device)
                stats = store.stats()
            del pipe
        found["runs"].append(
            {
                "equal": torch.equal(output, expected),
                "moved": stats.bytes_read if device == "cpu" else stats.bytes_onloaded,
                "outside": 100 * outside / total,
                "peak": max(stats.peak_bytes.get(t, 0) for t in ("HOST", "DEVICE")) / budget,
            }
        )
    shutil.rmtree(place)
    found["outside"] = max(run["outside"] for run in found["runs"])
    return found


def of_one_kind(
    kind: str, models: Sequence[str], devices: Sequence[str], small: bool, directory: Path
) -> dict[tuple[str, str], Run]:
    """Run all models of one kind on all devices."""
    if "pretend" in devices and (reason := pretend.ready()):
        raise RuntimeError(reason)
    size = "tiny" if small else "deep" if kind in FOUR_BIT_KINDS else "wide"
    found = {}
    for model in models:
        if kind in gguf_files.TYPES and model not in PARTS:
            continue
        checkpoint = directory / f"{model}-{size}"
        if not checkpoint.exists():
            pipelines.BUILDERS[model](checkpoint, size)
        for device in (d for d in devices if d == "cpu" or kind not in kinds.CPU_ONLY):
            place = directory / "store"
            found[f"{kind}, {model}", device] = with_budgets(model, checkpoint, kind, device, place)
        for file in checkpoint.glob("*.gguf"):
            file.unlink()
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=kinds.MODELS, default=kinds.MODELS)
    parser.add_argument("--device", nargs="+", choices=("cpu", "pretend"), default=["cpu"])


def measure(bench: Bench) -> Iterator[Claim]:
    words = bench.options.models, bench.options.device, bench.small, bench.kept
    found: dict[tuple[str, str], Run] = {}
    for kind in bench.options.kinds:
        found |= apart(of_one_kind, kind, *words)
    bench.page.text(
        "MB of the quantised parts, and for budgets of 15, 40 and 150 % of all weights: whether "
        "the output is bit-identical, and MB moved in one run (read from disk, or copied to the "
        "accelerator). Outside: the peak of quantised weights in memory that the budget does not "
        "count, in % of all weights."
    )

    def cell(number: int) -> Callable[[Run], str]:
        def text(one: Run) -> str:
            run = one["runs"][number]
            return f"{'equal' if run['equal'] else 'DIFFERS'}, {run['moved'] / 1e6:,.0f}"

        return text

    columns: dict[str, Callable[[Run], object]] = {"MB": value("large", scale=1e-6)}
    columns |= {f"{share:.0%}": cell(number) for number, share in enumerate(SHARES)}
    bench.page.compare(("", "on"), found, columns | {"outside, %": value("outside", 2)})
    runs = [run for one in found.values() for run in one["runs"]]
    yield Claim("outputs that differ", sum(not run["equal"] for run in runs), at_most=0)
    yield Claim("least MB moved", min(run["moved"] for run in runs) / 1e6, at_least=1e-3)
    yield Claim("% outside the budget", max(run["outside"] for run in runs), at_most=2)
    yield Claim("peak / budget", max(run["peak"] for run in runs), at_most=1)
