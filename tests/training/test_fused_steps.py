"""Optimizers of torch run their fused kernels by default."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tensors import assert_same
from tests.training.conftest import store_for
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

WIDTH, STEPS = 48, 4

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


class Kernels(TorchDispatchMode):
    """Counts the fused steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_fused_" in str(func)
        return func(*args, **(kwargs or {}))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def train(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of fused steps."""
    with Kernels() as kernels:
        for step in range(STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return kernels.count


def left(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()))


def trained(kind: str, disk_dir: Path, **options: Any) -> tuple[int, Any]:
    """Return the result of training on a store."""
    optimizer_class, usual = KINDS[kind]
    model = build()
    with store_for(model, disk_dir, share=0.4) as store:
        offloaded = OffloadModel(model, store)
        optimizer = OffloadOptimizer(offloaded, store, optimizer_class, **usual, **options)
        count = train(offloaded, optimizer)
        assert store.stats().bytes_read > 0
        return count, left(model, optimizer)


def trained_plainly(kind: str, **options: Any) -> Any:
    optimizer_class, usual = KINDS[kind]
    model = build()
    optimizer = optimizer_class(model.parameters(), **usual, **options)
    train(model, optimizer)
    return left(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_unset_is_chosen(kind: str, disk_dir: Path) -> None:
    count, found = trained(kind, disk_dir)
    assert count >= STEPS
    assert_same(found, trained_plainly(kind, fused=True))


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"foreach": True}, {"foreach": False}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_argument_is_respected(kind: str, options: dict[str, Any], disk_dir: Path) -> None:
    count, found = trained(kind, disk_dir, **options)
    assert count == 0
    assert_same(found, trained_plainly(kind, **options))


def test_fused_of_a_param_group_is_respected(disk_dir: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        layers = list(model.children())
        return [
            {"params": layers[0].parameters()},
            {"params": layers[1].parameters(), "foreach": True},
            {"params": layers[2].parameters(), "fused": False},
            {"params": layers[3].parameters(), "differentiable": True},
            {"params": layers[4].parameters(), "capturable": True},
        ]

    model = build()
    with store_for(model, disk_dir, share=0.4) as store:
        offloaded = OffloadModel(model, store)
        optimizer = OffloadOptimizer(groups(offloaded), store, torch.optim.AdamW)
        assert [group["fused"] for group in optimizer.param_groups] == [
            True,
            None,
            False,
            None,
            None,
        ]


def test_fused_in_a_loaded_state_is_respected(disk_dir: Path) -> None:
    """Resuming a plain training gives the same result as plain torch."""
    plain = build()
    usual = torch.optim.AdamW(plain.parameters())
    train(plain, usual)
    model = copy.deepcopy(plain)
    states = copy.deepcopy(usual.state_dict())
    train(plain, usual)
    with store_for(model, disk_dir, share=0.4) as store:
        offloaded = OffloadModel(model, store)
        optimizer = OffloadOptimizer(offloaded, store, torch.optim.AdamW)
        optimizer.load_state_dict(states)
        assert train(offloaded, optimizer) == 0
        assert_same(left(model, optimizer), left(plain, usual))


class Own(torch.optim.AdamW):
    """A third-party class, whose step is unknown."""


def test_other_optimizer_classes_are_unchanged(disk_dir: Path) -> None:
    model = build()
    with store_for(model, disk_dir, share=0.4) as store:
        optimizer = OffloadOptimizer(OffloadModel(model, store), store, Own)
        assert optimizer.param_groups[0]["fused"] is None


def test_complex_parameters_are_not_fused(disk_dir: Path) -> None:
    plain = [nn.Parameter(torch.ones(4, 4, dtype=torch.complex64)), nn.Parameter(torch.ones(4))]
    ours = copy.deepcopy(plain)
    usual = torch.optim.AdamW(plain)
    with store_for(1 << 20, disk_dir) as store:
        optimizer = OffloadOptimizer(ours, store, torch.optim.AdamW)
        assert optimizer.param_groups[0]["fused"] is None
        for each, parameters in ((usual, plain), (optimizer, ours)):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            each.step()
        assert_same(ours, plain)


# Limits of fused kernels --------------------------------------------------------------------------


def steps_of(
    optimizers: list[torch.optim.Optimizer], given: list[list[nn.Parameter]], *gradients: Any
) -> None:
    """Run several steps with these gradients; None means no gradient."""
    for step in gradients:
        for optimizer, parameters in zip(optimizers, given, strict=True):
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()


@pytest.mark.parametrize("chosen", [{}, {"fused": True}], ids=["by us", "by hand"])
def test_gradients_with_other_strides_are_not_fused(chosen: dict[str, Any], disk_dir: Path) -> None:
    """The kernel ignores strides, so such a parameter is stepped without it."""
    ours = [nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6, 8))]
    plain = copy.deepcopy(ours)
    gradients = [torch.randn(8, 6).t(), torch.randn(6, 8)]
    assert gradients[0].stride() != ours[0].stride()
    with store_for(1 << 20, disk_dir) as store:
        optimizer = OffloadOptimizer(ours, store, torch.optim.AdamW, **chosen)
        assert optimizer.param_groups[0]["fused"] is True
        usual = torch.optim.AdamW(
            [{"params": plain[:1], "fused": False}, {"params": plain[1:], "fused": True}]
        )
        for _ in range(3):
            for parameters, each in ((ours, optimizer), (plain, usual)):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                each.step()
        assert_same(ours, plain)
        assert optimizer.param_groups[0]["fused"] is True


def test_gradients_of_another_dtype_are_not_fused(disk_dir: Path) -> None:
    """Such a parameter is stepped as torch does without the kernel."""
    if not hasattr(nn.Parameter, "grad_dtype"):
        pytest.skip("torch before 2.9 has gradients of the dtype of their parameters only")
    ours = [nn.Parameter(torch.randn(6, 8).bfloat16())]
    plain = copy.deepcopy(ours)
    with store_for(1 << 20, disk_dir) as store:
        optimizer = OffloadOptimizer(ours, store, torch.optim.SGD, lr=0.1)
        usual = torch.optim.SGD(plain, lr=0.1, fused=False)
        for parameters in (ours, plain):
            parameters[0].grad_dtype = torch.float32  # type: ignore[attr-defined]
        steps_of([optimizer, usual], [ours, plain], *[[torch.randn(6, 8)] for _ in range(3)])
        assert_same(ours, plain)


def test_first_gradient_arriving_later_is_handled(disk_dir: Path) -> None:
    """A fused SGD needs momenta for all of its parameters, or for none."""
    ours = [nn.Parameter(torch.randn(6, 8)) for _ in range(3)]
    plain = copy.deepcopy(ours)
    options = {"lr": 0.1, "momentum": 0.9}
    with store_for(1 << 20, disk_dir) as store:
        optimizer = OffloadOptimizer(ours, store, torch.optim.SGD, **options)
        apart = [torch.optim.SGD([each], **options, fused=True) for each in plain]
        given = [torch.randn(6, 8) for _ in range(3)]
        for step in ([given[0], None, None], [given[1], given[2], None], given):
            steps_of([optimizer], [ours], step)
            for each, parameter, gradient in zip(apart, plain, step, strict=True):
                steps_of([each], [[parameter]], [gradient])
        assert_same(ours, plain)
