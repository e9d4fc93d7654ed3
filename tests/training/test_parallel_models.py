"""DistributedDataParallel and FSDP, around a model in training on a store, or inside of it.

Each has parameters and gradients of its own. What they do to a store's is refused with words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.training import models
from tests.training.conftest import store_for
from tierstore import OffloadModel, TierStore

ADVICE = "train on a store in one process, or without a store in several"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process, which is all of them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def store(disk_dir: Path) -> Iterator[TierStore]:
    with store_for(models.build("small"), disk_dir, share=0.3) as store:
        yield store


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(module, mesh=mesh)
    return module


def test_ddp_around_it_is_refused_before_anything_is_done(
    store: TierStore, mesh: DeviceMesh
) -> None:
    model = OffloadModel(models.build("small"), store)
    with pytest.raises(RuntimeError, match=f"in DistributedDataParallel, .*{ADVICE}"):
        DistributedDataParallel(model)
    batch = models.batch("small", 0)
    loss = model(*batch.args, **batch.kwargs).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.disable()


def test_fsdp_around_it_is_refused_when_it_runs(store: TierStore, mesh: DeviceMesh) -> None:
    model = OffloadModel(models.build("small"), store)
    sharded(model, mesh)
    batch = models.batch("small", 0)
    with pytest.raises(RuntimeError, match=f"was given to FSDPOffloadModel later, .*{ADVICE}"):
        model(*batch.args, **batch.kwargs)


def test_fsdp_of_a_part_is_refused_when_it_runs(store: TierStore, mesh: DeviceMesh) -> None:
    module = models.build("small")
    model = OffloadModel(module, store)
    sharded(next(part for part in module.modules() if type(part) is nn.Linear), mesh)
    batch = models.batch("small", 0)
    with pytest.raises(RuntimeError, match="was given to FSDPLinear later"):
        model(*batch.args, **batch.kwargs)


@pytest.mark.parametrize("whole", (True, False))
@pytest.mark.parametrize("library", ("DistributedDataParallel", "FSDPMlp"))
def test_what_is_spread_is_refused(
    library: str, whole: bool, store: TierStore, mesh: DeviceMesh
) -> None:
    module = models.build("small")
    part: nn.Module = (
        DistributedDataParallel(module) if library[0] == "D" else sharded(module, mesh)
    )
    model = part if whole else nn.Sequential(part, nn.Tanh())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"is in {library}, .*{ADVICE}"):
        OffloadModel(model, store)
    assert not [key for key in store if key.startswith("training/")]
    for found, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(found, expected)
