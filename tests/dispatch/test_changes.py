"""Weights that are changed while dispatched, in any way, are neither lost nor ignored.

Each change is made to a dispatched model and to a plain one of the same seed; afterwards both
compute the same, however often weights leave memory in between, and also after the model is
restored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Weights,
    evict,
    store_for,
)
from tests.helpers.tensors import assert_same
from tierstore import disable_offload, dispatch_model, load_checkpoint_and_dispatch

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="a third",
)

SHARE = 0.2
Change = Callable[[Any], object]


def check_change(
    change: Change, kind: str, device: str, disk_dir: Path, *, writes: bool = True
) -> Any:
    """Apply a change, and compare with a plain model throughout. Return the restored model."""
    plain, model = models.build(kind), models.build(kind)
    before = models.run(kind, plain.to(device), device)
    change(plain.to("cpu"))
    after = models.run(kind, plain.to(device), device)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        assert_same(models.run(kind, model), before)
        written = store.stats().bytes_written
        change(model)
        assert_same_values(model, plain)
        for _ in range(2):
            read = store.stats().bytes_read
            assert_same(models.run(kind, model), after)
            assert_same_values(model, plain)
            assert store.stats().bytes_read > read
            evict(store)
        assert (store.stats().bytes_written > written) == writes
        written = store.stats().bytes_written
        assert_same(models.run(kind, model), after)
        assert store.stats().bytes_written == written  # detected once
        disable_offload(model)
    assert_same_values(model, plain)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    return model


def assert_same_values(model: nn.Module, plain: nn.Module) -> None:
    found, expected = model.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].cpu(), value.cpu()), name


# Editing ------------------------------------------------------------------------------------------


@torch.no_grad()
def in_place(model: Any) -> None:
    model.blocks[1].weight.mul_(2)


def uncounted(model: Any) -> None:
    """Change data as a PEFT merge does: torch's version counter does not count it."""
    model.blocks[1].weight.data += 1


def one_element(model: Any) -> None:
    model.blocks[6].bias.data[3] = 100


def through_numpy(model: Any) -> None:
    model.blocks[6].bias.detach().numpy()[5] = -100


def other_memory(model: Any) -> None:
    model.blocks[2].weight.data = model.blocks[2].weight.data * 3


@torch.no_grad()
def by_index(model: Any) -> None:
    model.blocks[2].weight[3:5] = 7


def drawn_again(model: Any) -> None:
    torch.manual_seed(8)
    nn.init.xavier_normal_(model.blocks[0].weight)


