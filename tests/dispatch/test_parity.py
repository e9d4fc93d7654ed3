"""Dispatched, every model computes bit for bit the same as without a store.

Budgets lie below, around and above the size of the weights; a model runs twice or more: first the
order of use is unknown, then it is learned. After each run every parameter is the same object, on
the CPU, with its true value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, DEVICE_0, needs_accelerator
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Reference,
    References,
    Weights,
    store_for,
)
from tests.helpers.tensors import assert_same, parameter_bytes
from tierstore import (
    TierStore,
    cpu_offload,
    disable_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)

pytestmark = pytest.mark.full(
    "model, dispatch method and device are independent",
    keep="a third",
)

ALL_KINDS = pytest.mark.parametrize("kind", models.KINDS)
RUNS = 2


def assert_bytes_moved(store: TierStore, expected: Reference, runs: int, share: float) -> None:
    """Check that weights needed in `runs` were read, again if they cannot have stayed in memory.

    No run begins with more than the budgets hold, so it reads the rest of the weights that it
    needs, however well the store chose those to keep.
    """
    stats = store.stats()
    budget = int(expected.weights * share)
    tiers = [tier for tier in stats.budget_bytes if tier != "DISK"]
    again = max(0, expected.needed - budget * len(tiers))
    assert stats.bytes_read >= expected.needed + (runs - 1) * again
    if "DEVICE" in tiers:
        again = max(0, expected.needed - budget)
        assert stats.bytes_onloaded >= expected.needed + (runs - 1) * again
    for tier in tiers:
        assert 0 < stats.peak_bytes[tier] <= stats.budget_bytes[tier] <= budget
    assert stats.bytes_offloaded == 0


@ALL_KINDS
@ON_BOTH
@pytest.mark.parametrize("share", (0.1, 0.5, 2.0))
def test_loaded_model_equals_plain(
    share: float,
    device: str,
    kind: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    expected = reference(kind, device)
    model = models.load(kind, checkpoint(kind))
    weights = Weights.of(model)
    with store_for(expected.weights, disk_dir, device, share) as store:
        assert dispatch_model(model, store) is model
        weights.assert_unchanged(model)
        for runs in range(1, RUNS + 1):
            outputs = models.run(kind, model)
            assert_same(outputs, expected.outputs)
            assert {value.device.type for value in outputs.values()} == {"cpu"}
            weights.assert_unchanged(model)
            assert_bytes_moved(store, expected, runs, share)
        assert store.stats().bytes_written == 0  # the checkpoint holds all of it
        assert disable_offload(model) is model
    weights.assert_unchanged(model)
    assert_same(models.run(kind, model), reference(kind).outputs)


@ALL_KINDS
@ON_BOTH
def test_model_without_a_file_equals_plain(
    device: str, kind: str, reference: References, disk_dir: Path
) -> None:
    expected = reference(kind, device, built=True)
    model = models.build(kind)
    weights = Weights.of(model)
    with store_for(expected.weights, disk_dir, device, share=0.4) as store:
        dispatch_model(model, store)
        written = store.stats().bytes_written
        padding = 4096 * len(weights.objects) + 4096 * len(store)
        assert expected.weights <= written <= expected.weights + padding
        for _ in range(RUNS):
            assert_same(models.run(kind, model), expected.outputs)
            weights.assert_unchanged(model)
        assert store.stats().bytes_written == written
        # Each run found at most as much as the budgets hold, the first one too.
        memory = int(0.4 * expected.weights) * (1 if device == "cpu" else 2)
        assert store.stats().bytes_read >= RUNS * (expected.needed - memory)


def every_other(model: nn.Module) -> dict[str, str]:
    """Return a map that names leaves and parents, and the rest by the empty name."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    blocks = [f"{lists[0]}.{n}" for n in range(len(model.get_submodule(lists[0])))]
    places = {"": "disk", lists[0]: "cpu"}
    return places | {blocks[0]: "disk", blocks[-1]: "cpu"}


def mapped(model: Any, store: TierStore, directory: Path) -> Any:
    return dispatch_model(models.load(*_of(directory)), store, every_other(model))


