"""Modules that use weights in other ways than by calling the module that owns them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.adapters.conftest import DEVICES
from tests.adapters.models import WIDTH, Tower
from tests.helpers.wrappers import Scaled
from tests.store.helpers import open_store
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="any device",
)

LEVELS = (
    {"offload_type": "block_level", "num_blocks_per_group": 1},
    {"offload_type": "leaf_level", "group_size": 1},
)
PLENTY = 1 << 22


class Attending(nn.Module):
    """Its output projection is not called: attention uses the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def encoder_layer() -> nn.Module:
    """In inference it is one fused operation on the weights of all its children."""
    return nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True), nn.Tanh())


def normalised() -> nn.Module:
    tower = Tower()
    parametrizations.weight_norm(tower.blocks[1])
    return tower


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(7, affine=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS, ids=("block_level", "leaf_level"))
@pytest.mark.parametrize("make", (Attending, encoder_layer, normalised, with_statistics))
@torch.no_grad()
def test_unusual_module_equals_plain(
    make: Callable[[], nn.Module], level: dict[str, Any], device: str, disk_dir: Path
) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 7, WIDTH)
    expected = model.to(device)(x.to(device)).cpu()
    model.to("cpu")
    with open_store(disk_dir, PLENTY, device) as store, enable_group_offload(model, store, **level):
        for _ in range(2):
            assert torch.equal(model(x).cpu(), expected)
        assert store.stats().bytes_read > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS, ids=("block_level", "leaf_level"))
@torch.no_grad()
def test_wrapper_weights_move_as_their_parts(
    level: dict[str, Any], device: str, disk_dir: Path
) -> None:
    """Quantised weights are wrappers."""
    model, x = Tower(), torch.randn(2, 7, WIDTH)
    for block in model.blocks:
        numbers = (block.weight * 200).round().to(torch.int8)
        quantised = Scaled(numbers, torch.full((WIDTH, 1), 0.005))
        block.weight = nn.Parameter(quantised, requires_grad=False)
    expected = model(x)
    weights = [block.weight for block in model.blocks]
    nbytes = sum(weight.numbers.nbytes + weight.scales.nbytes for weight in weights)
    with (
        open_store(disk_dir, PLENTY, device) as store,
        enable_group_offload(model, store, **level) as handle,
    ):
        named = {name for names in handle.groups.values() for name in names}
        assert {"blocks.1.weight.numbers", "blocks.1.weight.scales"} <= named
        for _ in range(2):
            assert torch.equal(model(x.to(device)).cpu(), expected)
        assert all(w is block.weight for w, block in zip(weights, model.blocks, strict=True))
        assert all(weight.device.type == "cpu" for weight in weights)
        assert store.stats().bytes_read >= nbytes
        weights[1].scales.mul_(2)
        changed = model(x.to(device)).cpu()
        assert not torch.equal(changed, expected)
        copied = copy.deepcopy(model)
    assert torch.equal(copied(x), changed)
    assert torch.equal(model(x), changed)
