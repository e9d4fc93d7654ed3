"""Edits all weights of a model on a store, in each way that users have, and measures the memory.

    python tools/bench/edits.py --dir /nvme/scratch

A Flux transformer of 3.8 GB in float32 (6 double and 12 single blocks of 12 heads), of one
safetensors file, with a budget of 300 MB. Each way is a process of its own. What counts is the
largest anonymous memory from before the model is put on the store until it has run with the edited
weights, over what the process had before. The claim: the budget and two groups. The control keeps a
list of all parameters, so that nobody sees with which of them it has done.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

from tierstore import OffloadHandle, TierStore, enable_group_offload
from tools.bench import flux
from tools.bench.anonymous import AnonymousPeak
from tools.bench.own_process import answer, start
from tools.bench.report import Claim, Page

SHAPE = flux.Shape(heads=12, double=6, single=12, dtype="float32", shard="100GB")
SMALL = flux.Shape(heads=2, double=2, single=2, dtype="float32", shard="100GB")
BUDGET, SMALL_BUDGET = 300_000_000, 30_000_000
LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out", "net.0.proj", "net.2"]

State = Mapping[str, torch.Tensor]
"""The checkpoint's tensors by name: maps of its file."""


def _data(handle: OffloadHandle, model: Any, state: State) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _in_place(handle: OffloadHandle, model: Any, state: State) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def _other_memory(handle: OffloadHandle, model: Any, state: State) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def _suspended(handle: OffloadHandle, model: Any, state: State) -> None:
    with handle.suspended():
        for parameter in model.parameters():
            parameter.data.mul_(2)


def _unseen(handle: OffloadHandle, model: Any, state: State) -> None:
    for parameter in list(model.parameters()):
        parameter.data.mul_(2)


def _load(handle: OffloadHandle, model: Any, state: State) -> None:
    model.load_state_dict({name: state[_other(name, state)] for name in state})


def _fuse_lora(handle: OffloadHandle, model: Any, state: State) -> None:
    model.fuse_lora()


def _fuse_qkv(handle: OffloadHandle, model: Any, state: State) -> None:
    model.fuse_qkv_projections()


def _doubled(name: str, state: State, model: Any) -> torch.Tensor:
    return state[name] * 2


def _another(name: str, state: State, model: Any) -> torch.Tensor:
    return state[_other(name, state)]


def _as_it_was(name: str, state: State, model: Any) -> torch.Tensor:
    return state[name]


def _merged(name: str, state: State, model: Any) -> torch.Tensor:
    path, _, kind = name.replace(".base_layer", "").rpartition(".")
    layer, base = model.get_submodule(path) if path else model, state[f"{path}.{kind}".strip(".")]
    if not isinstance(layer, LoraLayer) or kind == "bias":
        return base
    return base + layer.get_delta_weight("default")


def _other(name: str, state: State) -> str:
    """The name of the same weight in the block as far from the other end."""
    found = re.match(r"((?:single_)?transformer_blocks\.)(\d+)(\..*)", name)
    if found is None:
        return name
    count = len({key.split(".")[1] for key in state if key.startswith(found[1])})
    return f"{found[1]}{count - 1 - int(found[2])}{found[3]}"


@dataclass(frozen=True)
class Way:
    """A way to edit all weights, and what one is expected to be then."""

    edit: Callable[[OffloadHandle, Any, State], None]
    expected: Callable[[str, State, Any], torch.Tensor]
    prepare: Callable[[Any], None] = lambda model: None


def _add_lora(model: Any) -> None:
    model.add_adapter(LoraConfig(r=8, target_modules=LINEARS, init_lora_weights=False))


CONTROL, LORA = "a list of parameters: the control", "fuse_lora"
WAYS = {
    "p.data.mul_ of each parameter": Way(_data, _doubled),
    "p.mul_ of each parameter": Way(_in_place, _doubled),
    "p.data = p.data * 2": Way(_other_memory, _doubled),
    "p.data.mul_, suspended": Way(_suspended, _doubled),
    "load_state_dict": Way(_load, _another),
    LORA: Way(_fuse_lora, _merged, _add_lora),
    "fuse_qkv_projections": Way(_fuse_qkv, _as_it_was),
    CONTROL: Way(_unseen, _doubled),
}