@torch.no_grad()
def every_weight(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def applied(model: Any) -> None:
    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.constant_(module.bias, 0.125)

    model.apply(reset)


def tied(model: Any) -> None:
    model.head.weight.data.mul_(2)
    assert torch.equal(model.embed.weight, model.head.weight)


@torch.no_grad()
def own_weight(model: Any) -> None:
    model.scale.add_(0.5)


def copied_into(model: Any) -> None:
    model.blocks[4].weight.data.copy_(model.blocks[5].weight)


@torch.no_grad()
def through_the_state_dict(model: Any) -> None:
    model.state_dict()["blocks.3.weight"].mul_(2)


EDITS = (
    in_place,
    through_the_state_dict,
    uncounted,
    one_element,
    through_numpy,
    other_memory,
    by_index,
    drawn_again,
    every_weight,
    applied,
    tied,
    own_weight,
    copied_into,
)


@pytest.mark.parametrize("change", EDITS, ids=lambda change: change.__name__)
def test_edit_is_used_and_stored(change: Change, disk_dir: Path) -> None:
    check_change(change, "parts", "cpu", disk_dir)


@needs_accelerator
@pytest.mark.parametrize("change", (in_place, uncounted, other_memory, own_weight, tied))
def test_edit_on_an_accelerator_is_used_and_stored(change: Change, disk_dir: Path) -> None:
    check_change(change, "parts", ACCELERATOR, disk_dir)


@pytest.mark.full("like test_edit_is_used_and_stored, for a whole model")
@ON_BOTH
@pytest.mark.parametrize("runs", (True, False), ids=("after a run", "at once"))
def test_edits_before_disabling_are_kept(runs: bool, device: str, disk_dir: Path) -> None:
    """No forward detects them: they must be kept all the same."""
    plain = models.build("parts")
    with store_for(plain, disk_dir, device, SHARE) as store:
        for change in EDITS:
            model, plain = dispatch_model(models.build("parts"), store), models.build("parts")
            if runs:
                models.run("parts", model)
            change(plain)
            change(model)
            assert_same_values(model, plain)
            disable_offload(model)
            assert_same_values(model, plain)


@pytest.mark.full("like test_edit_is_used_and_stored, for a whole model")
@ON_BOTH
def test_edits_keep_the_parameter_objects(device: str, disk_dir: Path) -> None:
    model, plain = models.build("parts"), models.build("parts")
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        objects = Weights.of(model).objects
        for number, change in enumerate(EDITS):
            change(plain)
            change(model)
            if number % 4 == 3:
                models.run("parts", model)
            assert Weights.of(model).objects == objects
        assert_same(models.run("parts", model), models.run("parts", plain.to(device), device))
        disable_offload(model)
    assert Weights.of(model).objects == objects
    assert_same_values(model, plain.to("cpu"))


@ON_BOTH
@torch.no_grad()
def test_weights_changed_by_a_forward_are_kept(device: str, disk_dir: Path) -> None:
    class Counting(models.Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(x) + self.calls[0]

    model = Counting()
    model.calls = nn.Parameter(torch.zeros(1000), requires_grad=False)
    with store_for(model, disk_dir, device, 0.4) as store:
        dispatch_model(model, store)
        for count in range(1, 4):
            model(models.rows())
            assert model.calls.tolist() == [float(count)] * 1000
            evict(store)
        disable_offload(model)
    assert model.calls.tolist() == [3.0] * 1000


@ON_BOTH
def test_edit_leaves_the_checkpoint_unchanged(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    true = models.in_files(checkpoint("parts"))
    model = models.load("parts", checkpoint("parts"))
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        every_weight(model)
        models.run("parts", model)
        model.blocks[0].weight.data += 1
        disable_offload(model)
    found = models.in_files(checkpoint("parts"))
    assert all(torch.equal(found[name], value) for name, value in true.items())


# Replacing ----------------------------------------------------------------------------------------


def new_parameter(model: Any) -> None:
    model.blocks[7].weight = nn.Parameter(model.blocks[7].weight.detach() * 2)


def new_tied_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach() * 2)


def tied_to_another(model: Any) -> None:
    model.blocks[3].weight = model.blocks[2].weight


def no_bias(model: Any) -> None:
    model.blocks[3].bias = None


def seeded_layer(seed: int) -> nn.Linear:
    layer = nn.Linear(models.WIDTH, models.WIDTH)
    models.draw(layer, seed)
    return layer


def replaced_module(model: Any) -> None:
    model.blocks[3] = seeded_layer(3)


def replaced_by_another_kind(model: Any) -> None:
    model.blocks[5] = nn.Sequential(seeded_layer(4), nn.ReLU(), seeded_layer(5))


def wrapped_module(model: Any) -> None:
    """Wrap a layer as PEFT puts an adapter around it."""
    model.blocks[8] = nn.Sequential(model.blocks[8], seeded_layer(6))


def added_module(model: Any) -> None:
    model.blocks.append(seeded_layer(7))


def removed_module(model: Any) -> None:
    del model.blocks[2]


def swapped_modules(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


REPLACEMENTS = {
    new_parameter: True,
    new_tied_parameter: True,
    tied_to_another: False,
    no_bias: False,
    replaced_module: True,
    replaced_by_another_kind: True,
    wrapped_module: True,
    added_module: True,
    removed_module: False,
    swapped_modules: False,
}


@ON_BOTH
@pytest.mark.parametrize("change", REPLACEMENTS, ids=lambda change: change.__name__)
def test_replaced_parameters_and_modules_are_used(
    change: Change, device: str, disk_dir: Path
) -> None:
    plain, model = models.build("parts"), models.build("parts")
    before = models.run("parts", plain.to(device), device)
    change(plain.to("cpu"))
    after = models.run("parts", plain.to(device), device)
    assert not torch.equal(before["output"], after["output"])
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        assert_same(models.run("parts", model), before)
        written = store.stats().bytes_written
        change(model)
        for _ in range(2):
            assert_same(models.run("parts", model), after)
            assert_same_values(model, plain)
            assert {p.device.type for p in model.parameters()} == {"cpu"}
            evict(store)
        if REPLACEMENTS[change]:
            assert store.stats().bytes_written > written
        written = store.stats().bytes_written
        assert_same(models.run("parts", model), after)
        assert store.stats().bytes_written == written
        disable_offload(model)
    assert_same_values(model, plain)


@ON_BOTH
@torch.no_grad()
def test_removed_module_is_ordinary(device: str, disk_dir: Path) -> None:
    plain, model = models.build("parts"), models.build("parts")
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        taken = model.blocks[3]
        model.blocks[3] = seeded_layer(3)
        models.run("parts", model)
        x = models.rows()
        assert torch.equal(taken.weight, plain.blocks[3].weight)
        assert torch.equal(taken(x).cpu(), plain.blocks[3](x))
        disable_offload(model)
        assert torch.equal(taken(x), plain.blocks[3](x))


# Loading ------------------------------------------------------------------------------------------


def other_state(prefix: str = "") -> dict[str, torch.Tensor]:
    state = models.build("parts", seed=1).state_dict()
    return {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}


def loaded(model: Any) -> None:
    assert str(model.load_state_dict(other_state())) == "<All keys matched successfully>"


def assigned(model: Any) -> None:
    model.load_state_dict(other_state(), assign=True)


def loaded_in_part(model: Any) -> None:
    found = model.load_state_dict(other_state("blocks.2"), strict=False)
    assert found.missing_keys  # the names lack their prefix: nothing was loaded
    model.load_state_dict({"blocks.2.weight": other_state()["blocks.2.weight"]}, strict=False)


def loaded_into_a_submodule(model: Any) -> None:
    model.blocks.load_state_dict(other_state("blocks."))


def loaded_into_a_leaf(model: Any) -> None:
    model.blocks[9].load_state_dict(other_state("blocks.9."))


def assigned_to_a_submodule(model: Any) -> None:
    model.blocks[4].load_state_dict(other_state("blocks.4."), assign=True)


def loaded_from_itself(model: Any) -> None:
    model.load_state_dict({n: v * 2 if n == "scale" else v for n, v in model.state_dict().items()})


def loaded_at_another_dtype(model: Any) -> None:
    model.load_state_dict({n: v.double() for n, v in other_state().items()})


LOADS = (
    loaded,
    assigned,
    loaded_in_part,
    loaded_into_a_submodule,
    loaded_into_a_leaf,
    assigned_to_a_submodule,
    loaded_from_itself,
    loaded_at_another_dtype,
)


@pytest.mark.parametrize("change", LOADS, ids=lambda change: change.__name__)
def test_load_state_dict_takes_effect(change: Change, disk_dir: Path) -> None:
    check_change(change, "parts", "cpu", disk_dir)


@needs_accelerator
@pytest.mark.parametrize("change", (loaded, assigned, loaded_into_a_leaf))
def test_load_state_dict_on_an_accelerator_takes_effect(change: Change, disk_dir: Path) -> None:
    check_change(change, "parts", ACCELERATOR, disk_dir)


@ON_BOTH
def test_failed_load_leaves_the_same_state_as_torch(device: str, disk_dir: Path) -> None:
    plain, model = models.build("parts"), models.build("parts")
    state = other_state()
    state["blocks.1.weight"] = torch.zeros(1)
    del state["blocks.0.bias"]
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        for each in (plain, model):
            with pytest.raises(RuntimeError, match=r"Missing key.*\n.*size mismatch"):
                each.load_state_dict(state)
        assert_same(models.run("parts", model), models.run("parts", plain.to(device), device))
        assert_same_values(model, plain)


@ON_BOTH
def test_load_state_dict_into_a_loaded_model_keeps_its_file(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    """The weights are maps of a checkpoint, whose file must not change."""
    kind = "t5"
    other = models.build(kind, seed=1)
    true = models.in_files(checkpoint(kind))
    with store_for(other, disk_dir, device, SHARE) as store:
        model = load_checkpoint_and_dispatch(models.empty(kind), checkpoint(kind), store)
        objects = Weights.of(model).objects
        models.forward(kind, model)
        assert store.stats().bytes_written == 0
        model.load_state_dict(other.state_dict())
        expected = models.forward(kind, other.to(device), device)
        for _ in range(2):
            assert_same(models.forward(kind, model), expected)
            assert_same_values(model, other)
        assert store.stats().bytes_written > 0
        assert Weights.of(model).objects == objects
    found = models.in_files(checkpoint(kind))
    assert all(torch.equal(found[name], value) for name, value in true.items())


@ON_BOTH
def test_edit_of_one_model_does_not_change_another(device: str, disk_dir: Path) -> None:
    """A second model of the same weights in the same store sees no change of the first."""
    first, second = models.build("parts"), models.build("parts")
    before = models.run("parts", models.build("parts").to(device), device)
    with store_for(first, disk_dir, device, SHARE) as store:
        for model in (first, second):
            dispatch_model(model, store)
            models.run("parts", model)
        every_weight(first)
        changed = models.run("parts", first)
        assert not torch.equal(changed["output"].cpu(), before["output"].cpu())
        assert_same(models.run("parts", second), before)
        assert_same(models.run("parts", first), changed)
        assert_same_values(second, models.build("parts"))
