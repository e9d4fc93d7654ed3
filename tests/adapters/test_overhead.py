"""A use of a unit takes few extra calls, and its lease does not block others' memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from tests.accelerator import on_both
from tests.helpers.calls import calls_of_functions
from tests.helpers.tensors import parameter_bytes
from tierstore import TierStore, dispatch_model, enable_group_offload

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
@pytest.mark.parametrize("all_fits", [True, False])
@torch.no_grad()
def test_layers_of_a_group_share_a_lease(source: str, all_fits: bool, tmp_path: Path) -> None:
    model = stack(source, tmp_path)
    x = torch.randn(2, 16)
    expected = model(x)
    weights = parameter_bytes(model)
    with (
        TierStore((20 if all_fits else 2) * weights, tmp_path / "store", device="cpu") as store,
        enable_group_offload(model, store, offload_type="leaf_level"),
    ):
        groups = [key for key in store if key.startswith("Stack")]
        assert len(groups) <= LAYERS / 2, "several layers share a group"
        for _ in range(STEPS):
            if not all_fits:  # all of the model must be evicted
                budget = store.stats().budget_bytes["HOST"]
                assert budget is not None
                store.put("other", torch.zeros(budget, dtype=torch.uint8), durable=False)
                store.discard("other")
            assert torch.equal(model(x), expected)
        counts = store.stats()
        assert counts.hits + counts.late + counts.misses == STEPS * len(groups)
        assert counts.misses >= (1 if all_fits else STEPS)
        for key in groups:  # no lease is left after the run
            store.offload(key)
        there = {group.key for group in store.snapshot().groups if "HOST" in group.tiers}
        assert not there.intersection(groups)


class Between(nn.Module):
    """Two layers of one group, and a function that is called between them."""

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
    """Run `act` on another thread, and wait for it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for an unused lease"


@pytest.mark.parametrize("where", ["here", "on another thread"])
@torch.no_grad()
def test_memory_between_two_layers_of_a_group_is_available(where: str, tmp_path: Path) -> None:
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


class Layer(nn.Module):
    """A block with several pairs of tensors, of which it uses only the first."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.parts[0].weight)


def calls_for_each_layer(pairs: int, device: str, tmp_path: Path) -> float:
    """Return the calls beyond those of the plain model, once all weights are resident."""
    model = nn.Sequential(*[Layer(pairs) for _ in range(LAYERS)]).eval()
    x = torch.randn(2, 16)
    plain = calls_of_functions(lambda: model(x))
    options: Any = {} if device == "cpu" else {"device_budget": "64MB"}
    with TierStore("64MB", tmp_path / f"store-{pairs}", device=device, **options) as store:
        dispatch_model(model, store)
        for _ in range(8):
            model(x)
        assert store.stats().bytes_read > 0
        fewest = min(calls_of_functions(lambda: model(x)) for _ in range(8))
    return (fewest - plain) / LAYERS


@on_both
@torch.no_grad()
def test_unit_takes_as_many_calls_with_many_tensors_as_with_few(
    device: str, tmp_path: Path
) -> None:
    few, many = (calls_for_each_layer(pairs, device, tmp_path) for pairs in (2, 16))
    assert 10 < many < (100 if device == "cpu" else 150)
    assert many < few + 10
