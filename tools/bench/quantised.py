"""Runs quantised models on a store, and compares their outputs with those without one, to the bit.

    python tools/bench/quantised.py --dir /nvme/scratch --kinds torchao_int8 Q4_K

50 million weights of each model for kinds of eight bits, 100 million for those of four, so 50 MB
or more. Each kind is a process of its own. Needs the libraries that quantise (`pip install
'tierstore[quantised]'`) and, for `--device pretend`, a C++ compiler. The status is 1 if any output
differs, or more than 2 % of the weights are in memory outside of the budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import diffusers
import torch

from tests import pipelines
from tests.device import pretend
from tests.quantised import gguf_files, kinds
from tierstore import TierStore, enable_group_offload, from_single_file
from tierstore.adapters.codecs import weight_bytes
from tools.bench.report import Claim, Page

SHARES = (0.15, 0.4, 1.5)
OF_FOUR_BITS = ("bitsandbytes_nf4", "Q4_0", "Q4_K")
KINDS = (*kinds.KINDS, *gguf_files.TYPES)
MODELS = kinds.MODELS
STEPS = {"flux": 2, "sd3": 2, "wan": 2, "llama": -3}
"""For `pipelines.run`: two steps, which use both experts of Wan, or two tokens."""
LIBRARIES = ("torchao", "bitsandbytes", "gguf", "optimum-quanto")
PARTS = {"flux": ("transformer",), "sd3": ("transformer",), "wan": ("transformer", "transformer_2")}
"""What a GGUF file holds of each pipeline. transformers makes ordinary weights of such files."""


def gguf_pipeline(model: str, checkpoint: Path, kind: str, store: TierStore | None) -> Any:
    """With its large parts from GGUF files: mapped for a store, or as diffusers loads them."""
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


def build(model: str, checkpoint: Path, kind: str, store: TierStore | None) -> Any:
    """The pipeline or model, quantised."""
    if kind in gguf_files.TYPES:
        return gguf_pipeline(model, checkpoint, kind, store)
    return kinds.quantised(model, lambda _: checkpoint, kind)


def measured(model: str, checkpoint: Path, kind: str, device: str, place: Path) -> dict[str, Any]:
    """What came of it with each budget."""
    plain = build(model, checkpoint, kind, None)
    if device != "cpu":
        plain.to(device)
    expected = pipelines.run(model, plain, steps=STEPS[model], device=device)
    total = weight_bytes(kinds.weights_of(plain))
    large = [w for part in kinds.large_parts(model, plain) for w in part.parameters()]
    found: dict[str, Any] = {"model": model, "device": device, "large": weight_bytes(large)}
    found |= {"total": total, "runs": []}
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
        moved = stats.bytes_read if device == "cpu" else stats.bytes_onloaded
        found["runs"].append(
            {
                "equal": torch.equal(output, expected),
                "moved": moved,
                "outside": outside / total,
                "peak": max(stats.peak_bytes.get(t, 0) for t in ("HOST", "DEVICE")) / budget,
            }
        )
    shutil.rmtree(place)
    return found


def size_for(kind: str, small: bool) -> str:
    """The name in `tests.pipelines`."""
    return "tiny" if small else "deep" if kind in OF_FOUR_BITS else "wide"


def of_one_kind(given: argparse.Namespace) -> list[dict[str, Any]]:
    """In a process of its own."""
    (kind,) = given.kinds
    size = size_for(kind, given.small)
    devices = [d for d in given.device if d == "cpu" or kind not in kinds.CPU_ONLY]
    found = []
    for model in given.models:
        if kind in gguf_files.TYPES and model not in PARTS:
            continue
        checkpoint: Path = given.dir / f"{model}-{size}"
        if not checkpoint.exists():
            pipelines.BUILDERS[model](checkpoint, size)
        for device in devices:
            found.append(measured(model, checkpoint, kind, device, given.dir / "store"))
            print(kind, found[-1], file=sys.stderr, flush=True)
        for file in checkpoint.glob("*.gguf"):
            file.unlink()
    return found


def run(kind: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One kind, in a process of its own."""
    words = [sys.executable, str(Path(__file__).resolve()), "--dir", str(given.dir), "--run"]
    words += ["--kinds", kind, "--models", *given.models, "--device", *given.device]
    words += ["--small"] * given.small
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="for the models and the store")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--device", nargs="+", choices=("cpu", "pretend"), default=["cpu"])
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--markdown", type=Path, help="a page of Markdown to write")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        if "pretend" in given.device and (reason := pretend.ready()):
            raise SystemExit(reason)
        print(json.dumps(of_one_kind(given)))
        return 0
    given.dir.mkdir(parents=True, exist_ok=True)
    found = {kind: run(kind, given) for kind in given.kinds}
    page = Page(__doc__, given.dir, ["torch", "diffusers", "transformers", *LIBRARIES])
    page.text(
        "MB of the quantised parts, and for budgets of 15, 40 and 150 % of all weights: whether "
        "the output is equal to the bit, and MB moved in one run (read from disk, or copied to "
        "the accelerator). Outside: quantised weights in memory that the budget does not count, "
        "at most, in % of all weights."
    )
    page.table(
        ("", "on", "MB", *(f"{share:.0%}" for share in SHARES), "outside, %"),
        [_row(kind, each) for kind, rows in found.items() for each in rows],
    )
    runs = [each for rows in found.values() for row in rows for each in row["runs"]]
    claims = [
        Claim("outputs that differ", sum(not each["equal"] for each in runs), at_most=0),
        Claim("least MB moved", min(each["moved"] for each in runs) / 1e6, at_least=1e-3),
        Claim("% outside of the budget", 100 * max(e["outside"] for e in runs), at_most=2),
        Claim("peak, in budgets", max(each["peak"] for each in runs), at_most=1),
    ]
    page.claims(claims)
    page.write(given.markdown)
    return 0 if all(claim.held for claim in claims) else 1


def _row(kind: str, found: dict[str, Any]) -> list[str]:
    runs = found["runs"]
    cells = [f"{'equal' if e['equal'] else 'DIFFERS'}, {e['moved'] / 1e6:,.0f}" for e in runs]
    outside = f"{100 * max(each['outside'] for each in runs):.2f}"
    name = f"{kind}, {found['model']}"
    return [name, found["device"], f"{found['large'] / 1e6:,.0f}", *cells, outside]


if __name__ == "__main__":
    sys.exit(main())
