"""Silent failures of accelerate's big model inference, each shown in accelerate as well.

Each fault has a test of tierstore's behaviour, and one that shows accelerate failing. If accelerate
has fixed it, the latter is skipped with a message.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Weights,
    assert_ordinary,
    store_for,
)
from tests.helpers.files import flip_bit
from tests.helpers.tensors import assert_same
from tierstore import (
    CorruptDataError,
    TierStore,
    cpu_offload,
    disable_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="a third",
)

SHARE = 0.25


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    with store_for(models.build("parts"), disk_dir, device, SHARE) as store:
        yield store


@contextmanager
def fault(what: str) -> Iterator[None]:
    """Skip the test if accelerate no longer fails inside: the exhibit is then obsolete."""
    try:
        yield
    except AssertionError:
        pytest.skip(f"accelerate {accelerate.__version__} has fixed this: {what}")


def exhibit(folder: Path, seed: int = 0) -> Any:
    """Return a model that accelerate offloads to disk."""
    folder.mkdir(exist_ok=True)
    model = models.build("parts", seed)
    accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model


def outputs(seed: int = 0, device: str = "cpu") -> models.Outputs:
    return models.run("parts", models.build("parts", seed).to(device), device)


def differs(found: models.Outputs, expected: models.Outputs) -> bool:
    return not torch.equal(found["output"], expected["output"])


# Training runs but nothing updates ----------------------------------------------------------------


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(models.tokens(shape=(16,))).square().sum().backward()
    optimizer.step()


@ON_BOTH
def test_training_raises(device: str, store: TierStore) -> None:
    model = dispatch_model(models.build("parts"), store)
    with pytest.raises(RuntimeError, match=r"tierstore.*disable_offload"):
        train(model)
    assert_same(models.run("parts", model), outputs(device=device))


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_training_updates_nothing(tmp_path: Path) -> None:
    model = exhibit(tmp_path / "folder")
    with fault("training is refused, or works"):
        try:
            train(model)
        except RuntimeError as error:
            raise AssertionError from error
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not differs(models.run("parts", model), outputs())


# load_state_dict keeps the old weights ------------------------------------------------------------


@ON_BOTH
def test_load_state_dict_replaces_the_weights(device: str, store: TierStore) -> None:
    model = dispatch_model(models.build("parts"), store)
    models.run("parts", model)
    written = store.stats().bytes_written
    model.load_state_dict(models.build("parts", seed=1).state_dict())
    assert store.stats().bytes_written > written
    assert_same(models.run("parts", model), outputs(seed=1, device=device))


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_load_state_dict_keeps_the_old_weights(tmp_path: Path) -> None:
    model, other = exhibit(tmp_path / "folder"), models.build("parts", seed=1)
    with fault("load_state_dict takes effect"):
        with pytest.warns(UserWarning, match="no-op"):
            found = model.load_state_dict(other.state_dict())
        assert not found.missing_keys and not found.unexpected_keys
        assert differs(models.run("parts", model), outputs(seed=1))


# Saved state dicts hold meta tensors, state dicts have holes --------------------------------------


@ON_BOTH
def test_torch_save_saves_values(device: str, store: TierStore, tmp_path: Path) -> None:
    model = dispatch_model(models.build("parts"), store)
    models.run("parts", model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", map_location="cpu")
    for name, value in models.build("parts").state_dict().items():
        assert torch.equal(saved[name], value), name


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_torch_save_saves_meta_tensors(tmp_path: Path) -> None:
    model = exhibit(tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt")
    with fault("state dicts hold values"):
        assert {saved[name].device.type for name, _ in model.named_parameters()} == {"meta"}


@ON_BOTH
def test_state_dict_has_values(device: str, store: TierStore, tmp_path: Path) -> None:
    model = dispatch_model(models.build("parts"), store)
    models.run("parts", model)
    state = model.state_dict()
    for name, value in models.build("parts").state_dict().items():
        assert torch.equal(state[name].cpu(), value), name
    del state["head.weight"]  # the tied one
    save_file({n: v.cpu() for n, v in state.items()}, tmp_path / "weights.safetensors")


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_state_dict_has_holes(tmp_path: Path) -> None:
    model = exhibit(tmp_path / "folder")
    state = model.state_dict()
    state.pop("head.weight")
    with fault("state dicts hold values"):
        holes = [name for name, value in state.items() if value.device.type == "meta"]
        assert len(holes) == len(dict(model.named_parameters())) - 1  # ties break, too
        with pytest.raises(NotImplementedError, match="meta"):
            save_file(state, tmp_path / "weights.safetensors")


# Weights used outside of forward are uninitialised memory -----------------------------------------


@ON_BOTH
@torch.no_grad()
def test_linear_outside_of_forward_is_right(device: str, store: TierStore) -> None:
    plain, model = models.build("parts"), dispatch_model(models.build("parts"), store)
    x = models.rows()
    for _ in range(2):
        for n in (0, 7):
            found = functional.linear(x, model.blocks[n].weight)
            assert torch.equal(found, functional.linear(x, plain.blocks[n].weight))
        models.run("parts", model)
    assert store.stats().bytes_read > 0


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
@torch.no_grad()
def test_accelerate_linear_outside_of_forward_is_garbage(
    tmp_path: Path,
) -> None:
    plain, model = models.build("parts"), exhibit(tmp_path / "folder")
    x = models.rows()
    with fault("a weight on meta is refused"):
        try:
            found = functional.linear(x, model.blocks[0].weight)
        except RuntimeError as error:  # newer torch raises
            raise AssertionError from error
        assert found.device.type == "cpu"
        assert not torch.equal(found, functional.linear(x, plain.blocks[0].weight))


# A second model in one folder runs the first one's weights ----------------------------------------


@ON_BOTH
@pytest.mark.parametrize("way", (dispatch_model, cpu_offload, disk_offload))
def test_second_model_in_one_directory_runs_its_own_weights(
    way: Callable[..., Any], device: str, disk_dir: Path
) -> None:
    expected = [outputs(seed, device) for seed in (0, 1)]
    assert differs(*expected)
    for seed in (0, 1, 0):  # each in a separate store, one after the other
        model = models.build("parts", seed)
        with store_for(model, disk_dir, device, SHARE) as store:
            way(model, store)
            for _ in range(2):
                assert_same(models.run("parts", model), expected[seed])
            assert store.stats().bytes_read > 0
            disable_offload(model)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
@torch.no_grad()
def test_accelerate_second_model_in_one_folder_runs_the_first(
    tmp_path: Path,
) -> None:
    first, second = models.Tower(seed=0)(models.rows()), models.Tower(seed=1)(models.rows())
    for seed in (0, 1):
        model = models.Tower(seed=seed)
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    found = model(models.rows())
    with fault("a folder knows whose weights it holds"):
        assert torch.equal(found, first) and not torch.equal(found, second)


# Ties break ---------------------------------------------------------------------------------------


@ON_BOTH
def test_tied_weights_are_one_parameter(device: str, store: TierStore) -> None:
    model = dispatch_model(models.build("parts"), store)
    count = sum(parameter.numel() for parameter in models.build("parts").parameters())
    models.run("parts", model)
    assert model.head.weight is model.embed.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    model.embed.weight.data[5] = 1
    assert torch.equal(model.head.weight[5], torch.ones(models.WIDTH))


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_ties_break(tmp_path: Path) -> None:
    model = exhibit(tmp_path / "folder")
    with fault("ties hold"):
        assert model.head.weight is not model.embed.weight


# Pickle fails -------------------------------------------------------------------------------------


@ON_BOTH
def test_pickle_makes_an_ordinary_model(device: str, store: TierStore) -> None:
    model = dispatch_model(models.build("parts"), store)
    models.run("parts", model)
    loaded = pickle.loads(pickle.dumps(model))
    assert_ordinary(loaded)
    assert_same(models.run("parts", loaded), outputs())
    assert_same(models.run("parts", copy.deepcopy(model)), outputs())


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_pickle_fails(tmp_path: Path) -> None:
    model = exhibit(tmp_path / "folder")
    with fault("a model can be pickled"):
        try:
            pickle.dumps(model)
        except (AttributeError, TypeError, pickle.PicklingError):
            return
        raise AssertionError


# Flipped bytes in a file go undetected ------------------------------------------------------------


def flip_every_file(folder: Path, pattern: str) -> None:
    """Change the exponent of a number in the middle of each; file times are unchanged."""
    paths = sorted(folder.rglob(pattern))
    assert paths
    for path in paths:
        flip_bit(path, -1 - 4 * (min(path.stat().st_size, 64) // 8), 6)


@ON_BOTH
def test_flipped_bytes_in_a_file_raise(device: str, disk_dir: Path) -> None:
    model = models.build("parts")
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        assert store.stats().bytes_written > 0
    flip_every_file(disk_dir, "*.safetensors")
    model = models.build("parts")
    with store_for(model, disk_dir, device, SHARE) as store:  # verify="first"
        dispatch_model(model, store)
        assert store.stats().bytes_written == 0
        with pytest.raises(CorruptDataError) as caught:
            models.run("parts", model)
        assert str(disk_dir) in str(caught.value)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_flipped_bytes_in_a_file_are_used(tmp_path: Path) -> None:
    model = exhibit(tmp_path / "folder")
    assert not differs(models.run("parts", model), outputs())
    flip_every_file(tmp_path / "folder", "*.dat")
    with fault("damage is noticed"):
        try:
            found = models.run("parts", model)
        except Exception as error:
            raise AssertionError from error
        assert differs(found, outputs())


# Removed from a loaded checkpoint, a model stays on meta ------------------------------------------


@ON_BOTH
def test_disabled_loaded_model_has_its_weights(
    device: str, checkpoint: Checkpoints, store: TierStore
) -> None:
    model = load_checkpoint_and_dispatch(models.empty("parts"), checkpoint("parts"), store)
    models.run("parts", model)
    disable_offload(model)
    assert_ordinary(model)
    Weights.of(models.load("parts", checkpoint("parts"))).assert_equal_to(model)
    expected = models.run("parts", models.load("parts", checkpoint("parts")))
    assert_same(models.run("parts", model), expected)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_accelerate_removed_hooks_leave_weights_on_meta(tmp_path: Path) -> None:
    save_file(models.Tower().state_dict(), tmp_path / "t.safetensors", metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        model = models.Tower()
    accelerate.load_checkpoint_and_dispatch(
        model,
        str(tmp_path / "t.safetensors"),
        device_map={f"layers.{n}": "disk" if n else "cpu" for n in range(8)},
        offload_folder=str(tmp_path),
        force_hooks=True,
    )
    assert torch.equal(model(models.rows()), models.Tower()(models.rows()))
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    with fault("weights come back"):
        assert "meta" in {parameter.device.type for parameter in model.parameters()}
