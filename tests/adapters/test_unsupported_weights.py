"""Weights of unsupported types stay, are named, and count in the budget."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model
from tierstore.errors import BudgetError

WIDTH, LAYERS = 64, 6
LAYER = 4 * WIDTH * WIDTH
BUDGET = 4 * LAYER
NBYTES = WIDTH * WIDTH  # bytes of the weight below: one each


class Mixed(nn.Module):
    """The first weight is of torch's old quantised type, which is neither plain nor a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        numbers = torch.quantize_per_tensor(torch.randn(WIDTH, WIDTH), 0.1, 0, torch.qint8)
        self.first = nn.Parameter(numbers, requires_grad=False)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x @ self.first.dequantize().to(x.device))
        return result


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def budget_of(store: TierStore) -> int:
    found = store.stats().budget_bytes["HOST"]
    assert found is not None
    return found


@torch.no_grad()
def test_unsupported_weight_stays_and_is_counted(
    disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Mixed()
    expected = model(X)
    caplog.set_level(logging.INFO, "tierstore")
    with open_store(disk_dir, BUDGET) as store:
        before = budget_of(store)
        dispatch_model(model, store)
        assert budget_of(store) == before - NBYTES
        for _ in range(2):
            assert torch.equal(model(X), expected)
        assert store.stats().bytes_read > LAYERS * LAYER
        assert store.stats().peak_bytes["HOST"] <= before - NBYTES
        disable_offload(model)
        assert budget_of(store) == before
    messages = [r.getMessage() for r in caplog.records if r.getMessage().startswith("budget of")]
    assert [" more are used outside" in each for each in messages] == [True, False], "and back"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    message = record.getMessage()
    assert "1 tensors (Parameter)" in message and f"{NBYTES:,} bytes" in message


def test_unsupported_weight_that_fills_the_budget_raises(disk_dir: Path) -> None:
    model = Mixed()
    with open_store(disk_dir, BUDGET) as store:
        store.put("mine", {"x": torch.zeros(8)})
        before = budget_of(store)
        model.first = nn.Parameter(
            torch.quantize_per_tensor(torch.zeros(before), 0.1, 0, torch.qint8), requires_grad=False
        )
        with pytest.raises(BudgetError, match=f"raise the budget to more than {before:,} bytes"):
            dispatch_model(model, store)
        assert budget_of(store) == before
        assert not model.layers[0].weight.is_inference()
        with store.acquire("mine") as lease:
            assert not lease.tensor.any()


@torch.no_grad()
def test_unsupported_weights_of_two_models_count_together(disk_dir: Path) -> None:
    one, other = Mixed(), Mixed()
    expected = one(X)
    with open_store(disk_dir, BUDGET) as store:
        before = budget_of(store)
        dispatch_model(one, store)
        dispatch_model(other, store)
        assert budget_of(store) == before - 2 * NBYTES
        assert torch.equal(one(X), expected) and torch.equal(other(X), expected)
        disable_offload(one)
        assert budget_of(store) == before - NBYTES
        assert torch.equal(other(X), expected)
