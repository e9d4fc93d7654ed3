"""Checkpoints saved by torch alone load on a store, and the other way round, in one process.

`tests/training/test_saving_ranks.py` does so on several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tierstore import OffloadModel, OffloadOptimizer, TierStore, load_training, save_training

pytestmark = [
    pytest.mark.floor,
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated"),
]

WIDTH, LAYERS = 96, 4
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99), "fused": False}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

Pair = tuple[nn.Module, torch.optim.Optimizer]


def alone(seed: int) -> Pair:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters(), **(ADAMW if seed == 0 else {}))


@contextmanager
def on_store(place: Path, seed: int) -> Iterator[Pair]:
    """Yield a model and optimizer on a store whose RAM holds a third of the state."""
    with TierStore(48 * 4096, place, device="cpu") as store:
        model = OffloadModel(alone(seed)[0], store)
        options = ADAMW if seed == 0 else {}
        yield model, OffloadOptimizer(model, store, torch.optim.AdamW, **options)
        assert store.stats().bytes_read > 0
        assert store.stats().bytes_written > 0


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + 3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(pair: Pair) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(pair[0]),
        "optimizer": get_optimizer_state_dict(*pair, options=FLAT),
    }


def assert_equal(one: Pair, other: Pair) -> None:
    assert all(map(torch.equal, one[0].parameters(), other[0].parameters()))
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        found, wanted = one[1].state[p], other[1].state[q]
        assert found.keys() == wanted.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    for group, wanted in zip(one[1].param_groups, other[1].param_groups, strict=True):
        assert {**group, "params": 0} == {**wanted, "params": 0}


def test_torch_checkpoint_continues_on_a_store(tmp_path: Path) -> None:
    pair = alone(0)
    steps(*pair, 0)
    dcp.save(by_name(pair), checkpoint_id=tmp_path / "run")
    with on_store(tmp_path / "store", 1) as offloaded:
        assert load_training(tmp_path / "run", *offloaded) is None
        assert_equal(offloaded, pair)
        steps(*pair, 3)
        steps(*offloaded, 3)
        assert_equal(offloaded, pair)


def test_store_checkpoint_continues_in_torch_alone(tmp_path: Path) -> None:
    with on_store(tmp_path / "store", 0) as offloaded:
        steps(*offloaded, 0)
        save_training(tmp_path / "run", *offloaded, extra={"step": 3})
        pair = alone(1)
        state = by_name(pair)
        dcp.load(state, checkpoint_id=tmp_path / "run")
        set_model_state_dict(pair[0], state["model"])
        set_optimizer_state_dict(*pair, state["optimizer"], options=FLAT)
        assert_equal(offloaded, pair)
        steps(*pair, 3)
        steps(*offloaded, 3)
        assert_equal(offloaded, pair)


def test_checkpoint_of_another_torch_optimizer_raises(tmp_path: Path) -> None:
    pair = alone(0)
    steps(*pair, 0)
    dcp.save(by_name(pair), checkpoint_id=tmp_path / "run")
    other = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(ValueError, match="it has no 'dampening', 'momentum', 'nesterov'"):
        load_training(tmp_path / "run", other, torch.optim.SGD(other.parameters()))
    assert all(map(torch.equal, other.parameters(), before))


def test_checkpoint_without_an_optimizer_loads_without_one(tmp_path: Path) -> None:
    pair, other = alone(0), alone(1)
    dcp.save({"model": get_model_state_dict(pair[0])}, checkpoint_id=tmp_path / "run")
    with pytest.raises(ValueError, match="without an optimizer"):
        load_training(tmp_path / "run", *other)
    load_training(tmp_path / "run", other[0])
    assert all(map(torch.equal, other[0].parameters(), pair[0].parameters()))


def test_checkpoint_of_unnamed_optimizer_parameters_raises(tmp_path: Path) -> None:
    pair = alone(0)
    steps(*pair, 0)
    state = {"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    with pytest.raises(ValueError, match="has an optimizer state without parameter names"):
        load_training(tmp_path / "run", *alone(1))
