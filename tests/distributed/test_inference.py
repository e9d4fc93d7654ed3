"""Weights that `parallelize_module` spreads over ranks are offloaded to each rank's store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed.ranks import Ranks
from tests.distributed.training import Block, local
from tierstore import TierStore, dispatch_model

pytestmark = pytest.mark.full("processes take seconds to start")

Of = Callable[[int], Ranks]


def parallel() -> nn.Sequential:
    """Blocks whose wide dimension is spread over all ranks.

    (torch's own styles need one that the number of ranks divides.)
    """
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Block(inner=304) for _ in range(6))).requires_grad_(False)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def inferred(place: str) -> dict[str, int]:
    plain, module = parallel(), parallel()
    parameters = sum(local(p).nbytes for p in module.parameters())
    given = torch.randn(3, 67, generator=torch.Generator().manual_seed(0))
    directory = Path(place) / str(dist.get_rank())
    with TierStore(ram_budget=parameters // 2, disk_dir=directory, device="cpu") as store:
        model: Any = dispatch_model(module, store)
        for _ in range(3):
            assert torch.equal(model(given), plain(given))
        stats = store.stats()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(ours) is type(theirs), name
            assert torch.equal(local(ours), local(theirs)), name
        assert stats.peak_bytes["HOST"] <= parameters // 2
        return {"parameters": parameters, "read": stats.bytes_read}


@pytest.mark.parametrize("world", (2, 4))
def test_tensor_parallel_inference_matches(ranks: Of, place: str, world: int) -> None:
    for found in ranks(world).call(inferred, place):
        assert found["read"] > found["parameters"]
