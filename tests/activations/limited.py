"""Run a step with 320 MiB of activations in a process that may grow by 64 MiB.

    python -m tests.activations.limited HOW DISK_DIR

HOW is `store`, `nothing` or `save_on_cpu`. Everything is used once before the limit is set, so that
threads, pools and lazily loaded code do not count against it. Prints a JSON line.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import tierstore
from tests.helpers.processes import data_bytes

MIB = 1 << 20
HEADROOM = 64 * MIB
LAYERS = 80
NUMBERS = MIB  # float32: each layer saves 4 MiB
BUDGET = 16 * MIB


def step(context: AbstractContextManager[Any], layers: int) -> torch.Tensor:
    """Return the gradient through this many layers, each of which saves its input."""
    start = torch.linspace(0, 3, NUMBERS, requires_grad=True)
    with context:
        x = start
        for _ in range(layers):
            x = torch.sin(x)
        loss = x.sum()
        del x
    loss.backward()
    assert start.grad is not None
    return start.grad


def expected() -> torch.Tensor:
    """Return the same gradient by the chain rule, from the end to the start, with three tensors."""
    result = torch.ones(1024)
    picked = torch.linspace(0, 3, NUMBERS)[:: NUMBERS // 1024]
    values = [picked]
    for _ in range(LAYERS):
        values.append(torch.sin(values[-1]))
    for value in reversed(values[:-1]):
        result = result * torch.cos(value)
    return result


def main(how: str, disk_dir: str) -> None:
    with tierstore.TierStore(BUDGET, disk_dir, device="cpu") as store:
        contexts = {
            "store": lambda: tierstore.offload_activations(store),
            "nothing": nullcontext,
            "save_on_cpu": torch.autograd.graph.save_on_cpu,
        }
        wanted = expected()
        step(contexts[how](), 8)
        warm = store.stats()
        limit = data_bytes() + HEADROOM
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        gradient = step(contexts[how](), LAYERS)
        stats = store.stats()
        right = torch.allclose(gradient[:: NUMBERS // 1024], wanted, rtol=1e-5, atol=0)
        result = {
            "right": right,
            "shipped": stats.activations.shipped_bytes - warm.activations.shipped_bytes,
            "written": stats.bytes_written - warm.bytes_written,
            "peak": stats.peak_bytes["HOST"],
        }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
