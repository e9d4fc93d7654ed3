"""The caller runs far ahead of the device, and still no more memory is reserved there.

torch frees memory in the caller's time, the device uses it in its own. What is reserved on the
device may be no more than the budget, what the model itself takes there, and one group.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from tests.device import pretend
from tierstore import (
    OffloadModel,
    TierStore,
    dispatch_model,
    enable_group_offload,
    offload_activations,
)
from tierstore.adapters.activations import cache
from tierstore.adapters.activations.cache import PendingCopy, ReadLeases
from tierstore.tiers.device_tier import DeviceTier

pytestmark = pytest.mark.pretend_only("late")

DEVICE = "pretend"
WIDTH, COUNT = 128, 16
ROWS = WIDTH  # so that all that is saved is as large as a weight
GROUP = 4 * WIDTH * WIDTH
BUDGET = 4 * GROUP
SLOWNESS = (0, 20, None)
"""How many calls the caller is ahead: none, twenty for each kernel, as many as there are."""

at_any_speed = pytest.mark.parametrize("slowness", SLOWNESS, ids="slowness {}".format)


@pytest.fixture(autouse=True)
def same_moments() -> Iterator[None]:
    pretend.start_over()
    yield
    pretend.start_over()


class Peak:
    """The most bytes reserved on the device since now, over those in use now."""

    def __init__(self) -> None:
        gc.collect()
        torch.accelerator.synchronize(DEVICE)
        torch.accelerator.empty_cache()
        pretend.reset_peak_memory_stats()
        self._before = pretend.memory_reserved()

    @property
    def reserved(self) -> int:
        return pretend.max_memory_reserved() - self._before


def layers() -> nn.Sequential:
    """Weights large enough for the gradient of each tanh to depend on what it has saved."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(COUNT)]
    net = nn.Sequential(*parts)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=2 * WIDTH**-0.5)
    return net


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def store_in(place: Path, ram: int = 4 * COUNT * GROUP) -> TierStore:
    return TierStore(ram, place, device=DEVICE, device_budget=BUDGET)


