"""`with edit_weights(layer)`: edits on the device reach the tier that the weights came from."""

from __future__ import annotations

import threading
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
    SHARE,
    Checkpoints,
    Weights,
    evict,
    store_for,
)
from tests.helpers.tensors import assert_same
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    edit_weights,
    enable_group_offload,
    load_checkpoint_and_dispatch,
)
from tierstore.errors import BudgetError, LeaseError

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="a third",
)


def low_rank(device: Any) -> torch.Tensor:
    """Return the change that a LoRA of rank 4 makes to a layer."""
    generator = torch.Generator().manual_seed(9)
    down = torch.randn(4, models.WIDTH, generator=generator) / 8
    up = torch.randn(models.WIDTH, 4, generator=generator) / 2
    return (up @ down).to(device)


def merged(layer: nn.Linear) -> None:
    layer.weight.data += low_rank(layer.weight.device)


@torch.no_grad()
def in_place(layer: nn.Linear) -> None:
    layer.weight.mul_(2)
    layer.bias.add_(1)


@torch.no_grad()
def copied(layer: nn.Linear) -> None:
    layer.weight.copy_(low_rank(layer.weight.device))


def other_memory(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 3


def one_element(layer: nn.Linear) -> None:
    layer.bias.data[3] = 50


def new_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 4)


def loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({n: v * 5 for n, v in layer.state_dict().items()})


EDITS = (merged, in_place, copied, other_memory, one_element, new_parameter, loaded)
Edit = Callable[[nn.Linear], None]


@ON_BOTH
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edit_reaches_the_tier(edit: Edit, device: str, model: Any, store: TierStore) -> None:
    plain = models.build("parts")
    before = models.run("parts", plain.to(device), device)
    edit(plain.to("cpu").blocks[5])
    after = models.run("parts", plain.to(device), device)
    plain.to("cpu")
    assert not torch.equal(before["output"].cpu(), after["output"].cpu())
    written = store.stats().bytes_written
    with edit_weights(model.blocks[5]) as layer:
        assert layer is model.blocks[5]
        edit(layer)
    if edit is not new_parameter:  # the next forward detects that one
        Weights.of(plain).assert_equal_to(model)
        assert store.stats().bytes_written > written
    for _ in range(2):
        read = store.stats().bytes_read
        assert_same(models.run("parts", model), after)
        Weights.of(plain).assert_equal_to(model)
        assert store.stats().bytes_read > read
        evict(store)
    assert store.stats().bytes_written > written
    written = store.stats().bytes_written
    assert_same(models.run("parts", model), after)
    assert store.stats().bytes_written == written
    disable_offload(model)
    Weights.of(plain).assert_equal_to(model)


