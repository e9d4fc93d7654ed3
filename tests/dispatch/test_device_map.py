"""Device maps: accepted forms, the meaning of each place, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, count, needs_accelerator
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Weights,
    assert_ordinary,
    store_for,
)
from tests.helpers.tensors import assert_same, parameter_bytes
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from tierstore.adapters.owners import owner_of
from tierstore.errors import BudgetError

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="any device",
)

COUNT = 16
SHARE = 0.7


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    with store_for(models.Tower(COUNT), disk_dir, device, SHARE) as store:
        yield store


def layers(first: int, last: int, place: Any) -> dict[str, Any]:
    return {f"layers.{n}": place for n in range(first, last)}


def outputs(device: str) -> torch.Tensor:
    with torch.no_grad():
        return models.Tower(COUNT).to(device)(models.rows().to(device)).cpu()


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    return model(models.rows()).cpu()


def read_in_each_run(model: Any, store: TierStore, runs: int = 4) -> list[int]:
    """Return the bytes read in each run.

    A prefetch may begin the next run before this one ends: compare their sum.
    """
    counts = []
    for _ in range(runs):
        before = store.stats().bytes_read
        run(model)
        counts.append(store.stats().bytes_read - before)
    return counts


# Places -------------------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("kept", (range(6), range(COUNT - 6, COUNT)), ids=("first", "last"))
def test_cpu_place_is_evicted_last(kept: range, device: str, disk_dir: Path) -> None:
    """Six of sixteen layers stay in RAM where there is space for nine."""
    model = models.Tower(COUNT)
    expected = outputs(device)
    budget = 9 * (models.LAYER_BYTES + 4096)
    budgets = {} if device == "cpu" else {"device_budget": 3 * (models.LAYER_BYTES + 4096)}
    with TierStore(budget, disk_dir, device=device, **budgets) as store:
        dispatch_model(model, store, {"": "disk", **layers(kept.start, kept.stop, "cpu")})
        names = {f"layers.{n}.{part}" for n in kept for part in ("weight", "bias")}
        keys = keys_with(model, names)
        for _ in range(2):
            assert torch.equal(run(model), expected)
        for _ in range(4):
            assert torch.equal(run(model), expected)
            assert keys <= in_memory(store)
        rest = (COUNT - len(kept)) * (models.LAYER_BYTES + 4096)
        assert 0 < sum(read_in_each_run(model, store)) <= 4 * rest + models.LAYER_BYTES
        assert torch.equal(run(model), expected)


def keys_with(model: Any, names: set[str]) -> set[str]:
    """Return the groups that hold only the named tensors."""
    owner = owner_of(model)
    assert owner is not None
    found = {key: set(held) for key, held in owner.groups.items() if names & set(held)}
    assert set().union(*found.values()) == names
    return set(found)


def in_memory(store: TierStore) -> set[str]:
    """Return the groups that need not be read."""
    return {group.key for group in store.snapshot().groups if {*group.tiers} - {"DISK"}}


@ON_BOTH
def test_cpu_place_of_a_fitting_model_is_read_once(device: str, disk_dir: Path) -> None:
    model = models.Tower(COUNT)
    with store_for(model, disk_dir, device, 1.5) as store:
        dispatch_model(model, store, {"": "cpu"})
        run(model)
        assert sum(read_in_each_run(model, store)) == 0
        assert torch.equal(run(model), outputs(device))


@ON_BOTH
def test_cpu_place_respects_the_budget(device: str, disk_dir: Path) -> None:
    model = models.Tower(COUNT)
    with store_for(model, disk_dir, device, 0.3) as store:
        dispatch_model(model, store, {"": "cpu"})
        for _ in range(3):
            assert torch.equal(run(model), outputs(device))
        stats = store.stats()
        assert 0 < stats.peak_bytes["HOST"] <= stats.budget_bytes["HOST"]
        assert min(read_in_each_run(model, store)) > 0


@needs_accelerator
@pytest.mark.parametrize("place", (0, ACCELERATOR, DEVICE_0, torch.device(ACCELERATOR, 0)))
def test_device_place_stays_on_the_device(place: Any, disk_dir: Path) -> None:
    model, stays = models.Tower(COUNT), 4
    weights = Weights.of(model)
    on_device = {f"layers.{n}.{part}" for n in range(stays) for part in ("weight", "bias")}
    with store_for(model, disk_dir, ACCELERATOR, 0.5) as store:
        dispatch_model(model, store, {"": "disk", **layers(0, stays, place)})
        onloaded, runs = store.stats().bytes_onloaded, 10
        for _ in range(runs):
            for name, parameter in model.named_parameters():
                where = ACCELERATOR if name in on_device else "cpu"
                assert parameter.device.type == where
                assert torch.equal(parameter.cpu(), weights.values[name])
            assert store.stats().used_bytes["DEVICE"] >= stays * models.LAYER_BYTES
            assert torch.equal(run(model), outputs(ACCELERATOR))
            assert Weights.of(model).objects == weights.objects
        # Only the rest moved, and the next run can begin with no more than fits beside the layers
        # on the device.
        rest = (COUNT - stays) * (models.LAYER_BYTES + 4096)
        beside = store.stats().budget_bytes["DEVICE"] - stays * models.LAYER_BYTES
        onloaded = store.stats().bytes_onloaded - onloaded
        assert onloaded <= runs * rest + beside < runs * parameter_bytes(model)
        stats = store.stats()
        assert stats.peak_bytes["DEVICE"] <= stats.budget_bytes["DEVICE"]
        disable_offload(model)
        assert store.stats().used_bytes["DEVICE"] < stays * models.LAYER_BYTES
    weights.assert_unchanged(model)
    assert_ordinary(model)


@needs_accelerator
def test_weights_placed_on_the_device_may_be_edited(disk_dir: Path) -> None:
    plain, model = models.Tower(COUNT), models.Tower(COUNT)
    with store_for(model, disk_dir, ACCELERATOR, 0.5) as store:
        dispatch_model(model, store, {"": "disk", "layers.0": 0})
        run(model)
        for each in (plain, model):
            each.layers[0].weight.data += 1
            each.layers[0].bias.data.zero_()
            each.layers[5].weight.data *= 2
        with torch.no_grad():
            expected = plain.to(ACCELERATOR)(models.rows().to(ACCELERATOR)).cpu()
        for _ in range(2):
            assert torch.equal(run(model), expected)
        disable_offload(model)
    Weights.of(plain).assert_equal_to(model)


@needs_accelerator
def test_device_place_beyond_its_budget_raises(disk_dir: Path) -> None:
    model = models.Tower(COUNT)
    weights = Weights.of(model)
    with store_for(model, disk_dir, ACCELERATOR, 0.5) as store:
        with pytest.raises(BudgetError, match="budget"):
            dispatch_model(model, store, {"": 0})
        weights.assert_unchanged(model)
        assert_ordinary(model)
        assert not [key for key in store if not key.startswith("weights/")]
        assert torch.equal(run(dispatch_model(model, store)), outputs(ACCELERATOR))


@needs_accelerator
@pytest.mark.parametrize("ram_share", (1.5, 0.25), ids=("as much", "more"))
def test_device_place_for_the_whole_model_stays(ram_share: float, disk_dir: Path) -> None:
    """This works even where RAM could not hold it."""
    model = models.Tower(COUNT)
    weights = Weights.of(model)
    size = parameter_bytes(model)
    ram, on_device = int(ram_share * size), int(1.5 * size)
    with TierStore(ram, disk_dir, device=ACCELERATOR, device_budget=on_device) as store:
        dispatch_model(model, store, {"": ACCELERATOR})
        onloaded = store.stats().bytes_onloaded
        for _ in range(2):
            assert torch.equal(run(model), outputs(ACCELERATOR))
            assert {parameter.device.type for parameter in model.parameters()} == {ACCELERATOR}
        stats = store.stats()
        assert stats.bytes_onloaded == onloaded
        assert stats.peak_bytes["HOST"] <= ram
        disable_offload(model)
    weights.assert_unchanged(model)


# Kinds of maps ------------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("device_map", (None, "auto", "balanced", "balanced_low_0", "sequential"))
def test_computed_map_names_are_accepted(
    device_map: str | None, device: str, store: TierStore
) -> None:
    model = models.Tower(COUNT)
    weights = Weights.of(model)
    dispatch_model(model, store, device_map)
    for _ in range(2):
        assert torch.equal(run(model), outputs(device))
        weights.assert_unchanged(model)
    assert store.stats().bytes_read > 0


@ON_BOTH
def test_map_computed_by_accelerate_is_accepted(
    device: str, checkpoint: Checkpoints, store: Any
) -> None:
    """The map comes from `infer_auto_device_map` of an empty model, for one device."""
    empty = models.empty("parts")
    size = parameter_bytes(models.build("parts")) // 3
    device_map = accelerate.infer_auto_device_map(
        empty, max_memory={"cpu": size, "disk": 10 * size}, no_split_module_classes=["Linear"]
    )
    assert set(device_map.values()) == {"cpu", "disk"}
    if device != "cpu":
        device_map["norm"] = 0
    load_checkpoint_and_dispatch(empty, checkpoint("parts"), store, device_map)
    plain = models.load("parts", checkpoint("parts")).to(device)
    for _ in range(2):
        assert_same(models.run("parts", empty), models.run("parts", plain, device))
    assert store.stats().bytes_written == 0 < store.stats().bytes_read


@ON_BOTH
def test_longest_name_wins(device: str, disk_dir: Path) -> None:
    """Names end at dots: `layers.1` does not cover `layers.10`."""
    model = models.Tower(COUNT)
    place = "cpu" if device == "cpu" else 0
    with store_for(model, disk_dir, device, 1.5) as store:
        dispatch_model(
            model,
            store,
            {"": "disk", "layers": place, "layers.1": "disk", "layers.10.weight": "disk"},
        )
        assert torch.equal(run(model), outputs(device))
        if device != "cpu":
            away = {n for n, p in model.named_parameters() if p.device.type == "cpu"}
            assert away == {"layers.1.weight", "layers.1.bias", "layers.10.weight"}


@ON_BOTH
def test_map_without_the_empty_name_is_accepted(device: str, store: TierStore) -> None:
    model = models.Tower(COUNT)
    dispatch_model(model, store, {**layers(0, 5, "cpu"), **layers(5, COUNT, "disk")})
    for _ in range(2):
        assert torch.equal(run(model), outputs(device))
    assert store.stats().bytes_read > 0


@ON_BOTH
def test_tied_weights_in_two_places_stay_tied(device: str, disk_dir: Path) -> None:
    model, plain = models.build("parts"), models.build("parts").to(device)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store, {"": "disk", "embed": "disk", "head": "cpu"})
        for _ in range(2):
            assert_same(models.run("parts", model), models.run("parts", plain, device))
            assert model.head.weight is model.embed.weight


WRONG: dict[str, tuple[Any, str]] = {
    "an unknown word": ("fastest", "'auto'"),
    "a device": (torch.device("cpu"), "'auto'"),
    "a list": (["layers"], "'auto'"),
    "an unknown name": ({"": "disk", "layer.0": "cpu"}, "layer.0.*named_modules"),
    "half a name": ({"": "disk", "lay": "cpu"}, "lay"),
    "an unknown place": ({"": "ram"}, "'ram'.*'cpu'.*'disk'"),
    "no place": ({"": None}, "None.*'cpu'.*'disk'"),
    "the meta device": ({"": "meta"}, "'meta'"),
    "a truth value": ({"": True}, "True"),
    "a negative index": ({"": -1}, "-1"),
    "a device that is not there": ({"": "xpu:0"}, "xpu:0"),
    "another index": ({"": "disk", "layers.0": 1}, "1.*serves"),
    "parameters without a place": (
        layers(0, COUNT - 1, "disk"),
        f"no entry for 2 parameters, .*layers.{COUNT - 1}.weight",
    ),
    "nothing": ({}, "layers.0.weight"),
}
if count() > 1:
    WRONG["another device"] = {"": "disk", "layers.0": DEVICE_1}, f"{DEVICE_1}.*serves"


@pytest.mark.parametrize("device", ["cpu"])
def test_map_with_unknown_place_names_the_places_once(device: str, store: TierStore) -> None:
    with pytest.raises(ValueError, match=r"device_map has 'ram': use 'cpu' or 'disk'$"):
        dispatch_model(models.Tower(COUNT), store, {"": "ram"})


@needs_accelerator
@ON_BOTH
def test_invalid_map_raises(device: str, store: TierStore) -> None:
    model = models.Tower(COUNT)
    weights = Weights.of(model)
    for device_map, message in WRONG.values():
        with pytest.raises(ValueError, match=message):
            dispatch_model(model, store, device_map)
        weights.assert_unchanged(model)
        assert_ordinary(model)
        assert not store.keys()
    dispatch_model(model, store)
    for device_map, message in WRONG.values():
        with pytest.raises(ValueError, match=message):  # nor does it undo the dispatch
            dispatch_model(model, store, device_map)
    read = store.stats().bytes_read
    for _ in range(2):
        assert torch.equal(run(model), outputs(device))
    assert store.stats().bytes_read > read
