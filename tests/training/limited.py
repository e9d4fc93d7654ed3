"""Two steps of training 1.2 GB of state in a process that may take 300 MiB more memory.

    python -m tests.training.limited HOW DISK_DIR

HOW is `store`, `plain`, or `unlimited`: plain, without the limit. The limit counts from the moment
when everything is imported and neither a store nor a model exists, so that the store's threads and
all first-time costs are limited too. The module's values lie in a file from the start, like those
of a checkpoint, in shared maps, which are no process's private memory. Prints a JSON line.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierstore
from tests.activations.limited import MIB
from tests.helpers.processes import data_bytes
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

HEADROOM = 300 * MIB
BUDGET = 96 * MIB
WIDTH = 1024
LAYERS = 72  # of 4 MiB: 302 MB of parameters, and four times that of state
BATCH = 8
STEPS = 2
PARAMETERS = 4 * LAYERS * WIDTH * WIDTH
COPIES = 4
"""For each parameter: its value, its gradient and two states of AdamW."""


class Layer(nn.Module):
    """A layer with one matrix, in a file."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.weight))


def build(directory: Path) -> nn.Module:
    """Build the module, layer by layer."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    layers = []
    for number in range(LAYERS):
        file = str(directory / f"layer-{number}")
        weight = torch.from_file(file, shared=True, size=WIDTH * WIDTH).view(WIDTH, WIDTH)
        weight.normal_(0, WIDTH**-0.5, generator=generator)
        layers.append(Layer(weight))
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: Any) -> list[str]:
    """Return the exact losses, and a checksum of the parameters after the last step."""
    told = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1 + step)
        x, y = torch.randn(2, BATCH, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item().hex())
    told += [parameter.detach().double().sum().item().hex() for parameter in model.parameters()]
    return told


def main(how: str, disk_dir: str, headroom: int = HEADROOM, budget: int = BUDGET) -> None:
    torch.set_num_threads(1)
    if how != "unlimited":
        limit = data_bytes() + headroom
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    place = Path(disk_dir)
    if how != "store":
        module = build(place / "values")
        told = train(module, torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
        print("RESULT " + json.dumps({"told": told}))
        return
    start = data_bytes()
    with tierstore.TierStore(budget, place / "store", device="cpu") as store:
        opened = data_bytes()
        model = OffloadModel(build(place / "values"), store)
        built = data_bytes()
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-3)
        told = train(model, optimizer)
        trained = data_bytes()
        stats = store.stats()
    result = {
        "told": told,
        "peak": stats.peak_bytes["HOST"],
        "written": stats.bytes_written,
        "opened": opened - start,
        "built": built - start,
        "trained": trained - start,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
