"""The caller runs far ahead of the device, without more memory being reserved there.

Memory is freed in the caller's time; the device uses it later. The memory reserved on the device
may be no more than the budget, the model's own memory there, and one group.
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
ROWS = WIDTH  # so that each saved tensor is as large as a weight
GROUP = 4 * WIDTH * WIDTH
BUDGET = 4 * GROUP
SLOWNESS = (0, 20, None)
"""Number of calls by which the caller is ahead: none, twenty for each kernel, unlimited."""

at_any_speed = pytest.mark.parametrize("slowness", SLOWNESS, ids="slowness {}".format)


@pytest.fixture(autouse=True)
def same_moments() -> Iterator[None]:
    pretend.start_over()
    yield
    pretend.start_over()


class Peak:
    """The peak of reserved device bytes since its creation, above those in use then."""

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
    """Return layers whose weights make the gradient of each tanh depend on its input."""
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
    """Return a model's result, and the bytes that it takes on a device that runs calls at once."""
    pretend.set_slowness(0)
    peak = Peak()
    return run(net).cpu(), peak.reserved


# Inference ---------------------------------------------------------------------------------------


@at_any_speed
@pytest.mark.parametrize("how", [dispatch_model, enable_group_offload])
def test_inference_model_larger_than_the_budget_fits(
    how: Any, slowness: float | None, disk_dir: Path
) -> None:
    """The caller uses two streams: each has separate memory for activations."""
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
    """Return the gradient of the input.

    Gradients of weights are dropped at once, to take no memory.
    """
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
    """Return a model, the gradient of its input, and the bytes of a step.

    The step's saved tensors are not on the device.
    """
    net = on_the_device()
    return net, *in_step(net, lambda net: gradient(net, save_on_cpu()))


@at_any_speed
@pytest.mark.parametrize("share", [0.5, 4], ids=["with the disk", "in RAM"])
def test_activations_beyond_the_budget_fit(
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


def left_to_allocator(self: ReadLeases, lease: Any) -> torch.UntypedStorage:
    """View memory of another stream that is only free when the reader's work has passed."""
    with lease:
        reader = torch.accelerator.current_stream(DEVICE)
        with torch.Stream(DEVICE) as other:
            other.wait_stream(reader)
            memory = lease.tensor.clone()
        reader.wait_stream(other)
        memory.record_stream(reader)
        return memory.untyped_storage()


@pytest.mark.parametrize("slowness", SLOWNESS[1:], ids="slowness {}".format)
def test_memory_outside_the_budget_is_detected(
    slowness: float | None,
    step: tuple[nn.Module, torch.Tensor, int],
    monkeypatch: pytest.MonkeyPatch,
    disk_dir: Path,
) -> None:
    """The control: no budget counts the memory that is handed over."""
    net, wanted, activations = step
    monkeypatch.setattr(ReadLeases, "view", left_to_allocator)
    with store_in(disk_dir) as store:
        peak = Peak()
        pretend.set_slowness(slowness)
        found = gradient(net, offload_activations(store, min_size=1, model=net))
        assert torch.equal(found.cpu(), wanted)
        assert peak.reserved > BUDGET + activations + GROUP


def leases_record_no_event(patch: pytest.MonkeyPatch) -> None:
    """Let the end of a lease record no event."""
    patch.setattr(DeviceTier, "used_on", lambda tier, entry, event: None)


def frees_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """Free saved tensors before they are copied, without a wait."""
    patch.setattr(
        cache,
        "PendingCopy",
        lambda copied, stream, *rest: PendingCopy(copied, torch.Stream(DEVICE), *rest),
    )


@pytest.mark.parametrize("fault", [leases_record_no_event, frees_before_the_copy])
def test_memory_reused_too_early_is_detected(
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
def test_training_model_larger_than_the_budget_fits(
    saved: str, slowness: float | None, disk_dir: Path
) -> None:
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
