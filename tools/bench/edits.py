"""Editing all weights of a model larger than RAM

A Flux transformer of 3.8 GB in float32 (6 double and 12 single blocks of 12 heads), from one
safetensors file, with a budget of 300 MB. Each way is a separate process. The figure is the peak
increase of anonymous memory from offloading the model until it has run with the edited weights. The
claim: the budget and two groups. The control keeps a list of all parameters, so the store cannot
detect when an edit of one is finished.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

from tierstore import TierStore, enable_group_offload
from tierstore.types import OffloadHandle
from tools.bench import flux
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import apart
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, value

PACKAGES = ("torch", "diffusers", "peft")
FULL = flux.Shape(heads=12, double=6, single=12, dtype="float32", shard="100GB")
SMALL = flux.Shape(heads=2, double=2, single=2, dtype="float32", shard="100GB")
LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out", "net.0.proj", "net.2"]
CONTROL, LORA = "a list of parameters: the control", "fuse_lora"

State = Mapping[str, torch.Tensor]
"""The checkpoint's tensors by name, as maps of its file."""


def _data(model: Any, handle: OffloadHandle, state: State) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _in_place(model: Any, handle: OffloadHandle, state: State) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def _other_memory(model: Any, handle: OffloadHandle, state: State) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def _suspended(model: Any, handle: OffloadHandle, state: State) -> None:
    with handle.suspended():
        _data(model, handle, state)


def _listed(model: Any, handle: OffloadHandle, state: State) -> None:
    for parameter in list(model.parameters()):
        parameter.data.mul_(2)


def _load(model: Any, handle: OffloadHandle, state: State) -> None:
    model.load_state_dict({name: state[_other(name, state)] for name in state})


def _merged(name: str, state: State, model: Any) -> torch.Tensor:
    path, _, kind = name.replace(".base_layer", "").rpartition(".")
    layer, base = model.get_submodule(path) if path else model, state[f"{path}.{kind}".strip(".")]
    if not isinstance(layer, LoraLayer) or kind == "bias":
        return base
    return base + layer.get_delta_weight("default")


def _other(name: str, state: State) -> str:
    """Return the name of the same weight in the mirrored block."""
    found = re.match(r"((?:single_)?transformer_blocks\.)(\d+)(\..*)", name)
    if found is None:
        return name
    count = len({key.split(".")[1] for key in state if key.startswith(found[1])})
    return f"{found[1]}{count - 1 - int(found[2])}{found[3]}"


Expected = Callable[[str, State, Any], torch.Tensor]
DOUBLED: Expected = lambda name, state, model: state[name] * 2  # noqa: E731
WAYS: dict[str, tuple[Callable[[Any, OffloadHandle, State], None], Expected]] = {
    "p.data.mul_ of each parameter": (_data, DOUBLED),
    "p.mul_ of each parameter": (_in_place, DOUBLED),
    "p.data = p.data * 2": (_other_memory, DOUBLED),
    "p.data.mul_, suspended": (_suspended, DOUBLED),
    "load_state_dict": (_load, lambda name, state, model: state[_other(name, state)]),
    LORA: (lambda model, *_: model.fuse_lora(), _merged),
    "fuse_qkv_projections": (
        lambda model, *_: model.fuse_qkv_projections(),
        lambda name, state, model: state[name],
    ),
    CONTROL: (_listed, DOUBLED),
}
"""Ways to edit all weights, with the expected value of each weight."""


@torch.no_grad()
def edited(name: str, checkpoint: Path, directory: Path, budget: int) -> Run:
    """Edit all weights in one way. Return bytes and seconds."""
    edit, expected = WAYS[name]
    model = flux.load(checkpoint)
    (file,) = checkpoint.glob("*.safetensors")
    state = load_file(file)
    if name == LORA:
        model.add_adapter(LoraConfig(r=8, target_modules=LINEARS, init_lora_weights=False))
    nn.Linear(512, 512)(torch.zeros(1, 512))  # starts torch's threads
    with AnonymousPeak() as peak, TierStore(budget, directory, device="cpu") as store:
        handle = enable_group_offload(model, store)
        group = max(each.nbytes for each in store.snapshot().groups)
        begun, offloaded = time.monotonic(), peak.gained
        edit(model, handle, state)
        seconds, after = time.monotonic() - begun, peak.gained
        for _ in flux.denoise(model, 1):
            pass
        gained, written = peak.gained, store.stats().bytes_written
        right = all(
            torch.equal(weight, expected(each, state, model))
            for each, weight in model.named_parameters()
            if "lora_" not in each and "to_qkv" not in each and "to_added_qkv" not in each
        )
    found = {"offloaded": offloaded, "edited": after, "gained": gained, "over": gained - budget}
    return found | {"group": group, "seconds": seconds, "written": written, "right": right}


def measure(bench: Bench) -> Iterator[Claim]:
    checkpoint = flux.save(SMALL if bench.small else FULL, bench.kept / "checkpoint")
    nbytes = flux.weight_bytes(flux.load(checkpoint))
    budget = 30_000_000 if bench.small else 300_000_000
    found = {
        name: apart(edited, name, checkpoint, bench.scratch / str(number), budget)
        for number, name in enumerate(WAYS)
    }
    bench.page.text(
        f"Weights {nbytes / 1e6:,.0f} MB, budget {budget / 1e6:,.0f} MB, largest group "
        f"{max(run['group'] for run in found.values()) / 1e6:,.1f} MB. Memory is the increase of "
        "RssAnon, in MB."
    )
    columns = {
        "s": value("seconds", 1),
        "when on the store": value("offloaded", scale=1e-6),
        "when edited": value("edited", scale=1e-6),
        "at most": value("gained", scale=1e-6),
        "over the budget": value("over", scale=1e-6),
        "written": value("written", scale=1e-6),
    }
    bench.page.compare("", found, columns)
    for name, run in found.items():
        yield Claim(f"{name}: all weights are correct", run["right"], at_least=1)
        if name == CONTROL:
            least = nbytes / 2e6
            yield Claim(f"{name}: MB over the budget", run["over"] / 1e6, at_least=least)
        else:
            groups = run["over"] / run["group"]
            yield Claim(f"{name}: groups over the budget", groups, at_most=2)
