"""Parameters that are given the memory of others while they are trained on a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.test_ties_made_later import (
    FIRST,
    LAST,
    copy_values,
    tie,
    tie_to_new_memory,
    tie_transposed,
)
from tests.store.helpers import open_store
from tests.training.conftest import ON_BOTH
from tierstore import OffloadModel, OffloadOptimizer

WIDTH, LAYERS = 64, 24
WEIGHTS = 4 * LAYERS * WIDTH * (WIDTH + 1)
Change = Callable[[Any], None]
ties = pytest.mark.parametrize("change", [tie, tie_transposed, tie_to_new_memory])
budgets = pytest.mark.parametrize("share", [1, 6])


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def step(model: Any, optimizer: torch.optim.Optimizer, device: str) -> float:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@ON_BOTH
@budgets
@ties
def test_tie_made_in_training_raises(
    change: Change, share: int, device: str, disk_dir: Path
) -> None:
    with open_store(disk_dir, share * WEIGHTS, device) as store:
        model = OffloadModel(build(), store)
        optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
        step(model, optimizer, device)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        change(model.module)
        for work in (lambda: step(model, optimizer, device), model.state_dict, optimizer.step):
            with pytest.raises(RuntimeError, match="share memory since"):
                work()
        for number in (FIRST, LAST):  # the advice
            model.module[number].weight.data = model.module[number].weight.data.clone()
        others = {n: v for n, v in model.state_dict().items() if n != f"{LAST}.weight"}
        others.pop(f"{FIRST}.weight")
        assert all(torch.equal(value, values[name]) for name, value in others.items())
        step(model, optimizer, device)


@ON_BOTH
@budgets
@pytest.mark.parametrize("change", [copy_values, lambda model: None], ids=["copy", "nothing"])
def test_assigned_values_are_trained(
    change: Change, share: int, device: str, disk_dir: Path
) -> None:
    """The control: equal values are not a tie."""
    plain = build().to(device)
    with open_store(disk_dir, share * WEIGHTS, device) as store:
        model = OffloadModel(build(), store)
        ours = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
        for number in range(3):
            if number == 1:
                change(model.module)
                change(plain)
            assert step(model, ours, device) == step(plain, theirs, device)
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, expected.cpu())
        assert device == "cpu" or store.stats().bytes_onloaded > WEIGHTS


@pytest.mark.parametrize("change", [tie, tie_to_new_memory, copy_values])
def test_optimizer_alone_leaves_ties(change: Change, disk_dir: Path) -> None:
    """Parameters outside any store keep the shared memory: each step changes it twice."""
    plain, model = build(), build()
    with open_store(disk_dir, 6 * WEIGHTS) as store:
        ours = OffloadOptimizer(model, store, torch.optim.AdamW, lr=0.01)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
        for number in range(3):
            if number == 1:
                change(model)
                change(plain)
            assert step(model, ours, "cpu") == step(plain, theirs, "cpu")
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, expected)
        shared = model[FIRST].weight.data_ptr() == model[LAST].weight.data_ptr()
        assert shared == (change is not copy_values)
