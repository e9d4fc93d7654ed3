"""Training a few weights while most are frozen and offloaded gives bitwise the same gradients.

Frozen weights stream in the forward and in the backward; none is written. A change that could give
wrong gradients gives right ones or raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.adapters.conftest import DEVICES
from tests.dispatch import models
from tests.helpers.engine import core_of
from tests.helpers.tensors import parameter_bytes
from tests.store.helpers import open_store
from tests.training import models as training_models
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
    offload_activations,
)
from tierstore.errors import BudgetError

pytestmark = pytest.mark.parametrize("device", DEVICES)

STEPS = 5
SHARE = 0.3
Gradients = dict[str, torch.Tensor | None]


def lora(model: nn.Module, *targets: str) -> nn.Module:
    """Add an adapter of random weights, so that all of them get gradients."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(model, config)


def llama() -> nn.Module:
    return lora(models.build("llama"), "q_proj", "v_proj")


def t5_head() -> nn.Module:
    model = models.build("t5").requires_grad_(False)
    model.decoder.final_layer_norm.requires_grad_(True)
    return model


def flux() -> Any:
    torch.manual_seed(0)
    model: Any = training_models.build("flux").requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    return model


def unet() -> Any:
    model: Any = models.build("unet").requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    return model


def loss_of(model: Any, number: int, device: str) -> torch.Tensor:
    """Return the loss of a batch that depends on its number."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    kind = type(inner).__name__
    ids = models.tokens(number, (2, 7), 96).to(device)
    if kind == "LlamaForCausalLM":
        return model(input_ids=ids, labels=ids, use_cache=False).loss
    if kind == "T5ForConditionalGeneration":
        return model(input_ids=ids, labels=ids, use_cache=False).loss
    if kind == "UNet2DConditionModel":
        random = torch.Generator().manual_seed(number)
        # Reentrant checkpointing only goes back through an input that requires a gradient.
        latents = torch.randn(1, 4, 8, 8, generator=random).to(device).requires_grad_()
        states = torch.randn(1, 3, 32, generator=random).to(device)
        return model(latents, torch.tensor([3]).to(device), states).sample.square().mean()
    batch = training_models.batch("flux", number).to(device)
    batch.kwargs["hidden_states"].requires_grad_()
    return training_models.loss("flux", model, batch)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(model: Any, device: str) -> list[torch.Tensor]:
    """Return losses, gradients and trained weights of a few steps."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    found = []
    for number in range(STEPS):
        loss = loss_of(model, number, device)
        loss.backward()
        gradients = [p.grad for p in trained(model).values()]
        assert all(gradient is not None for gradient in gradients)
        found += [each.detach().cpu().clone() for each in (loss, *gradients)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().cpu().clone() for p in trained(model).values()]


def recompute(model: Any, how: str) -> None:
    """Enable gradient checkpointing as each library offers it."""
    if how == "plain":
        return
    reentrant = {"use_reentrant": how == "reentrant"}
    if hasattr(model, "enable_input_require_grads"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
        model.enable_input_require_grads()
    else:
        model.enable_gradient_checkpointing(
            lambda module, *args: checkpoint(module, *args, **reentrant)
        )


OFFLOADS: dict[str, Callable[[nn.Module, TierStore], object]] = {
    "dispatched": dispatch_model,
    "in groups": enable_group_offload,
}


@pytest.mark.full(
    "every model, way to offload, recomputation and budget",
    keep="a third",
)
@pytest.mark.long("these are independent of each other", keep="values")
@pytest.mark.parametrize("build", (llama, flux, t5_head, unet), ids=lambda build: build.__name__)
@pytest.mark.parametrize("how", ("plain", "reentrant", "not reentrant"))
@pytest.mark.parametrize(
    ("offload", "share"),
    [("dispatched", 0.15), ("dispatched", 0.5), ("dispatched", 1.5), ("in groups", 0.5)],
)
def test_training_steps_equal_plain(
    offload: str, share: float, how: str, build: Callable[[], Any], device: str, disk_dir: Path
) -> None:
    plain, model = build(), build()
    for each in (plain, model):
        recompute(each.train(), how)
    expected = train(plain.to(device), device)
    frozen = parameter_bytes(model) - parameter_bytes(model, trained=True)
    budget = int(frozen * share) + 3 * parameter_bytes(model, trained=True)
    with open_store(disk_dir, budget, device) as store:
        budgets = store.stats().budget_bytes
        OFFLOADS[offload](model, store)
        before = store.stats()
        found = train(model, device)
        moved = store.stats()
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
        assert moved.bytes_written == before.bytes_written
        # at least the bytes that cannot have stayed, in the forward and in the backward
        if share < 1:
            assert moved.bytes_read - before.bytes_read > 2 * STEPS * (frozen - budget) * 0.4
        assert all(p.grad is None for p in model.parameters())
        for tier, peak in moved.peak_bytes.items():
            assert tier == "DISK" or peak <= (budgets[tier] or 0)


def head_only(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.layers[-1].requires_grad_(True)


def first_bias(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.layers[0].bias.requires_grad_(True)


def nothing(model: nn.Module) -> None:
    model.requires_grad_(False)


def gradients_of(
    model: nn.Module, x: torch.Tensor, run: Callable[..., torch.Tensor] | None = None
) -> Gradients:
    x = x.clone().requires_grad_(True)
    ((run or (lambda model, x: model(x)))(model, x)).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: None if g is None else g.cpu() for name, g in {**found, "x": x.grad}.items()}


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert {n for n, g in found.items() if g is not None} == {
        n for n, g in expected.items() if g is not None
    }
    for name, gradient in expected.items():
        assert gradient is None or torch.equal(gradient, found[name]), name


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(model(x))


def layers_twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(torch.tanh(layer(x)))
    return x


def not_reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False)


def reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=True)


