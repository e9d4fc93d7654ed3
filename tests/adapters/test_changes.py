"""Weights that are changed while offloaded: failures (4) and (5) of diffusers.

Each change is made on an offloaded pipeline and on one that is not, and both must compute the same
after every step. Here weights change through methods of pipelines and models; direct edits are in
test_edits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from tests import pipelines
from tests.adapters.conftest import (
    DEVICES,
    OFFLOAD_TYPES,
    Checkpoints,
    References,
    a_third_of,
    acquires,
    diffusers_offload,
)
from tests.store.helpers import open_store
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

ON_BOTH = pytest.mark.parametrize("device", DEVICES)
Change = Callable[[Any], object]
LORA_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp")


def lora_of(transformer: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return a LoRA of rank 4 like that of a hub file, strong enough to change the output."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, layer in transformer.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(LORA_LAYERS):
            down = torch.randn(4, layer.in_features, generator=generator) / layer.in_features**0.5
            up = torch.randn(layer.out_features, 4, generator=generator) / 2
            found[f"transformer.{name}.lora_A.weight"] = down.to(pipelines.DTYPE)
            found[f"transformer.{name}.lora_B.weight"] = up.to(pipelines.DTYPE)
    assert found
    return found


@pytest.fixture
def loras(checkpoint: Checkpoints) -> list[dict[str, torch.Tensor]]:
    transformer = pipelines.load("flux", checkpoint("flux")).transformer
    return [lora_of(transformer, seed) for seed in (0, 1)]


def outputs(kind: str, pipe: Any, device: str, changes: list[Change]) -> Iterator[torch.Tensor]:
    """Return the output before all changes and after each."""
    yield pipelines.run(kind, pipe, device=device)
    for change in changes:
        change(pipe)
        yield pipelines.run(kind, pipe, device=device)


def assert_equal_after_each(
    kind: str, pipes: tuple[Any, Any], device: str, changes: list[Change]
) -> list[torch.Tensor]:
    """Check that both pipelines compute the same throughout; return the first one's outputs."""
    computed = []
    both = zip(*(outputs(kind, pipe, device, changes) for pipe in pipes), strict=True)
    for number, (plain, offloaded) in enumerate(both):
        assert torch.equal(plain, offloaded), f"not equal after change {number}"
        computed.append(plain)
    return computed


# (5) LoRA and fused projections -------------------------------------------------------------------


@pytest.mark.long("the pipeline, the kind of offloading", keep="values")
@pytest.mark.full("loads and fuses twice; tests/dispatch/test_other_libraries.py has a LoRA")
@ON_BOTH
@pytest.mark.parametrize("offload_type", OFFLOAD_TYPES)
def test_lora_loaded_fused_and_unloaded_equals_plain(
    offload_type: str,
    device: str,
    loras: list[dict[str, torch.Tensor]],
    checkpoint: Checkpoints,
    disk_dir: Path,
) -> None:
    changes: list[Change] = [
        lambda pipe: pipe.load_lora_weights(dict(loras[0]), adapter_name="first"),
        lambda pipe: pipe.fuse_lora(lora_scale=0.5),
        lambda pipe: pipe.unfuse_lora(),
        lambda pipe: pipe.load_lora_weights(dict(loras[1]), adapter_name="second"),
        lambda pipe: pipe.set_adapters(["first", "second"], [0.3, 0.7]),
        lambda pipe: pipe.disable_lora(),
        lambda pipe: pipe.enable_lora(),
        lambda pipe: pipe.delete_adapters("first"),
        lambda pipe: pipe.unload_lora_weights(),
    ]
    plain = pipelines.load("flux", checkpoint("flux")).to(device)
    pipe = pipelines.load("flux", checkpoint("flux"))
    with (
        a_third_of(pipe, disk_dir, device) as store,
        enable_group_offload(pipe, store, offload_type=offload_type) as handle,
    ):
        computed = assert_equal_after_each("flux", (plain, pipe), device, changes)
        assert handle.stats().bytes_written > 0  # no file holds the LoRA, or the fused weights
    base, loaded, fused = computed[:3]
    assert not torch.equal(base, loaded)
    assert not torch.equal(loaded, fused)


def test_lora_loaded_by_a_sharing_pipeline_equals_plain(
    loras: list[dict[str, torch.Tensor]], checkpoint: Checkpoints, disk_dir: Path
) -> None:
    """diffusers takes the mark of an offloaded model for its own hook, and applies it again."""
    plain = pipelines.load("flux", checkpoint("flux"))
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, "cpu") as store, enable_group_offload(pipe, store) as handle:
        before = set(handle.groups)
        other = diffusers.FluxPipeline(**pipe.components)
        for each in (plain, other):
            each.load_lora_weights(dict(loras[0]), adapter_name="first")
        assert handle.enabled and before & set(handle.groups)
        assert torch.equal(pipelines.run("flux", pipe), pipelines.run("flux", plain))
        registries = [m.__dict__.get("_diffusers_hook") for m in pipe.transformer.modules()]
        assert not any(registry._hook_order for registry in registries if registry is not None)


