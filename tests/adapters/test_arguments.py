"""Arguments of enable_group_offload, and the invalid ones that raise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from tests import pipelines
from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, needs_accelerator
from tests.adapters.conftest import (
    DEVICES,
    Checkpoints,
    References,
    a_third_of,
    diffusers_offload,
)
from tests.adapters.models import BLOCK_BYTES, Caching, Enclosing, Tower, given
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, enable_group_offload
from tierstore.errors import BudgetError

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

ON_BOTH = pytest.mark.parametrize("device", DEVICES)
PLENTY = 1 << 20


def layers(groups: dict[str, list[str]]) -> list[list[str]]:
    """Return the layers whose weights are in each group."""
    return [list(dict.fromkeys(n.rpartition(".")[0] for n in names)) for names in groups.values()]


@torch.no_grad()
def assert_right(model: nn.Module, made: type[nn.Module], device: str) -> None:
    expected = made().to(device)(given().to(device)).cpu()
    for _ in range(2):
        assert torch.equal(model(given()).cpu(), expected)


# Partition of a model -----------------------------------------------------------------------------


@ON_BOTH
def test_leaf_level_divides_between_modules(device: str, disk_dir: Path) -> None:
    model = Tower()
    with (
        open_store(disk_dir, PLENTY, device) as store,
        enable_group_offload(
            model, store, offload_type="leaf_level", group_size=BLOCK_BYTES // 2
        ) as handle,
    ):
        assert layers(handle.groups) == [
            ["head"],
            ["blocks.0"],
            ["blocks.1"],
            ["blocks.2"],
            ["blocks.3"],
            ["tail"],
        ]
        assert_right(model, Tower, device)


@ON_BOTH
@pytest.mark.parametrize(
    ("count", "blocks"),
    (
        (1, [["blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3"]]),
        (2, [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]),
        (3, [["blocks.0", "blocks.1", "blocks.2"], ["blocks.3"]]),
        (9, [["blocks.0", "blocks.1", "blocks.2", "blocks.3"]]),
    ),
)
def test_num_blocks_per_group_sets_the_groups(
    count: int, blocks: list[list[str]], device: str, disk_dir: Path
) -> None:
    model = Tower()
    with (
        open_store(disk_dir, PLENTY, device) as store,
        enable_group_offload(model, store, num_blocks_per_group=count) as handle,
    ):
        groups = layers(handle.groups)
        assert groups == [["head"], *blocks, ["tail"]]
        assert_right(model, Tower, device)


@pytest.mark.parametrize("size", (2 * BLOCK_BYTES, f"{2 * BLOCK_BYTES / 1000}kB"))
@pytest.mark.parametrize("offload_type", ("block_level", "leaf_level"))
def test_group_size_is_an_upper_bound(offload_type: str, size: int | str, disk_dir: Path) -> None:
    model = Tower()
    with (
        TierStore(PLENTY, disk_dir, device="cpu") as store,
        enable_group_offload(model, store, offload_type=offload_type, group_size=size) as handle,
    ):
        groups = layers(handle.groups)
        assert max(len(group) for group in groups) == 2
        assert sum(len(group) for group in groups) == 6
        assert_right(model, Tower, "cpu")


def test_default_size_makes_groups_that_fit_side_by_side(
    checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama", "small"))
    budget = pipelines.weight_bytes(model) // 2
    with (
        TierStore(budget, disk_dir, device="cpu") as store,
        enable_group_offload(model, store) as handle,
    ):
        sizes = [group.nbytes for group in store.snapshot().groups]
        assert len(sizes) == len(handle.groups)
        assert max(sizes) <= budget // 4


def test_block_modules_are_kept_whole(disk_dir: Path) -> None:
    tower = nn.Module()
    tower.first, tower.second = Tower(), Tower()
    tower.forward = lambda x: tower.second(tower.first(x))
    with TierStore(PLENTY, disk_dir, device="cpu") as store:
        handle = enable_group_offload(tower, store, num_blocks_per_group=1)
        assert len(handle.groups) > 2
        handle = enable_group_offload(
            tower, store, num_blocks_per_group=1, block_modules=["first", "second"]
        )
        parts = [{name.partition(".")[0] for name in names} for names in handle.groups.values()]
        assert parts == [{"first"}, {"second"}]
        tower._group_offload_block_modules = ["second"]
        handle = enable_group_offload(tower, store, num_blocks_per_group=1)
        whole = [names for names in handle.groups.values() if names[0].startswith("second")]
        assert len(whole) == 1
        expected = Tower()(Tower()(given()))
        assert torch.equal(tower(given()), expected)


# Excluded modules ---------------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("excluded", ("vae", ["vae", "text_encoder"]))
def test_excluded_modules_stay_on_the_device(
    excluded: str | list[str],
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    names = [excluded] if isinstance(excluded, str) else excluded
    with (
        a_third_of(pipe, disk_dir, device) as store,
        enable_group_offload(pipe, store, exclude_modules=excluded) as handle,
    ):
        offloaded = {key.split("/")[1] for key in handle.groups}
        assert offloaded == set(pipelines.components(pipe)) - set(names)
        for name in names:
            assert {p.device.type for p in getattr(pipe, name).parameters()} == {device}
        output = pipelines.run("flux", pipe, device=device)
        assert torch.equal(output, reference("flux", device=device).output)


def test_excluding_an_unknown_module_raises(checkpoint: Checkpoints, disk_dir: Path) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with (
        TierStore(PLENTY, disk_dir, device="cpu") as store,
        pytest.raises(ValueError, match=r"'unet'.*text_encoder.*transformer.*vae"),
    ):
        enable_group_offload(pipe, store, exclude_modules=["unet"])


@needs_accelerator
@pytest.mark.parametrize("named_by", ("argument", "model"))
def test_excluded_keywords_are_not_moved(named_by: str, disk_dir: Path) -> None:
    model = Caching()
    cache, other, listed = torch.zeros(2), torch.zeros(2), [torch.zeros(2)]
    if named_by == "model":
        model._skip_keys = ["cache", "listed"]
    excluded = ["cache", "listed"] if named_by == "argument" else None
    with (
        open_store(disk_dir, PLENTY, ACCELERATOR) as store,
        enable_group_offload(model, store, exclude_kwargs=excluded),
    ):
        model(given(), cache=cache, other=other, listed=listed)
        assert model.seen["cache"] is cache and model.seen["listed"] is listed
        assert model.seen["other"].device.type == ACCELERATOR
        on_device = [torch.zeros(2, device=ACCELERATOR)]
        model(given(), caches=on_device)
        assert model.seen["caches"] is on_device  # nothing to move: the very same list


# Offloading of diffusers that the store replaces --------------------------------------------------


@pytest.mark.parametrize(
    "harmless",
    (
        {"use_stream": True, "record_stream": True},
        {"low_cpu_mem_usage": True, "non_blocking": True},
        {"offload_to_disk_path": None, "offload_device": torch.device("cpu")},
        {"onload_device": "cpu"},
        {"onload_device": torch.device("cpu")},
    ),
)
def test_harmless_arguments_of_diffusers_change_nothing(
    harmless: dict[str, Any], disk_dir: Path
) -> None:
    model = Tower()
    with TierStore(PLENTY, disk_dir, device="cpu") as store:
        handle = enable_group_offload(model, store, **harmless)
        assert enable_group_offload(model, store) is handle
        assert_right(model, Tower, "cpu")


@pytest.mark.parametrize(
    ("replaced", "replacement"),
    (
        ({"offload_to_disk_path": "somewhere"}, "disk_dir"),
        ({"offload_device": "meta"}, "budget"),
        ({"ofload_type": "leaf_level"}, "unexpected keyword argument 'ofload_type'"),
    ),
)
def test_replaced_arguments_name_their_replacement(
    replaced: dict[str, Any], replacement: str, disk_dir: Path
) -> None:
    with (
        TierStore(PLENTY, disk_dir, device="cpu") as store,
        pytest.raises(TypeError, match=replacement) as caught,
    ):
        enable_group_offload(Tower(), store, **replaced)
    assert next(iter(replaced)) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"offload_type": "layer_level"}, "block_level, leaf_level"),
        ({"num_blocks_per_group": 0}, "positive int"),
        ({"num_blocks_per_group": 1.5}, "positive int"),
        ({"num_blocks_per_group": 1, "group_size": "1MB"}, "pass one"),
        ({"group_size": "8"}, "'8'"),
        ({"onload_device": "cuda:0"}, "the store serves cpu|no cuda device"),
    ),
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str, disk_dir: Path) -> None:
    model = Tower()
    with TierStore(PLENTY, disk_dir, device="cpu") as store:
        with pytest.raises(ValueError, match=message):
            enable_group_offload(model, store, **arguments)
        assert not store.keys()
        assert_right(model, Tower, "cpu")


@needs_accelerator
@pytest.mark.two_devices
def test_onload_device_is_that_of_the_store(disk_dir: Path) -> None:
    with open_store(disk_dir, PLENTY, ACCELERATOR) as store:
        model = Tower()
        handle = enable_group_offload(model, store, onload_device=ACCELERATOR)
        assert enable_group_offload(model, store, onload_device=DEVICE_0) is handle
        for other in (DEVICE_1, "cpu"):
            with pytest.raises(ValueError, match=f"serves {DEVICE_0}"):
                enable_group_offload(model, store, onload_device=other)
        assert_right(model, Tower, ACCELERATOR)


def test_wrong_types_of_store_and_model_raise(disk_dir: Path) -> None:
    with pytest.raises(TypeError, match=r"TierStore\(ram_budget, disk_dir\)"):
        enable_group_offload(Tower(), disk_dir)
    with (
        TierStore(PLENTY, disk_dir, device="cpu") as store,
        pytest.raises(TypeError, match="diffusers pipeline or a module"),
    ):
        enable_group_offload({"weight": torch.zeros(1)}, store)


# Other offloading ---------------------------------------------------------------------------------


@ON_BOTH
def test_diffusers_sees_the_execution_device(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store) as handle:
        assert pipe._execution_device == store.device
        assert pipe.transformer.device == pipe.vae.device == store.device
        disable_offload(handle)
        assert pipe._execution_device == pipe.transformer.device == torch.device("cpu")


@ON_BOTH
def test_moving_an_offloaded_pipeline_moves_nothing(
    device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store):
        pipe.to(device)
        pipe.transformer.to(device)
        assert {tensor.device.type for _, tensor in pipelines.weights(pipe)} == {"cpu"}
        output = pipelines.run("flux", pipe, device=device)
        assert torch.equal(output, reference("flux", device=device).output)


@pytest.mark.parametrize("way", ("alone", "with a device", "by name"))
def test_offloaded_pipeline_is_converted(way: str, checkpoint: Checkpoints, disk_dir: Path) -> None:
    """diffusers skips models that are offloaded."""
    plain, pipe = (pipelines.load("flux", checkpoint("flux")) for _ in range(2))
    plain.to(torch.float32)
    with a_third_of(pipe, disk_dir, "cpu") as store:
        handle = enable_group_offload(pipe, store)
        match way:
            case "alone":
                assert pipe.to(torch.float32) is pipe
            case "with a device":
                pipe.to("cpu", torch.float32)
            case "by name":
                pipe.to(dtype=torch.float32)
        assert pipe.dtype is torch.float32
        written, read = store.stats().bytes_written, store.stats().bytes_read
        assert written > 0
        if way == "alone":
            expected = pipelines.run("flux", plain)
            assert torch.allclose(pipelines.run("flux", pipe), expected, rtol=1e-4, atol=1e-5)
            assert store.stats().bytes_read > read
        disable_offload(handle)
        for (name, found), (_, value) in zip(
            pipelines.weights(pipe), pipelines.weights(plain), strict=True
        ):
            assert torch.equal(found, value), name
        assert pipe.to(torch.bfloat16).dtype is torch.bfloat16
        assert "to" not in vars(pipe)


@ON_BOTH
@pytest.mark.parametrize("other", ("enable_model_cpu_offload", "enable_sequential_cpu_offload"))
def test_diffusers_offloading_on_top_raises(
    other: str, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store):
        with pytest.raises(ValueError, match="group offloading enabled"):
            getattr(pipe, other)(device=device)
        output = pipelines.run("flux", pipe, device=device)
        assert torch.equal(output, reference("flux", device=device).output)


def test_model_offloaded_by_accelerate_raises(disk_dir: Path) -> None:
    model = Tower()
    accelerate.cpu_offload(model, torch.device("cpu"))
    with TierStore(PLENTY, disk_dir, device="cpu") as store:
        with pytest.raises(ValueError, match="remove_hook_from_module"):
            enable_group_offload(model, store)
        assert not store.keys()
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        enable_group_offload(model, store)
        assert_right(model, Tower, "cpu")


def test_model_offloaded_by_diffusers_raises(disk_dir: Path, tmp_path: Path) -> None:
    model = Tower()
    diffusers_offload(model, tmp_path / "diffusers")
    with (
        TierStore(PLENTY, disk_dir, device="cpu") as store,
        pytest.raises(ValueError, match="already offloaded"),
    ):
        enable_group_offload(model, store)


def test_model_on_another_store_raises(
    checkpoint: Checkpoints, reference: References, disk_dir: Path, tmp_path: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with (
        a_third_of(pipe, disk_dir, "cpu") as store,
        a_third_of(pipe, tmp_path / "other", "cpu") as other,
        enable_group_offload(pipe, store),
    ):
        with pytest.raises(ValueError, match="already offloaded"):
            enable_group_offload(pipe.transformer, other)
        assert torch.equal(pipelines.run("flux", pipe), reference("flux").output)


# Budgets that are too small -----------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("kind", ("flux", "llama"))
def test_budget_below_the_largest_group_raises(
    kind: str, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    pipe = pipelines.load(kind, checkpoint(kind))
    largest = max(tensor.nbytes for _, tensor in pipelines.weights(pipe))
    with open_store(disk_dir, largest - 4096, device) as store:
        with pytest.raises(BudgetError, match=r"raise (ram|device)_budget") as caught:
            enable_group_offload(pipe, store)
        error = caught.value
        assert largest <= error.nbytes < largest + 2 * 4096
        assert largest - 2 * 4096 < error.budget <= largest - 4096
        assert f"{error.nbytes:,}" in str(error) and f"{error.budget:,}" in str(error)
        assert not store.keys()
    assert torch.equal(pipelines.run(kind, pipe), reference(kind).output)


@needs_accelerator
def test_budget_error_names_the_tier(disk_dir: Path, tmp_path: Path) -> None:
    small = BLOCK_BYTES - 4096
    with TierStore(PLENTY, disk_dir, device=ACCELERATOR, device_budget=small) as store:
        with pytest.raises(BudgetError, match="raise device_budget") as caught:
            enable_group_offload(Tower(), store)
        assert caught.value.tier == "DEVICE"
    with TierStore(small, tmp_path / "b", device=ACCELERATOR, device_budget=PLENTY) as store:
        with pytest.raises(BudgetError, match="raise ram_budget") as caught:
            enable_group_offload(Tower(), store)
        assert caught.value.tier == "HOST"


class Counting(Tower):
    """A tower with small buffers, which stay on the device: 32 KiB."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.register_buffer(f"counts{number}", torch.ones(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.counts7.sum()


