"""Handles and the components that they offload: shared, dropped, copied, replaced, and rejected."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests import pipelines
from tests.adapters.conftest import (
    DEVICES,
    Checkpoints,
    References,
    a_third_of,
    diffusers_offload,
)
from tests.adapters.models import BLOCK_BYTES, Tower, given
from tests.helpers.tensors import pickled, saved
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model, enable_group_offload
from tierstore.errors import BudgetError, ClosedError

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

ON_BOTH = pytest.mark.parametrize("device", DEVICES)


class Pair:
    """A pipeline of two models, without other methods."""

    def __init__(self) -> None:
        self.encoder = Tower(2)
        self.decoder = Tower(4)

    @property
    def components(self) -> dict[str, Any]:
        return {"encoder": self.encoder, "decoder": self.decoder, "scheduler": None}


def sharing(pipe: Any, **own: Any) -> Any:
    """Return another pipeline of the same components, except for some replacements."""
    other = diffusers.FluxPipeline(**{**pipe.components, **own})
    other.set_progress_bar_config(disable=True)
    return other


def groups_in(store: TierStore) -> list[str]:
    """Return the keys of groups in use, except derived weights."""
    return [key for key in store.keys() if not key.startswith("weights/")]  # noqa: SIM118


def offloaded(store: TierStore) -> set[str]:
    """Return the names of the components that are in a store."""
    return {key.split("/")[1] for key in groups_in(store)}


def with_patched_methods(pipe: Any) -> set[str]:
    """Return the names of the components that have patched methods."""
    return {
        name
        for name, root in pipelines.components(pipe).items()
        for module in root.modules()
        if any(callable(getattr(type(module), method, None)) for method in vars(module))
    }


# Shared components --------------------------------------------------------------------------------


@ON_BOTH
def test_shared_component_stays_until_its_last_pipeline_ends(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("flux").output
    first = pipelines.load("flux", checkpoint("flux"))
    second = sharing(first, vae=pipelines.load("flux", checkpoint("flux")).vae)
    with a_third_of(first, disk_dir, device) as store:
        first_handle = enable_group_offload(first, store)
        second_handle = enable_group_offload(second, store)
        assert offloaded(store) == set(pipelines.components(first))
        disable_offload(first_handle)
        assert not first_handle.enabled and second_handle.enabled
        assert with_patched_methods(first) == set(pipelines.components(first)) - {"vae"}
        assert sorted(second_handle.groups) == groups_in(store)
        assert offloaded(store) == set(pipelines.components(second))
        assert torch.equal(
            pipelines.run("flux", second, device=device), reference("flux", device=device).output
        )
        second.transformer.load_state_dict(second.transformer.state_dict())
        assert second_handle.enabled
        assert torch.equal(
            pipelines.run("flux", second, device=device), reference("flux", device=device).output
        )
        disable_offload(second_handle)
        assert not groups_in(store) and not with_patched_methods(second)
    assert torch.equal(pipelines.run("flux", first), expected)
    assert torch.equal(pipelines.run("flux", second), expected)


@pytest.mark.full("as one that is offloaded until the last is disabled")
@ON_BOTH
@pytest.mark.parametrize("kept", (True, False), ids=("with its handle", "without"))
def test_shared_component_outlives_the_first_pipeline(
    kept: bool, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("flux").output
    first = pipelines.load("flux", checkpoint("flux"))
    second = sharing(first, vae=pipelines.load("flux", checkpoint("flux")).vae)
    with a_third_of(first, disk_dir, device) as store:
        handles = [enable_group_offload(first, store), enable_group_offload(second, store)]
        dropped = weakref.ref(first.vae)
        first = None
        if not kept:
            del handles[0]
        gc.collect()
        assert dropped() is None
        assert torch.equal(
            pipelines.run("flux", second, device=device), reference("flux", device=device).output
        )
        second.transformer.load_state_dict(second.transformer.state_dict())
        assert handles[-1].enabled
        assert torch.equal(
            pipelines.run("flux", second, device=device), reference("flux", device=device).output
        )
        assert sorted(handles[-1].groups) == groups_in(store)
        disable_offload(handles[-1])
        assert not groups_in(store) and not with_patched_methods(second)
        disable_offload(handles[0])
        assert torch.equal(pipelines.run("flux", second), expected)


@pytest.mark.full("as the first of them")
@ON_BOTH
def test_either_sharing_pipeline_suspends_the_shared_components(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    first = pipelines.load("flux", checkpoint("flux"))
    second = sharing(first)
    with a_third_of(first, disk_dir, device) as store:
        handles = [enable_group_offload(pipe, store) for pipe in (first, second)]
        for handle, other in (handles, reversed(handles)):
            with handle.suspended():
                assert not groups_in(store)
                with other.suspended():
                    pass
                assert not groups_in(store) and not handle.enabled and not other.enabled
            assert handle.enabled and other.enabled
            assert offloaded(store) == set(pipelines.components(first))
        for pipe in (first, second):
            assert torch.equal(
                pipelines.run("flux", pipe, device=device), reference("flux", device=device).output
            )


@ON_BOTH
def test_pipeline_disabled_while_suspended_stays_ordinary(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("flux").output
    first = pipelines.load("flux", checkpoint("flux"))
    second = sharing(first)
    with a_third_of(first, disk_dir, device) as store:
        first_handle, second_handle = [enable_group_offload(p, store) for p in (first, second)]
        with first_handle.suspended():
            disable_offload(first_handle)
            assert not groups_in(store)
        assert not first_handle.enabled and second_handle.enabled
        assert torch.equal(
            pipelines.run("flux", second, device=device), reference("flux", device=device).output
        )
        with second_handle.suspended():
            disable_offload(second_handle)
        assert not second_handle.enabled and not groups_in(store)
        assert torch.equal(pipelines.run("flux", first), expected)


# Dropped pipelines --------------------------------------------------------------------------------


@pytest.mark.full("loads a pipeline for it alone")
@ON_BOTH
def test_kept_component_keeps_no_others(
    device: str, checkpoint: Checkpoints, disk_dir: Path, tmp_path: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        enable_group_offload(pipe, store)
        pipelines.run("flux", pipe, device=device)
        transformer = pipe.transformer
        dropped = [weakref.ref(pipe), weakref.ref(pipe.text_encoder_2)]
        del pipe
        gc.collect()
        assert [reference() for reference in dropped] == [None, None]
        true = {name: value.clone() for name, value in transformer.state_dict().items()}
        transformer.load_state_dict(true)
        assert offloaded(store) == {"transformer"}
        with open_store(
            tmp_path / "another", store.stats().budget_bytes["HOST"], device
        ) as another:
            with enable_group_offload(transformer, another):
                assert groups_in(another) and not groups_in(store)
            assert not groups_in(another)
        assert all(torch.equal(transformer.state_dict()[name], true[name]) for name in true)


@ON_BOTH
def test_components_of_a_dropped_pipeline_run_and_change(device: str, disk_dir: Path) -> None:
    pipe, other = Pair(), Pair()
    encoder, decoder = pipe.encoder, pipe.decoder
    changed = {name: value * 2 for name, value in other.encoder.state_dict().items()}
    other.encoder.load_state_dict(changed)
    expected = other.decoder.to(device)(other.encoder.to(device)(given().to(device))).cpu()
    with open_store(disk_dir, 4 * BLOCK_BYTES, device) as store, torch.no_grad():
        handle = enable_group_offload(pipe, store)
        del pipe
        encoder.load_state_dict(changed)
        assert offloaded(store) == {"encoder", "decoder"}
        with handle.suspended():
            assert not groups_in(store)
        assert torch.equal(decoder(encoder(given())).cpu(), expected)
        del encoder
        gc.collect()
        store.put("another", torch.zeros(1))  # a call of the store, which cleans up
        store.discard("another")
        assert offloaded(store) == {"decoder"}
        disable_offload(handle)
        assert not groups_in(store)


# Copies and pickles -------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("made", (copy.deepcopy, pickled, saved))
def test_copy_of_an_offloaded_pipeline_is_ordinary(
    made: Callable[[Any], Any],
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
    tmp_path: Path,
) -> None:
    expected = reference("flux").output
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store)
        other = made(pipe)
        disable_offload(handle)
    assert torch.equal(pipelines.run("flux", other), expected)
    other.transformer.load_state_dict(other.transformer.state_dict())
    with (
        a_third_of(other, tmp_path / "another", device) as store,
        enable_group_offload(other, store),
    ):
        assert torch.equal(
            pipelines.run("flux", other, device=device), reference("flux", device=device).output
        )


@ON_BOTH
@pytest.mark.parametrize("made", (copy.deepcopy, pickled, saved))
def test_copy_of_an_offloaded_model_may_use_diffusers_offload(
    made: Callable[[Any], Any],
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
    tmp_path: Path,
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store)
        other = made(pipe.transformer)
        disable_offload(handle)
    diffusers_offload(other, tmp_path / "diffusers")
    pipe.transformer = other
    assert torch.equal(pipelines.run("flux", pipe), reference("flux").output)


# A call that fails --------------------------------------------------------------------------------


@ON_BOTH
def test_invalid_second_call_changes_nothing(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store)
        groups = handle.groups
        with pytest.raises(ValueError, match=r"unet"):
            enable_group_offload(pipe, store, exclude_modules=["unet"])
        assert handle.enabled and handle.groups == groups
        assert enable_group_offload(pipe, store) is handle
        assert torch.equal(
            pipelines.run("flux", pipe, device=device), reference("flux", device=device).output
        )


@ON_BOTH
@pytest.mark.parametrize("fails", ("a group", "the store"))
def test_failed_second_call_leaves_the_first_in_effect(
    fails: str, device: str, disk_dir: Path, tmp_path: Path
) -> None:
    model = Tower(8)
    expected = model.to(device)(given().to(device)).cpu()
    model.to("cpu")
    with open_store(disk_dir, 4 * BLOCK_BYTES, device) as store, torch.no_grad():
        handle = enable_group_offload(model, store)
        groups = list(handle.groups.values())
        if fails == "a group":
            with pytest.raises(BudgetError, match="budget"):
                enable_group_offload(model, store, num_blocks_per_group=8)
        else:
            another = open_store(tmp_path / "another", 4 * BLOCK_BYTES, device)
            another.close()
            with pytest.raises(ClosedError):
                enable_group_offload(model, another)
        assert handle.enabled and list(handle.groups.values()) == groups
        assert sorted(handle.groups) == groups_in(store)
        assert enable_group_offload(model, store) is handle
        assert torch.equal(model(given()).cpu(), expected)
        disable_offload(handle)
        assert not handle.enabled and not groups_in(store)
        assert torch.equal(model(given().to("cpu")), Tower(8)(given()))


@ON_BOTH
def test_failed_second_call_in_a_suspended_block_resumes(device: str, disk_dir: Path) -> None:
    model = Tower(8)
    with open_store(disk_dir, 4 * BLOCK_BYTES, device) as store:
        handle = enable_group_offload(model, store)
        groups = list(handle.groups.values())
        with handle.suspended():
            with pytest.raises(BudgetError, match="budget"):
                enable_group_offload(model, store, num_blocks_per_group=8)
            assert not handle.enabled and not groups_in(store)
        assert handle.enabled and list(handle.groups.values()) == groups


@ON_BOTH
def test_failed_first_call_moves_nothing(device: str, disk_dir: Path) -> None:
    pipe = Pair()
    with open_store(disk_dir, 3 * BLOCK_BYTES, device) as store:
        with pytest.raises(BudgetError, match="budget"):
            enable_group_offload(pipe, store, num_blocks_per_group=4, exclude_modules="encoder")
        assert not groups_in(store)
        models = {"encoder": pipe.encoder, "decoder": pipe.decoder}
        for model in models.values():
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
            assert "forward" not in vars(model) and "load_state_dict" not in vars(model)


@ON_BOTH
def test_failed_second_dispatch_leaves_the_first_in_effect(
    device: str, disk_dir: Path, tmp_path: Path
) -> None:
    model = Tower(8)
    expected = model.to(device)(given().to(device)).cpu()
    model.to("cpu")
    with open_store(disk_dir, 4 * BLOCK_BYTES, device) as store, torch.no_grad():
        dispatch_model(model, store)
        keys = groups_in(store)
        another = open_store(tmp_path / "another", 4 * BLOCK_BYTES, device)
        another.close()
        with pytest.raises(ClosedError):
            dispatch_model(model, another)
        assert groups_in(store) == keys
        assert torch.equal(model(given()).cpu(), expected)
        disable_offload(model)
        assert not groups_in(store)
        assert torch.equal(model(given()), Tower(8)(given()))


def test_failed_dispatch_on_a_closed_store_is_ordinary(disk_dir: Path, tmp_path: Path) -> None:
    model = Tower(8)
    first, second = (open_store(tmp_path / name, 4 * BLOCK_BYTES, "cpu") for name in ("a", "b"))
    dispatch_model(model, first)
    first.close()
    second.close()
    with pytest.raises(ClosedError):
        dispatch_model(model, second)
    assert torch.equal(model(given()), Tower(8)(given()))


# Replaced components ------------------------------------------------------------------------------


@ON_BOTH
def test_second_call_offloads_the_current_components(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    other = pipelines.load("flux", checkpoint("flux", transformer=1))
    expected = pipelines.run("flux", other.to(device), device=device)
    other.to("cpu")
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store)
        pipelines.run("flux", pipe, device=device)
        before, pipe.transformer = pipe.transformer, other.transformer
        assert enable_group_offload(pipe, store) is handle
        assert handle.enabled and sorted(handle.groups) == groups_in(store)
        assert offloaded(store) == set(pipelines.components(pipe))
        assert torch.equal(pipelines.run("flux", pipe, device=device), expected)
        assert "forward" not in vars(before) and "load_state_dict" not in vars(before)
        assert not enable_group_offload(before, store).groups.keys() & handle.groups.keys()
        disable_offload(handle)
        assert torch.equal(pipelines.run("flux", pipe), pipelines.run("flux", other))


@pytest.mark.full("loads a pipeline twice")
@ON_BOTH
def test_components_replaced_while_suspended_are_offloaded(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    other = pipelines.load("flux", checkpoint("flux", transformer=1))
    expected = pipelines.run("flux", other.to(device), device=device)
    other.to("cpu")
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store) as handle:
        before = weakref.ref(pipe.transformer)
        with handle.suspended():
            pipe.transformer = other.transformer
        gc.collect()
        assert before() is None
        assert torch.equal(pipelines.run("flux", pipe, device=device), expected)
        assert offloaded(store) == set(pipelines.components(pipe))


@ON_BOTH
def test_component_on_another_store_raises_and_changes_nothing(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path, tmp_path: Path
) -> None:
    other = pipelines.load("flux", checkpoint("flux")).transformer
    pipe = pipelines.load("flux", checkpoint("flux"))
    with (
        a_third_of(pipe, disk_dir, device) as store,
        a_third_of(other, tmp_path / "another", device) as another,
    ):
        handle = enable_group_offload(pipe, store)
        groups = handle.groups
        dispatch_model(other, another)
        before, pipe.transformer = pipe.transformer, other
        with pytest.raises(ValueError, match="transformer is already offloaded"):
            enable_group_offload(pipe, store)
        assert handle.enabled and handle.groups == groups
        pipe.transformer = before
        assert torch.equal(
            pipelines.run("flux", pipe, device=device), reference("flux", device=device).output
        )


# Tied components ----------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("ended", ("changed", "replaced", "disabled"))
def test_weight_tied_to_a_disabled_component_stays_true(
    ended: str, device: str, disk_dir: Path
) -> None:
    pipe = Pair()
    encoder, decoder = pipe.encoder, pipe.decoder
    decoder.blocks[1].weight = encoder.blocks[1].weight
    expected = copy.deepcopy(decoder).to(device)(given().to(device)).cpu()
    with open_store(disk_dir, 4 * BLOCK_BYTES, device) as store, torch.no_grad():
        if ended == "disabled":
            handle = enable_group_offload(encoder, store)
        enable_group_offload(pipe, store)
        assert torch.equal(decoder(given()).cpu(), expected)
        if ended == "changed":
            encoder.load_state_dict(encoder.state_dict())
        elif ended == "replaced":
            pipe.encoder = Tower(2)
            enable_group_offload(pipe, store)
        else:
            pipe.encoder = Tower(2)
            enable_group_offload(pipe, store)
            disable_offload(handle)
        assert torch.equal(decoder(given()).cpu(), expected)
