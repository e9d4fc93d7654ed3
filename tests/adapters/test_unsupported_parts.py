"""Models with parts that no store can hold, and results of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.store.helpers import open_store
from tierstore import disable_offload, dispatch_model, enable_group_offload
from tierstore.adapters.nested import map_tensors, tensors_in

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="any device",
)

WIDTH = 128
LAYER = 4 * (WIDTH + 1) * WIDTH


class Holds(nn.Module):
    """Uses a weight of an unusual kind."""

    def __init__(self, weight: torch.Tensor, use: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.weight, x)


def sparse() -> nn.Module:
    return Holds(torch.eye(WIDTH).to_sparse(), lambda w, x: (w @ x.T).T)


def sparse_rows() -> nn.Module:
    return Holds(torch.eye(WIDTH).to_sparse_csr(), lambda w, x: (w @ x.T).T)


def quantized() -> nn.Module:
    weight = torch.quantize_per_tensor(torch.randn(WIDTH, WIDTH), 0.1, 0, torch.qint8)
    return Holds(weight, lambda w, x: x @ w.dequantize())


def four_bits() -> nn.Module:
    weight = torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8)
    packed = weight.view(torch.float4_e2m1fn_x2)
    return Holds(packed, lambda w, x: x * w.view(torch.uint8).float().mean())


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(WIDTH, WIDTH))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH))


@pytest.mark.parametrize("part", [sparse, sparse_rows, quantized, four_bits, scripted, traced])
@pytest.mark.parametrize("how", ["block_level", "leaf_level", "dispatch"])
@torch.no_grad()
def test_unsupported_parts_stay_and_others_are_offloaded(
    part: Callable[[], nn.Module], how: str, disk_dir: Path
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = nn.Sequential(*layers[:3], part(), *layers[3:])
    x = torch.randn(3, WIDTH)
    wanted = model(x)
    with open_store(disk_dir, 3 * LAYER) as store:
        if how == "dispatch":
            dispatch_model(model, store)
        else:
            enable_group_offload(model, store, offload_type=how)
        for _ in range(2):
            before = store.stats().bytes_read
            assert torch.equal(model(x), wanted)
            assert store.stats().bytes_read - before >= 2 * LAYER
        if how == "dispatch":
            disable_offload(model)
            assert torch.equal(model(x), wanted)


@dataclass(frozen=True)
class Rows:
    rows: torch.Tensor
    name: str


class Table(nn.Module):
    """Returns a view of its weight in a custom object."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> Rows:
        return Rows(self.table[:8], "rows")


@torch.no_grad()
def test_view_of_a_weight_in_a_dataclass_is_a_copy(disk_dir: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Table() for _ in range(6)])
    wanted = [part.table[:8].clone() for part in model]
    with open_store(disk_dir, 2 * 4 * WIDTH * WIDTH) as store:
        enable_group_offload(model, store, offload_type="leaf_level")
        found = [part(torch.zeros(1)) for part in model]
        assert all(type(each) is Rows and each.name == "rows" for each in found)
        assert all(torch.equal(f.rows, w) for f, w in zip(found, wanted, strict=True))
        assert store.stats().bytes_read > 0


def test_dataclasses_are_rebuilt_only_if_a_field_changes() -> None:
    one = Rows(torch.zeros(2), "one")
    assert map_tensors([one], lambda tensor: tensor)[0] is one
    other = map_tensors({"a": one}, lambda tensor: tensor + 1)["a"]
    assert other is not one
    assert other.rows.tolist() == [1, 1]
    assert one.rows.tolist() == [0, 0]
    assert [tensor.tolist() for tensor in tensors_in([one, other, Rows])] == [[0, 0], [1, 1]]
