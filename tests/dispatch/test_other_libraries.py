"""Operations of torch and other libraries on a dispatched model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.adapters.conftest import acquires
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Weights,
    assert_ordinary,
    store_for,
)
from tests.helpers.tensors import assert_same
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    edit_weights,
    enable_group_offload,
    load_checkpoint_and_dispatch,
)
from tierstore.errors import BudgetError

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="any device",
)

SHARE = 0.3


@torch.no_grad()
def run(model: Any, device: str = "cpu") -> torch.Tensor:
    return model(models.rows().to(device)).cpu()


# PEFT ---------------------------------------------------------------------------------------------


def lora(model: Any) -> Any:
    """Add an adapter that changes the model's output."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@ON_BOTH
def test_peft_lora_of_a_dispatched_model_equals_plain(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    """It is added, disabled and enabled, merged, unmerged and merged permanently."""
    plain = models.load("llama", checkpoint("llama"))
    with store_for(plain, disk_dir, device, SHARE) as store:
        base = load_checkpoint_and_dispatch(models.empty("llama"), checkpoint("llama"), store)
        before = models.forward("llama", base)["logits"]
        both = [lora(plain), lora(base)]

        def assert_as_plain() -> torch.Tensor:
            expected = models.forward("llama", plain.to(device), device)["logits"].cpu()
            plain.to("cpu")
            for _ in range(2):
                found = models.forward("llama", base)["logits"]
                # Merged weights lie in files of the store, with another alignment: last bits
                # differ.
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
            assert {parameter.device.type for parameter in base.parameters()} == {"cpu"}
            return found

        adapted = assert_as_plain()
        assert not torch.allclose(adapted, before, rtol=1e-2)
        with both[0].disable_adapter(), both[1].disable_adapter():
            assert torch.equal(assert_as_plain(), before)
        for each in both:
            each.merge_adapter()
        assert_as_plain()
        for each in both:
            each.unmerge_adapter()
        assert_as_plain()
        merged = [each.merge_and_unload() for each in both]
        assert merged[1] is base
        assert torch.allclose(assert_as_plain(), adapted, rtol=1e-2, atol=1e-3)
        Weights.of(merged[0]).assert_equal_to(merged[1])
        assert store.stats().bytes_written > 0
        disable_offload(base)
        assert_ordinary(base)
        Weights.of(merged[0]).assert_equal_to(merged[1])


@pytest.mark.full("as a LoRA of peft")
@ON_BOTH
def test_peft_lora_merged_layer_by_layer_equals_plain(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    """It is merged on the device, within the budget."""
    plain = lora(models.load("llama", checkpoint("llama")))
    with store_for(plain, disk_dir, device, SHARE) as store:
        base = load_checkpoint_and_dispatch(models.empty("llama"), checkpoint("llama"), store)
        adapted = lora(base)
        models.forward("llama", base)
        plain.to(device)
        for each in (plain, adapted):
            for layer in each.modules():
                if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                    with edit_weights(layer):
                        assert layer.base_layer.weight.device.type == device
                        layer.merge()
        Weights.of(plain).assert_equal_to(adapted)
        expected = models.forward("llama", plain, device)["logits"].cpu()
        found = models.forward("llama", adapted)["logits"]
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


# torch --------------------------------------------------------------------------------------------


@ON_BOTH
def test_parametrization_while_dispatched_equals_plain(device: str, disk_dir: Path) -> None:
    plain, model = models.Tower(), models.Tower()
    with store_for(model, disk_dir, device, 0.6) as store:
        dispatch_model(model, store)
        assert torch.equal(run(model), run(plain.to(device), device))
        plain.to("cpu")
        for each in (plain, model):
            parametrizations.weight_norm(each.layers[2])
            parametrizations.orthogonal(each.layers[4])
            each.layers[2].parametrizations.weight.original0.data *= 2
        for _ in range(2):
            expected = run(plain.to(device), device)
            assert torch.equal(run(model), expected)
        plain.to("cpu")
        Weights.of(plain).assert_equal_to(model)
        for each in (plain, model):
            parametrize.remove_parametrizations(each.layers[2], "weight")
        assert torch.equal(run(model), run(plain.to(device), device))
        Weights.of(plain.to("cpu")).assert_equal_to(model)
        assert store.stats().bytes_read > 0


@ON_BOTH
def test_autocast_equals_plain(device: str, disk_dir: Path) -> None:
    plain, model = models.Tower(), models.Tower()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        for grad in (False, True):
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
                expected = plain.to(device)(models.rows().to(device))
                for _ in range(2):
                    found = model(models.rows())
                    assert found.dtype == expected.dtype
                    assert torch.equal(found.cpu(), expected.cpu())
        assert store.stats().bytes_read > 0


def test_functional_call_with_other_weights_equals_plain(disk_dir: Path) -> None:
    """`functional_call` replaces the parameters by other tensors for one call."""
    plain, model = models.Tower(), models.Tower()
    others = dict(models.Tower(seed=1).named_parameters())
    with store_for(model, disk_dir, "cpu", SHARE) as store, torch.no_grad():
        dispatch_model(model, store)
        weights = Weights.of(model)
        for _ in range(2):
            found = torch.func.functional_call(model, others, (models.rows(),))
            assert torch.equal(found, run(models.Tower(seed=1)))
            assert torch.equal(run(model), run(plain))
            weights.assert_unchanged(model)
        assert store.stats().bytes_read > 0


@ON_BOTH
def test_dispatch_in_inference_mode_leaves_ordinary_weights(device: str, disk_dir: Path) -> None:
    """Afterwards the weights may be edited, and used with gradients, as before."""
    plain, model = models.Tower(), models.Tower()
    with store_for(model, disk_dir, device, SHARE) as store:
        with torch.inference_mode():
            dispatch_model(model, store)
            assert torch.equal(
                model(models.rows()), plain.to(device)(models.rows().to(device)).cpu()
            )
        assert not any(parameter.is_inference() for parameter in model.parameters())
        plain.to("cpu")
        with torch.no_grad():
            for each in (plain, model):
                each.layers[2].weight.mul_(2)
                each.layers[3].weight.data += 1
        assert torch.equal(run(model), run(plain.to(device), device))
        model.layers[1].weight.square().sum().backward()
        disable_offload(model)
    Weights.of(plain).assert_equal_to(model)
    model(models.rows()).sum().backward()


@ON_BOTH
def test_model_of_inference_tensors_runs(device: str, disk_dir: Path) -> None:
    with torch.inference_mode():
        plain, model = models.Tower(), models.Tower()
        expected = plain.to(device)(models.rows().to(device)).cpu()
        with store_for(model, disk_dir, device, SHARE) as store:
            dispatch_model(model, store)
            for _ in range(2):
                assert torch.equal(model(models.rows()), expected)
            model.layers[2].weight.mul_(2)
            plain.layers[2].weight.mul_(2)
            expected = plain(models.rows().to(device)).cpu()
            assert torch.equal(model(models.rows()), expected)
            assert store.stats().bytes_read > 0


class Strided(nn.Module):
    """A product of strided tensors, for which torch has two code paths.

    It chooses by whether the weight, viewed as a transposed matrix, requires a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.transpose(0, 1)).transpose(0, 1)
        return self.norm(x)


@pytest.mark.parametrize("way", (dispatch_model, enable_group_offload), ids=lambda f: f.__name__)
def test_inference_tensors_compute_the_same_bits(way: Any, disk_dir: Path) -> None:
    """They are inference tensors again afterwards, the same objects."""
    with torch.inference_mode():
        torch.manual_seed(4)
        model = Strided().eval()
        plain, x = copy.deepcopy(model), torch.randn(3, 7, 64)
    assert all(parameter.requires_grad for parameter in model.parameters())
    objects = Weights.of(model).objects

    def assert_equal() -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), plain(x))

    with store_for(model, disk_dir, "cpu", SHARE) as store:
        offloaded = way(model, store)
        for _ in range(2):
            assert_equal()
        assert store.stats().bytes_read > 0
        disable_offload(offloaded)
    assert_equal()
    for tensor in [*model.parameters(), *model.buffers()]:
        assert tensor.is_inference()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert Weights.of(model).objects == objects


class Recurrent(nn.Module):
    """torch's recurrent modules keep lists and weak references of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(models.WIDTH, models.WIDTH, num_layers=2, batch_first=True)
        self.more = nn.Sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rnn(x[None])[0]
        for layer in self.more:
            x = layer(x)[0]
        return x[0]


def recurrent(device: str) -> nn.Module:
    model = Recurrent()
    if device == "cpu":  # the pretend accelerator has no kernels for these
        model.more.append(nn.LSTM(models.WIDTH, models.WIDTH, batch_first=True))
        model.more.append(nn.GRU(models.WIDTH, models.WIDTH, batch_first=True))
    return models.draw(model)


@ON_BOTH
def test_recurrent_modules_equal_plain(device: str, disk_dir: Path) -> None:
    plain, model = recurrent(device), recurrent(device)
    with store_for(model, disk_dir, device, 1.2) as store:
        dispatch_model(model, store)
        for _ in range(2):
            assert torch.equal(run(model), run(plain.to(device), device))
            plain.to("cpu")
            for each in (plain, model):
                each.rnn.weight_hh_l1.data += 0.125
        assert torch.equal(run(model), run(plain.to(device), device))
        assert store.stats().bytes_written > 0 < acquires(store)
        disable_offload(model)
    Weights.of(plain).assert_equal_to(model)


# Modules that two models share --------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("first_goes", (True, False), ids=("first goes", "second goes"))
def test_two_models_that_share_a_module_run(
    first_goes: bool, device: str, disk_dir: Path, tmp_path: Path
) -> None:
    """Pipelines share a text encoder like this. Neither contains the other."""

    def pair() -> list[nn.Module]:
        shared, own = models.Tower(seed=1), [models.Tower(seed=2), models.Tower(seed=3)]
        return [nn.Sequential(shared, own[0]), nn.Sequential(own[1], shared)]

    expected = [run(each.to(device), device) for each in pair()]
    both = pair()
    weights = [Weights.of(each) for each in both]
    with (
        store_for(both[0], disk_dir, device, 0.5) as store,
        store_for(both[0], tmp_path / "other", device, 0.5) as other,
    ):
        dispatch_model(both[0], store)
        dispatch_model(both[1], other)
        for _ in range(2):
            for each, output in zip(both, expected, strict=True):
                assert torch.equal(run(each), output)
        assert both[0][0] is both[1][1]
        both[0][0].layers[2].weight.data += 1
        changed = pair()
        changed[0][0].layers[2].weight.data += 1
        expected = [run(each.to(device), device) for each in changed]
        for each, output in zip(both, expected, strict=True):
            assert torch.equal(run(each), output)
        disable_offload(both[0 if first_goes else 1])
        left = 1 if first_goes else 0
        for _ in range(2):
            assert torch.equal(run(both[left]), expected[left])
        disable_offload(both[left])
    for each, before in zip(both, weights, strict=True):
        assert Weights.of(each).objects == before.objects
        assert_ordinary(each)


@ON_BOTH
def test_module_that_occurs_twice_runs(device: str, disk_dir: Path) -> None:
    def twice() -> nn.Module:
        tower = models.Tower()
        tower.layers[6] = tower.layers[1]
        return tower

    plain, model = twice(), twice()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        for _ in range(2):
            assert torch.equal(run(model), run(plain.to(device), device))
        assert model.layers[6] is model.layers[1]
        plain.to("cpu")
        for each in (plain, model):
            each.layers[6].weight.data += 1
        assert torch.equal(run(model), run(plain.to(device), device))
        assert store.stats().bytes_read > 0


@ON_BOTH
def test_model_that_calls_itself_runs(device: str, disk_dir: Path) -> None:
    class Again(models.Tower):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    plain, model = Again(), Again()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        for _ in range(2):
            assert torch.equal(run(model), run(plain.to(device), device))
        Weights.of(plain.to("cpu")).assert_equal_to(model)
        assert store.stats().bytes_read > 0


@ON_BOTH
def test_new_weight_larger_than_the_budget_raises(device: str, disk_dir: Path) -> None:
    """The next forward raises; the model is then an ordinary one."""
    model, plain = models.build("parts"), models.build("parts")
    expected = models.run("parts", plain.to(device), device)
    with store_for(model, disk_dir, device, 0.15) as store:
        dispatch_model(model, store)
        assert_same(models.run("parts", model), expected)
        large = nn.Parameter(torch.zeros(16 * models.WIDTH, models.WIDTH))
        small, model.blocks[3].weight = model.blocks[3].weight, large
        with pytest.raises(BudgetError, match=r"raise (ram|device)_budget"):
            models.run("parts", model)
        assert_ordinary(model)
        assert not [key for key in store if not key.startswith("weights/")]
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        model.blocks[3].weight = small
        dispatch_model(model, store)
        assert_same(models.run("parts", model), expected)
    Weights.of(plain).assert_equal_to(model)


class WithAttention(nn.Module):
    """PEFT replaces the parameters of its attention at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.attention(x, x, x)[0])


@torch.no_grad()
def test_lora_of_attention_runs_merges_and_unmerges(tmp_path: Path) -> None:
    def adapted(model: WithAttention) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["attention"], init_lora_weights=False)
        return peft.get_peft_model(model, config).eval()

    torch.manual_seed(0)
    model, x = WithAttention(), torch.randn(9, 2, 64)
    bare, plain = model(x), adapted(copy.deepcopy(model))
    with TierStore("1MB", tmp_path, device="cpu") as store:
        dispatch_model(model, store)
        lora = adapted(model)
        assert not torch.allclose(plain(x), bare)
        for _ in range(2):
            used = store.stats().hits + store.stats().misses
            assert torch.equal(lora(x), plain(x))
            assert store.stats().hits + store.stats().misses > used
            for each in (lora, plain):
                each.merge_adapter()
            assert torch.equal(lora(x), plain(x))
            for each in (lora, plain):
                each.unmerge_adapter()
