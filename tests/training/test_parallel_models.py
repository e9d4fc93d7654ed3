"""DistributedDataParallel and FSDP, around a model in training on a store, or inside it.

Each manages parameters and gradients itself, so combining it with a store raises an error. FSDP2
inside the module is trained: here in one process, in tests/distributed in several.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.training import models
from tests.training.conftest import store_for
from tierstore import OffloadModel, OffloadOptimizer, TierStore

ADVICE = "apply torch.distributed.fsdp.fully_shard to the module before OffloadModel"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Make a mesh of one process."""
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


def test_ddp_around_the_model_raises_at_construction(store: TierStore, mesh: DeviceMesh) -> None:
    model = OffloadModel(models.build("small"), store)
    with pytest.raises(RuntimeError, match=f"in DistributedDataParallel, .*{ADVICE}"):
        DistributedDataParallel(model)
    batch = models.batch("small", 0)
    loss = model(*batch.args, **batch.kwargs).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.disable()


def test_fsdp_around_the_model_raises_on_forward(store: TierStore, mesh: DeviceMesh) -> None:
    model = OffloadModel(models.build("small"), store)
    sharded(model, mesh)
    batch = models.batch("small", 0)
    with pytest.raises(RuntimeError, match=r"\(FSDPOffloadModel\): apply it before OffloadModel"):
        model(*batch.args, **batch.kwargs)


def test_fsdp_of_a_submodule_raises_on_forward(store: TierStore, mesh: DeviceMesh) -> None:
    module = models.build("small")
    model = OffloadModel(module, store)
    sharded(next(part for part in module.modules() if type(part) is nn.Linear), mesh)
    batch = models.batch("small", 0)
    with pytest.raises(RuntimeError, match=r"\(FSDPLinear\): apply it before OffloadModel"):
        model(*batch.args, **batch.kwargs)


@pytest.mark.parametrize("whole", (True, False))
@pytest.mark.parametrize("library", ("DistributedDataParallel", "FullyShardedDataParallel"))
def test_distributed_parameters_raise(
    library: str, whole: bool, store: TierStore, mesh: DeviceMesh
) -> None:
    module = models.build("small")
    part: nn.Module = (
        DistributedDataParallel(module)
        if library[0] == "D"
        else FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    )
    model = part if whole else nn.Sequential(part, nn.Tanh())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"is in {library}, .*{ADVICE}"):
        OffloadModel(model, store)
    assert not [key for key in store if key.startswith("training/")]
    for found, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("share", (0.2, 2.0))
def test_single_process_trains_a_sharded_model(
    share: float, disk_dir: Path, mesh: DeviceMesh
) -> None:
    def sharded_model() -> nn.Module:
        model = models.build("small")
        for part in model.layers:
            if type(part) is nn.Linear:
                fully_shard(part, mesh=mesh)
        return sharded(model, mesh)

    plain, module = sharded_model(), sharded_model()
    usual = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with store_for(models.build("small"), disk_dir, share=share) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            batch = models.batch("small", step)
            for each, its in ((plain, usual), (model, optimizer)):
                its.zero_grad()
                each(*batch.args, **batch.kwargs).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert torch.equal(optimizer.clip_grad_norm_(0.1), expected.full_tensor())
            usual.step()
            optimizer.step()
        for (name, found), (other, wanted) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert name == other and type(found) is type(wanted)
            assert torch.equal(found.full_tensor(), wanted.full_tensor())
            assert torch.equal(found.grad.full_tensor(), wanted.grad.full_tensor())
        assert store.stats().bytes_written > 0 or share > 1
        model.disable()


@pytest.mark.parametrize("optimizer_class", (torch.optim.Adafactor, torch.optim.Muon))
def test_optimizer_that_is_not_elementwise_raises(
    optimizer_class: type[torch.optim.Optimizer], store: TierStore, mesh: DeviceMesh
) -> None:
    linear = nn.Linear(8, 8, bias=False)
    whole = OffloadOptimizer(nn.Linear(8, 8, bias=False), store, optimizer_class)
    assert len(whole.param_groups) == 1, "an unsharded parameter was rejected"
    model = OffloadModel(sharded(linear, mesh), store)
    with pytest.raises(TypeError, match=f"{optimizer_class.__name__} is not element-wise"):
        OffloadOptimizer(model, store, optimizer_class)
    for fitting in (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad):
        OffloadOptimizer(model, store, fitting)
    model.disable()


def test_ungathered_parameters_raise(store: TierStore, mesh: DeviceMesh) -> None:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [Replicate()]))
    module = nn.Sequential(linear, sharded(nn.Linear(8, 8), mesh))
    with pytest.raises(ValueError, match=r"0\.weight is a DTensor that no fully_shard gathers"):
        OffloadModel(module, store)
    assert not [key for key in store if key.startswith("training/")]
    assert torch.isfinite(module[1](torch.ones(2, 8))).all(), "the module changed"


def test_model_that_has_already_run_raises(store: TierStore, mesh: DeviceMesh) -> None:
    module = sharded(nn.Linear(8, 8), mesh)
    expected = module(torch.ones(2, 8))
    with pytest.raises(ValueError, match="has run since fully_shard was applied"):
        OffloadModel(module, store)
    assert torch.equal(module(torch.ones(2, 8)), expected), "the module changed"


def test_sharded_model_offloads_states_only(store: TierStore, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = sharded(nn.Linear(8, 8), mesh)
    torch.manual_seed(0)
    module = sharded(nn.Linear(8, 8), mesh)
    usual = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    optimizer = OffloadOptimizer(module, store, torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        for each, its in ((plain, usual), (module, optimizer)):
            each(torch.ones(2, 8)).sum().backward()
            its.step()
            its.zero_grad()
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted.full_tensor())
    assert any(key.startswith("optimizer/") for key in store)


def test_dropped_sharded_model_is_freed(store: TierStore, mesh: DeviceMesh) -> None:
    def train() -> list[weakref.ref[nn.Module]]:
        module = sharded(nn.Linear(64, 64), mesh)
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert list(store)
        return [weakref.ref(module), weakref.ref(model)]

    references = train()
    gc.collect()
    assert not any(reference() for reference in references)
    assert not list(store)
