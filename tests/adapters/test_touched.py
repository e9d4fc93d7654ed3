"""Weights that are used without a call of the module that has them: values, bytes, and budgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.adapters.conftest import DEVICES
from tests.adapters.touched_models import (
    CASES,
    COUNT,
    LIBRARIES,
    SHARE,
    WIDTH,
    Case,
    Listed,
    expected,
)
from tests.dispatch import models
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model, edit_weights, enable_group_offload
from tierstore.adapters.contents import tensors_of
from tierstore.adapters.on_demand import OnDemandLeasing
from tierstore.errors import BudgetError
from tierstore.torch_private import current_function_mode

WEIGHT = 4 * WIDTH * WIDTH

on_both = pytest.mark.parametrize("device", DEVICES)
both_ways = pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
Offload = Callable[..., Any]


def nbytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(model))


@contextmanager
def offloaded(
    offload: Offload, model: nn.Module, disk_dir: Path, device: str, share: float = SHARE
) -> Iterator[TierStore]:
    """Yield a model on a store whose budgets are a share of its weights; disable it afterwards."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with open_store(disk_dir, int(nbytes_of(model) * share), device) as store:
        handle = offload(model, store)
        yield store
        stats = store.stats()
        for tier in (name for name in stats.peak_bytes if name != "DISK"):
            budget = stats.budget_bytes[tier]
            assert budget is not None and stats.peak_bytes[tier] <= budget
        disable_offload(handle)
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, before[name])


def assert_right(
    name: str, case: Case, offload: Offload, device: str, disk_dir: Path, share: float
) -> None:
    for with_grad in (False, True):
        model = case.model()
        with (
            offloaded(offload, model, disk_dir / str(with_grad), device, share) as store,
            torch.set_grad_enabled(with_grad),
        ):
            least = nbytes_of(model) if name in CASES else 1
            for _ in range(2):
                before = store.stats().bytes_read
                assert torch.equal(case.run(model, case.given()).cpu(), expected(name))
                assert store.stats().bytes_read - before >= least
                least = 1


@pytest.mark.full("the case, the device", keep="a third")
@pytest.mark.parametrize("name", CASES)
@both_ways
@on_both
def test_touched_weights_give_right_values_and_move(
    device: str, offload: Offload, name: str, disk_dir: Path
) -> None:
    assert_right(name, CASES[name], offload, device, disk_dir, SHARE)


@pytest.mark.full("as the models above", keep=["cpu-dispatch_model-wavlm"])
@pytest.mark.parametrize("name", LIBRARIES)
@both_ways
@on_both
def test_touched_weights_of_libraries_give_right_values(
    device: str, offload: Offload, name: str, disk_dir: Path
) -> None:
    # A device and RAM have this much each: together, they must not hold all used weights.
    share = 0.5 if device == "cpu" else 0.3
    assert_right(name, LIBRARIES[name], offload, device, disk_dir, share)


def run_unchanged(
    touching: OnDemandLeasing, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
) -> Any:
    return func(*args, **(kwargs or {}))


