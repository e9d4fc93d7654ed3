"""A deleted or replaced parameter is freed at once, and its offloaded model still runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICES, same
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model, enable_group_offload

WIDTH, LAYERS = 64, 6
WEIGHT = 4 * WIDTH * WIDTH
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Gated(nn.Module):
    """Also runs without its weight, and has a small parameter that stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, "weight", None)
        return (x if weight is None else x @ weight) * self.scale


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated() for _ in range(LAYERS))).requires_grad_(False)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    with open_store(disk_dir, 3 * WEIGHT, device) as store:
        yield store


@pytest.fixture(params=[dispatch_model, enable_group_offload], ids=lambda made: made.__name__)
def model(request: pytest.FixtureRequest, store: TierStore) -> Any:
    """Return a model that has run, so that all state of a run exists."""
    model = build()
    request.param(model, store)
    model(X)
    return model


def delete(module: Any) -> None:
    del module.weight


def replace(module: Any) -> None:
    module.weight = nn.Parameter(2 * torch.eye(WIDTH), requires_grad=False)


def empty(module: Any) -> None:
    module.weight = None


CHANGES = (delete, replace, empty)
changed_by = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def expected(change: Callable[[Any], None]) -> torch.Tensor:
    plain = build()
    change(plain[2])
    found: torch.Tensor = plain(X)
    return found


@pytest.mark.full("the way, the device", keep="a third")
@changed_by
def test_parameter_is_freed_with_its_last_name(
    change: Callable[[Any], None], model: Any, store: TierStore, device: str
) -> None:
    gone = weakref.ref(model[2].weight)
    change(model[2])
    gc.collect()
    assert gone() is None
    others = [nn.Parameter(torch.full((WIDTH, WIDTH), 7.0)) for _ in range(20)]  # reuse its memory
    before = store.stats().bytes_read
    for _ in range(2):
        assert same(model(X).cpu(), expected(change), device)
    assert store.stats().bytes_read > before
    assert all(torch.equal(other, torch.full((WIDTH, WIDTH), 7.0)) for other in others)


@pytest.mark.full("the way, the device", keep="a third")
@changed_by
def test_parameter_still_referenced_stays_true(
    change: Callable[[Any], None], model: Any, store: TierStore, device: str
) -> None:
    """The control."""
    kept, true = model[2].weight, build()[2].weight
    change(model[2])
    gc.collect()
    model(X)
    assert torch.equal(kept, true)
    model[2].weight = kept
    assert same(model(X).cpu(), build()(X), device)


def test_tied_parameter_stays_with_its_other_name(model: Any, device: str) -> None:
    plain = build()
    for each in (model, plain):
        each[3].weight = each[2].weight
    model(X)
    tied = weakref.ref(model[2].weight)
    for each in (model, plain):
        del each[2].weight
    gc.collect()
    assert tied() is model[3].weight
    assert same(model(X).cpu(), plain(X), device)


def test_parameter_may_be_deleted_while_in_use(store: TierStore, device: str) -> None:
    class Forgetful(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            self._parameters.pop("weight", None)
            return result

    plain, model = build(), build()
    for each in (plain, model):
        old = each[2]
        each[2] = Forgetful()
        each[2].load_state_dict(old.state_dict())
        each.requires_grad_(False)
    gone = weakref.ref(model[2].weight)
    dispatch_model(model, store)
    for _ in range(3):
        assert same(model(X).cpu(), plain(X), device)
    gc.collect()
    assert gone() is None


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "double": lambda model: model.double(),
    "state_dict": lambda model: model.state_dict(),
    "walk": lambda model: [p.mul_(1) for p in model.parameters()],
    "edit": lambda model: model[1].weight.mul_(2),
}


@pytest.mark.full("the operation", keep="a third")
@pytest.mark.parametrize("name", ACTIONS)
def test_other_operations_work_after_a_parameter_is_deleted(
    name: str, store: TierStore, device: str
) -> None:
    plain, model = build(), dispatch_model(build(), store)
    results = []
    for each in (plain, model):
        each(X)
        del each[2].weight
        gc.collect()
        results.append(ACTIONS[name](each))
    if name == "state_dict":
        assert results[1].keys() == results[0].keys()
        assert all(torch.equal(results[1][key], results[0][key]) for key in results[0])
    x = X.double() if name == "double" else X
    assert same(model(x).cpu(), plain(x), device)
    disable_offload(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_resident_parameter_is_freed_when_replaced(model: Any, device: str) -> None:
    gone = weakref.ref(model[2].scale)
    model[2].scale = nn.Parameter(torch.full((), 3.0), requires_grad=False)
    gc.collect()
    assert gone() is None
    plain = build()
    plain[2].scale.fill_(3.0)
    assert same(model(X).cpu(), plain(X), device)
