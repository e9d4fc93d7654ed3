"""Optimizers that check their parameters or replace their memory, and resumed schedules.

The reference is plain torch: the same optimizer and steps, without a store or an interruption.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import same
from tests.helpers.tensors import assert_same
from tests.training.conftest import DEVICES, Traffic, store_for
from tierstore import load_training, save_training
from tierstore.adapters.training import OffloadModel, OffloadOptimizer

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

WIDTH, STEPS = 64, 6


def matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


def by_shape(model: nn.Module, name: str, value: Any) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices, and all others with an extra option."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() == 2]},
        {"params": [p for p in parameters if p.dim() != 2], name: value},
    ]


def take_steps(model: Any, optimizer: torch.optim.Optimizer, device: str = "cpu") -> None:
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()


class Renewing(torch.optim.Optimizer):
    """Gives each parameter other memory instead of changing it in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter - group["lr"] * parameter.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Renewing, torch.optim.Muon])
def test_optimizer_trains_as_in_plain_torch(
    kind: type[torch.optim.Optimizer], device: str, disk_dir: Path
) -> None:
    model = matrices()
    plain = copy.deepcopy(model)
    before = copy.deepcopy(plain)
    take_steps(plain, kind(plain.parameters(), lr=0.1))
    with store_for(model, disk_dir, device) as store:
        traffic = Traffic(store)
        offloaded = OffloadModel(model, store)
        take_steps(offloaded, OffloadOptimizer(offloaded, store, kind, lr=0.1), device)
        for found, expected, first in zip(
            model.parameters(), plain.parameters(), before.parameters(), strict=True
        ):
            assert same(found, expected, device)
            assert not same(found, first, device)
        assert traffic.read > 0


def test_master_may_be_given_new_memory(disk_dir: Path) -> None:
    model = matrices().bfloat16()
    plain = copy.deepcopy(model)
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    with store_for(model, disk_dir) as store:
        offloaded = OffloadModel(model, store)
        ours = OffloadOptimizer(offloaded, store, Renewing, master_dtype=torch.float32)
        usual = Renewing(masters)
        for step in range(STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
            for each in (plain, offloaded):
                each.zero_grad()
                each(x).float().square().mean().backward()
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            usual.step()
            ours.step()
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                parameter.data.copy_(master.data)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(ours.state[parameter]["master"], master)


class Choosy(torch.optim.SGD):
    """Accepts only matrices, except in groups with an option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            if any(p.dim() != 2 for p in group["params"]) and not group.get("any"):
                raise ValueError("only matrices")


def test_optimizer_is_checked_for_each_group(disk_dir: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plain = copy.deepcopy(model)
    take_steps(plain, Choosy(by_shape(plain, "any", True)))
    with store_for(model, disk_dir) as store:
        offloaded = OffloadModel(model, store)
        groups = by_shape(offloaded, "any", True)
        take_steps(offloaded, OffloadOptimizer(groups, store, Choosy))
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        with pytest.raises(ValueError, match="only matrices"):
            OffloadOptimizer(offloaded, store, Choosy)


def test_integer_matrix_is_checked_too(disk_dir: Path) -> None:
    model = matrices()
    model.register_parameter("table", nn.Parameter(torch.ones(2, 2, dtype=torch.int64), False))
    torch.optim.Muon(model.parameters())
    with store_for(model, disk_dir) as store:
        OffloadOptimizer(OffloadModel(model, store), store, torch.optim.Muon)


def test_unsupported_parameter_raises_as_in_torch(disk_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))  # with a bias, which is not a matrix
    with pytest.raises(ValueError) as plain:
        torch.optim.Muon(model.parameters())
    with store_for(model, disk_dir) as store, pytest.raises(ValueError) as ours:
        OffloadOptimizer(OffloadModel(model, store), store, torch.optim.Muon)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("norm_type", [1, 2.0, "inf", float("inf")])
def test_gradients_are_clipped_by_any_norm(norm_type: float | str, disk_dir: Path) -> None:
    model = matrices()
    plain = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    plain(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-4, norm_type)  # type: ignore[arg-type]
    with store_for(model, disk_dir) as store:
        offloaded = OffloadModel(model, store)
        optimizer = OffloadOptimizer(offloaded, store, torch.optim.SGD, lr=0.1)
        offloaded(x).square().mean().backward()
        assert torch.equal(optimizer.clip_grad_norm_(1e-4, norm_type), expected)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert found.grad is not None
            assert wanted.grad is not None
            assert torch.equal(found.grad, wanted.grad)


Schedule = torch.optim.lr_scheduler.LRScheduler


def milestones(optimizer: torch.optim.Optimizer) -> Schedule:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 7], gamma=0.1)


def sequence(optimizer: torch.optim.Optimizer) -> Schedule:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, milestones(optimizer)], [3])


def rates(optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("make", [milestones, sequence])
def test_schedule_resumes(
    make: Callable[[torch.optim.Optimizer], Schedule], tmp_path: Path
) -> None:
    model = nn.Linear(4, 4)
    without_a_break = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = rates(without_a_break, make(without_a_break), 12)
    first = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = make(first)
    found = rates(first, schedule, 4)
    save_training(tmp_path / "run", model, first, extra={"schedule": schedule.state_dict()})
    again = torch.optim.SGD(model.parameters(), lr=1.0)
    resumed = make(again)
    resumed.load_state_dict(load_training(tmp_path / "run", model, again)["schedule"])
    assert found + rates(again, resumed, 8) == expected
    assert len(set(expected)) > 3


def test_extra_comes_back_unchanged(tmp_path: Path) -> None:
    extra = {
        "numbers": {1: "a", 2.5: None, None: [True], "text": {False: ()}},
        "counted": Counter({3: 2, "x": 1}),
        "pair": (1, [2.0, (3,)]),
    }
    save_training(tmp_path / "run", nn.Linear(2, 2), extra=extra)
    found = load_training(tmp_path / "run", nn.Linear(2, 2))
    assert found == extra
    assert type(found["counted"]) is Counter
    assert type(found["pair"]) is tuple


def test_extra_may_be_tensors(tmp_path: Path) -> None:
    extra = {"random": torch.get_rng_state(), "means": [torch.rand(3), torch.rand(())]}
    save_training(tmp_path / "run", nn.Linear(2, 2), extra=extra)
    assert_same(load_training(tmp_path / "run", nn.Linear(2, 2)), extra)


@pytest.mark.parametrize(
    "extra", [{"function": print}, {"deep": [nn.ReLU()]}, {"object": object()}]
)
def test_extra_of_an_unsupported_type_raises_before_writing(extra: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="extra"):
        save_training(tmp_path / "run", nn.Linear(2, 2), extra=extra)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_hand", [False, True])
def test_scaler_on_another_device_raises(by_hand: bool, device: str, disk_dir: Path) -> None:
    """It would read its scale before that has arrived. With everything on the CPU, it works."""
    module = matrices()
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    with store_for(module, disk_dir, device) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        scaler.scale(model(torch.ones(4, WIDTH, device=device)).square().mean()).backward()
        if by_hand:
            scaler.unscale_(optimizer)
        if device == "cpu":
            scaler.step(optimizer)
        else:
            with pytest.raises(RuntimeError, match="bfloat16"):
                scaler.step(optimizer)
        same = [torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
        assert all(same) if device != "cpu" else not any(same)