def in_step(net: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """What a run of a model gives, and takes beside it on a device that does all at the call."""
    pretend.set_slowness(0)
    peak = Peak()
    return run(net).cpu(), peak.reserved


# Inference ---------------------------------------------------------------------------------------


@at_any_speed
@pytest.mark.parametrize("how", [dispatch_model, enable_group_offload])
def test_a_model_larger_than_the_budget(how: Any, slowness: float | None, disk_dir: Path) -> None:
    """Under two streams of the caller: each has memory of its own for activations."""
    net = layers()
    with torch.no_grad():
        wanted, activations = in_step(layers().to(DEVICE), lambda resident: resident(rows()))
        with store_in(disk_dir) as store:
            peak = Peak()
            attached = how(net, store)
            streams = [torch.Stream(DEVICE) for _ in range(2)]
            pretend.set_slowness(slowness)
            found = []
            for stream in streams * 2:
                with stream:
                    found.append(net(rows()))
            outputs = len(found) * wanted.nbytes
            assert peak.reserved <= BUDGET + 2 * activations + outputs + GROUP
            torch.accelerator.synchronize(DEVICE)
            assert all(torch.equal(output.cpu(), wanted) for output in found)
            assert store.stats().bytes_onloaded >= 3 * (COUNT * GROUP - BUDGET)
            del attached


# Activations -------------------------------------------------------------------------------------


def gradient(net: nn.Module, context: AbstractContextManager[Any]) -> torch.Tensor:
    """That of the input. Those of weights are dropped as they come, so that they take no room."""
    x = rows().requires_grad_()
    with context:
        loss = net(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return x.grad


def drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def on_the_device() -> nn.Module:
    net = layers().to(DEVICE)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(drop_gradient)
    return net


@pytest.fixture
def step() -> tuple[nn.Module, torch.Tensor, int]:
    """A model, the gradient of its input, and what a step takes while nothing that it saves is on
    the device."""
    net = on_the_device()
    return net, *in_step(net, lambda net: gradient(net, save_on_cpu()))


@at_any_speed
@pytest.mark.parametrize("share", [0.5, 4], ids=["with the disk", "in RAM"])
def test_activations(
    share: float,
    slowness: float | None,
    step: tuple[nn.Module, torch.Tensor, int],
    disk_dir: Path,
) -> None:
    net, wanted, activations = step
    with store_in(disk_dir, int(share * COUNT * GROUP)) as store:
        peak = Peak()
        pretend.set_slowness(slowness)
        for _ in range(3):
            found = gradient(net, offload_activations(store, min_size=1, model=net))
            assert peak.reserved <= BUDGET + activations + GROUP
            assert torch.equal(found.cpu(), wanted)
            del found
        stats = store.stats()
        assert stats.activations.shipped_bytes >= 3 * COUNT * GROUP
        assert stats.peak_bytes["DEVICE"] <= BUDGET


def left_to_the_allocator(self: ReadLeases, lease: Any) -> torch.UntypedStorage:
    """Memory of another stream that is only free when the reader's work has passed."""
    with lease:
        reader = torch.accelerator.current_stream(DEVICE)
        with torch.Stream(DEVICE) as other:
            other.wait_stream(reader)
            memory = lease.tensor.clone()
        reader.wait_stream(other)
        memory.record_stream(reader)
        return memory.untyped_storage()


@pytest.mark.parametrize("slowness", SLOWNESS[1:], ids="slowness {}".format)
def test_more_would_be_noticed(
    slowness: float | None,
    step: tuple[nn.Module, torch.Tensor, int],
    monkeypatch: pytest.MonkeyPatch,
    disk_dir: Path,
) -> None:
    """The control: what is handed over is in no budget."""
    net, wanted, activations = step
    monkeypatch.setattr(ReadLeases, "view", left_to_the_allocator)
    with store_in(disk_dir) as store:
        peak = Peak()
        pretend.set_slowness(slowness)
        found = gradient(net, offload_activations(store, min_size=1, model=net))
        assert torch.equal(found.cpu(), wanted)
        assert peak.reserved > BUDGET + activations + GROUP


def nobody_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What ends a lease leaves no event behind."""
    patch.setattr(DeviceTier, "used_on", lambda tier, entry, event: None)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    """What was saved is let go of before it is copied, and nothing waits for that."""
    patch.setattr(
        cache,
        "PendingCopy",
        lambda copied, stream, *rest: PendingCopy(copied, torch.Stream(DEVICE), *rest),
    )


@pytest.mark.parametrize("fault", [nobody_is_waited_for, nobody_waits])
def test_memory_that_is_used_again_too_early_would_be_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    step: tuple[nn.Module, torch.Tensor, int],
    monkeypatch: pytest.MonkeyPatch,
    disk_dir: Path,
) -> None:
    net, wanted, _ = step

    def are_right(name: str) -> list[bool]:
        right = []
        with store_in(disk_dir / name) as store:
            for seed in range(10):
                pretend.seed(seed)
                found = gradient(net, offload_activations(store, min_size=1, model=net))
                right.append(torch.equal(found.cpu(), wanted))
        return right

    pretend.set_slowness()
    assert all(are_right("right"))
    fault(monkeypatch)
    assert not all(are_right("wrong"))


# Training ----------------------------------------------------------------------------------------


@at_any_speed
@pytest.mark.parametrize("saved", ["kept", "offloaded"])
def test_training(saved: str, slowness: float | None, disk_dir: Path) -> None:
    how: Callable[[], Any] = {"kept": torch.enable_grad, "offloaded": save_on_cpu}[saved]
    wanted, activations = in_step(on_the_device(), lambda net: gradient(net, how()))
    with store_in(disk_dir, 16 * COUNT * GROUP) as store:
        peak = Peak()
        model = OffloadModel(layers(), store, num_slices=COUNT)
        ours = offload_activations(store, min_size=1) if saved == "offloaded" else how()
        pretend.set_slowness(slowness)
        for _ in range(3):
            found = gradient(model, ours)
            assert peak.reserved <= BUDGET + activations + GROUP
            assert torch.equal(found.cpu(), wanted)
            del found
        stats = store.stats()
        assert stats.bytes_onloaded >= 3 * 2 * (COUNT * GROUP - BUDGET)
        assert (stats.activations.shipped_bytes > 0) == (saved == "offloaded")
        model.disable()
