"""Promises of every adapter, on an accelerator: a real one where there is one.

It needs no other package than torch, so that it runs wherever a GPU is available.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, needs_accelerator
from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    disable_offload,
    dispatch_model,
    edit_weights,
    enable_group_offload,
    offload_activations,
)

pytestmark = pytest.mark.floor

ACCELERATORS = (pytest.param(ACCELERATOR, marks=needs_accelerator),)
WIDTH, COUNT = 256, 12
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH

on_each = pytest.mark.parametrize("device", ACCELERATORS)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT)]
    return nn.Sequential(*layers)


def rows(device: str) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


@torch.no_grad()
def expected(device: str) -> torch.Tensor:
    return model().to(device)(rows(device)).cpu()


def store_of(layers: float, device: str, place: Path) -> TierStore:
    budget = int(layers * (LAYER_BYTES + 8192))
    return TierStore(budget, place, device=device, device_budget=budget)


@on_each
@pytest.mark.parametrize("layers", (3, COUNT / 2, 2 * COUNT))
@pytest.mark.parametrize("how", (dispatch_model, enable_group_offload))
def test_adapter_output_equals_the_cpu(
    how: object, layers: float, device: str, disk_dir: Path
) -> None:
    net = model()
    with store_of(layers, device, disk_dir) as store, torch.no_grad():
        handle = how(net, store)  # type: ignore[operator]
        for _ in range(4):
            assert torch.equal(net(rows(device)).cpu(), expected(device))
        stats = store.stats()
        assert stats.bytes_onloaded >= COUNT * LAYER_BYTES
        assert stats.peak_bytes["DEVICE"] <= stats.budget_bytes["DEVICE"]
        assert stats.peak_bytes["HOST"] <= stats.budget_bytes["HOST"]
        assert {p.device.type for p in net.parameters()} == {"cpu"}
        for away, plain in zip(net.parameters(), model().parameters(), strict=True):
            assert torch.equal(away, plain)
        disable_offload(handle)


@on_each
def test_streams_of_the_caller_output_equals_the_cpu(device: str, disk_dir: Path) -> None:
    net, streams = model(), [torch.Stream(device) for _ in range(2)]
    with store_of(3, device, disk_dir) as store, torch.no_grad():
        dispatch_model(net, store)
        found = []
        for stream in streams * 3:
            with stream:
                found.append(net(rows(device)))
            stream.synchronize()
        disable_offload(net)
    assert all(torch.equal(output.cpu(), expected(device)) for output in found)


@on_each
def test_edit_on_the_device_reaches_its_tier(device: str, disk_dir: Path) -> None:
    plain, net = model(), model()
    plain[3][0].weight.data += 1
    with store_of(3, device, disk_dir) as store, torch.no_grad():
        dispatch_model(net, store)
        with edit_weights(net[3]):
            assert net[3][0].weight.device.type == device
            net[3][0].weight.data += 1
        wanted = plain.to(device)(rows(device))
        for _ in range(2):  # by the second, every layer has left
            assert torch.equal(net(rows(device)), wanted)
        disable_offload(net)


@on_each
def test_saved_activations_are_restored_exactly(device: str, disk_dir: Path) -> None:
    nets = [model().to(device) for _ in range(2)]
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    nets[0](x).square().sum().backward()
    with store_of(4, device, disk_dir) as store:
        with offload_activations(store, min_size=1024, model=nets[1]):
            loss = nets[1](x).square().sum()
        loss.backward()
        assert store.stats().activations.shipped_bytes > 0
    for plain, ours in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(plain.grad, ours.grad)


@on_each
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("share", (0.3, 2))
def test_training_equals_an_optimizer_on_the_cpu(
    share: float, recompute: bool, device: str, disk_dir: Path
) -> None:
    plain, net = model().to(device), model()
    on_cpu = [nn.Parameter(p.detach().cpu()) for p in plain.parameters()]
    usual = torch.optim.AdamW(on_cpu, lr=1e-2, fused=True)
    state_bytes = 4 * COUNT * LAYER_BYTES
    losses: list[list[float]] = [[], []]
    budget = int(share * state_bytes)
    with TierStore(budget, disk_dir, device=device, device_budget=budget) as store:
        ours = OffloadModel(net, store, num_slices=4, checkpoint_activation=recompute)
        optimizer = OffloadOptimizer(ours, store, torch.optim.AdamW, lr=1e-2)
        for _ in range(4):
            loss = plain(rows(device)).square().mean()
            loss.backward()
            for there, here in zip(plain.parameters(), on_cpu, strict=True):
                here.grad, there.grad = there.grad.cpu(), None
            usual.step()
            with torch.no_grad():
                for there, here in zip(plain.parameters(), on_cpu, strict=True):
                    there.copy_(here)
            losses[0].append(loss.item())
            loss = ours(rows(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[1].append(loss.item())
        stats = store.stats()
        assert losses[0] == losses[1]
        for here, away in zip(on_cpu, ours.parameters(), strict=True):
            assert torch.equal(here, away)
        for name, states in usual.state_dict()["state"].items():
            for kind, value in states.items():
                assert torch.equal(value, optimizer.state_dict()["state"][name][kind])
        assert stats.bytes_onloaded >= 4 * COUNT * LAYER_BYTES
        assert stats.peak_bytes["HOST"] <= budget
        # Each step reads values and states in RAM; gradients arrive there anyway.
        assert stats.bytes_read >= 3 * max(0, 3 * COUNT * LAYER_BYTES - budget)
        ours.disable()
