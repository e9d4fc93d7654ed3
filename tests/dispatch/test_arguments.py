"""Arguments of dispatch: the invalid ones raise and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, needs_accelerator
from tests.adapters.conftest import diffusers_offload
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Weights,
    assert_ordinary,
    store_for,
)
from tierstore import (
    TierStore,
    cpu_offload,
    disable_offload,
    disk_offload,
    dispatch_model,
    enable_group_offload,
    load_checkpoint_and_dispatch,
)
from tierstore.errors import BudgetError, ClosedError

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="any device",
)

SHARE = 0.5


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    with store_for(models.Tower(), disk_dir, device, SHARE) as store:
        yield store


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    return model(models.rows()).cpu()


@torch.no_grad()
def outputs(device: str = "cpu") -> torch.Tensor:
    return models.Tower().to(device)(models.rows().to(device)).cpu()


@pytest.fixture(scope="module")
def tower_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tower") / "model.safetensors"
    accelerate.utils.save(models.Tower().state_dict(), path, safe_serialization=True)
    return path


Dispatch = Callable[..., Any]
FUNCTIONS = ("dispatch_model", "load_checkpoint_and_dispatch", "cpu_offload", "disk_offload")


@pytest.fixture(params=FUNCTIONS)
def dispatch(request: pytest.FixtureRequest, tower_file: Path) -> Dispatch:
    """Yield each way to dispatch, called with a model and a store."""
    if request.param == "load_checkpoint_and_dispatch":
        return lambda model, store, **rest: load_checkpoint_and_dispatch(
            model, tower_file, store, **rest
        )
    return {
        "dispatch_model": dispatch_model,
        "cpu_offload": cpu_offload,
        "disk_offload": disk_offload,
    }[request.param]


def assert_refused(model: Any, store: TierStore, weights: Weights) -> None:
    """Check that the model is unchanged, and can still be dispatched."""
    weights.assert_unchanged(model)
    assert_ordinary(model)
    assert not [key for key in store if not key.startswith("weights/")]
    assert torch.equal(run(model), outputs())
    dispatch_model(model, store)
    assert torch.equal(run(model), outputs(str(store.device).partition(":")[0]))
    assert store.stats().bytes_read > 0


# Arguments of accelerate --------------------------------------------------------------------------

REPLACED = {
    "offload_dir": ("folder", "disk_dir"),
    "offload_folder": ("folder", "disk_dir"),
    "offload_index": ({"layers.0.weight": {}}, "store"),
    "state_dict": ({"layers.0.weight": torch.zeros(1)}, "load"),
    "max_memory": ({0: "1GB"}, "budget"),
    "offload_state_dict": (True, "store"),
}


@ON_BOTH
def test_argument_replaced_by_the_store_raises(
    device: str, dispatch: Dispatch, store: TierStore
) -> None:
    model = models.Tower()
    weights = Weights.of(model)
    for name, (value, advice) in REPLACED.items():
        with pytest.raises(TypeError, match=rf"{name} is replaced by .*{advice}"):
            dispatch(model, store, **{name: value})
        assert not store.keys()
    assert_refused(model, store, weights)


HARMLESS = {
    "offload_buffers": True,
    "force_hooks": True,
    "no_split_module_classes": ["Linear"],
    "offload_dir": None,
    "max_memory": None,
    "offload_state_dict": False,
    "non_blocking": True,
}


@ON_BOTH
def test_harmless_argument_has_no_effect(device: str, dispatch: Dispatch, store: TierStore) -> None:
    model = models.Tower()
    assert dispatch(model, store, **HARMLESS) is model
    for _ in range(2):
        assert torch.equal(run(model), outputs(device))
    assert store.stats().bytes_read > 0


@ON_BOTH
def test_unknown_argument_raises(device: str, dispatch: Dispatch, store: TierStore) -> None:
    model = models.Tower()
    weights = Weights.of(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'offload_directory'"):
        dispatch(model, store, offload_directory="folder")
    assert_refused(model, store, weights)


# Devices ------------------------------------------------------------------------------------------


@needs_accelerator
@ON_BOTH
def test_other_device_than_the_store_raises(
    device: str, dispatch: Dispatch, store: TierStore
) -> None:
    offloads = dispatch in (cpu_offload, disk_offload)
    name = "execution_device" if offloads else "main_device"
    model = models.Tower()
    weights = Weights.of(model)
    wrong = ["meta", DEVICE_1, torch.device(ACCELERATOR, 1), "xpu:7"]
    wrong += [ACCELERATOR, 0] if device == "cpu" else ["cpu"]
    for place in wrong:
        with pytest.raises(ValueError, match=rf"{name}.*{device}|meta device"):
            dispatch(model, store, **{name: place})
        weights.assert_unchanged(model)
    assert not store.keys()
    right = [None, "cpu", torch.device("cpu")]
    if device != "cpu":
        right = [None, ACCELERATOR, DEVICE_0, 0, torch.device(DEVICE_0), store.device]
    for place in right:
        model = models.Tower()
        dispatch(model, store, **{name: place})
        assert torch.equal(run(model), outputs(device))


# Models that cannot be dispatched -----------------------------------------------------------------


@ON_BOTH
def test_object_not_a_model_raises(device: str, dispatch: Dispatch, store: TierStore) -> None:
    for thing in (None, {"weight": torch.zeros(1)}, [models.Tower()], models.Tower):
        with pytest.raises(TypeError, match="module"):
            dispatch(thing, store)
    assert not store.keys()


@ON_BOTH
def test_object_not_a_store_raises(
    device: str, dispatch: Dispatch, store: TierStore, tmp_path: Path
) -> None:
    """accelerate takes a map or a directory as the second argument."""
    for thing in (None, {"": "cpu"}, "auto", tmp_path, 0):
        model = models.Tower()
        with pytest.raises(TypeError, match=r"TierStore\("):
            dispatch(model, thing)
        assert_ordinary(model)


@ON_BOTH
def test_closed_store_raises(device: str, dispatch: Dispatch, disk_dir: Path) -> None:
    model = models.Tower()
    weights = Weights.of(model)
    with store_for(model, disk_dir, device) as store:
        pass
    with pytest.raises(ClosedError):
        dispatch(model, store)
    weights.assert_unchanged(model)
    assert_ordinary(model)
    assert torch.equal(run(model), outputs())


@ON_BOTH
@pytest.mark.parametrize("way", (dispatch_model, cpu_offload, disk_offload))
def test_weights_on_meta_raise(way: Dispatch, device: str, store: TierStore) -> None:
    model = models.empty("parts")
    with pytest.raises(ValueError, match=r"meta.*load_checkpoint_and_dispatch"):
        way(model, store)
    partly = models.Tower()
    partly.layers[3].to("meta")
    with pytest.raises(ValueError, match=r"layers\.3\.weight.*load_checkpoint_and_dispatch"):
        way(partly, store)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.device.type for p in partly.layers[2].parameters()} == {"cpu"}
    assert_ordinary(model)
    assert_ordinary(partly)
    assert not store.keys()


@ON_BOTH
def test_model_offloaded_by_accelerate_raises(
    device: str, dispatch: Dispatch, store: TierStore
) -> None:
    model = models.Tower()
    accelerate.cpu_offload(model.layers[2], execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"accelerate|meta"):
        dispatch(model, store)
    assert not store.keys()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    dispatch(model, store)
    assert torch.equal(run(model), outputs(device))


@ON_BOTH
def test_model_with_a_hook_of_accelerate_raises(
    device: str, dispatch: Dispatch, store: TierStore
) -> None:
    """Its weights are real, but two libraries would move them."""
    model = models.Tower()
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu")
    accelerate.hooks.add_hook_to_module(model.layers[1], hook)
    with pytest.raises(ValueError, match="remove_hook_from_module"):
        dispatch(model, store)
    assert not store.keys()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    dispatch(model, store)
    assert torch.equal(run(model), outputs(device))


@ON_BOTH
def test_model_offloaded_by_diffusers_raises(
    device: str, dispatch: Dispatch, store: TierStore, tmp_path: Path
) -> None:
    model = models.Tower()
    diffusers_offload(model, tmp_path / "diffusers")
    with pytest.raises(ValueError, match="already offloaded"):
        dispatch(model, store)
    assert not store.keys()


@ON_BOTH
def test_model_offloaded_in_groups_raises(
    device: str, dispatch: Dispatch, store: TierStore
) -> None:
    model = models.Tower()
    with enable_group_offload(model, store):
        with pytest.raises(ValueError, match="already offloaded"):
            dispatch(model, store)
        assert torch.equal(run(model), outputs(device))
    dispatch(model, store)
    with pytest.raises(ValueError, match=r"already.*disable_offload"):
        enable_group_offload(model, store)
    assert torch.equal(run(model), outputs(device))


@ON_BOTH
def test_checkpoint_for_a_dispatched_model_raises(
    device: str, tower_file: Path, store: TierStore
) -> None:
    model = dispatch_model(models.Tower(seed=4), store)
    weights = Weights.of(model)
    with pytest.raises(ValueError, match=r"disable_offload.*load_state_dict"):
        load_checkpoint_and_dispatch(model, tower_file, store)
    weights.assert_unchanged(model)
    load_checkpoint_and_dispatch(disable_offload(model), tower_file, store)
    assert torch.equal(run(model), outputs(device))


# Budgets ------------------------------------------------------------------------------------------


class Uneven(models.Tower):
    """One of its weights is larger than a tenth of all."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(16384))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.large.sum()


