"""Failed backward passes, edits between steps, and per-group counts.

The reference is plain torch, which must end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.tensors import assert_same
from tests.training import models
from tests.training.conftest import (
    ON_BOTH,
    assert_nothing_is_leased,
    assert_within_budgets,
    clip,
    compare,
    offloaded,
    store_for,
    train,
)
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

Found = list[torch.Tensor]
MASTERED = {"lr": 1e-2, "weight_decay": 0.05, "fused": True}


class Interrupted(Exception):
    """Raised by a hook."""


def fail(*_: Any) -> None:
    raise Interrupted


def loss_of(model: Any, number: int, device: str) -> torch.Tensor:
    given = models.batch("small", number).to(device)
    return (model(*given.args).float() - given.target).square().mean()


def step(model: Any, optimizer: Any, number: int, device: str) -> None:
    train("small", model, optimizer, 1, first=number, device=device)


# A backward pass that fails -----------------------------------------------------------------------


def fail_in_backward(model: Any, number: int, device: str) -> None:
    handle = model.layers[3].weight.register_hook(fail)
    with pytest.raises(Interrupted):
        loss_of(model, number, device).backward()
    handle.remove()


@ON_BOTH
@pytest.mark.parametrize("before", (False, True), ids=("alone", "added"))
@pytest.mark.parametrize("whose", ("model", "optimizer"))
@pytest.mark.parametrize("to_none", (False, True))
def test_zero_grad_discards_a_failed_batch(
    to_none: bool, whose: str, before: bool, device: str, disk_dir: Path
) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        found = []
        for number in range(3):
            if before:
                loss_of(model, 10 + number, device).backward()
            fail_in_backward(model, 20 + number, device)
            {"model": model, "optimizer": optimizer}[whose].zero_grad(set_to_none=to_none)
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                found.append(loss_of(model, 30, device).cpu())
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            step(model, optimizer, number, device)
        return found

    compare(scenario, disk_dir, device)


# Groups that count --------------------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Counts steps in its parameter groups, in a number and in a tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0, "weight": 0.0, "seen": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] += 1
            group["weight"] += group["lr"] ** 2
            group["seen"].append(group["step"])
            rate = group["lr"] / (1 - 0.9 ** group["step"]) + float(group["weight"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


def counters() -> dict[str, Any]:
    return {"weight": torch.zeros(()), "seen": []}


def in_three_groups(model: Any) -> list[dict[str, Any]]:
    """The first two groups share layers; the third never has a gradient."""
    *others, last = model.parameters()
    return [
        {"params": others[::2], "lr": 1e-2, **counters()},
        {"params": others[1::2], "lr": 2e-2, **counters()},
        {"params": [last], "lr": 3e-2, **counters()},
    ]


@ON_BOTH
def test_param_group_counts_steps_and_not_tiles(device: str, disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        found = []
        for number in range(4):
            if number < 3:
                loss_of(model, number, device).backward()
            list(model.parameters())[-1].grad = None
            optimizer.step()  # the last step has no gradient at all
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                found += [torch.tensor(group["step"]), group["weight"].clone()]
                found.append(torch.tensor(group["seen"]))
        return found

    compare(
        scenario,
        disk_dir,
        device,
        optimizer_class=Counting,
        options={},
        grouping=in_three_groups,
    )


def test_param_group_removed_is_left_unchanged(disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        step(model, optimizer, 0, device)
        del optimizer.param_groups[1]
        loss_of(model, 1, device).backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain = models.build("small")
    wanted = scenario(plain, Counting(in_three_groups(plain)), "cpu")
    module = models.build("small")
    with store_for(module, disk_dir, share=0.3) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(in_three_groups(model), store, Counting)
        assert_same(scenario(model, optimizer, "cpu"), wanted)


class Summing(torch.optim.Optimizer):
    """Derives a rate from the sum of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            group["total"] += sum(float(p.grad.abs().sum()) for p in given)
            for parameter in given:
                parameter.add_(parameter.grad, alpha=-group["total"])


def test_param_group_reducing_over_parameters_raises(disk_dir: Path) -> None:
    module = models.build("small")
    with store_for(module, disk_dir, share=0.3) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, Summing)
        loss_of(model, 0, "cpu").backward()
        with pytest.raises(TypeError, match="Summing computes a value over all parameters"):
            optimizer.step()
        assert optimizer.param_groups[0]["total"] == 0.0
        assert_nothing_is_leased(model)


# Masters ------------------------------------------------------------------------------------------

Edit = Callable[[Any], None]


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.head.weight[0] = 0.5
        model.layers[0].weight.mul_(0.9)
        model.layers[3].bias[1] = float("nan")


def by_other_data(model: Any) -> None:
    model.head.weight.data = torch.full_like(model.head.weight, 0.01)
    model.layers[0].bias.data.clamp_(-0.01, 0.01)


def by_loading(model: Any) -> None:
    model.load_state_dict(models.build("small", seed=5).bfloat16().state_dict())


def not_at_all(model: Any) -> None:
    pass


