"""Parameters that share memory still share it, however often they are changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.store.helpers import on_both, open_store
from tierstore import dispatch_model, enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="any device",
)

WIDTH = 128
LAYER = 4 * WIDTH * WIDTH


class Fused(nn.Module):
    """The weights of queries, keys and values in one tensor, and parts of it as parameters."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.together = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device="meta")
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
        self.together.weight = nn.Parameter(memory)
        self.queries.weight = nn.Parameter(memory[:WIDTH])
        self.keys.weight = nn.Parameter(memory[WIDTH : 2 * WIDTH])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.together(x), self.queries(x), self.keys(x)], dim=1)


def whole(model: Any) -> None:
    model[1].together.weight.mul_(1.5)


def part(model: Any) -> None:
    model[1].queries.weight.sub_(1)


def other_part(model: Any) -> None:
    model[1].keys.weight.data.add_(2)


def scattered(model: Any) -> None:
    model[1].together.weight.data[WIDTH // 2 : WIDTH + WIDTH // 2] = 3


EDITS: list[Callable[[Any], None]] = [
    part,
    whole,
    other_part,
    part,
    scattered,
    part,
    other_part,
    whole,
]


def made(memory: torch.Tensor) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Fused(memory), nn.Linear(5 * WIDTH, WIDTH))


@on_both
@pytest.mark.parametrize("how", ["block_level", "leaf_level", "dispatch"])
@pytest.mark.parametrize("where", ["memory", "file"])
@torch.no_grad()
def test_slices_of_a_parameter_share_memory(
    where: str, how: str, device: str, disk_dir: Path
) -> None:
    torch.manual_seed(0)
    memory = torch.randn(3 * WIDTH, WIDTH)
    torch.manual_seed(1)
    plain = made(memory.clone())
    torch.manual_seed(1)
    if where == "file":
        save_file({"memory": memory}, disk_dir.with_suffix(".safetensors"))
        memory = load_file(disk_dir.with_suffix(".safetensors"))["memory"]
    model = made(memory)
    x = torch.randn(3, WIDTH)
    with open_store(disk_dir, 6 * LAYER, device) as store:
        if how == "dispatch":
            dispatch_model(model, store)
        else:
            enable_group_offload(model, store, offload_type=how)
        for edit in EDITS:
            edit(plain)
            edit(model)
            for name, tensor in plain.state_dict().items():
                assert torch.equal(model.state_dict()[name], tensor), (edit.__name__, name)
            assert torch.equal(model(x.to(device)).cpu(), plain(x)), edit.__name__
        assert store.stats().bytes_read > 4 * LAYER