@pytest.mark.full("a whole pipeline, run with and without")
def test_diffusers_cache_switched_off_equals_plain(checkpoint: Checkpoints, disk_dir: Path) -> None:
    """diffusers then restores the forward of each module from before the cache."""
    pipe = pipelines.load("flux", checkpoint("flux"))
    expected = pipelines.run("flux", pipe)
    with open_store(disk_dir, pipelines.weight_bytes(pipe)) as store:  # blocks stay whole
        with enable_group_offload(pipe, store):
            start = acquires(store)
            pipelines.run("flux", pipe)
            usual = acquires(store) - start
        pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
        with enable_group_offload(pipe, store):
            pipe.transformer.disable_cache()
            start = acquires(store)
            assert torch.equal(pipelines.run("flux", pipe), expected)
            assert acquires(store) - start == usual
    assert torch.equal(pipelines.run("flux", pipe), expected)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_diffusers_loading_a_lora_raises(
    loras: list[dict[str, torch.Tensor]], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    diffusers_offload(pipe, tmp_path)
    with pytest.raises(KeyError):
        pipe.load_lora_weights(dict(loras[0]), adapter_name="first")
        pipelines.run("flux", pipe)


def fuse_projections(pipe: Any) -> None:
    denoiser(pipe).fuse_qkv_projections()


def unfuse_projections(pipe: Any) -> None:
    denoiser(pipe).unfuse_qkv_projections()


def denoiser(pipe: Any) -> Any:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


@pytest.mark.full("loads and fuses twice")
@ON_BOTH
@pytest.mark.parametrize("kind", ("flux", "sdxl"))
def test_fused_projections_equal_plain(
    kind: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    changes: list[Change] = [fuse_projections, unfuse_projections]
    plain = pipelines.load(kind, checkpoint(kind))
    pipe = pipelines.load(kind, checkpoint(kind))
    plain.to(device)
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store):
        before = sum(1 for _ in denoiser(pipe).parameters())
        assert_equal_after_each(kind, (plain, pipe), device, changes)
        assert store.stats().bytes_written > 0
        fuse_projections(pipe)
        assert sum(1 for _ in denoiser(pipe).parameters()) > before


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
@pytest.mark.parametrize("kind", ("flux", "sdxl"))
def test_diffusers_fused_projections_are_wrong(
    kind: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    pipe = pipelines.load(kind, checkpoint(kind))
    diffusers_offload(pipe, tmp_path)
    fuse_projections(pipe)
    plain = pipelines.load(kind, checkpoint(kind))
    fuse_projections(plain)
    assert not torch.equal(pipelines.run(kind, pipe), pipelines.run(kind, plain))


# (4) load_state_dict ------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("assign", (False, True), ids=("copied", "assigned"))
@pytest.mark.parametrize("kind", ("flux", "llama"))
@pytest.mark.long("the model, how it is assigned, the device", keep="values")
def test_load_state_dict_takes_effect(
    kind: str,
    assign: bool,
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    name = next(iter(pipelines.components(pipelines.load(kind, checkpoint(kind)))))
    other = pipelines.load(kind, checkpoint(kind, **{name: 1}))
    pipe = pipelines.load(kind, checkpoint(kind))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store):
        assert torch.equal(
            pipelines.run(kind, pipe, device=device), reference(kind, device=device).output
        )
        state = pipelines.components(other)[name].state_dict()
        pipelines.components(pipe)[name].load_state_dict(state, assign=assign)
        changed = pipelines.run(kind, pipe, device=device)
    assert torch.equal(changed, pipelines.run(kind, other.to(device), device=device))
    assert not torch.equal(changed, reference(kind, device=device).output)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_diffusers_load_state_dict_is_ignored(
    checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    other = pipelines.load("llama", checkpoint("llama", model=1))
    model = pipelines.load("llama", checkpoint("llama"))
    diffusers_offload(model, tmp_path)
    model.load_state_dict(other.state_dict())
    assert torch.equal(pipelines.run("llama", model), reference("llama").output)


# Any change, while suspended ----------------------------------------------------------------------


@ON_BOTH
def test_suspended_edit_writes_only_changed_weights(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    plain = pipelines.load("llama", checkpoint("llama"))
    model = pipelines.load("llama", checkpoint("llama"))
    with (
        a_third_of(model, disk_dir, device) as store,
        enable_group_offload(model, store, offload_type="leaf_level") as handle,
    ):
        with handle.suspended():
            assert not handle.enabled
            model.lm_head.weight.data.mul_(2)
        plain.lm_head.weight.data.mul_(2)
        written = store.stats().bytes_written
        assert model.lm_head.weight.nbytes <= written < 2 * model.lm_head.weight.nbytes
        found = pipelines.run("llama", model, device=device)
        with handle.suspended():
            model.lm_head.weight.data.mul_(4)
            model.lm_head.weight.data.div_(4)
        assert store.stats().bytes_written == written
        assert torch.equal(pipelines.run("llama", model, device=device), found)
    assert torch.equal(found, pipelines.run("llama", plain.to(device), device=device))


def test_suspension_of_one_model_does_not_scan_others(disk_dir: Path) -> None:
    """Otherwise each suspension of one model would check all weights of the others for edits."""
    first, second = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2))
    with open_store(disk_dir, pipelines.weight_bytes(first)) as store:
        enable_group_offload(first, store)
        handle = enable_group_offload(second, store)
        first[0].weight.data.mul_(2)
        written = store.stats().bytes_written
        with handle.suspended():
            pass
        assert store.stats().bytes_written == written
        first(torch.ones(1, 64))
        assert store.stats().bytes_written > written


@ON_BOTH
def test_failed_change_leaves_the_pipeline_offloaded(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store) as handle:
        with pytest.raises(RuntimeError, match="Missing key"):
            pipe.transformer.load_state_dict({})
        assert handle.enabled
        with pytest.raises(ZeroDivisionError), handle.suspended(), handle.suspended():
            raise ZeroDivisionError
        assert handle.enabled
        assert torch.equal(
            pipelines.run("flux", pipe, device=device), reference("flux", device=device).output
        )