@ON_BOTH
def test_edit_of_a_checkpoint_weight_keeps_the_file(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    """PEFT merges layer after layer into a loaded model."""
    plain = models.load("llama", checkpoint("llama"))
    true = models.in_files(checkpoint("llama"))
    with store_for(plain, disk_dir, device, SHARE) as store:
        model = load_checkpoint_and_dispatch(models.empty("llama"), checkpoint("llama"), store)
        models.run("llama", model)
        for each in (plain, model):
            for layer in each.model.layers:
                with edit_weights(layer.self_attn.q_proj) as projection:
                    merged(projection)
        Weights.of(plain).assert_equal_to(model)
        assert store.stats().bytes_written >= 8 * 4 * models.WIDTH**2
        outputs, expected = (
            models.run("llama", model),
            models.run("llama", plain.to(device), device),
        )
        for name, value in expected.items():
            # Weights in files of the store may be aligned otherwise, which shows in last bits.
            close = torch.allclose(outputs[name].float(), value.cpu().float(), rtol=1e-4, atol=1e-5)
            assert close, name
        disable_offload(model)
    Weights.of(plain.to("cpu")).assert_equal_to(model)
    found = models.in_files(checkpoint("llama"))
    assert all(torch.equal(found[name], value) for name, value in true.items())


@ON_BOTH
def test_weights_inside_are_on_the_device(device: str, model: Any, store: TierStore) -> None:
    weights = Weights.of(model)
    written = store.stats().bytes_written
    with edit_weights(model.blocks[2]) as layer:
        for name, parameter in layer.named_parameters():
            assert parameter.device.type == device
            assert id(parameter) == weights.objects[f"blocks.2.{name}"]
            assert torch.equal(parameter.cpu(), weights.values[f"blocks.2.{name}"])
        assert {p.device.type for p in model.blocks[3].parameters()} == {"cpu"}
    weights.assert_unchanged(model)
    assert store.stats().bytes_written == written  # nothing was changed
    with edit_weights(model.embed):
        assert model.head.weight.device.type == device  # tied
        model.head.weight.data.zero_()
    assert not model.embed.weight.any() and model.embed.weight.device.type == "cpu"


@needs_accelerator
def test_edit_uses_the_budget(disk_dir: Path) -> None:
    model = models.Tower()
    with store_for(model, disk_dir, ACCELERATOR, 0.4) as store:
        dispatch_model(model, store)
        with edit_weights(model.layers[1]):
            assert store.stats().used_bytes["DEVICE"] >= models.LAYER_BYTES
        for _ in range(2):
            with pytest.raises(BudgetError), edit_weights(model):
                pytest.fail("a model larger than the device")
        assert torch.equal(
            model(models.rows()).detach(),
            models.Tower().to(ACCELERATOR)(models.rows().to(ACCELERATOR)).cpu().detach(),
        )
        stats = store.stats()
        assert stats.peak_bytes["DEVICE"] <= stats.budget_bytes["DEVICE"]


@ON_BOTH
def test_edit_of_a_whole_model_that_fits(device: str, disk_dir: Path) -> None:
    model, plain = models.Tower(), models.Tower()
    with store_for(model, disk_dir, device, 3.0) as store:
        dispatch_model(model, store)
        with edit_weights(model):
            assert {p.device.type for p in model.parameters()} == {device}
            for each in (plain, model):
                for layer in each.layers:
                    merged(layer)
        Weights.of(plain).assert_equal_to(model)
        expected = plain.to(device)(models.rows().to(device)).cpu().detach()
        assert torch.equal(model(models.rows()).detach(), expected)
        assert store.stats().bytes_written >= 2 * 8 * models.LAYER_BYTES


@ON_BOTH
def test_model_may_run_inside(device: str, model: Any, store: TierStore) -> None:
    plain = models.build("parts")
    before = models.run("parts", plain.to(device), device)
    merged(plain.to("cpu").blocks[5])
    after = models.run("parts", plain.to(device), device)
    with edit_weights(model.blocks[5]) as layer:
        assert_same(models.run("parts", model), before)
        merged(layer)
        assert_same(models.run("parts", model), after)
        assert {p.device.type for p in layer.parameters()} == {device}
    assert_same(models.run("parts", model), after)
    Weights.of(plain.to("cpu")).assert_equal_to(model)


@ON_BOTH
def test_earlier_edits_are_visible_inside(device: str, model: Any) -> None:
    plain = models.build("parts")
    for each in (plain, model):
        each.blocks[5].weight.data += 1
        with edit_weights(each.blocks[5]) as layer:
            layer.weight.data *= 2
    Weights.of(plain).assert_equal_to(model)
    assert_same(models.run("parts", model), models.run("parts", plain.to(device), device))


@ON_BOTH
def test_edit_before_an_exception_is_kept(device: str, model: Any, store: TierStore) -> None:
    """As without a store: the change is kept, and no lease remains."""
    plain = models.build("parts")
    merged(plain.blocks[5])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), edit_weights(model.blocks[4]):
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), edit_weights(model.blocks[5]) as layer:
        merged(layer)
        raise ZeroDivisionError
    Weights.of(plain).assert_equal_to(model)
    for _ in range(2):
        assert_same(models.run("parts", model), models.run("parts", plain.to(device), device))
    assert not [key for key in store if "onloaded" in key]


@ON_BOTH
@pytest.mark.parametrize("first", ("the layer", "what is around it"))
def test_nested_edits_restore_in_order(
    first: str, device: str, model: Any, store: TierStore
) -> None:
    """The inner one uses the weights that are present; the outermost evicts them."""
    plain = models.build("parts")
    weights = Weights.of(model)
    around, layer = model.blocks[1:3], model.blocks[1]
    outer, inner = (layer, around) if first == "the layer" else (around, layer)
    written = store.stats().bytes_written
    with edit_weights(outer):
        shown = layer.weight.data_ptr()
        with edit_weights(inner), edit_weights(inner):
            assert {p.device.type for p in around.parameters()} == {device}
            assert layer.weight.data_ptr() == shown
            in_place(layer)
            in_place(around[1])
        assert {p.device.type for p in outer.parameters()} == {device}
        assert layer.weight.data_ptr() == shown
        merged(layer)
        run = models.run("parts", model)
    assert store.stats().bytes_written > written
    for block in plain.blocks[1:3]:
        in_place(block)
    merged(plain.blocks[1])
    Weights.of(plain).assert_equal_to(model)
    assert Weights.of(model).objects == weights.objects
    evict(store)
    expected = models.run("parts", plain.to(device), device)
    assert_same(run, expected)
    assert_same(models.run("parts", model), expected)
    assert not [key for key in store if "onloaded" in key]


