"""Gradients that are added to stored ones: by the device, in parallel with its other work."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, needs_accelerator, pretend
from tests.helpers.tensors import assert_same
from tests.training.conftest import store_for
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel, OffloadOptimizer
from tierstore.engine.mutable_groups import MutableGroups

WIDTH = 64


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def given(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.pretend_only("late")
def test_gradient_accumulation_never_blocks_the_device(disk_dir: Path) -> None:
    """The device runs nothing before a caller waits for it: so it has not even begun."""
    model = build()
    with store_for(1 << 22, disk_dir, ACCELERATOR, share=4.0) as store:
        offloaded = OffloadModel(model, store, num_slices=1)
        offloaded(given(0)).square().sum().backward()
        expected = {name: gradient + 5.0 for name, gradient in gradients(model).items()}
        (weights,) = offloaded._groups
        added = {
            n: torch.full(p.shape, 5.0, device=ACCELERATOR) for n, p in model.named_parameters()
        }
        torch.accelerator.synchronize(ACCELERATOR)
        pretend.set_slowness(None)
        torch.ones(1, device=ACCELERATOR).add_(1)
        start = torch.accelerator.current_stream(ACCELERATOR).record_event()
        for name, gradient in added.items():
            weights.gradients._store(name, gradient, add=True)
        assert not start.query()
        weights.gradients.bind()
        assert start.query()
        assert_same(gradients(model), expected)


@needs_accelerator
def test_gradients_on_cpu_and_device_add_up(disk_dir: Path) -> None:
    """One gradient is assigned by hand in between."""
    plain, model = build(), build()
    with store_for(1 << 22, disk_dir, ACCELERATOR, share=4.0) as store:
        offloaded = OffloadModel(model, store, num_slices=1)
        for each in (plain, offloaded):
            each(given(0)).square().sum().backward()
            for parameter in each.parameters():
                assert parameter.grad is not None
                parameter.grad = torch.full_like(parameter, 2.0)
            each(given(1)).square().sum().backward()
            for parameter in each.parameters():
                parameter.backward(torch.full_like(parameter, 3.0))
        assert_same(gradients(model), gradients(plain), device=ACCELERATOR)


@needs_accelerator
def test_weight_used_twice_accumulates_its_gradient(disk_dir: Path) -> None:
    def run(model: nn.Module) -> None:
        for seed in range(3):
            model(given(seed)).square().sum().backward()

    tied, plain = build(), build()
    for each in (tied, plain):
        each[2].weight = each[0].weight
    run(plain)
    with store_for(1 << 22, disk_dir, ACCELERATOR, share=4.0) as store:
        run(OffloadModel(tied, store))
        for name, gradient in gradients(tied).items():  # summed in another order
            torch.testing.assert_close(gradient, gradients(plain)[name])


@pytest.mark.pretend_only("counts")
@pytest.mark.parametrize("share", [4.0, 0.5])
def test_gradient_transfers_are_counted(disk_dir: Path, share: float) -> None:
    """Each pass moves all gradients to the host; stored ones are loaded first, to add to them."""
    model = build()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with store_for(nbytes, disk_dir, ACCELERATOR, share=share) as store:
        offloaded = OffloadModel(model, store, num_slices=3)
        up = []
        for seed in range(3):
            before, copied = store.stats(), pretend.copied("d2h")
            offloaded(given(seed)).square().sum().backward()
            after = store.stats()
            assert after.bytes_offloaded - before.bytes_offloaded == nbytes
            assert pretend.copied("d2h") - copied == nbytes
            up.append(after.bytes_onloaded - before.bytes_onloaded)
        if share > 1:
            assert up[1] == up[2] == up[0] + nbytes


def leases_by_key(run: Callable[[], object]) -> Counter[str]:
    """Count how often each group of gradients is leased in RAM."""
    leases: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is MutableGroups.lease_in_host.__code__:
            leases.update([frame.f_locals["key"]])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Counter({key: count for key, count in leases.items() if "/gradient." in key})


def test_streaming_gradient_is_leased_once_per_phase(disk_dir: Path) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)])
    x = torch.randn(2, 256)
    with TierStore("4MB", disk_dir, device="cpu") as store:
        trained = OffloadModel(model, store)
        optimizer = OffloadOptimizer(trained, store, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            loss = trained(x).sum()
            backward = leases_by_key(loss.backward)
            step = leases_by_key(optimizer.step)
        assert len(backward) >= 10, "gradients that do not stream prove nothing"
        assert set(backward.values()) == {1} and step == backward
        trained.disable()
