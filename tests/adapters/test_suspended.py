"""Weights that are changed while the offloading is suspended are stored as they are changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.store.helpers import open_store
from tierstore import disable_offload, enable_group_offload

WIDTH, LAYERS = 256, 12
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    halves = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2))) for _ in "ab")
    return nn.Sequential(*halves).requires_grad_(False)


def parameters(layers: nn.Module) -> None:
    for parameter in layers.parameters():
        parameter.data.mul_(2)


def modules(layers: nn.Module) -> None:
    """Replace modules as fusing projections does: the walk continues into the new ones."""
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight + 1, requires_grad=False)


def children(layers: nn.Module) -> None:
    for child in layers.children():
        children(child)
    if isinstance(layers, nn.Linear):
        layers.weight.data += 1


def apply(layers: nn.Module) -> None:
    layers.apply(lambda module: isinstance(module, nn.Linear) and module.weight.data.add_(1))


def cast(layers: nn.Module) -> None:
    layers.double()


def at_once(layers: nn.Module) -> None:
    for parameter in list(layers.parameters()):
        parameter.data.mul_(2)


def run(layers: nn.Module) -> torch.Tensor:
    dtype = next(layers.parameters()).dtype
    with torch.no_grad():
        return layers(torch.ones(2, WIDTH, dtype=dtype))


def bytes_written_by(change: Callable[[nn.Module], None], disk_dir: Path) -> int:
    """Return the bytes written while all weights are changed in a block; check the values."""
    plain, layers = model(), model()
    with open_store(disk_dir, 5 * LAYER_BYTES) as store:
        handle = enable_group_offload(layers, store)
        before = store.stats().bytes_written
        with handle.suspended():
            change(layers)
            within = store.stats().bytes_written - before
        change(plain)
        assert torch.equal(run(layers), run(plain))
        assert store.stats().bytes_read > 0
        for (name, found), expected in zip(
            layers.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            assert torch.equal(found, expected), name
    return within


@pytest.mark.full("the change", keep="a third")
@pytest.mark.parametrize("change", [parameters, modules, children, apply, cast])
def test_suspended_change_module_by_module_is_stored_at_once(
    change: Callable[[nn.Module], None], disk_dir: Path
) -> None:
    assert bytes_written_by(change, disk_dir) > 0.7 * LAYERS * LAYER_BYTES


def test_suspended_change_without_a_walk_is_stored_at_the_end(disk_dir: Path) -> None:
    """The control."""
    assert bytes_written_by(at_once, disk_dir) == 0


def test_suspended_reads_store_nothing(disk_dir: Path) -> None:
    layers = model()
    with open_store(disk_dir, 5 * LAYER_BYTES) as store:
        handle = enable_group_offload(layers, store)
        before = store.stats().bytes_written
        with handle.suspended():
            assert sum(float(parameter.sum()) != 0 for parameter in layers.parameters())
        run(layers)
        assert store.stats().bytes_written == before


def test_suspended_change_keeps_shared_memory_shared(disk_dir: Path) -> None:
    layers = model()
    first, last = layers[0][0], layers[1][-1]
    last.weight = nn.Parameter(first.weight.data, requires_grad=False)
    with open_store(disk_dir, 5 * LAYER_BYTES) as store:
        handle = enable_group_offload(layers, store)
        with handle.suspended():
            parameters(layers)
            first.weight.data.fill_(3)
            assert (last.weight == 3).all()


def test_model_after_suspension_has_no_patched_methods(disk_dir: Path) -> None:
    layers = model()
    with open_store(disk_dir, 5 * LAYER_BYTES) as store:
        handle = enable_group_offload(layers, store)
        with handle.suspended():
            parameters(layers)
        disable_offload(handle)
    for module in layers.modules():
        assert not {"named_modules", "named_children", "apply"} & vars(module).keys()