@torch.no_grad()
def edited(way: Way, place: Path, budget: int) -> dict[str, float]:
    """In a process of its own. Bytes and seconds."""
    model = flux.load(place / "checkpoint")
    (file,) = (place / "checkpoint").glob("*.safetensors")
    state = load_file(file)
    way.prepare(model)
    nn.Linear(512, 512)(torch.zeros(1, 512))  # what torch sets up once
    with AnonymousPeak() as peak, TierStore(budget, place / "store", device="cpu") as store:
        handle = enable_group_offload(model, store)
        group = max(each.nbytes for each in store.snapshot().groups)
        begun, offloaded = time.monotonic(), peak.gained
        way.edit(handle, model, state)
        seconds, after_edit = time.monotonic() - begun, peak.gained
        for _ in flux.denoise(model, 1):
            pass
        gained, written = peak.gained, store.stats().bytes_written
        right = all(
            torch.equal(weight, way.expected(name, state, model))
            for name, weight in model.named_parameters()
            if "lora_" not in name and "to_qkv" not in name and "to_added_qkv" not in name
        )
    return {
        "offloaded": offloaded,
        "edited": after_edit,
        "gained": gained,
        "group": group,
        "seconds": seconds,
        "written": written,
        "right": right,
    }


def run(name: str, place: Path, budget: int) -> dict[str, float]:
    """One way, in a process of its own."""
    shutil.rmtree(place / "store", ignore_errors=True)
    return answer(name, start(__file__, name, place, budget))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="for the model and the store")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--markdown", type=Path, help="a page of Markdown to write")
    parser.add_argument("--run", choices=[*WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help="bytes")
    given = parser.parse_args()
    budget = given.budget or (SMALL_BUDGET if given.small else BUDGET)
    if given.run:
        print(json.dumps(edited(WAYS[given.run], given.dir, budget)))
        return 0
    place = given.dir / ("small" if given.small else "large")
    place.mkdir(parents=True, exist_ok=True)
    nbytes = flux.weight_bytes(
        flux.load(flux.save(SMALL if given.small else SHAPE, place / "checkpoint"))
    )
    found = {name: run(name, place, budget) for name in WAYS}
    shutil.rmtree(place / "store", ignore_errors=True)
    page = Page(
        "Editing all weights of what does not fit", given.dir, ["torch", "diffusers", "peft"]
    )
    group = max(result["group"] for result in found.values())
    page.text(
        f"Weights {nbytes / 1e6:,.0f} MB, budget {budget / 1e6:,.0f} MB, largest group "
        f"{group / 1e6:,.1f} MB. Memory is RssAnon over what it was before, in MB."
    )
    columns = ("", "s", "when on the store", "when edited", "at most", "over the budget", "written")
    page.table(columns, [_row(name, result, budget) for name, result in found.items()])
    claims = [
        claim for name, result in found.items() for claim in _claims(name, result, budget, nbytes)
    ]
    page.claims(claims)
    page.write(given.markdown)
    return 0 if all(claim.held for claim in claims) or given.small else 1


def _row(name: str, result: Mapping[str, float], budget: int) -> list[str]:
    sizes = (
        *(result[each] for each in ("offloaded", "edited", "gained")),
        result["gained"] - budget,
    )
    shown = [f"{nbytes / 1e6:,.0f}" for nbytes in (*sizes, result["written"])]
    return [name, f"{result['seconds']:.1f}", *shown]


def _claims(name: str, result: Mapping[str, float], budget: int, nbytes: int) -> list[Claim]:
    over = result["gained"] - budget
    claims = [Claim(f"{name}: every weight is right", result["right"], at_least=1)]
    if name == CONTROL:
        return [*claims, Claim(f"{name}: MB over the budget", over / 1e6, at_least=nbytes / 2e6)]
    over /= result["group"]
    return [*claims, Claim(f"{name}: groups over the budget", over, at_most=2)]


if __name__ == "__main__":
    sys.exit(main())