@pytest.mark.full("the frozen part, the way to run", keep="a third")
@pytest.mark.parametrize("run", (twice, layers_twice, not_reentrant, reentrant))
@pytest.mark.parametrize("freeze", (head_only, first_bias, nothing))
def test_gradients_of_trained_weights_equal_plain(
    freeze: Callable[[nn.Module], None],
    run: Callable[..., torch.Tensor],
    device: str,
    disk_dir: Path,
) -> None:
    plain, model = models.Tower(), models.Tower()
    for each in (plain, model):
        freeze(each)
    x = models.rows().to(device)
    expected = gradients_of(plain.to(device), x, run)
    with open_store(disk_dir, int(parameter_bytes(model) * SHARE) + 40_000, device) as store:
        dispatch_model(model, store)
        before = store.stats()
        assert_equal(gradients_of(model, x, run), expected)
        assert store.stats().bytes_read > before.bytes_read
        assert store.stats().bytes_written == before.bytes_written
        disable_offload(model)
    assert_equal(gradients_of(model, x.cpu(), run), gradients_of(plain.cpu(), x.cpu(), run))


def frozen_tower(
    disk_dir: Path, device: str, share: float = SHARE
) -> tuple[nn.Module, nn.Module, TierStore]:
    """Return a plain tower with a trained head, and the same on a store."""
    plain, model = models.Tower(), models.Tower()
    for each in (plain, model):
        head_only(each)
    store = open_store(disk_dir, int(parameter_bytes(model) * share) + 40_000, device)
    dispatch_model(model, store)
    return plain.to(device), model, store


