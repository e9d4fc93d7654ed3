"""From the names of tensors to groups: the rules of the partition, and the meaning of names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tierstore.adapters.grouping import Partitioner
from tierstore.model.groups import Extent, FileTensor
from tierstore.model.module_order import in_customary_order
from tierstore.model.module_tree import groups_of, partition_model
from tierstore.model.outline import (
    LEAST_TILE,
    TILE,
    Need,
    needed_by,
    portions,
    target_bytes,
    tile_sizes,
    tiles,
    unused,
)
from tierstore.model.tiers import Tier

BYTES = 4096


def in_a_file(shapes: Mapping[str, int], dtype: str = "F32") -> list[FileTensor]:
    """Return tensors of these numbers of elements, one after another in a file."""
    found = []
    here = 0
    for name, elements in shapes.items():
        nbytes = elements * {"F32": 4, "I64": 8}[dtype]
        found.append(FileTensor(name, dtype, (elements,), Extent("model", here, nbytes)))
        here += nbytes
    return found


def keys(shapes: Mapping[str, int], target: int, offload_type: str = "block_level") -> list[str]:
    return [group.key for group, _ in groups_of(in_a_file(shapes), offload_type, target)]


def blocks(count: int, elements: int = 1024) -> dict[str, int]:
    return {f"blocks.{n}.linear.weight": elements for n in range(count)}


# --- meaning of names -----------------------------------------------------------------------------


def test_lists_are_in_numerical_order_between_inputs_and_outputs() -> None:
    shapes = {"final.weight": 1024, **blocks(11), "patch_embed.weight": 1024}
    expected = ["patch_embed", *(f"blocks.{n}" for n in range(11)), "final"]
    assert keys(shapes, BYTES) == expected


def test_small_blocks_share_a_group_and_large_ones_are_divided() -> None:
    assert keys(blocks(6), 2 * BYTES) == ["blocks.0", "blocks.2", "blocks.4"]
    shapes = {f"blocks.{n}.{part}.weight": 1024 for n in range(2) for part in ("up", "down")}
    assert keys(shapes, 2 * BYTES) == ["blocks.0", "blocks.1"]
    assert keys(shapes, BYTES) == ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up"]


def test_neighbouring_leaves_share_a_group() -> None:
    shapes = {"embed.weight": 1024, **blocks(3)}
    assert keys(shapes, 2 * BYTES, "leaf_level") == ["embed", "blocks.1.linear"]


def test_tensors_beside_modules_form_a_separate_group() -> None:
    shapes = {"table": 16, "embed.weight": 16, "embed.bias": 16, "head.weight": 16}
    ((root, _), (rest, _)) = groups_of(in_a_file(shapes), "block_level", BYTES)
    assert (root.key, [t.name for t in root.tensors]) == ("root", ["table"])
    assert [t.name for t in rest.tensors] == ["embed.weight", "embed.bias", "head.weight"]


def test_attention_with_one_projection_moves_whole() -> None:
    shapes = {"attn.in_proj_weight": 1024, "attn.out_proj.weight": 1024}
    assert keys(shapes, BYTES) == ["attn"]
    apart = {"attn.in_proj.weight": 1024, "attn.out_proj.weight": 1024}
    assert keys(apart, BYTES) == ["attn.in_proj", "attn.out_proj"]


def test_parametrized_module_moves_whole() -> None:
    shapes = {f"conv.parametrizations.weight.original{n}": 1024 for n in range(2)}
    assert keys(shapes, BYTES) == ["conv"]


def test_small_statistics_stay_with_their_user() -> None:
    shapes = {"norm.weight": 64, "norm.running_mean": 64, "norm.running_var": 1 << 20}
    ((group, _),) = groups_of(in_a_file(shapes), "block_level", BYTES << 20)
    assert [t.name for t in group.tensors] == ["norm.weight", "norm.running_var"]


def test_empty_tensors_are_ignored() -> None:
    assert keys({"a.weight": 0, "b.weight": 8}, BYTES) == ["b"]
    assert keys({}, BYTES) == []


@pytest.mark.parametrize(
    "names",
    [
        ["norm_q", "norm_k", "to_q", "to_k", "to_v"],
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"],
        ["conv_in", "time_embedding", "down_blocks", "up_blocks", "mid_block", "conv_out"],
    ],
)
def test_well_known_modules_follow_the_order_of_their_class(names: list[str]) -> None:
    assert in_customary_order(sorted(names)) == names
    assert in_customary_order(reversed(names)) == names


# --- the same rules as for modules ----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)


class Model(nn.Module):
    """A model whose customary order of modules is that of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(Block(width) for width in (32, 64, 32, 32))
        self.stages = nn.ModuleList(nn.Sequential(Block(32), Block(16)) for _ in range(2))
        self.tables = nn.ParameterList(nn.Parameter(torch.zeros(32, n)) for n in range(20, 32))
        self.head = nn.Linear(32, 100)


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
@pytest.mark.parametrize("target", [1, 5_000, 9_000, 20_000, 200_000])
def test_groups_from_names_equal_those_from_modules(offload_type: str, target: int) -> None:
    model = Model()
    partitioner = Partitioner(offload_type, target)
    plans = partitioner.groups(partitioner.units(model))
    sizes = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    told = [group for group, _ in groups_of(in_a_file(sizes), offload_type, target)]
    keys: set[str] = set()
    assert [(group.key, {t.name for t in group.tensors}) for group in told] == [
        (unused(plan.name, keys), set(plan.tensors)) for plan in plans
    ]