class Mastered:
    """Plain training with a master of each parameter, which takes over edits."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self._left = [p.detach().clone() for p in self.parameters]
        self._inner = torch.optim.AdamW(self.masters, **MASTERED)

    @torch.no_grad()
    def step(self) -> None:
        for p, master, left in zip(self.parameters, self.masters, self._left, strict=True):
            edited = (p != left) & ~(p.isnan() & left.isnan())
            master[edited] = p[edited].float()
            master.grad = None if p.grad is None else p.grad.float()
        self._inner.step()
        for p, master, left in zip(self.parameters, self.masters, self._left, strict=True):
            p.copy_(master)
            left.copy_(p)


@ON_BOTH
@pytest.mark.parametrize("edit", (not_at_all, in_place, by_other_data, by_loading))
def test_edit_of_a_weight_with_a_master_takes_effect(
    edit: Edit, device: str, disk_dir: Path
) -> None:
    plain = models.build("small").bfloat16()
    generator = torch.Generator().manual_seed(3)
    given = [
        [
            torch.randn(p.shape, generator=generator).bfloat16()
            for p in models.build("small").parameters()
        ]
        for _ in range(4)
    ]

    def run(model: Any, optimizer: Any) -> Found:
        for number in range(4):
            for parameter, gradient in zip(model.parameters(), given[number], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            edit(model)
        return [p.detach().clone() for p in model.parameters()]

    usual = Mastered(plain)
    wanted = run(plain, usual)
    module = models.build("small").bfloat16()
    with store_for(module, disk_dir, device, 0.3) as store:
        how = {**MASTERED, "master_dtype": torch.float32}
        model, optimizer = offloaded(module, store, options=how)
        for found, expected in zip(run(model, optimizer), wanted, strict=True):
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        for parameter, master in zip(model.parameters(), usual.masters, strict=True):
            found = optimizer.state[parameter]["master"]
            assert torch.equal(found.nan_to_num(7.0), master.detach().nan_to_num(7.0))
        assert_within_budgets(store)


# States -------------------------------------------------------------------------------------------


def assigning(model: Any, optimizer: Any) -> None:
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["exp_avg"] = torch.full(parameter.shape, 0.01 * number)


def assigning_all(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.ones(parameter.shape),
            "exp_avg_sq": torch.ones(parameter.shape),
        }


def clearing(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def removing_one(model: Any, optimizer: Any) -> None:
    del optimizer.state[model.head.weight]


@ON_BOTH
@pytest.mark.parametrize("clipped", (False, True))
@pytest.mark.parametrize("edit", (assigning, assigning_all, clearing, removing_one))
def test_tensor_replaced_in_the_state_takes_effect(
    edit: Any, clipped: bool, device: str, disk_dir: Path
) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        found = []
        for number in range(4):
            loss_of(model, number, device).backward()
            if number == 2:
                edit(model, optimizer)
            if clipped:
                found.append(clip(model, optimizer, 0.01))
            found += states(model, optimizer)
            optimizer.step()
            found += states(model, optimizer)
            optimizer.zero_grad()
        return found

    compare(scenario, disk_dir, device)


def states(model: Any, optimizer: Any) -> Found:
    return [
        optimizer.state[p][name].clone()
        for p in model.parameters()
        if p in optimizer.state
        for name in sorted(optimizer.state[p])
    ]


def test_state_may_change_dtype(disk_dir: Path) -> None:
    class Momentum(torch.optim.Optimizer):
        """Keeps its state in whatever dtype that has."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter))
                state["mean"] = state["mean"] * 0.9 + parameter.grad
                parameter.sub_(state["mean"].float(), alpha=0.01)

    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        for number in range(4):
            step(model, optimizer, number, device)
            if number == 1:
                for parameter in model.parameters():
                    state = optimizer.state[parameter]
                    state["mean"] = state["mean"].double()
        found = states(model, optimizer)
        assert {each.dtype for each in found} == {torch.float64}
        return found

    plain = models.build("small")
    wanted = scenario(plain, Momentum(plain.parameters(), {}), "cpu")
    module = models.build("small")
    with store_for(module, disk_dir, share=0.3) as store:
        model, optimizer = offloaded(module, store, Momentum, {"defaults": {}})
        assert_same(scenario(model, optimizer, "cpu"), wanted)
        kept = [g.key for g in store.snapshot().groups if g.key.startswith("optimizer/")]
        assert len(kept) == len(optimizer._tiles)  # replaced tensors are gone
        assert_nothing_is_leased(model)


# Gradients in another dtype -----------------------------------------------------------------------

HAS_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(torch.empty(0), "grad_dtype"), reason="this torch has no grad_dtype"
)


def in_half_with_full_gradients() -> nn.Module:
    model = models.build("small").bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined,unused-ignore]
    return model


@HAS_GRAD_DTYPE
@ON_BOTH
def test_gradients_may_have_another_dtype(device: str, disk_dir: Path) -> None:
    def scenario(model: Any, optimizer: Any, device: str) -> Found:
        found = []
        for number in range(3):
            for part in (0, 10):
                x = models.batch("small", number + part).to(device).args[0].bfloat16()
                model(x).float().square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        assert found[0].dtype is torch.float32
        return found

    compare(
        scenario,
        disk_dir,
        device,
        build=in_half_with_full_gradients,
        optimizer_class=torch.optim.SGD,
        options={"lr": 0.1, "foreach": False},
    )


@HAS_GRAD_DTYPE
def test_gradients_of_an_undeclared_dtype_raise(disk_dir: Path) -> None:
    module = models.build("small")
    with store_for(module, disk_dir, share=0.3) as store:
        model, _ = offloaded(module, store)
        loss_of(model, 0, "cpu").backward()
        weight: Any = module.get_parameter("head.weight")
        weight.grad = None
        weight.grad_dtype = torch.float64
        with pytest.raises(RuntimeError, match=r"'head.weight' is torch.float64.*grad_dtype"):
            loss_of(model, 1, "cpu").backward()
        assert_nothing_is_leased(model)
