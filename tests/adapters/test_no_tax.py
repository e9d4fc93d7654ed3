"""Modules that share a group share its lease, and it is in nobody's way."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from tests.helpers.tensors import parameter_bytes
from tierstore import TierStore, enable_group_offload

LAYERS = 20
STEPS = 3


class Stack(nn.Module):
    """Many small layers: several of them make one group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(source: str, tmp_path: Path) -> Stack:
    torch.manual_seed(0)
    model = Stack().eval()
    if source == "a checkpoint":
        save_model(model, str(tmp_path / "model.safetensors"))
        load_model(model, str(tmp_path / "model.safetensors"))
    return model


@pytest.mark.parametrize("source", ["a checkpoint", "memory"])
@pytest.mark.parametrize("roomy", [True, False])
@torch.no_grad()
def test_a_lease_is_shared_by_the_layers_of_a_group(
    source: str, roomy: bool, tmp_path: Path
) -> None:
    model = stack(source, tmp_path)
    x = torch.randn(2, 16)
    expected = model(x)
    weights = parameter_bytes(model)
    with (
        TierStore((20 if roomy else 2) * weights, tmp_path / "store", device="cpu") as store,
        enable_group_offload(model, store, offload_type="leaf_level"),
    ):
        groups = [key for key in store if key.startswith("Stack")]
        assert len(groups) <= LAYERS / 2, "several layers share a group"
        for _ in range(STEPS):
            if not roomy:  # all of the model has to go
                budget = store.stats().budget_bytes["HOST"]
                assert budget is not None
                store.put("other", torch.zeros(budget, dtype=torch.uint8), durable=False)
                store.discard("other")
            assert torch.equal(model(x), expected)
        counts = store.stats()
        assert counts.hits + counts.late + counts.misses == STEPS * len(groups)
        assert counts.misses >= (1 if roomy else STEPS)
        for key in groups:  # nobody has any of it after the run
            store.offload(key)
        there = {group.key for group in store.snapshot().groups if "HOST" in group.tiers}
        assert not there.intersection(groups)


class Between(nn.Module):
    """Two layers of one group, and something that is called between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.between()
        result: torch.Tensor = self.second(x)
        return result


def on_another_thread(act: Callable[[], object]) -> None:
    """What the model itself waits for."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for a lease that nobody uses"


@pytest.mark.parametrize("where", ["here", "on another thread"])
@torch.no_grad()
def test_between_two_layers_of_a_group_all_of_the_memory_can_be_had(
    where: str, tmp_path: Path
) -> None:
    model = Between().eval()
    x = torch.randn(2, 16)
    expected = model(x)
    budget = 64 << 10
    with (
        TierStore(budget, tmp_path / "store", device="cpu") as store,
        enable_group_offload(model, store, offload_type="leaf_level"),
    ):

        def fill() -> None:
            store.put("all", torch.ones(budget, dtype=torch.uint8), durable=False)
            store.discard("all")

        model.between = fill if where == "here" else functools.partial(on_another_thread, fill)
        for _ in range(STEPS):
            assert torch.equal(model(x), expected)
        assert store.stats().peak_bytes["HOST"] == budget
