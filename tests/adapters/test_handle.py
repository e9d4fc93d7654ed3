"""The life of a handle: enabled, suspended, disabled, enabled again, and beside others."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from tests import pipelines
from tests.accelerator import same
from tests.adapters.conftest import (
    DEVICES,
    OFFLOAD_TYPES,
    Checkpoints,
    References,
    a_third_of,
    acquires,
)
from tests.helpers.tensors import assert_same
from tests.store.helpers import open_store
from tierstore import disable_offload, enable_group_offload
from tierstore.errors import ClosedError

pytestmark = [
    pytest.mark.full(
        "model and partition are independent; test_parity.py covers both devices",
        keep="a third",
    ),
    pytest.mark.parametrize("device", DEVICES),
]


def values(pipe: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipelines.weights(pipe)}


def patched_methods(pipe: Any) -> dict[str, set[str]]:
    """Return the patched methods of a pipeline and its modules."""
    objects = {"": pipe}
    for component, root in pipelines.components(pipe).items():
        objects |= {f"{component}.{path}": module for path, module in root.named_modules()}
    replaced = {
        name: {method for method in vars(owner) if callable(getattr(type(owner), method, None))}
        for name, owner in objects.items()
    }
    return {name: methods for name, methods in replaced.items() if methods}


# One handle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload_type", OFFLOAD_TYPES)
@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_disabled_pipeline_is_unchanged(
    kind: str,
    offload_type: str,
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    pipe = pipelines.load(kind, checkpoint(kind))
    true = values(pipe)
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store, offload_type=offload_type)
        assert handle.enabled and handle.store is store
        assert patched_methods(pipe)
        pipelines.run(kind, pipe, device=device)
        groups = list(handle.groups)
        assert groups and all(key in store for key in groups)
        disable_offload(handle)
        assert not handle.enabled and not handle.groups
        assert not any(key in store for key in groups)
        assert not patched_methods(pipe)
        assert_same(values(pipe), true)
        assert {tensor.device.type for _, tensor in pipelines.weights(pipe)} == {"cpu"}
        leases = acquires(store)  # not bytes: a prefetch may still be on its way from the disk
        assert torch.equal(pipelines.run(kind, pipe), reference(kind).output)
        assert acquires(store) == leases > 0
        disable_offload(handle)  # nothing more to do
    assert torch.equal(pipelines.run(kind, pipe), reference(kind).output)


def test_disabled_cast_weights_survive_the_closed_store(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama"), torch_dtype=torch.float32)
    true = values(model)
    with a_third_of(model, disk_dir, device) as store, enable_group_offload(model, store):
        pipelines.run("llama", model, device=device)
        assert store.stats().bytes_written > 0
    assert_same(values(model), true)


def test_handle_stats_are_those_of_the_store(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("flux", device=device)
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store) as handle:
        assert handle.stats().bytes_read == 0
        pipelines.run("flux", pipe, device=device)
        stats, later = handle.stats(), store.stats()
        for field in ("hits", "late", "misses", "bytes_written", "budget_bytes"):
            assert getattr(stats, field) == getattr(later, field)
        assert stats.bytes_read <= later.bytes_read  # a prefetch may have come in between
        assert stats.bytes_read >= expected.needed
        assert stats.misses > 0 and stats.hits > 0
        assert (stats.bytes_onloaded >= expected.needed) == (device != "cpu")
        assert stats.bytes_offloaded == stats.bytes_written == 0
        tiers = {"HOST", "DISK"} | ({"DEVICE"} if device != "cpu" else set())
        assert stats.budget_bytes.keys() == stats.peak_bytes.keys() == tiers
        for tier in tiers - {"DISK"}:
            assert 0 < stats.peak_bytes[tier] <= stats.budget_bytes[tier]


def test_suspended_pipeline_has_ordinary_weights(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("flux").output
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store) as handle:
        pipelines.run("flux", pipe, device=device)
        with handle.suspended():
            assert not handle.enabled and not handle.groups
            with handle.suspended():
                leases, reads = acquires(store), store.stats().bytes_read
                assert torch.equal(pipelines.run("flux", pipe), expected)
                assert acquires(store) == leases > 0
            assert not handle.enabled
        assert handle.enabled and handle.groups
        assert torch.equal(
            pipelines.run("flux", pipe, device=device), reference("flux", device=device).output
        )
        assert store.stats().bytes_read > reads
        assert store.stats().bytes_written == 0


def test_handle_context_disables_after_an_error(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama"))
    with a_third_of(model, disk_dir, device) as store:
        with pytest.raises(ZeroDivisionError), enable_group_offload(model, store) as handle:
            raise ZeroDivisionError
        assert not handle.enabled
        assert not store.keys("LlamaForCausalLM")


# Offloading again ---------------------------------------------------------------------------------


def test_offload_again_with_the_same_arguments_does_nothing(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store, offload_type="leaf_level")
        groups = dict(handle.groups)
        assert enable_group_offload(pipe, store, offload_type="leaf_level") is handle
        assert handle.groups == groups
        disable_offload(handle)
        assert enable_group_offload(pipe, store, offload_type="leaf_level") is not handle


def test_offload_again_with_other_arguments_starts_over(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path, tmp_path: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    assert not patched_methods(pipe)
    with (
        a_third_of(pipe, disk_dir, device) as store,
        a_third_of(pipe, tmp_path / "other", device) as other,
    ):
        first = enable_group_offload(pipe, store)
        second = enable_group_offload(pipe, store, offload_type="leaf_level")
        assert not first.enabled and second.enabled
        third = enable_group_offload(pipe, other, offload_type="leaf_level")
        assert not second.enabled and third.enabled
        assert not store.keys("FluxPipeline")
        output = pipelines.run("flux", pipe, device=device)
        assert torch.equal(output, reference("flux", device=device).output)
        assert other.stats().bytes_read > 0 and store.stats().bytes_read == 0
        with pytest.raises(ValueError, match="not offloaded on its own: pass the pipeline"):
            disable_offload(pipe.transformer)
        assert disable_offload(pipe) is pipe and not third.enabled
        assert not patched_methods(pipe)
        for target in (pipe, pipe.transformer, store):
            with pytest.raises(ValueError, match="not offloaded"):
                disable_offload(target)


def test_dropped_handle_leaves_the_pipeline_offloaded(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        enable_group_offload(pipe, store)
        gc.collect()
        output = pipelines.run("flux", pipe, device=device)
        assert torch.equal(output, reference("flux", device=device).output)
        assert store.stats().bytes_read > 0


def test_dropped_pipeline_leaves_the_store(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        enable_group_offload(pipe, store)
        pipelines.run("flux", pipe, device=device)
        dropped = weakref.ref(pipe.transformer)
        del pipe
        gc.collect()
        assert dropped() is None
        store.put("another", torch.zeros(1))  # a call of the store, which cleans up
        assert store.keys() == ["another"]


# With other stores and handles --------------------------------------------------------------------


def test_two_pipelines_on_one_store_run(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipes = {kind: pipelines.load(kind, checkpoint(kind)) for kind in ("flux", "wan")}
    handles = {}
    with a_third_of(pipes["flux"], disk_dir, device) as store:
        for kind, pipe in pipes.items():
            handles[kind] = enable_group_offload(pipe, store)
        for kind in ("flux", "wan", "flux"):
            output = pipelines.run(kind, pipes[kind], device=device)
            assert torch.equal(output, reference(kind, device=device).output)
        disable_offload(handles["flux"])
        output = pipelines.run("wan", pipes["wan"], device=device)
        assert torch.equal(output, reference("wan", device=device).output)
        assert sorted(handles["wan"].groups) == store.keys()


@pytest.mark.full("as two pipelines on one store")
def test_two_pipelines_that_share_components_run(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference("flux").output
    first = pipelines.load("flux", checkpoint("flux"))
    own = pipelines.load("flux", checkpoint("flux", transformer=1))
    second = diffusers.FluxPipeline(**{**first.components, "transformer": own.transformer})
    second.set_progress_bar_config(disable=True)
    other = pipelines.run("flux", own.to(device), device=device)
    own.to("cpu")
    assert not torch.equal(other, expected)
    with a_third_of(first, disk_dir, device) as store:
        first_handle = enable_group_offload(first, store)
        second_handle = enable_group_offload(second, store)
        assert {key.split("/")[1] for key in second_handle.groups} == {"transformer"}
        for _ in range(2):
            assert torch.equal(
                pipelines.run("flux", first, device=device), reference("flux", device=device).output
            )
            assert same(pipelines.run("flux", second, device=device), other, device)
        disable_offload(second_handle)
        assert torch.equal(
            pipelines.run("flux", first, device=device), reference("flux", device=device).output
        )
        disable_offload(first_handle)
    assert torch.equal(pipelines.run("flux", first), expected)
    assert torch.equal(pipelines.run("flux", second), other)


# A closed store -----------------------------------------------------------------------------------


def test_closed_store_call_raises_and_weights_are_true(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path, tmp_path: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    true = values(pipe)
    store = a_third_of(pipe, disk_dir, device)
    handle = enable_group_offload(pipe, store)
    pipelines.run("flux", pipe, device=device)
    store.close()
    with pytest.raises(ClosedError, match="open a new TierStore"):
        pipelines.run("flux", pipe, device=device)
    assert_same(values(pipe), true)
    with open_store(tmp_path / "another", store.stats().budget_bytes["HOST"], device) as another:
        enable_group_offload(pipe, another)
        assert not handle.enabled
        output = pipelines.run("flux", pipe, device=device)
        assert torch.equal(output, reference("flux", device=device).output)


def test_disable_after_the_store_was_closed_works(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store)
        pipelines.run("flux", pipe, device=device)
    with handle.suspended():
        pass
    disable_offload(handle)
    assert torch.equal(pipelines.run("flux", pipe), reference("flux").output)


# Models -------------------------------------------------------------------------------------------


def test_autoencoder_runs_through_encode_and_decode(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    image, latents = torch.randn(1, 3, 16, 16), torch.randn(1, 4, 8, 8)
    image, latents = image.to(pipelines.DTYPE), latents.to(pipelines.DTYPE)
    vae = pipelines.load("flux", checkpoint("flux")).vae.to(device)
    with torch.no_grad():
        moments = vae.encode(image.to(device)).latent_dist.parameters.cpu()
        decoded = vae.decode(latents.to(device)).sample.cpu()
    vae = pipelines.load("flux", checkpoint("flux")).vae
    with (
        a_third_of(vae, disk_dir, device) as store,
        enable_group_offload(vae, store),
        torch.no_grad(),
    ):
        # Inputs may be on the CPU: the entry moves them.
        assert torch.equal(vae.encode(image).latent_dist.parameters.cpu(), moments)
        reads = store.stats().bytes_read
        assert torch.equal(vae.decode(latents).sample.cpu(), decoded)
        assert store.stats().bytes_read > reads > 0


@torch.no_grad()
def test_submodules_may_be_called_alone(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    tokens = torch.arange(3, 51).reshape(2, 24).to(device)
    model = pipelines.load("llama", checkpoint("llama")).to(device)
    hidden = model.model(tokens).last_hidden_state
    expected = model.lm_head(hidden[:, -1]).cpu()
    model = pipelines.load("llama", checkpoint("llama"))
    with a_third_of(model, disk_dir, device) as store, enable_group_offload(model, store):
        found = model.lm_head(model.model(tokens).last_hidden_state[:, -1])
        assert torch.equal(found.cpu(), expected)
        assert store.stats().bytes_read > 0


@torch.no_grad()
def test_compiled_model_equals_plain(device: str, disk_dir: Path) -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(3, 64)
    expected = model.to(device)(x.to(device)).cpu()
    model.to("cpu")
    with (
        a_third_of(model, disk_dir, device) as store,
        enable_group_offload(model, store, num_blocks_per_group=1),
    ):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            assert torch.equal(compiled(x).cpu(), expected)
        assert store.stats().bytes_read > pipelines.weight_bytes(model)


def test_model_given_on_the_device_is_stored(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama")).to(device)
    true = values(model)
    with a_third_of(model, disk_dir, device) as store:
        handle = enable_group_offload(model, store)
        # On an accelerator no file can be found for them: they are written, once.
        assert (store.stats().bytes_written >= pipelines.weight_bytes(model)) == (device != "cpu")
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        for _ in range(2):
            output = pipelines.run("llama", model, device=device)
            assert torch.equal(output, reference("llama", device=device).output)
        disable_offload(handle)
        assert_same(values(model), true)