@needs_accelerator
@pytest.mark.parametrize("observed", [True, False])
@torch.no_grad()
def test_touched_weights_undetected_raise_with_advice(
    observed: bool, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not observed:
        monkeypatch.setattr(OnDemandLeasing, "__torch_function__", run_unchanged)
    case, model = CASES["functional"], CASES["functional"].model()
    with offloaded(dispatch_model, model, disk_dir, ACCELERATOR):
        if observed:
            assert torch.equal(model(case.given()), expected("functional"))
        else:
            with pytest.raises(RuntimeError, match="same device") as raised:
                model(case.given())
            (note,) = raised.value.__notes__
            assert note.startswith("tierstore: Functional may use a weight that is not")


@on_both
@torch.no_grad()
def test_part_that_touches_weights_runs_alone(device: str, disk_dir: Path) -> None:
    case = CASES["sharing"]
    model, x = case.model(), case.given()
    right = case.model().second(x)
    with offloaded(dispatch_model, model, disk_dir, device) as store:
        for _ in range(2):
            before = store.stats().bytes_read
            assert torch.equal(model.second(x).cpu(), right)
            assert store.stats().bytes_read > before


# Observed operations ------------------------------------------------------------------------------


class RecordsMode(nn.Linear):
    """Records whether operations are observed while it runs."""

    observed: list[bool]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observed.append(current_function_mode() is not None)
        return super().forward(x)


class Branching(nn.Module):
    """In some calls, it uses a weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecordsMode(WIDTH, WIDTH) for _ in range(COUNT))
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.observed: list[bool] = []
        for layer in self.layers:
            layer.observed = self.observed

    def forward(self, x: torch.Tensor, with_tail: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return linear(x, self.tail.weight) if with_tail else x


@both_ways
@on_both
@torch.no_grad()
def test_entry_that_touches_no_weight_is_observed_once(
    device: str, offload: Offload, disk_dir: Path
) -> None:
    case = Case(Branching)
    model, x = case.model(), case.given()
    with offloaded(offload, model, disk_dir, device):
        for _ in range(3):
            model(x)
        assert model.observed == [True] * COUNT + [False] * 2 * COUNT
        model.forward = type(model).forward.__get__(model)  # a patched forward may touch weights
        model.observed.clear()
        model(x)
        assert model.observed == [True] * COUNT
        del model.forward


@needs_accelerator
@both_ways
@torch.no_grad()
def test_weight_touched_in_a_later_call_raises_then_loads(offload: Offload, disk_dir: Path) -> None:
    case = Case(Branching)
    model, x = case.model(), case.given()
    right = case.model()(x, True)
    with offloaded(offload, model, disk_dir, ACCELERATOR):
        model(x)
        with pytest.raises(RuntimeError, match="same device") as raised:
            model(x, True)
        assert any("call it again" in note for note in raised.value.__notes__)
        for _ in range(2):
            assert torch.equal(model(x, True).cpu(), right)


class Attending(nn.Module):
    """torch computes these with fused operations, which it skips under a mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attend": nn.MultiheadAttention(WIDTH, 4, batch_first=True)})
            for _ in range(4)
        )
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["attend"](x, x, x, need_weights=False)[0]
        result: torch.Tensor = self.encoder(x)
        return result


@both_ways
@on_both
@torch.no_grad()
def test_fused_operations_stay_while_observed(
    device: str, offload: Offload, disk_dir: Path
) -> None:
    case = Case(Attending, (2, 5, WIDTH))
    model, x = case.model(), case.given()
    right = case.model().to(device)(x.to(device)).cpu()
    with offloaded(offload, model, disk_dir, device, 0.6) as store:
        for _ in range(2):
            assert torch.equal(model(x).cpu(), right)
        assert store.stats().bytes_read > 0


