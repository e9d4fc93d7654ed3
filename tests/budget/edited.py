"""Edit weights of a model that is on a store, and print how much memory that takes.

    python -m tests.budget.edited HOW CHECKPOINT DISK_DIR

The allocator is as users have it. Only anonymous memory counts, which includes a written page of a
private map of a file.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tierstore import TierStore, dispatch_model, enable_group_offload
from tools.bench.anonymous import AnonymousPeak, anonymous_memory

MB = 1_000_000
WIDTH, LAYERS = 512, 96  # of 1 MB each
BUDGET = 8 * MB
OTHER = "other.safetensors"
"""Beside the checkpoint: the same weights, with 1 added."""


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def mapped(checkpoint: Path) -> nn.Sequential:
    """Load as `from_pretrained` does: all weights are parts of one map of the file."""
    with torch.device("meta"):
        model = build()
    model.load_state_dict(load_file(checkpoint), assign=True)
    return model


def layer_by_layer(model: nn.Sequential, _: Path) -> None:
    for layer in model:
        layer.weight.data += 1
        layer(torch.zeros(1, WIDTH))


def at_once(model: nn.Sequential, _: Path) -> None:
    for layer in model:
        layer.weight.data += 1


def load(model: nn.Sequential, other: Path) -> None:
    model.load_state_dict(load_file(other))  # maps of the file


def apply(model: nn.Sequential, _: Path) -> None:
    model.apply(lambda module: isinstance(module, nn.Linear) and module.weight.data.add_(1))


def parameters(model: nn.Sequential, _: Path) -> None:
    for parameter in model.parameters():
        parameter.data += 1


def modules(model: nn.Sequential, _: Path) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data += 1


EDITS = {
    "layer by layer": layer_by_layer,
    "at once": at_once,
    "load_state_dict": load,
    "load_state_dict of a model with group offload": load,
    "apply": apply,
    "parameters": parameters,
    "parameters while group offload is suspended": parameters,
    "modules": modules,
}
"""Ways to add 1 to all weights."""


def edited(how: str, checkpoint: Path, disk_dir: str) -> dict[str, Any]:
    model, other = mapped(checkpoint), checkpoint.with_name(OTHER)
    offload: Any = dispatch_model
    if "group offload" in how:
        import_module("diffusers.pipelines.pipeline_utils")  # enabling imports these, with hooks
        offload = enable_group_offload
    with torch.no_grad(), TierStore(BUDGET, disk_dir, device="cpu") as store:
        with AnonymousPeak() as peak:
            handle: Any = offload(model, store)
            with handle.suspended() if "suspended" in how else nullcontext():
                EDITS[how](model, other)
            model(torch.zeros(1, WIDTH))
        expected = load_file(other)
        right = all(torch.equal(w, expected[name]) for name, w in model.state_dict().items())
    return {"gained": peak.gained, "right": right}


def in_memory(disk_dir: str) -> dict[str, Any]:
    """Return the memory of a model made in memory, before and after it is on a store."""
    start = anonymous_memory()
    model = build()
    made = anonymous_memory()
    with TierStore(BUDGET, disk_dir, device="cpu") as store:
        dispatch_model(model, store)
        return {"made": made - start, "dispatched": anonymous_memory() - start}


def main(how: str, checkpoint: Path, disk_dir: str) -> None:
    torch.manual_seed(0)
    nn.Linear(WIDTH, WIDTH)(torch.zeros(1, WIDTH))
    if how == "save":
        state = build().state_dict()
        save_file(state, checkpoint)
        save_file({name: weight + 1 for name, weight in state.items()}, checkpoint.with_name(OTHER))
        return
    result = in_memory(disk_dir) if how == "in memory" else edited(how, checkpoint, disk_dir)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
