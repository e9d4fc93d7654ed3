"""User operations on a dispatched model: saving, copying, reading, querying.

Changes of weights are in test_changes.py, other ways to run the model in test_running.py. Expected
values come from an ordinary model of the same seed.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn import functional

from tests.adapters.conftest import acquires
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    SHARE,
    Checkpoints,
    References,
    assert_ordinary,
    store_for,
)
from tests.helpers.tensors import assert_same
from tierstore import TierStore, disable_offload, dispatch_model

pytestmark = [
    pytest.mark.full(
        "model and dispatch method are independent; test_parity.py covers both devices",
        keep="a third",
    ),
    ON_BOTH,
]


def assert_still_runs(model: nn.Module, store: TierStore, expected: models.Outputs) -> None:
    read = store.stats().bytes_read
    assert_same(models.run("parts", model), expected)
    assert store.stats().bytes_read > read


def same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].cpu(), value) for name, value in expected.items()
    )


# Saving -------------------------------------------------------------------------------------------


def test_state_dict_has_true_values(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    expected = models.build("parts").state_dict()
    for _ in range(2):
        assert same_state(model.state_dict(), expected)
        assert list(model.state_dict()) == list(expected)
        inner = model.blocks.state_dict(prefix="blocks.")
        assert same_state(inner, {n: v for n, v in expected.items() if n.startswith("blocks.")})
        assert_still_runs(model, store, reference("parts", device, built=True).outputs)
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


def test_torch_save_of_the_state_dict_saves_values(
    model: Any, store: TierStore, tmp_path: Path
) -> None:
    plain = models.build("parts").state_dict()
    for name, state in (("plain", plain), ("dispatched", model.state_dict())):
        torch.save(state, tmp_path / name)
    # Not the whole file that a weight maps.
    assert (tmp_path / "dispatched").stat().st_size <= (tmp_path / "plain").stat().st_size + 4096
    loaded = torch.load(tmp_path / "dispatched", map_location="cpu")
    assert same_state(loaded, plain)


def test_torch_save_of_the_model_makes_an_ordinary_one(
    model: Any, store: TierStore, reference: References
) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_ordinary_model(loaded, store, reference)


def test_safetensors_save_file_saves_values(model: Any, tmp_path: Path) -> None:
    plain = models.build("parts").state_dict()
    del plain["head.weight"]  # tied: safetensors rejects it in any model
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(state, tmp_path / "refused.safetensors")
    del state["head.weight"]
    save_file(state, tmp_path / "weights.safetensors")
    saved = load_file(tmp_path / "weights.safetensors")
    assert same_state(saved, plain)


def test_safetensors_save_model_saves_values(model: Any, tmp_path: Path) -> None:
    plain, other = models.build("parts"), models.build("parts", seed=1)
    save_model(plain, str(tmp_path / "plain.safetensors"))
    save_model(model, str(tmp_path / "dispatched.safetensors"))
    found = (tmp_path / "dispatched.safetensors").read_bytes()
    assert found == (tmp_path / "plain.safetensors").read_bytes()
    load_model(other, str(tmp_path / "dispatched.safetensors"))
    assert same_state(other.state_dict(), plain.state_dict())


@pytest.mark.full("saves and loads twice; test_loading.py reads checkpoints")
@pytest.mark.parametrize("kind", ("llama", "t5", "unet"))
def test_save_pretrained_reloads_equal(
    kind: str,
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
    tmp_path: Path,
) -> None:
    model = models.load(kind, checkpoint(kind))
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run(kind, model)
        read = store.stats().bytes_read
        model.save_pretrained(tmp_path / "saved", max_shard_size="400KB")
        assert store.stats().bytes_read >= read > 0
        assert_same(models.run(kind, model), reference(kind, device).outputs)
    assert same_state(models.in_files(tmp_path / "saved"), models.in_files(checkpoint(kind)))
    models.load(kind, checkpoint(kind)).save_pretrained(tmp_path / "plain", max_shard_size="400KB")
    saved, plain = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("saved", "plain")
    )
    assert saved == plain
    loaded = models.load(kind, tmp_path / "saved")
    assert_same(models.run(kind, loaded), reference(kind).outputs)


# Copying ------------------------------------------------------------------------------------------


def assert_ordinary_model(copied: Any, store: TierStore, reference: References) -> None:
    """Check that the copy runs alone, on its own weights, and that ties hold."""
    expected = models.build("parts")
    assert same_state(copied.state_dict(), expected.state_dict())
    assert copied.head.weight is copied.embed.weight
    assert_ordinary(copied)
    leases = acquires(store)
    assert_same(models.run("parts", copied), reference("parts", built=True).outputs)
    assert acquires(store) == leases > 0
    loss = copied(models.tokens()).square().sum()
    loss.backward()
    expected(models.tokens()).square().sum().backward()
    for name, parameter in expected.named_parameters():
        grad = dict(copied.named_parameters())[name].grad
        assert (grad is None) == (parameter.grad is None)
        assert grad is None or torch.equal(grad, parameter.grad), name


def test_deepcopy_is_an_ordinary_model(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    copied = copy.deepcopy(model)
    assert_ordinary_model(copied, store, reference)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert_still_runs(model, store, reference("parts", device, built=True).outputs)
    assert same_state(model.state_dict(), models.build("parts").state_dict())


def test_deepcopy_of_a_submodule_is_ordinary(model: Any, store: TierStore) -> None:
    plain = models.build("parts")
    copied = copy.deepcopy(model.blocks[3])
    assert_ordinary(copied)
    leases = acquires(store)
    x = models.rows()
    assert torch.equal(copied(x), plain.blocks[3](x))
    assert acquires(store) == leases
    copied.weight.data.zero_()
    assert torch.equal(model.blocks[3].weight, plain.blocks[3].weight)


def test_copy_may_be_dispatched(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    expected = reference("parts", device, built=True).outputs
    written = store.stats().bytes_written
    copied = dispatch_model(copy.deepcopy(model), store)
    assert store.stats().bytes_written == written > 0  # the store has all of it already
    for each in (copied, model, copied):
        assert_still_runs(each, store, expected)


def test_pickled_model_is_ordinary(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    loaded = pickle.loads(pickle.dumps(model))
    assert_ordinary_model(loaded, store, reference)
    assert_still_runs(model, store, reference("parts", device, built=True).outputs)
    part = pickle.loads(pickle.dumps(model.blocks[2]))
    assert_ordinary(part)
    assert torch.equal(part.weight, models.build("parts").blocks[2].weight)


# Reading ------------------------------------------------------------------------------------------


def test_parameters_can_be_read(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    plain = models.build("parts")
    named = dict(model.named_parameters())
    assert list(named) == [name for name, _ in plain.named_parameters()]
    for name, expected in plain.named_parameters():
        found = named[name]
        assert isinstance(found, nn.Parameter) and found.is_leaf and found.requires_grad
        assert (found.device.type, found.dtype) == ("cpu", expected.dtype)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert found.tolist() == expected.tolist()
        assert found.sum().item() == expected.sum().item()
        assert torch.equal(found + 1, expected + 1)
        assert (found.detach().numpy() == expected.detach().numpy()).all()
    assert_still_runs(model, store, reference("parts", device, built=True).outputs)


def test_view_of_a_weight_keeps_its_value(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    """A view of a weight shows the weight whatever runs afterwards."""
    plain = models.build("parts")
    views = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for _ in range(2):
        assert_still_runs(model, store, reference("parts", device, built=True).outputs)
        for name, expected in plain.named_parameters():
            assert torch.equal(views[name], expected), name


@torch.no_grad()
def test_weight_used_outside_of_forward_is_right(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    plain, x = models.build("parts"), models.rows()
    for n in (0, 11, models.COUNT - 1):
        weight, expected = model.blocks[n].weight, plain.blocks[n].weight
        assert torch.equal(functional.linear(x, weight), functional.linear(x, expected))
        assert torch.equal(x @ weight, x @ expected)
    ids = models.tokens()
    assert torch.equal(
        functional.embedding(ids, model.embed.weight),
        functional.embedding(ids, plain.embed.weight),
    )
    assert_still_runs(model, store, reference("parts", device, built=True).outputs)


@torch.no_grad()
def test_submodule_called_alone_runs(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    plain, x = models.build("parts").to(device), models.rows().to(device)
    read = store.stats().bytes_read
    for n in range(models.COUNT):
        assert torch.equal(model.blocks[n](x).cpu(), plain.blocks[n](x).cpu())
    assert store.stats().bytes_read > read
    assert_still_runs(model, store, reference("parts", device, built=True).outputs)


@torch.no_grad()
def test_state_dict_taken_inside_a_forward_stays_true(device: str, store: TierStore) -> None:
    """The memory of a leased weight holds other weights soon after its module has run."""
    taken: list[dict[str, torch.Tensor]] = []

    class Taking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            taken.append(model.state_dict())
            return super().forward(x)

    model = models.build("parts")
    true = models.build("parts").state_dict()
    for n in (0, 7, 23):
        model.blocks[n].__class__ = Taking
    dispatch_model(model, store)
    for _ in range(2):
        models.run("parts", model)
    assert len(taken) == 6
    for state in taken:
        assert same_state(state, true)


@pytest.mark.full("reads for seconds beside a run")
@torch.no_grad()
def test_state_dict_while_another_thread_runs_is_true(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    """Its values are true then, and stay so when the memory of the run holds other weights."""
    expected = reference("parts", device, built=True).outputs
    true = models.build("parts").state_dict()
    outputs: list[models.Outputs] = []

    def work() -> None:
        outputs.extend(models.run("parts", model) for _ in range(20))

    thread = threading.Thread(target=work)
    thread.start()
    reads = 0
    while thread.is_alive():
        assert same_state(model.state_dict(), true)
        reads += 1
    thread.join()
    assert reads > 0
    assert len(outputs) == 20
    for found in outputs:
        assert_same(found, expected)


@torch.no_grad()
def test_several_threads_run_the_model(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    expected = reference("parts", device, built=True).outputs
    found: list[models.Outputs] = []

    def work() -> None:
        found.extend(models.run("parts", model) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    for outputs in found:
        assert_same(outputs, expected)
    assert same_state(model.state_dict(), models.build("parts").state_dict())


# Ties and buffers ---------------------------------------------------------------------------------


def test_tied_weights_stay_tied(
    model: Any, store: TierStore, reference: References, device: str
) -> None:
    for _ in range(2):
        assert model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == len(list(models.build("parts").parameters()))
        assert_still_runs(model, store, reference("parts", device, built=True).outputs)
    disable_offload(model)
    assert model.head.weight is model.embed.weight


def test_buffers_are_where_forward_needs_them(model: Any, store: TierStore, device: str) -> None:
    expected = dict(models.build("parts").named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name
    disable_offload(model)
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert "mask" not in model.state_dict()


@torch.no_grad()
def test_statistics_are_updated(model: Any, store: TierStore, device: str) -> None:
    plain = models.build("parts").to(device).train()
    model.train()
    for seed in range(3):
        ids = models.tokens(seed, shape=(16,))
        assert torch.equal(model(ids).cpu(), plain(ids.to(device)).cpu())
        for name, value in plain.named_buffers():
            assert torch.equal(model.get_buffer(name).cpu(), value.cpu()), name
    assert model.norm.num_batches_tracked == 3
    read = store.stats().bytes_read
    assert read > 0
    state = {name: value.cpu() for name, value in plain.state_dict().items()}
    assert same_state(model.state_dict(), state)
    disable_offload(model)
    assert same_state(model.state_dict(), state)


@torch.no_grad()
def test_edited_buffer_is_used(model: Any, store: TierStore, device: str) -> None:
    plain = models.build("parts")
    for each in (plain, model):
        each.shift.add_(0.5)
        each.mask.logical_not_()
        each.norm.running_mean.data += 1
    expected = models.run("parts", plain.to(device), device)
    assert_still_runs(model, store, expected)
    disable_offload(model)
    assert same_state(model.state_dict(), plain.to("cpu").state_dict())
    assert torch.equal(model.mask, plain.mask)
