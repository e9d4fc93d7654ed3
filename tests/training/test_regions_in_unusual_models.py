"""Recomputation in models with weights outside their blocks.

Compared with the plain model, bit for bit.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import same
from tests.helpers.tensors import parameter_bytes
from tests.training.conftest import DEVICES, SMALL
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

WIDTH, ROWS, BLOCKS = 256, 64, 6


class Positioned(nn.Module):
    """Blocks in a module with or without a separate weight, as ViTs have."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, WIDTH)) if own else None
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.position is not None:
            x = x + self.position
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("own", [False, True], ids=["blocks only", "a weight around them"])
@pytest.mark.parametrize("device", DEVICES)
def test_block_inputs_are_offloaded(own: bool, device: str, disk_dir: Path) -> None:
    torch.manual_seed(0)
    plain = Positioned(own)
    model = copy.deepcopy(plain)
    x = torch.randn(ROWS, WIDTH)
    plain(x).square().mean().backward()
    weights = parameter_bytes(plain)
    budgets = {} if device == "cpu" else {"device_budget": 2 * weights}
    with TierStore(int(SMALL * 4 * weights), disk_dir, device=device, **budgets) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        loss = offloaded(x.to(device)).square().mean()
        assert store.stats().activations.shipped_bytes >= (BLOCKS - 1) * ROWS * WIDTH * 4
        loss.backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            assert parameter.grad is not None
            assert same(parameter.grad, expected, device), name


class Hidden(nn.Module):
    """Its blocks are lists themselves, between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(torch.tanh(self.first(x)))


@pytest.mark.parametrize("share", [SMALL, 4.0], ids=["most leaves", "all stays"])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_in_lists_are_offloaded(share: float, device: str, disk_dir: Path) -> None:
    torch.manual_seed(0)
    plain = Hidden()
    model = copy.deepcopy(plain)
    x = torch.randn(ROWS, WIDTH)
    plain(x).square().mean().backward()
    weights = parameter_bytes(plain)
    budgets = {} if device == "cpu" else {"device_budget": 2 * weights}
    with TierStore(int(share * 4 * weights), disk_dir, device=device, **budgets) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        offloaded(x.to(device)).square().mean().backward()
        assert store.stats().activations.saved_bytes > 0
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            assert parameter.grad is not None
            assert same(parameter.grad, expected, device), name


@pytest.mark.parametrize("checkpoint", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("device", DEVICES)
def test_two_losses_of_one_pass_in_microbatches_train(
    checkpoint: bool, device: str, disk_dir: Path
) -> None:
    torch.manual_seed(0)
    plain = Hidden()
    model = copy.deepcopy(plain)
    x, own = (torch.randn(4, WIDTH).repeat(2, 1).requires_grad_() for _ in range(2))
    with torch.no_grad():
        own.copy_(x)
    outputs = [plain(part) for part in x.tensor_split(2)]
    for output in outputs:
        output.square().sum().backward(retain_graph=True)
    for output in outputs:
        output.sum().backward()
    with TierStore("64MB", disk_dir, device=device, device_budget=device_budget(device)) as store:
        offloaded = OffloadModel(model, store, num_microbatches=2, checkpoint_activation=checkpoint)
        found = offloaded(own.to(device))
        found.square().sum().backward(retain_graph=True)
        found.sum().backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            assert parameter.grad is not None
            assert same(parameter.grad, expected, device), name
        assert x.grad is not None
        assert own.grad is not None
        assert same(own.grad, x.grad, device)
        with pytest.raises(RuntimeError, match="second time"):
            found.sum().backward()


def device_budget(device: str) -> str | None:
    return None if device == "cpu" else "64MB"