def to_ram(model: Any, store: TierStore, directory: Path) -> Any:
    return cpu_offload(models.load(*_of(directory)), store, execution_device=store.device)


def to_disk(model: Any, store: TierStore, directory: Path) -> Any:
    return disk_offload(models.load(*_of(directory)), store)


def from_files(model: Any, store: TierStore, directory: Path) -> Any:
    objects = [id(parameter) for parameter in model.parameters()]
    load_checkpoint_and_dispatch(model, directory, store, device_map=every_other(model))
    assert [id(parameter) for parameter in model.parameters()] == objects
    return model


def _of(directory: Path) -> tuple[str, Path]:
    return directory.name.partition("-")[0], directory


Way = Callable[[Any, TierStore, Path], Any]


@ALL_KINDS
@ON_BOTH
@pytest.mark.parametrize("way", (mapped, to_ram, to_disk, from_files))
def test_each_way_to_dispatch_equals_plain(
    way: Way,
    device: str,
    kind: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    """Each is given an empty model, and loads one where it needs one."""
    expected = reference(kind, device)
    true = Weights.of(models.load(kind, checkpoint(kind))).values
    with store_for(expected.weights, disk_dir, device, share=0.1) as store:
        model = way(models.empty(kind), store, checkpoint(kind))
        weights = Weights.of(model)
        assert weights.values.keys() == true.keys()
        assert all(torch.equal(weights.values[name], value) for name, value in true.items())
        for runs in range(1, RUNS + 1):
            outputs = models.forward(kind, model)
            assert_same(outputs, {name: expected.outputs[name] for name in outputs})
            weights.assert_unchanged(model)
            assert_bytes_moved(store, expected, runs, share=0.1)
        assert store.stats().bytes_written == 0
        disable_offload(model)
    weights.assert_unchanged(model)


@needs_accelerator
@ALL_KINDS
def test_layers_placed_on_the_device_equal_plain(
    kind: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference(kind, ACCELERATOR)
    model = models.load(kind, checkpoint(kind))
    weights = Weights.of(model)
    # The first block stays there; everything else moves.
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    first = f"{lists[0]}.0"
    with store_for(expected.weights, disk_dir, ACCELERATOR, share=0.25) as store:
        dispatch_model(model, store, {"": "disk", first: DEVICE_0})
        for _ in range(RUNS):
            assert_same(models.run(kind, model), expected.outputs)
            for name, parameter in model.named_parameters():
                stays = name.startswith(f"{first}.")
                assert parameter.device.type == (ACCELERATOR if stays else "cpu"), name
                assert torch.equal(parameter.cpu(), weights.values[name]), name
        again = expected.needed - 2 * int(0.25 * expected.weights)
        assert store.stats().bytes_read >= expected.needed + (RUNS - 1) * again
        assert store.stats().peak_bytes["DEVICE"] <= int(0.25 * expected.weights)
        disable_offload(model)
    weights.assert_unchanged(model)


@needs_accelerator
@ALL_KINDS
def test_outputs_are_on_the_device_of_the_inputs(
    kind: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference(kind, ACCELERATOR)
    model = models.load(kind, checkpoint(kind))
    with store_for(expected.weights, disk_dir, ACCELERATOR, share=0.5) as store:
        dispatch_model(model, store)
        for device in (ACCELERATOR, "cpu", ACCELERATOR):
            outputs = models.forward(kind, model, device)
            assert {value.device.type for value in outputs.values()} == {device}
            for name, value in outputs.items():
                assert torch.equal(value.cpu(), expected.outputs[name])


@pytest.mark.parametrize("kind", models.LANGUAGE_MODELS)
@ON_BOTH
def test_beam_search_equals_plain(
    kind: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    plain = models.load(kind, checkpoint(kind)).to(device)
    expected = models.generated(plain, "beams", device)
    with store_for(plain, disk_dir, device, share=0.15) as store:
        model = load_checkpoint_and_dispatch(models.empty(kind), checkpoint(kind), store)
        assert_same(models.generated(model, "beams"), expected)
        assert store.stats().bytes_read > parameter_bytes(plain)