def test_retained_graph_second_backward_equals_plain(device: str, disk_dir: Path) -> None:
    plain, model, store = frozen_tower(disk_dir, device)
    found = []
    with store:
        for each in (plain, model):
            x = models.rows().to(device).requires_grad_(True)
            loss = each(x).square().sum()
            found += [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
        assert all(torch.equal(gradient, found[0]) for gradient in found)
        assert store.stats().bytes_read > 0


@pytest.mark.parametrize("share", (SHARE, 3))
def test_second_derivatives_equal_plain_or_raise(share: float, device: str, disk_dir: Path) -> None:
    """They keep the weights that the first ones need: right if these fit, else an error."""
    plain, model, store = frozen_tower(disk_dir, device, share)
    found = []
    with store:
        for each in (plain, model):
            x = models.rows().to(device).requires_grad_(True)
            try:
                (first,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
                (second,) = torch.autograd.grad(first.square().sum(), x)
            except BudgetError:
                assert each is model
                assert share == SHARE
                return
            found.append(second)
        assert torch.equal(*found)
        assert store.stats().bytes_read > 0


def by_torch(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def other_memory(weight: torch.Tensor) -> None:
    weight.data = weight.detach() * 2


@pytest.mark.parametrize("run_again", (False, True), ids=("at once", "after another run"))
@pytest.mark.parametrize("edit", (by_torch, other_memory))
def test_frozen_weight_changed_before_backward_raises_or_works(
    edit: Callable[[torch.Tensor], None], run_again: bool, device: str, disk_dir: Path
) -> None:
    """It raises, as torch does, or the gradient is that of the forward."""
    plain, model, store = frozen_tower(disk_dir, device)
    x = models.rows().to(device).requires_grad_(True)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    with store:
        loss = model(x).square().sum()
        edit(model.layers[3].weight)
        if run_again:
            with torch.no_grad():
                model(models.rows())
        try:
            (gradient,) = torch.autograd.grad(loss, x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) or "tierstore" in str(error)
        else:
            assert edit is other_memory
            assert torch.equal(gradient, expected)
        edit(plain.layers[3].weight)
        before = expected
        (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
        assert not torch.equal(before, expected)  # control: a late read sees another value
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        assert torch.equal(gradient, expected)


def test_model_repartitioned_before_backward_raises(device: str, disk_dir: Path) -> None:
    _, model, store = frozen_tower(disk_dir, device)
    with store:
        x = models.rows().to(device).requires_grad_(True)
        loss = model(x).square().sum()
        model.layers.append(nn.Linear(models.WIDTH, models.WIDTH).requires_grad_(False))
        model(models.rows())
        with pytest.raises(RuntimeError, match="Run the forward again"):
            loss.backward()


def test_frozen_and_trained_weights_may_be_exchanged(device: str, disk_dir: Path) -> None:
    """No gradient is silently missing."""
    plain, model, store = frozen_tower(disk_dir, device)
    x = models.rows().to(device)
    with store:
        for wanted, number in ((True, 2), (False, 2), (True, 5)):
            for each in (plain, model):
                each.layers[number].requires_grad_(wanted)
            assert_equal(gradients_of(model, x), gradients_of(plain, x))
        disable_offload(model)


@pytest.mark.parametrize("wanted", (True, False))
def test_trained_set_changed_before_backward_raises_or_is_right(
    wanted: bool, device: str, disk_dir: Path
) -> None:
    """The backward uses the state of the forward, as in torch, or raises."""
    plain, model, store = frozen_tower(disk_dir, device)
    x = models.rows().to(device)
    number = 3 if wanted else -1  # a frozen weight is trained from now on, or the head is not
    with store:
        for each in (plain, model):
            loss = each(x.clone().requires_grad_(True)).square().sum()
            each.layers[number].requires_grad_(wanted)
            if each is model and wanted:
                with pytest.raises(RuntimeError, match=r"tierstore.*disable_offload"):
                    loss.backward()
            else:
                loss.backward()
            assert each.layers[number].weight.grad is None
            each.zero_grad()
        expected = gradients_of(plain, x)
        assert (expected[f"layers.{3 if wanted else 7}.weight"] is not None) == wanted  # control
        assert_equal(gradients_of(model, x), expected)
        assert store.stats().bytes_read > 0


def test_weight_unfrozen_during_a_run_raises(device: str, disk_dir: Path) -> None:
    _, model, store = frozen_tower(disk_dir, device)
    with store:
        x = models.rows().to(device).requires_grad_(True)
        model.layers[1].register_forward_pre_hook(
            lambda module, args: model.layers[3].requires_grad_(True) and None
        )
        with pytest.raises(RuntimeError, match=r"tierstore.*disable_offload"):
            model(x).sum().backward()
        assert model.layers[3].weight.grad is None


def test_adapter_added_later_trains(device: str, disk_dir: Path) -> None:
    plain, model = models.build("llama"), models.build("llama")
    with open_store(disk_dir, parameter_bytes(model) // 2, device) as store:
        dispatch_model(model, store)
        models.run("llama", model)
        before = store.stats().bytes_written
        adapted = [lora(each, "q_proj", "v_proj").train() for each in (plain, model)]
        expected = train(adapted[0].to(device), device)
        found = train(adapted[1], device)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
        assert store.stats().bytes_written == before
        assert all(p.device.type == store.device.type for p in trained(model).values())


def test_gradients_are_kept_when_the_model_is_repartitioned(device: str, disk_dir: Path) -> None:
    """They accumulate on the device of the trained weights."""
    plain, model, store = frozen_tower(disk_dir, device)
    x = models.rows().to(device)
    with store:
        for each in (plain, model):
            each(x).square().sum().backward()
            each.layers.insert(2, nn.Tanh())
            each.layers[-1].bias.requires_grad_(False)
            each(x).square().sum().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
        disable_offload(model)
        assert model.layers[-1].weight.grad.device.type == "cpu"


def test_trained_weights_count_in_the_budget(device: str, disk_dir: Path) -> None:
    model = models.Tower()
    model.requires_grad_(False)
    model.layers[:3].requires_grad_(True)
    small = 3 * models.LAYER_BYTES
    with open_store(disk_dir, small, device) as store:
        dispatch_model(model, store)
        with pytest.raises(BudgetError):
            model(models.rows())
    torch.testing.assert_close(model(models.rows()), models.Tower()(models.rows()), rtol=0, atol=0)


class Stashes(torch.autograd.Function):
    """Keeps its own view of a weight, beside the tensors that autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.t()
        return x @ ctx.weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.weight.t(), None


class Stashing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Stashes.apply(x, self.weight)


def tower(*, frozen: bool) -> nn.Module:
    return models.Tower().requires_grad_(not frozen)


def stashing() -> nn.Module:
    return nn.Sequential(*(Stashing(64, 64) for _ in range(8))).requires_grad_(False)


def bytes_kept_after_a_forward(model: nn.Module, device: str, disk_dir: Path) -> int:
    """Return the bytes of the store that a graph still holds once its groups are evicted."""
    with open_store(disk_dir, 2 * parameter_bytes(model), device) as store:
        dispatch_model(model, store)
        output = model(models.rows().requires_grad_(True))
        assert output.grad_fn is not None
        assert store.stats().bytes_read > 0
        disable_offload(model)
        core = core_of(store)
        core.mover.drain()
        return sum(slot.nbytes for slot in core.tiers.top.detached)


def test_graph_holds_no_memory_of_the_store(device: str, disk_dir: Path) -> None:
    assert not bytes_kept_after_a_forward(tower(frozen=True), device, disk_dir / "1")
    assert not bytes_kept_after_a_forward(tower(frozen=False), device, disk_dir / "2")
    assert bytes_kept_after_a_forward(stashing(), device, disk_dir / "3")  # control


def test_kept_view_in_a_graph_stays_valid(device: str, disk_dir: Path) -> None:
    model = stashing()
    x = models.rows().to(device)
    expected = gradients_of(copy.deepcopy(model).to(device), x)
    with open_store(disk_dir, 4 * parameter_bytes(model), device) as store:
        dispatch_model(model, store)
        assert_equal(gradients_of(model, x), expected)
        for key in store:
            store.offload(key)
        assert_equal(gradients_of(model, x), expected)


def test_activations_may_be_offloaded_as_well(device: str, disk_dir: Path) -> None:
    plain, model, store = frozen_tower(disk_dir, device, share=2)
    x = models.rows(count=64).to(device)

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with offload_activations(store, min_size=1):
            return model(x)

    with store:
        expected = gradients_of(plain, x)
        assert_equal(gradients_of(model, x, run), expected)
        assert store.stats().activations.shipped_bytes > 0


def test_backward_that_raised_leaves_no_lease(device: str, disk_dir: Path) -> None:
    plain, model, store = frozen_tower(disk_dir, device)
    x = models.rows().to(device)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("for the test")

    with store:
        for _ in range(3):
            given = x.clone().requires_grad_(True)
            middle = model.layers[0](given)
            middle.register_hook(fail)
            with pytest.raises(ValueError, match="for the test"):
                model.layers[1:](middle).sum().backward()
            model.zero_grad()
        assert_equal(gradients_of(model, x), gradients_of(plain, x))
        disable_offload(model)


def test_recomputed_layers_are_loaded_again_in_the_backward(device: str, disk_dir: Path) -> None:
    """Layers of transformers recompute with the forward of their class, not with a patch."""
    plain, model = llama().train(), llama().train()
    for each in (plain, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.enable_input_require_grads()
    loss_of(plain, 0, "cpu").backward()
    with open_store(disk_dir, parameter_bytes(model), device) as store:
        dispatch_model(model, store)
        loss = loss_of(model, 0, device)
        before = store.stats()
        loss.backward()
        after = store.stats()
    leases = [stats.hits + stats.late + stats.misses for stats in (before, after)]
    assert leases[1] - leases[0] >= model.config.num_hidden_layers
    if device == "cpu":
        for name, parameter in trained(plain).items():
            assert torch.equal(parameter.grad, trained(model)[name].grad), name