@ON_BOTH
def test_layer_edited_by_another_thread_raises(device: str, model: Any) -> None:
    weights = Weights.of(model)
    refused: list[BaseException] = []

    def edit(layer: nn.Module) -> None:
        with pytest.raises(LeaseError, match="in use") as raised, edit_weights(layer):
            pytest.fail("its weights are in use")
        refused.append(raised.value)

    with edit_weights(model.blocks[1]):
        for layer in (model.blocks[1], model.blocks):
            thread = threading.Thread(target=edit, args=(layer,))
            thread.start()
            thread.join()
    assert len(refused) == 2
    weights.assert_unchanged(model)


@ON_BOTH
def test_layer_that_is_running_raises(device: str, store: TierStore) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        """Overrides forward: hooks would run before its weights arrive, or after they have left."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(60)
            return super().forward(x)

    model = models.build("parts")
    weights = Weights.of(model)
    model.blocks[3].__class__ = Waiting
    dispatch_model(model, store)
    outputs: list[models.Outputs] = []
    thread = threading.Thread(target=lambda: outputs.append(models.run("parts", model)))
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(LeaseError, match="in use"), edit_weights(model.blocks[3]):
            pytest.fail("its weights are in use")
    finally:
        go_on.set()
        thread.join()
    assert_same(outputs[0], models.run("parts", models.build("parts").to(device), device))
    weights.assert_unchanged(model)
    with edit_weights(model.blocks[3]) as layer:
        layer.weight.data.zero_()
    assert not model.blocks[3].weight.any()


@ON_BOTH
def test_layers_not_dispatched_are_edited_in_place(
    device: str, model: Any, store: TierStore
) -> None:
    plain = models.build("parts")
    earlier = store.stats()
    with edit_weights(plain.blocks[0]) as layer:
        assert layer is plain.blocks[0]
        assert layer.weight.device.type == "cpu"
        layer.weight.data.zero_()
    assert not plain.blocks[0].weight.any()
    with edit_weights(nn.ReLU()):
        pass
    disable_offload(model)
    with edit_weights(model):
        assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert store.stats().bytes_onloaded == earlier.bytes_onloaded


@ON_BOTH
def test_child_and_parent_on_different_stores_are_edited(
    device: str, disk_dir: Path, tmp_path: Path
) -> None:
    model, plain = models.Tower(), models.Tower()
    with (
        store_for(model, disk_dir, device, 2.5) as store,
        store_for(model, tmp_path / "other", "cpu", 2.5) as other,
    ):
        dispatch_model(model.layers[2], other)
        dispatch_model(model, store)
        with edit_weights(model):
            places = [layer.weight.device.type for layer in model.layers]
            assert places == [device] * 2 + ["cpu"] + [device] * 5
            for each in (plain, model):
                for layer in each.layers:
                    merged(layer)
        Weights.of(plain).assert_equal_to(model)
        assert store.stats().bytes_written > other.stats().bytes_written > models.LAYER_BYTES


@ON_BOTH
def test_model_offloaded_in_groups_is_edited(device: str, disk_dir: Path) -> None:
    """It serves diffusers' pipelines as well."""
    model, plain = models.Tower(), models.Tower()
    with store_for(model, disk_dir, device, 0.6) as store, enable_group_offload(model, store):
        with edit_weights(model.layers[2]) as layer:
            assert layer.weight.device.type == device
            merged(layer)
        merged(plain.layers[2])
        Weights.of(plain).assert_equal_to(model)
        expected = plain.to(device)(models.rows().to(device)).cpu()
        with torch.no_grad():
            assert torch.equal(model(models.rows()).cpu(), expected)
    Weights.of(plain.to("cpu")).assert_equal_to(model)
