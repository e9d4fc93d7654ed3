"""A child and its parent, each dispatched separately; and restored models."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import acquires
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    References,
    Weights,
    assert_ordinary,
    store_for,
)
from tests.helpers.tensors import assert_same, parameter_bytes
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
    load_checkpoint_and_dispatch,
)
from tierstore.errors import ClosedError

pytestmark = [
    pytest.mark.full(
        "model and dispatch method are independent; test_parity.py covers both devices",
        keep="a third",
    ),
    ON_BOTH,
]
SHARE = 0.5


class Pair(nn.Module):
    """Two towers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = models.Tower(seed=1), models.Tower(seed=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    return model(models.rows()).cpu()


@torch.no_grad()
def outputs(device: str, model: nn.Module | None = None) -> torch.Tensor:
    plain = Pair() if model is None else model
    return plain.to(device)(models.rows().to(device)).cpu()


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    with store_for(Pair(), disk_dir, device, SHARE) as store:
        yield store


@pytest.fixture
def other(device: str, tmp_path: Path) -> Iterator[TierStore]:
    with store_for(Pair(), tmp_path / "other", device, SHARE) as store:
        yield store


def lease_counts(*stores: TierStore) -> list[int]:
    return [acquires(store) for store in stores]


def serving(model: Any, *stores: TierStore) -> list[bool]:
    """Return which stores lease weights when the model runs."""
    before = lease_counts(*stores)
    run(model)
    return [now > then for now, then in zip(lease_counts(*stores), before, strict=True)]


def groups(store: TierStore) -> list[str]:
    return [key for key in store if not key.startswith("weights/")]


def bytes_in_groups(store: TierStore) -> int:
    sizes = {group.key: group.nbytes for group in store.snapshot().groups}
    return sum(sizes[key] for key in groups(store))


# Nested -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("child_first", (True, False), ids=("child first", "parent first"))
@pytest.mark.parametrize("same_store", (True, False), ids=("one store", "two stores"))
def test_child_and_parent_run_on_their_stores(
    same_store: bool, child_first: bool, device: str, store: TierStore, other: TierStore
) -> None:
    expected, model = outputs(device), Pair()
    weights = Weights.of(model)
    childs = store if same_store else other
    if child_first:
        dispatch_model(model.first, childs)
        dispatch_model(model, store)
    else:
        dispatch_model(model, store)
        assert torch.equal(run(model), expected)
        dispatch_model(model.first, childs)
    for _ in range(2):
        assert torch.equal(run(model), expected)
        weights.assert_unchanged(model)
    # Each weight is in one dispatch.
    padding = 4096 * len(groups(store) + groups(other)) + 256 * len(list(model.parameters()))
    assert padding < models.LAYER_BYTES * 8  # one tower
    total = bytes_in_groups(store) + (0 if same_store else bytes_in_groups(other))
    assert parameter_bytes(model) <= total <= parameter_bytes(model) + padding
    if not same_store:
        assert parameter_bytes(model.first) <= bytes_in_groups(other)
        assert serving(model, store, other) == [True, True]
        assert serving(model.first, store, other) == [False, True]
    disable_offload(model)
    assert torch.equal(run(model), expected)
    assert serving(model, store, other) == [same_store, not same_store]
    disable_offload(model.first)
    assert serving(model, store, other) == [False, False]
    assert not groups(store) and not groups(other)
    assert_ordinary(model)
    weights.assert_unchanged(model)


@pytest.mark.parametrize("child_first", (True, False), ids=("child first", "parent first"))
def test_disabled_child_returns_to_its_parent(
    child_first: bool, device: str, store: TierStore, other: TierStore
) -> None:
    expected, model = outputs(device), Pair()
    weights = Weights.of(model)
    pair = [(model.first, other), (model, store)]
    for module, its_store in pair if child_first else reversed(pair):
        dispatch_model(module, its_store)
    run(model)
    disable_offload(model.first)
    assert not groups(other)
    for _ in range(2):
        assert torch.equal(run(model), expected)
        weights.assert_unchanged(model)
    assert bytes_in_groups(store) >= parameter_bytes(model)
    assert serving(model, store, other) == [True, False]
    disable_offload(model)
    assert_ordinary(model)
    weights.assert_unchanged(model)


def test_edits_in_a_nested_dispatch_are_used(
    device: str, store: TierStore, other: TierStore
) -> None:
    model, plain = Pair(), Pair()
    dispatch_model(model.first, other)
    dispatch_model(model, store)
    run(model)
    for each in (plain, model):
        each.first.layers[0].weight.data += 1
        each.second.layers[3].bias.data -= 1
        each.first.layers[2] = models.draw(nn.Linear(models.WIDTH, models.WIDTH), 5)
    for _ in range(2):
        assert torch.equal(run(model), outputs(device, plain))
        Weights.of(plain).assert_equal_to(model)
    disable_offload(model.first)
    assert torch.equal(run(model), outputs(device, plain))
    disable_offload(model)
    Weights.of(plain).assert_equal_to(model)


@pytest.mark.parametrize("child_first", (True, False), ids=("child first", "parent first"))
def test_weights_tied_across_nested_dispatches_stay_tied(
    child_first: bool, device: str, store: TierStore, other: TierStore
) -> None:
    """An encoder's embedding and a language model's head are tied like this."""

    def tied() -> Pair:
        pair = Pair()
        pair.second.layers[-1].weight = pair.first.layers[0].weight
        return pair

    expected, model = outputs(device, tied()), tied()
    weights = Weights.of(model)
    pair = [(model.first, other), (model, store)]
    for module, its_store in pair if child_first else reversed(pair):
        dispatch_model(module, its_store)
    padding = 4096 * len(groups(store) + groups(other)) + 256 * len(list(model.parameters()))
    assert padding < models.LAYER_BYTES * 8  # one tower
    total = bytes_in_groups(store) + bytes_in_groups(other)
    assert parameter_bytes(model) <= total <= parameter_bytes(model) + padding  # it moves once
    for _ in range(2):
        assert torch.equal(run(model), expected)
        weights.assert_unchanged(model)
    disable_offload(model.first)
    assert torch.equal(run(model), expected)
    disable_offload(model)
    weights.assert_unchanged(model)
    assert_ordinary(model)


def test_three_nested_dispatches_run(device: str, store: TierStore, other: TierStore) -> None:
    expected, model = outputs(device), Pair()
    weights = Weights.of(model)
    dispatch_model(model.first.layers[2], other)
    dispatch_model(model.first, store)
    dispatch_model(model, other)
    for module in (model.first, model, model.first.layers[2]):
        assert torch.equal(run(model), expected)
        disable_offload(module)
        assert torch.equal(run(model), expected)
    assert_ordinary(model)
    weights.assert_unchanged(model)
    assert not groups(store) and not groups(other)


def test_dispatched_part_of_a_larger_model_follows_it(device: str, store: TierStore) -> None:
    """An operation on the whole model also applies to the part."""
    inner, plain = Pair(), nn.Sequential(Pair(), nn.Tanh())
    weights = Weights.of(inner)
    model = nn.Sequential(dispatch_model(inner, store), nn.Tanh())
    expected = outputs(device, plain)
    for _ in range(2):
        assert torch.equal(run(model), expected)
    weights.assert_unchanged(inner)
    model.to("cpu")
    with pytest.raises(RuntimeError, match="disable_offload"):
        model.to("meta")
    assert torch.equal(run(model), expected)
    state = plain.to("cpu").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.double()
    plain.double()
    with torch.no_grad():
        found = model(models.rows().double()).cpu()
        expected = plain.to(device)(models.rows().double().to(device)).cpu()
    assert torch.equal(found, expected)
    assert {parameter.dtype for parameter in inner.parameters()} == {torch.float64}
    model.load_state_dict(nn.Sequential(Pair(), nn.Tanh()).state_dict())
    Weights.of(Pair().double()).assert_equal_to(inner)


def test_child_offloaded_in_groups_raises(device: str, store: TierStore, other: TierStore) -> None:
    """Only one of the two adapters may have it."""
    model = Pair()
    with enable_group_offload(model.first, other):
        with pytest.raises(ValueError, match="already offloaded"):
            dispatch_model(model, store)
        assert not store.keys()
        plain = Pair().first.to(device)
        with torch.no_grad():
            expected = plain(models.rows().to(device))
            assert torch.equal(model.first(models.rows()).cpu(), expected.cpu())
    dispatch_model(model, store)
    assert torch.equal(run(model), outputs(device))


# Dispatching again --------------------------------------------------------------------------------


def test_dispatch_again_with_the_same_arguments_does_nothing(device: str, store: TierStore) -> None:
    model = dispatch_model(Pair(), store)
    run(model)
    before, written = groups(store), store.stats().bytes_written
    assert dispatch_model(model, store) is model
    assert dispatch_model(model, store, "auto", main_device=device) is model
    assert groups(store) == before
    assert store.stats().bytes_written == written
    assert torch.equal(run(model), outputs(device))


def test_dispatch_again_with_other_arguments_starts_over(
    device: str, store: TierStore, other: TierStore
) -> None:
    model = dispatch_model(Pair(), store)
    weights = Weights.of(model)
    before, written = groups(store), store.stats().bytes_written
    dispatch_model(model, store, {"": "cpu"})
    assert not set(groups(store)) & set(before)
    assert store.stats().bytes_written == written  # it holds all of it
    assert torch.equal(run(model), outputs(device))
    dispatch_model(model, other)
    assert not groups(store)
    assert torch.equal(run(model), outputs(device))
    assert serving(model, store, other) == [False, True]
    weights.assert_unchanged(model)
    disable_offload(model)
    assert_ordinary(model)
    weights.assert_unchanged(model)


def test_dispatch_after_removal_works(device: str, store: TierStore) -> None:
    model = Pair()
    weights = Weights.of(model)
    for _ in range(3):
        dispatch_model(model, store)
        assert torch.equal(run(model), outputs(device))
        disable_offload(model)
        weights.assert_unchanged(model)
        assert not groups(store)
    assert_ordinary(model)


# Removal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", models.KINDS)
def test_disabled_model_is_unchanged(
    kind: str, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    model = models.load(kind, checkpoint(kind))
    weights = Weights.of(model)
    modes = [(p.requires_grad, p.dtype, p.stride()) for p in model.parameters()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.forward(kind, model)
        read = store.stats().bytes_read
        assert read > 0
        assert disable_offload(model) is model
        assert not groups(store)
        before = lease_counts(store)
        assert_same(models.run(kind, model), reference(kind).outputs)
        assert lease_counts(store) == before
        assert store.stats().bytes_written == 0
    weights.assert_unchanged(model)
    assert_ordinary(model)
    assert [(p.requires_grad, p.dtype, p.stride()) for p in model.parameters()] == modes
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert {buffer.device.type for buffer in model.buffers()} <= {"cpu"}


def test_disabled_model_needs_neither_store_nor_directory(device: str, disk_dir: Path) -> None:
    model = Pair()
    weights = Weights.of(model)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        assert store.stats().bytes_written > 0
        run(model)
        disable_offload(model)
    shutil.rmtree(disk_dir)
    weights.assert_unchanged(model)
    assert torch.equal(run(model), outputs("cpu"))
    model.to("meta")


def test_disabled_model_trains(device: str, store: TierStore) -> None:
    model, plain = Pair(), Pair()
    dispatch_model(model, store)
    run(model)
    disable_offload(model)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            each(models.rows()).square().sum().backward()
            optimizer.step()
    Weights.of(plain).assert_equal_to(model)
    assert not torch.equal(model.first.layers[0].bias, Pair().first.layers[0].bias)


def test_edits_after_disabling_stay_out_of_the_store(device: str, disk_dir: Path) -> None:
    """Its weights are maps of the store's files: writes to them must not reach the files."""
    model = Pair()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        disable_offload(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        again = dispatch_model(Pair(), store)
        assert torch.equal(run(again), outputs(device))
    model = Pair()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        assert store.stats().bytes_written == 0
        assert torch.equal(run(model), outputs(device))


def test_disable_of_a_model_not_offloaded_raises(device: str, store: TierStore) -> None:
    model = Pair()
    with pytest.raises(ValueError, match=r"not offloaded.*dispatch_model"):
        disable_offload(model)
    dispatch_model(model, store)
    for part in (model.first, model.first.layers, model.first.layers[0]):
        with pytest.raises(ValueError, match="not offloaded"):
            disable_offload(part)
    assert serving(model, store) == [True]
    disable_offload(model)
    with pytest.raises(ValueError, match="not offloaded"):
        disable_offload(model)


def test_store_closed_first_leaves_an_ordinary_model(
    device: str, checkpoint: Checkpoints, disk_dir: Path, tmp_path: Path
) -> None:
    model = Pair()
    weights = Weights.of(model)
    loaded = models.empty("parts")
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        load_checkpoint_and_dispatch(loaded, checkpoint("parts"), store)
        run(model)
    weights.assert_unchanged(model)
    Weights.of(models.load("parts", checkpoint("parts"))).assert_equal_to(loaded)
    for each in (model, loaded):
        for _ in range(2):
            with pytest.raises(ClosedError):
                models.run("parts", each) if each is loaded else run(each)
        disable_offload(each)
        assert_ordinary(each)
    assert torch.equal(run(model), outputs("cpu"))
    plain = models.load("parts", checkpoint("parts"))
    assert_same(models.run("parts", loaded), models.run("parts", plain))


def test_dropped_model_leaves_the_store(device: str, store: TierStore) -> None:
    model = dispatch_model(Pair(), store)
    run(model)
    assert groups(store)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert not groups(store)
    assert torch.equal(run(dispatch_model(Pair(), store)), outputs(device))


def test_weight_outlives_its_model(device: str, disk_dir: Path) -> None:
    model = Pair()
    true = Weights.of(model).values["first.layers.3.weight"]
    with store_for(model, disk_dir, device, SHARE) as store:
        weight = dispatch_model(model, store).first.layers[3].weight
        run(model)
        del model
        gc.collect()
        assert torch.equal(weight, true)
    shutil.rmtree(disk_dir)
    assert torch.equal(weight, true)
