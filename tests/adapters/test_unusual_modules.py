"""Modules that use weights in other ways than by calling the module that owns them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from tests.adapters.conftest import DEVICES
from tests.adapters.models import WIDTH, Tower
from tests.store.helpers import open_store
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "the model, how it is cut: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

LEVELS = (
    {"offload_type": "block_level", "num_blocks_per_group": 1},
    {"offload_type": "leaf_level", "group_size": 1},
)
PLENTY = 1 << 22


class Attending(nn.Module):
    """Its output projection is no call: attention uses the weight itself."""

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
def test_unusual_use(
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


@pytest.mark.parametrize("level", LEVELS, ids=("block_level", "leaf_level"))
@torch.no_grad()
def test_weights_that_wrap_others_stay_where_they_are(
    level: dict[str, Any], disk_dir: Path
) -> None:
    """Quantised weights are such: two tensors that look like one."""
    model, x = Tower(), torch.randn(2, 7, WIDTH)
    expected = model(x)
    wrapped = TwoTensor(model.blocks[1].weight.detach(), model.blocks[1].weight.detach().clone())
    model.blocks[1].weight = nn.Parameter(wrapped, requires_grad=False)
    with (
        open_store(disk_dir, PLENTY, "cpu") as store,
        enable_group_offload(model, store, **level) as handle,
    ):
        named = [name for names in handle.groups.values() for name in names]
        assert "blocks.1.weight" not in named and "blocks.2.weight" in named
        for _ in range(2):
            assert torch.equal(model(x).a, expected)