@needs_accelerator
@torch.no_grad()
def test_budget_error_includes_resident_buffers(disk_dir: Path) -> None:
    """The budget that the error advises works."""
    model = Counting()
    expected = Counting().to(ACCELERATOR)(given().to(ACCELERATOR)).cpu()
    budget = BLOCK_BYTES + 16384
    with TierStore(PLENTY, disk_dir, device=ACCELERATOR, device_budget=budget) as store:
        for _ in range(2):
            with pytest.raises(BudgetError, match="raise device_budget") as caught:
                enable_group_offload(model, store, num_blocks_per_group=1)
            assert caught.value.tier == "DEVICE"
        found = re.search(r"to at least ([\d,]+) bytes", str(caught.value))
        assert found is not None
        enough = int(found[1].replace(",", ""))
        assert enough >= BLOCK_BYTES + 8 * 4000
        assert store.stats().used_bytes["DEVICE"] == 0
    with TierStore(PLENTY, disk_dir, device=ACCELERATOR, device_budget=enough) as store:
        enable_group_offload(model, store, num_blocks_per_group=1)
        for _ in range(2):
            assert torch.equal(model(given()).cpu(), expected)
        assert store.stats().bytes_onloaded > 2 * 8 * BLOCK_BYTES - enough


@ON_BOTH
@torch.no_grad()
def test_enclosing_weight_without_space_beside_blocks_runs(device: str, disk_dir: Path) -> None:
    """A weight around blocks is leased for the whole call if it fits beside each of them.

    Otherwise, it is leased for each operation.
    """
    for budget in (BLOCK_BYTES + 8192, 2 * BLOCK_BYTES + 8192):
        model = Enclosing()
        with open_store(disk_dir, budget, device) as store:
            enable_group_offload(model, store, num_blocks_per_group=1)
            assert_right(model, Enclosing, device)
            assert store.stats().bytes_read >= 5 * BLOCK_BYTES - 256


def test_model_without_group_offload_support_raises(disk_dir: Path) -> None:
    model = Tower()
    model._supports_group_offloading = False
    with (
        open_store(disk_dir, PLENTY) as store,
        pytest.raises(ValueError, match="Tower does not support group offloading"),
    ):
        enable_group_offload(model, store)
