"""Train on a store with little RAM, save, and load; print the memory that this takes.

    python -m tests.training.saving_limited HOW PLACE

HOW is `streaming`, or `copying`: the control, which copies the state before it saves it. Prints a
line of JSON. Only anonymous memory counts: a map of a file belongs to the page cache. Each step is
first run with a small model, so that lazily loaded code is not measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tierstore import OffloadModel, OffloadOptimizer, TierStore, load_training, save_training
from tools.bench.anonymous import AnonymousPeak

MIB = 1 << 20
WIDTH, LAYERS = 1024, 16
GROUP = 4 * WIDTH * (WIDTH + 1)
"""Bytes of a group of weights: tensors too large for groups under so small a budget."""
NBYTES = 4 * WIDTH * WIDTH * LAYERS  # 67 MB of weights
STATE_BYTES = 2 * NBYTES
BUDGET = 24 * MIB


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    model(torch.ones(2, width)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(how: str, place: Path, width: int, layers: int) -> dict[str, int]:
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with TierStore(BUDGET, place / "store", device="cpu") as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW)
        step(model, optimizer, width)
        weight = module[-1].weight
        before, moment = weight.clone(), optimizer.state[weight]["exp_avg"].clone()
        copies: Any = None
        with AnonymousPeak() as saving:
            if how == "copying":
                state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
                copies = (
                    tree_map(torch.clone, state["model"]),
                    [tree_map(torch.clone, kept) for kept in state["optimizer"]["state"].values()],
                )
            save_training(place / "run", model, optimizer)
        del copies
        step(model, optimizer, width)
        with AnonymousPeak() as loading:
            load_training(place / "run", model, optimizer)
        right = torch.equal(weight, before)
        right = right and torch.equal(optimizer.state[weight]["exp_avg"], moment)
    return {
        "right": right,
        "saving": saving.gained,
        "loading": loading.gained,
        "nbytes": sum(p.stat().st_size for p in (place / "run").iterdir()),
    }


def main(how: str, place: Path) -> None:
    place.mkdir()
    (place / "small").mkdir()
    measured(how, place / "small", 64, 2)
    print("RESULT " + json.dumps(measured(how, place, WIDTH, LAYERS)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
