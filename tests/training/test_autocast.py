"""Training under autocast: no cast of a weight is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.accelerator import ACCELERATOR, pretend
from tests.device import autocast
from tests.helpers.casts import Casts
from tests.helpers.tensors import assert_same, parameter_bytes
from tests.training.conftest import store_for
from tierstore.adapters.training import OffloadModel

WIDTH = 64
LAYERS = 12
CAST = WIDTH * WIDTH * 2
"""Bytes of one weight, cast."""


class Looked(nn.Module):
    """Uses a weight in several ways: transposed, in part, cast by hand, twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.how == "linear":
            return functional.linear(x, weight).float()
        if self.how == "transposed":
            return (x.bfloat16() @ weight.to(torch.bfloat16).t()).float()
        if self.how == "part":
            half = weight.bfloat16()[: WIDTH // 2]
            return torch.cat([x.bfloat16() @ half.t()] * 2, -1).float()
        if self.how == "columns":
            cast = weight.to(torch.bfloat16).contiguous()
            return (x.bfloat16() @ cast).float()
        if self.how == "twice":
            return functional.linear(functional.linear(x, weight), weight).float()
        assert self.how == "changed"
        cast = weight.bfloat16()
        cast.mul_(2)
        return (x.bfloat16() @ cast).float()


WAYS = ("linear", "transposed", "part", "columns", "twice", "changed")


class Stack(nn.Module):
    def __init__(self, how: str = "linear", layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Looked(how) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def given(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def plain(how: str) -> Iterator[dict[str, Any]]:
    """Disable autocast's cache.

    With it, gradients of a weight that is used twice are added in the lower precision.
    """
    model = Stack(how)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(given()).square().sum()
    loss.backward()
    yield gradients(model)


@pytest.mark.parametrize("how", WAYS)
def test_casts_are_repeated_in_backward(how: str, plain: dict[str, Any], disk_dir: Path) -> None:
    model = Stack(how)
    with store_for(model, disk_dir, share=0.1) as store:
        offloaded = OffloadModel(model, store)
        with Casts([torch.Size((WIDTH, WIDTH))]) as casts:
            with torch.autocast("cpu", torch.bfloat16):
                loss = offloaded(given()).square().sum()
            after_forward = casts.alive
            loss.backward()
        assert_same(gradients(model), plain)
        assert store.stats().bytes_read > 0
    if how == "changed":  # no longer a cast of the weight: it stays
        assert after_forward == (LAYERS - 1) * CAST  # the first layer's input needs no gradient
        return
    assert after_forward == 0
    assert casts.peak <= 4 * CAST, "more than two casts and their gradients"
    assert casts.total > LAYERS * CAST


def test_double_backward_and_second_derivatives_work(disk_dir: Path) -> None:
    def twice(model: nn.Module) -> tuple[Any, ...]:
        x = given().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return gradients(model), first.detach(), second

    model = Stack()
    with store_for(model, disk_dir) as store:
        found = twice(OffloadModel(model, store))
        assert store.stats().bytes_read > 0
    assert_same(found, twice(Stack()))


def test_weight_changed_before_backward_raises(disk_dir: Path) -> None:
    model = Stack()
    with store_for(model, disk_dir) as store:
        offloaded = OffloadModel(model, store)
        with torch.autocast("cpu", torch.bfloat16):
            loss = offloaded(given()).square().sum()
        with torch.no_grad():
            model.blocks[3].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.pretend_only("kernels")
@pytest.mark.full("builds extra kernels; casts are counted on the CPU above")
@pytest.mark.parametrize("layers", [12, 36])
def test_device_holds_no_casts_between_passes(layers: int, disk_dir: Path) -> None:
    """It holds two of four slices, and each layer's output in both precisions."""
    autocast.load()
    model = Stack("linear", layers)
    weights = parameter_bytes(model)
    with store_for(model, disk_dir, ACCELERATOR, device_budget=weights // 2) as store:
        offloaded = OffloadModel(model, store, num_slices=4)
        x = given().to(ACCELERATOR)
        torch.accelerator.synchronize(ACCELERATOR)
        before = pretend.memory_allocated()
        with torch.autocast(ACCELERATOR, torch.bfloat16):
            loss = offloaded(x).square().sum()
        torch.accelerator.synchronize(ACCELERATOR)
        held = pretend.memory_allocated() - before
        activations = (layers + 1) * 2 * x.nbytes
        assert layers * CAST > 4 * activations, "the bound would allow casts"
        assert held <= weights // 2 + activations
        loss.backward()
        assert store.stats().bytes_onloaded > weights
