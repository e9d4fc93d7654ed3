"""An automatic device budget: half of the free memory, and half of the memory that models leave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, pretend
from tierstore import TierStore, dispatch_model
from tierstore.engine.settings import grown_device_budget
from tierstore.model.sizes import PAGE

WIDTH, LAYERS = 256, 24
LAYER = WIDTH * WIDTH * 4
LIMIT = 20 * LAYER
"""Device limit: less than the weights."""
ROWS = 64


class Tower(nn.Module):
    """Layers one after the other, with small activations."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def given() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def limit() -> Iterator[int]:
    """Limit the device to little memory, and free it all."""
    torch.accelerator.synchronize(ACCELERATOR)
    torch.accelerator.empty_cache()
    before = pretend.memory_reserved()
    pretend.set_memory_limit(before + LIMIT)
    yield LIMIT
    pretend.set_memory_limit(None)


def open_store(place: Path, **options: Any) -> TierStore:
    return TierStore(2 * LAYERS * LAYER, place, device=ACCELERATOR, **options)


def budget(store: TierStore) -> int:
    found = store.stats().budget_bytes["DEVICE"]
    assert found is not None
    return found


def on_device(store: TierStore) -> int:
    return store.stats().used_bytes["DEVICE"]


# The rule -----------------------------------------------------------------------------------------


def test_grown_budget_never_shrinks_or_exceeds_memory() -> None:
    draw = random.Random(0)
    grown = 0
    for _ in range(2000):
        total = draw.randrange(PAGE, 1 << 37)
        before = draw.randrange(PAGE, total + 1) // PAGE * PAGE
        held = draw.randrange(0, before + 1)
        free = draw.randrange(0, total - held + 1)
        after = grown_device_budget(before, held, free)
        assert after % PAGE == 0
        assert after >= before
        assert after == before or after <= held + free // 2 <= total
        grown += after > before
    assert 200 < grown < 1800


# On a device --------------------------------------------------------------------------------------


@pytest.mark.pretend_only("limits")
def test_budget_grows_after_the_model_has_run(disk_dir: Path, limit: int) -> None:
    model = Tower()
    with torch.no_grad():
        expected = model(given())
        with open_store(disk_dir) as store:
            first = budget(store)
            assert limit // 2 - PAGE <= first <= limit // 2
            dispatch_model(model, store)
            assert torch.equal(model(given()), expected)
            second = budget(store)
            assert first + 2 * LAYER < second < limit
            for _ in range(3):
                assert torch.equal(model(given()), expected)
            assert on_device(store) > first
            assert budget(store) == second, "it grows once"
            assert store.stats().peak_bytes["DEVICE"] <= second


@pytest.mark.pretend_only("limits")
@pytest.mark.parametrize("chosen", [8 * LAYER, "40%"])
def test_budget_set_by_the_caller_stays(chosen: int | str, disk_dir: Path, limit: int) -> None:
    model = Tower()
    with open_store(disk_dir, device_budget=chosen) as store, torch.no_grad():
        first = budget(store)
        dispatch_model(model, store)
        for _ in range(2):
            model(given())
        assert budget(store) == first


@pytest.mark.pretend_only("limits")
def test_budget_growth_leaves_memory_for_activations(disk_dir: Path, limit: int) -> None:
    """The more memory activations take, the less the budget grows."""
    grown = []
    for number, rows in enumerate((64, 256)):
        torch.accelerator.empty_cache()
        with open_store(disk_dir / str(number), device_budget="auto") as store, torch.no_grad():
            first = budget(store)
            model = dispatch_model(Tower(), store)
            x = torch.ones(rows, WIDTH)
            for _ in range(3):
                model(x)
            grown.append(budget(store) - first)
            free = pretend.mem_get_info()[0]
            assert free >= 0
    assert grown[0] > grown[1]


@pytest.mark.pretend_only("limits")
def test_budget_grows_once_every_model_has_run(disk_dir: Path, limit: int) -> None:
    """The decoder of an image runs last, and needs more memory than all before it."""
    with open_store(disk_dir) as store, torch.no_grad():
        first = budget(store)
        one, other = dispatch_model(Tower(), store), dispatch_model(Tower(1), store)
        for _ in range(3):
            one(given())
            assert budget(store) == first
        other(given())
        assert budget(store) > first


@pytest.mark.pretend_only("limits")
def test_failed_run_does_not_grow_the_budget(disk_dir: Path, limit: int) -> None:
    with open_store(disk_dir) as store, torch.no_grad():
        first = budget(store)
        model = dispatch_model(Tower(), store)
        with pytest.raises(RuntimeError):
            model(torch.ones(1, WIDTH + 1))
        assert budget(store) == first
        model(given())
        assert budget(store) > first


def test_budget_without_an_accelerator_does_not_grow(disk_dir: Path) -> None:
    model = Tower()
    with TierStore(8 * LAYER, disk_dir, device="cpu") as store, torch.no_grad():
        dispatch_model(model, store)
        model(given())
        assert store.stats().budget_bytes["HOST"] == 8 * LAYER