def test_tied_weight_is_in_its_first_users_group() -> None:
    units = [Need("a", ("x", "tied")), Need("b", ("tied", "y")), Need("c", ("tied",))]
    sizes = dict.fromkeys(("x", "y", "tied"), 10)
    found = portions(units, sizes, 10, None)
    assert [(group.name, group.memory) for group in found] == [("a", ["x", "tied"]), ("b", ["y"])]


def test_block_count_sets_the_groups() -> None:
    units = [Need(str(n), (n,), block=True) for n in range(5)]
    found = portions(units, dict.fromkeys(range(5), 10), 1, 2)
    assert [group.memory for group in found] == [[0, 1], [2, 3], [4]]


def test_groups_are_a_share_of_the_smallest_budget() -> None:
    much = 1 << 50
    assert target_bytes("block_level", 800, much) == 100
    assert target_bytes("leaf_level", 800, much) == 50
    assert target_bytes("block_level", 128 << 20, much) == 16 << 20
    assert target_bytes("block_level", 512 << 20, much) == 32 << 20
    assert target_bytes("block_level", 2048 << 20, much) == 64 << 20
    assert target_bytes("block_level", 1 << 40, much) == 256 << 20
    assert target_bytes("leaf_level", 1 << 40, much) == 32 << 20
    assert target_bytes("block_level", 1 << 30, 1 << 30) == 128 << 20, "all groups fit"
    assert target_bytes("block_level", 1, 1) == 1


def test_deeply_nested_name_is_only_a_name() -> None:
    shapes = {"a." * 50_000 + "weight": 8, "b.weight": 8, "." * 10_000: 8, "b": 8}
    found = groups_of(in_a_file(shapes), "block_level", BYTES)
    assert {spec.name for group, _ in found for spec in group.tensors} == set(shapes)


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 40_960, 1_000_000, 75_497_472])
@pytest.mark.parametrize("tile", [4096, 16_384, 16 << 20])
def test_tiles_of_a_group_are_few_and_even(nbytes: int, tile: int) -> None:
    found = tiles(nbytes, tile)
    sizes = [size for _, size in found]
    assert sum(sizes) == nbytes
    assert [start for start, _ in found] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert len(found) <= -(-nbytes // tile)
    assert max(sizes) <= tile
    assert all(size % 4096 == 0 for size in sizes[:-1])
    assert len(set(sizes[:-1])) <= 1, "all tiles but the last have one size"


def test_tile_sizes_follow_from_the_budgets() -> None:
    large = tile_sizes({Tier.DEVICE: 12 << 30, Tier.HOST: 64 << 30, Tier.DISK: None})
    assert (large.group, large.block) == (TILE, (12 << 30) // 64)
    smaller = tile_sizes({Tier.HOST: 1 << 30, Tier.DISK: None})
    assert smaller.group == 8 << 20, "two in transit and a ring fit into a small budget, too"
    assert smaller.block == 16 << 20
    assert tile_sizes({Tier.HOST: 4096, Tier.DISK: None}).group == LEAST_TILE


def test_crumbs_stay_with_their_neighbours() -> None:
    sizes = {"bias": 1, "weight": 90, "next bias": 1, "next weight": 90, "small": 30}
    sizes = {name: nbytes << 10 if nbytes > 1 else nbytes for name, nbytes in sizes.items()}
    unit = Need("unit", tuple(sizes), block=True)
    together = [part.memory for part in portions([unit], sizes, 64 << 10, None)]
    assert together == [["bias", "weight", "next bias"], ["next weight"], ["small"]]
    larger = {**sizes, "bias": 65, "next bias": 65}
    apart = [part.memory for part in portions([unit], larger, 64 << 10, None)]
    assert apart == [["bias"], ["weight"], ["next bias"], ["next weight"], ["small"]]


def test_units_name_the_groups_that_they_need() -> None:
    units = [Need("a", ("x", "y")), Need("b", ("y", "z"))]
    parts = portions(units, {"x": 3, "y": 3, "z": 3}, 6, None)
    assert [part.memory for part in parts] == [["x", "y"], ["z"]]
    assert needed_by(units, parts) == [(0,), (0, 1)]


def test_model_is_partitioned_into_units_and_groups() -> None:
    shapes = {f"blocks.{n}.{part}.weight": 1024 for n in range(2) for part in ("up", "down")}
    found = partition_model(in_a_file(shapes), "block_level", BYTES, largest_block=4 * BYTES)
    assert found.units == [("blocks.0", (0, 1)), ("blocks.1", (2, 3))]
    assert found.groups == groups_of(
        in_a_file(shapes), "block_level", BYTES, largest_block=4 * BYTES
    )
