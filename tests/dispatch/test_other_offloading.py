"""Offloading of other libraries for a model on a store raises, with advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers.hooks import apply_group_offloading
from torch import nn

from tests import pipelines
from tests.adapters.conftest import acquires, checkpoint
from tests.dispatch import models
from tests.dispatch.conftest import Checkpoints, Weights, store_for
from tierstore import (
    OffloadModel,
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
)

CPU = torch.device("cpu")

pipeline_checkpoint = checkpoint


def dispatched(model: Any, store: TierStore) -> Callable[[], object]:
    dispatch_model(model, store)
    return lambda: disable_offload(model)


def offloaded_in_groups(model: Any, store: TierStore) -> Callable[[], object]:
    handle = enable_group_offload(model, store)
    return lambda: disable_offload(handle)


def in_training(model: Any, store: TierStore) -> Callable[[], object]:
    return OffloadModel(model, store).disable


def a_layer(model: Any, store: TierStore) -> Callable[[], object]:
    dispatch_model(model.layers[5], store)
    return lambda: disable_offload(model.layers[5])


def cpu_offload(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(model, CPU)


def cpu_offload_with_hook(model: Any, folder: Path) -> None:
    accelerate.cpu_offload_with_hook(model, CPU)


def disk_offload(model: Any, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), CPU)


def dispatch(model: Any, folder: Path) -> None:
    device_map = {f"layers.{i}": "cpu" if i % 2 else "disk" for i in range(8)}
    accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder))


def a_hook(model: Any, folder: Path) -> None:
    add_hook_to_module(model.layers[5], AlignDevicesHook(CPU, offload=True))


def a_hook_more(model: Any, folder: Path) -> None:
    add_hook_to_module(model.layers[5], AlignDevicesHook(CPU), append=True)


def around_the_model(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(nn.Sequential(model, nn.Linear(4, 4)), CPU)


def blocks_of_diffusers(model: Any, folder: Path) -> None:
    apply_group_offloading(model, CPU, offload_type="block_level", num_blocks_per_group=1)


def leaves_of_diffusers(model: Any, folder: Path) -> None:
    apply_group_offloading(model, CPU, offload_type="leaf_level", offload_to_disk_path=str(folder))


OTHERS = (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch,
    a_hook,
    a_hook_more,
    around_the_model,
    blocks_of_diffusers,
    leaves_of_diffusers,
)
Other = Callable[[Any, Path], None]
Way = Callable[[Any, TierStore], Callable[[], object]]


def attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


@pytest.mark.full("the library, the request", keep="a third")
@pytest.mark.parametrize(
    "way",
    (dispatched, offloaded_in_groups, in_training, a_layer),
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_other_offloading_raises_until_the_model_is_disabled(
    other: Other, way: Way, disk_dir: Path, tmp_path: Path
) -> None:
    model, rows = models.Tower(), models.rows()
    weights = Weights.of(model)
    with store_for(model, disk_dir, "cpu", 0.4) as store, torch.no_grad():
        expected = model(rows)
        undo = way(model, store)
        assert torch.equal(model(rows), expected)
        before = attributes(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"tierstore.*disable_offload\(model\)"):
                other(model, tmp_path / "other")
        assert attributes(model) == before
        leases = acquires(store)
        assert torch.equal(model(rows), expected)
        assert way is in_training or acquires(store) > leases
        undo()
    weights.assert_equal_to(model)
    other(model, tmp_path / "other")
    assert attributes(model) != before or other is around_the_model
    with torch.no_grad():
        assert torch.equal(model(rows), expected)


def test_other_models_may_be_offloaded(disk_dir: Path, tmp_path: Path) -> None:
    """The model is on no store, beside one that is."""
    model, rows = models.Tower(), models.rows()
    with store_for(model, disk_dir, "cpu", 0.4) as store, torch.no_grad():
        dispatch_model(model, store)
        expected = model(rows)
        for other in (cpu_offload, blocks_of_diffusers):
            each = models.Tower()
            other(each, tmp_path / "other")
            assert torch.equal(each(rows), expected)
        assert store.stats().bytes_read > 0


@pytest.mark.full("the library, the call", keep="a third")
@pytest.mark.parametrize("way", (dispatched, offloaded_in_groups), ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "other",
    (
        lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
        lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
        lambda pipe: pipe.enable_group_offload(CPU, offload_type="leaf_level"),
        lambda pipe: pipe.transformer.enable_group_offload(CPU, offload_type="leaf_level"),
    ),
    ids=("model", "sequential", "groups", "groups of a component"),
)
def test_pipeline_with_a_model_on_a_store_raises(
    other: Callable[[Any], None],
    way: Way,
    pipeline_checkpoint: Checkpoints,
    disk_dir: Path,
) -> None:
    pipe = pipelines.load("flux", pipeline_checkpoint("flux"))
    expected = pipelines.run("flux", pipe)
    with store_for(pipe.transformer, disk_dir, "cpu", 0.4) as store:
        way(pipe.transformer, store)
        with pytest.raises(ValueError, match=r"tierstore|disable group offloading"):
            other(pipe)
        assert not hasattr(pipe.transformer, "_hf_hook")
        pipe.remove_all_hooks()
        read = store.stats().bytes_read
        assert torch.equal(pipelines.run("flux", pipe), expected)
        assert store.stats().bytes_read > read
