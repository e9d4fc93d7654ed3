"""Run training steps in a separate process.

    python -m tests.activations.stepping DEVICE DISK_DIR STEPS WHAT

WHAT is `measure` (print a JSON line after every fifth step), `leak` (the same, but keep every
graph, as a leak would), `forward` or `backward` (print `READY` in the middle of that part of the
last step, with bytes on the disk, and wait to be killed).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tierstore
from tests import accelerator  # loads the device before the first backward pass
from tests.budget.denoise import anonymous_bytes
from tests.helpers.engine import core_of

SIZE = 256  # a matrix is 256 KiB
LAYERS = 4
EVERY = 5
BUDGET = 1 << 20  # a step saves 2.25 MiB


def measured(store: tierstore.TierStore, device: str) -> dict[str, Any]:
    """Return the memory in use between two steps, in bytes (`groups` and `tensors` are counts)."""
    snapshot = store.snapshot()
    spill = core_of(store).tiers.disk.spill
    on_cpu = device == "cpu"
    on_device = 0 if on_cpu else accelerator.module().memory_allocated()
    pinned = 0 if on_cpu else accelerator.counted("pinned_bytes")
    return {
        "host": anonymous_bytes(),
        "device": on_device,
        "pinned": pinned,
        "slab": 0 if spill is None else os.stat(spill.path).st_size,
        "used": snapshot.used_bytes,
        "groups": len(snapshot.groups),
        "files": sorted(os.listdir(core_of(store).directory.path)),
        "tensors": sum(type(each) is torch.Tensor for each in gc.get_objects()),
        "written": store.stats().bytes_written,
    }


def stop_here() -> None:
    print("READY", flush=True)
    time.sleep(600)


class Stop(torch.autograd.Function):
    """Stops in the middle of the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        stop_here()
        return gradient


def main(device: str, disk_dir: str, steps: str, what: str) -> None:
    torch.manual_seed(0)
    made = [torch.randn(SIZE, SIZE) * SIZE**-0.5 for _ in range(LAYERS + 1)]
    start, *weights = [matrix.to(device).requires_grad_() for matrix in made]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    options = {} if device == "cpu" else {"device_budget": BUDGET}
    kept = []
    store = tierstore.TierStore(BUDGET, disk_dir, device=device, **options)
    for step in range(int(steps)):
        last = step == int(steps) - 1
        optimizer.zero_grad()
        with tierstore.offload_activations(store, min_size=4096):
            x = start * 1
            for i, weight in enumerate(weights):
                if last and i == LAYERS // 2 and what == "backward":
                    x = Stop.apply(x)
                x = torch.sin(torch.tanh(x @ weight))
            loss = x.square().mean()
        if last and what == "forward":
            assert store.stats().used_bytes["DISK"] > 0
            stop_here()
        loss.backward(retain_graph=what == "leak")
        optimizer.step()
        if what == "leak":
            kept.append(loss)
        del loss, x
        if what in ("measure", "leak") and (step + 1) % EVERY == 0:
            gc.collect()
            print("STEP " + json.dumps(measured(store, device)), flush=True)
    store.close()


if __name__ == "__main__":
    assert Path(sys.argv[2]).is_absolute()
    main(*sys.argv[1:])
