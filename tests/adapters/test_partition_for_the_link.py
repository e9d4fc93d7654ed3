"""Well-known models, partitioned for an accelerator: groups suit its link, blocks stay whole."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.real_models import MODELS
from tierstore.adapters.grouping import GroupPlan, Partitioner, Unit
from tierstore.model import shares
from tierstore.model.groups import Extent, FileTensor
from tierstore.model.module_tree import groups_of
from tierstore.model.outline import LINK_GROUP, GroupSizes, Need, portions, usual_sizes
from tierstore.model.sizes import slot_bytes
from tierstore.model.tiers import Tier

GB = 10**9
MIB = 1 << 20


@functools.cache
def in_a_file(kind: str) -> tuple[FileTensor, ...]:
    """Return the parameters in bfloat16, one after the other in a file."""
    with torch.device("meta"):
        model = MODELS[kind]()
    found, here = [], 0
    for name, parameter in model.named_parameters():
        nbytes = 2 * parameter.numel()
        found.append(FileTensor(name, "BF16", tuple(parameter.shape), Extent("m", here, nbytes)))
        here += nbytes
    return tuple(found)


def sizes(device_gb: float | None, ram_gb: float, kind: str) -> GroupSizes:
    budgets: dict[Tier, int | None] = {Tier.HOST: int(ram_gb * GB), Tier.DISK: None}
    if device_gb is not None:
        budgets[Tier.DEVICE] = int(device_gb * GB)
    return usual_sizes("block_level", budgets, weights(kind))


def weights(kind: str) -> int:
    return sum(tensor.extent.nbytes for tensor in in_a_file(kind))


def cut(kind: str, size: GroupSizes) -> list[tuple[str, int]]:
    """Return the name and the bytes of each group."""
    tensors = in_a_file(kind)
    groups = groups_of(tensors, "block_level", size.group, largest_block=size.block)
    return [(group.key, group.nbytes) for group, _ in groups]


# For each model and device budget in GB: the number of groups, and the largest in MiB.
GROUPS = {
    ("flux", 12.0): (326, 108),
    ("flux", 24.0): (326, 108),
    ("sdxl", 3.0): (86, 63),
    ("wan", 12.0): (446, 300),
}


@pytest.mark.parametrize(("kind", "device_gb"), GROUPS)
def test_groups_take_some_milliseconds_of_the_link(kind: str, device_gb: float) -> None:
    size = sizes(device_gb, 64, kind)
    assert size.group <= LINK_GROUP
    groups = cut(kind, size)
    largest_tensor = max(tensor.extent.nbytes for tensor in in_a_file(kind))
    most = slot_bytes(max(size.group, largest_tensor) + MIB)  # with padding between tensors
    assert all(nbytes <= most for _, nbytes in groups)
    assert sum(nbytes for _, nbytes in groups) >= weights(kind)
    assert len(groups) <= 2.5 * weights(kind) / size.group, "they are too small"
    assert (len(groups), max(nbytes for _, nbytes in groups) // MIB) == GROUPS[kind, device_gb]


@pytest.mark.parametrize(("kind", "device_gb"), [("flux", 24.0), ("wan", 40.0)])
def test_blocks_of_a_model_that_fits_are_whole_units(kind: str, device_gb: float) -> None:
    """Units as in a loaded model. A block of Flux has 680 or 283 MB, one of Wan 660."""
    assert weights(kind) <= device_gb * GB
    size = sizes(device_gb, 64, kind)
    found = [name for name, _ in cut(kind, size)]
    blocks = ("transformer_blocks", "single_transformer_blocks", "blocks")
    numbers = {name for name in found if name.split(".")[0] in blocks}
    assert numbers
    for name in numbers:  # of a block, or of one of several groups of a block
        assert re.fullmatch(r"[a-z_]+\.[0-9]+(\.[0-9]+)?", name)


@pytest.mark.parametrize("device_gb", [2, 6, 12])
def test_large_blocks_beyond_the_budget_are_divided(device_gb: int) -> None:
    size = sizes(device_gb, 64, "flux")
    assert size.block == max(size.group, device_gb * GB // 64)
    assert any("attn" in name for name, _ in cut("flux", size))


def test_block_of_a_sixty_fourth_of_the_device_is_whole() -> None:
    size = sizes(20, 64, "flux")
    assert size.block == 312_500_000, "a single block of 283 MB, and no double block"
    names = [name for name, _ in cut("flux", size)]
    assert not any("attn" in name for name in names if name.startswith("single"))
    assert any("attn" in name for name in names if name.startswith("transformer_blocks"))


@pytest.mark.full("each two of the model and the budgets", keep="values")
@pytest.mark.long("all budgets with each other", keep="pairs")
@pytest.mark.parametrize("device_gb", [None, 0.5, 1, 2, 4, 8, 12, 24, 70])
@pytest.mark.parametrize("ram_gb", [0.5, 4, 64])
@pytest.mark.parametrize("kind", MODELS)
def test_every_group_fits_every_budget(kind: str, ram_gb: float, device_gb: float | None) -> None:
    size = sizes(device_gb, ram_gb, kind)
    smallest = min(ram_gb, ram_gb if device_gb is None else device_gb) * GB
    assert size.group <= smallest / shares.LARGE_GROUP
    if device_gb is None:
        assert size.block == size.group
    else:
        fits = weights(kind) <= device_gb * GB
        share = shares.LARGE_GROUP if fits else shares.PLANNED_BLOCK
        assert size.block <= max(size.group, device_gb * GB / share)
    largest_tensor = max(tensor.extent.nbytes for tensor in in_a_file(kind))
    most = slot_bytes(max(size.group, largest_tensor) + MIB)  # with padding between tensors
    assert max(nbytes for _, nbytes in cut(kind, size)) <= most


def test_without_an_accelerator_sizes_are_unchanged() -> None:
    assert sizes(None, 64, "flux")[:2] == (256 * MIB, 256 * MIB)
    assert sizes(None, 1, "flux")[:2] == (32 * MIB, 32 * MIB)


def test_compiled_size_is_half_of_the_smallest_budget() -> None:
    assert sizes(None, 64, "flux").compiled == 32 * GB
    assert sizes(2, 64, "flux").compiled == GB


# Blocks in several groups -------------------------------------------------------------------------


def memory(unit: str, count: int) -> tuple[str, ...]:
    return tuple(f"{unit}{number}" for number in range(count))


def test_large_block_is_in_several_groups() -> None:
    needs = [Need("a", memory("a", 10), block=True), Need("b", memory("b", 2), block=True)]
    nbytes = {piece: 10 for need in needs for piece in need.memory}
    found = portions(needs, nbytes, 40, None)
    assert [(group.name, len(group.memory)) for group in found] == [
        ("a", 4),
        ("a", 4),
        ("a", 2),
        ("b", 2),
    ]


def test_large_tensor_is_a_separate_group() -> None:
    needs = [Need("a", memory("a", 4), block=True)]
    found = portions(needs, dict(zip(needs[0].memory, (5, 100, 5, 5), strict=True)), 40, None)
    assert [group.memory for group in found] == [["a0"], ["a1"], ["a2", "a3"]]


def test_tensor_shared_with_an_earlier_block_is_not_repeated() -> None:
    needs = [Need("a", ("x", "tied"), block=True), Need("b", ("tied", "y", "z"), block=True)]
    found = portions(needs, dict.fromkeys(("x", "tied", "y", "z"), 30), 40, None)
    assert [group.memory for group in found] == [["x"], ["tied"], ["y"], ["z"]]


def test_counted_blocks_move_together() -> None:
    needs = [Need(name, memory(name, 3), block=True) for name in "ab"]
    nbytes = {piece: 30 for need in needs for piece in need.memory}
    assert [len(group.memory) for group in portions(needs, nbytes, 40, 1)] == [3, 3]


def test_loaded_modules_are_partitioned_like_names() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    model: Any = nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(3))})
    partitioner = Partitioner("block_level", 600, largest_block=1 << 20)
    units: list[Unit] = partitioner.units(model)
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2"]
    plans: list[GroupPlan] = partitioner.groups(units)
    assert [plan.name for plan in plans] == [f"blocks.{n}" for n in range(3) for _ in range(4)]
    finer = Partitioner("block_level", 600)
    leaves = finer.units(model)
    assert len(leaves) == 6
    assert len(finer.groups(leaves)) == 6