@torch.no_grad()
def test_compiled_function_in_an_observed_forward_is_traced(disk_dir: Path) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ by)

    class Calling(Listed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(super().forward(x), self.weights[0] + 1)

    case = Case(Calling)
    model, right = case.model(), case.run(case.model(), case.given())
    with offloaded(dispatch_model, model, disk_dir, "cpu") as store:
        for _ in range(2):
            assert torch.equal(model(case.given()), right)
        assert store.stats().bytes_read > 0


# Gradients, threads, edits ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["list", "many", "functional", "encode"])
@both_ways
@on_both
def test_gradient_through_touched_weights_is_right(
    device: str, offload: Offload, name: str, disk_dir: Path
) -> None:
    case = CASES[name]
    gradients = []
    for on_store in (False, True):
        model, x = case.model(), case.given().requires_grad_()
        if on_store:
            with offloaded(offload, model, disk_dir, device) as store:
                case.run(model, x).sum().backward()
                assert store.stats().bytes_read > 0
        else:
            case.run(model.to(device), x.to(device)).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@on_both
@torch.no_grad()
def test_threads_that_touch_weights_get_right_values(device: str, disk_dir: Path) -> None:
    case, found = CASES["many"], []
    model = case.model()
    with offloaded(dispatch_model, model, disk_dir, device, 0.6):

        def run() -> None:
            with torch.no_grad():
                found.extend(model(case.given()).cpu() for _ in range(4))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8
    assert all(torch.equal(each, expected("many")) for each in found)


@on_both
@torch.no_grad()
def test_touched_weight_changed_in_forward_keeps_its_change(device: str, disk_dir: Path) -> None:
    class Counting(Listed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weights[0].mul_(0.5)
            return super().forward(x)

    case = Case(Counting)
    plain, model = case.model(), case.model()
    # leaves space for `edit_weights`
    with open_store(disk_dir, 2 * nbytes_of(model), device) as store:
        dispatch_model(model, store)
        for _ in range(3):
            assert torch.equal(model(case.given()).cpu(), plain(case.given()))
        assert torch.equal(model.weights[0], plain.weights[0])
        model.weights[1].mul_(2)
        plain.weights[1].mul_(2)
        assert torch.equal(model(case.given()).cpu(), plain(case.given()))
        with edit_weights(model.weights):
            assert model.weights[1].device.type == device
            assert torch.equal(model(case.given()).cpu(), plain(case.given()))


@on_both
@torch.no_grad()
def test_generator_forward_runs_like_a_plain_one(device: str, disk_dir: Path) -> None:
    case = CASES["yielding"]
    plain, model = case.model(), case.model()
    with open_store(disk_dir, int(nbytes_of(model) * SHARE), device) as store:
        dispatch_model(model, store)
        for stop in (1, 5, COUNT):
            pairs = zip(model(case.given()), plain(case.given()), strict=True)
            for number, (ours, theirs) in enumerate(pairs, 1):
                assert torch.equal(ours.cpu(), theirs)
                model.layers[-1].weight.mul_(0.5)
                plain.layers[-1].weight.mul_(0.5)
                if number == stop:
                    break
        assert store.stats().bytes_read > 0
        steps = model(case.given())
        next(steps)
        with pytest.raises(ZeroDivisionError):
            steps.throw(ZeroDivisionError)
        assert list(steps) == []
        steps = model(case.given())
        next(steps)
        disable_offload(model)
        with pytest.raises(RuntimeError, match="has not finished"):
            next(steps)


# Weights that never fit ---------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, large: int) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)
        self.table = nn.ParameterList([nn.Parameter(torch.randn(large, WIDTH))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.small(x), self.table[0])


@both_ways
@on_both
def test_weight_larger_than_the_budget_is_named(
    device: str, offload: Offload, disk_dir: Path
) -> None:
    with open_store(disk_dir, 8 * WEIGHT, device) as store:
        with pytest.raises(BudgetError, match=r"'table\.0' is one weight; raise") as raised:
            offload(Pair(12 * WIDTH), store)
        assert "offload_type" not in str(raised.value)
        offload(Pair(4 * WIDTH), store)  # a smaller one is accepted


@on_both
@torch.no_grad()
def test_preloaded_class_larger_than_the_budget_runs(device: str, disk_dir: Path) -> None:
    model = CASES["functional"].model()
    with open_store(disk_dir, int(nbytes_of(model) * SHARE), device) as store:
        dispatch_model(model, store, preload_module_classes=["Functional"])
        for _ in range(2):
            assert torch.equal(model(CASES["functional"].given()).cpu(), expected("functional"))
        assert store.stats().bytes_read >= nbytes_of(model)


@needs_accelerator
@both_ways
def test_small_buffers_larger_than_the_budget_are_named(offload: Offload, disk_dir: Path) -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(4096) for _ in range(4)))
    with open_store(disk_dir, 1 << 16, ACCELERATOR) as store, pytest.raises(BudgetError) as raised:
        offload(model, store)
    assert "of Sequential, '0.running_mean', '0.running_var'" in raised.value.__notes__[-1]


@both_ways
def test_operation_with_weights_beyond_the_budget_names_them(
    offload: Offload, disk_dir: Path
) -> None:
    class Joining(Listed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.cat(list(self.weights), 1)

    model = Case(Joining).model()
    with (
        offloaded(offload, model, disk_dir, "cpu") as store,
        pytest.raises(BudgetError) as raised,
        torch.no_grad(),
    ):
        model(Case(Joining).given())
    assert "cat needs 'weights.0', 'weights.1'" in raised.value.__notes__[-1]
    recurrent = nn.LSTM(WIDTH, WIDTH, 3)
    with (
        open_store(disk_dir / "other", nbytes_of(recurrent) // 2) as store,
        pytest.raises(
            BudgetError,
            match=r"and 9 more are needed at the same time; raise ram_budget .* computing overlap",
        ),
    ):
        offload(recurrent, store)


# Inputs of generate -------------------------------------------------------------------------------


@both_ways
@on_both
@torch.no_grad()
def test_generate_takes_inputs_on_the_cpu(device: str, offload: Offload, disk_dir: Path) -> None:
    model, ids = models.build("t5"), models.tokens(shape=(2, 5))
    right = models.build("t5").generate(ids, max_new_tokens=4, do_sample=False)
    with offloaded(offload, model, disk_dir, device) as store:
        found = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert found.device.type == "cpu" and torch.equal(found, right)
        assert store.stats().bytes_read > 0