@ON_BOTH
def test_weight_larger_than_the_budget_raises(device: str, disk_dir: Path) -> None:
    model = Uneven()
    weights = Weights.of(model)
    expected = run(Uneven().to(device)) if device == "cpu" else None
    with store_for(4 * 16384, disk_dir, device, 0.75) as store:
        for way in (dispatch_model, cpu_offload, disk_offload):
            with pytest.raises(BudgetError, match=r"raise (ram|device)_budget") as caught:
                way(model, store)
            assert caught.value.nbytes >= 4 * 16384 > caught.value.budget
            assert f"{caught.value.budget:,}" in str(caught.value)
            weights.assert_unchanged(model)
            assert_ordinary(model)
            assert not [key for key in store if not key.startswith("weights/")]
        assert expected is None or torch.equal(run(model), expected)
    with store_for(model, disk_dir, device, 0.75) as store:
        dispatch_model(model, store)
        assert expected is None or torch.equal(run(model), expected)


class Pair(nn.Module):
    """Two matrices; the first also belongs to another module."""

    def __init__(self, first: nn.Parameter) -> None:
        super().__init__()
        self.first = first
        self.second = nn.Parameter(torch.randn(128, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.second


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    plain = [nn.Linear(128, 128, bias=False) for _ in range(4)]
    return nn.Sequential(*plain, Pair(plain[0].weight))


@ON_BOTH
@torch.no_grad()
def test_groups_needed_at_once_beyond_the_budget_raise(device: str, disk_dir: Path) -> None:
    """It raises at once, not in the middle of a run, and names a budget that suffices."""
    x = torch.randn(2, 128)
    expected = tied().to(device)(x.to(device)).cpu()
    layer = 4 * 128 * 128
    for budget in range(layer, 3 * layer, 5 * 4096):
        model = tied()
        with TierStore(
            budget,
            disk_dir,
            device=device,
            **({"device_budget": budget} if device != "cpu" else {}),
        ) as store:
            try:
                dispatch_model(model, store)
            except BudgetError as error:
                assert error.nbytes > error.budget
                assert_ordinary(model)
            else:
                assert torch.equal(model(x), expected)
                break
    else:
        raise AssertionError("no budget sufficed")


@ON_BOTH
def test_checkpoint_weight_larger_than_the_budget_raises(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = models.empty("parts")
    objects = [id(parameter) for parameter in model.parameters()]
    with store_for(12288, disk_dir, device, 1.0) as store:
        with pytest.raises(BudgetError, match=r"raise (ram|device)_budget"):
            load_checkpoint_and_dispatch(model, checkpoint("parts"), store)
        assert_ordinary(model)
        assert not store.keys()
        assert [id(parameter) for parameter in model.parameters()] == objects
    with store_for(models.build("parts"), disk_dir, device, 0.5) as store:
        load_checkpoint_and_dispatch(model, checkpoint("parts"), store)
        plain = models.load("parts", checkpoint("parts")).to(device)
        expected = models.run("parts", plain, device)["output"].cpu()
        assert torch.equal(models.run("parts", model)["output"], expected)


def test_advised_budget_works(disk_dir: Path) -> None:
    model = Uneven()
    with store_for(4 * 16384, disk_dir, "cpu", 0.75) as store:
        with pytest.raises(BudgetError) as caught:
            dispatch_model(model, store)
        needed = caught.value.nbytes
    # While the large one is in use, so is each of the others.
    with TierStore(needed + 2 * 4096 + models.LAYER_BYTES, disk_dir, device="cpu") as store:
        dispatch_model(model, store)
        assert torch.equal(run(model), run(Uneven()))
