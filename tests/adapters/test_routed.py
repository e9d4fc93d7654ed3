"""Experts that a router chooses: bitwise right, and only chosen experts are read.

The reference is always the same model without a store.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, DEVICES, needs_accelerator
from tests.helpers.threads import PATIENCE, Gate, start_thread
from tests.routed_models import (
    EXPERTS,
    IMPLEMENTATIONS,
    KINDS,
    STACKED,
    WIDTH,
    Deep,
    Routed,
    Stacked,
    build,
    generate,
    inputs,
    logits,
    one_by_one,
    rows,
    weight_bytes,
)
from tests.store.helpers import open_store
from tierstore import (
    Access,
    Stats,
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
    from_pretrained,
)
from tierstore.errors import BudgetError
from tierstore.types import OffloadHandle

EXPERT_BYTES = WIDTH * WIDTH * 4


def assert_within_budgets(stats: Stats) -> None:
    for tier, budget in stats.budget_bytes.items():
        assert budget is None or stats.peak_bytes[tier] <= budget, tier


def assert_nothing_is_leased(store: TierStore, handle: OffloadHandle) -> None:
    """Check that every group in use can be leased to update, which conflicts with other leases."""
    slices = [key for key in handle.groups if key.endswith("]")]
    stacks = {key.rpartition("/")[0] for key in slices}
    assert len(slices) == EXPERTS * len(stacks) > 0
    for key in handle.groups.keys() - stacks:
        if not key.endswith("/resident"):
            store.acquire(key, Access.UPDATE).release()


# Bitwise results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", (15, 25, 40, 150))
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [*((kind, way) for kind in STACKED for way in IMPLEMENTATIONS), ("list", "eager")],
)
@pytest.mark.full("the model and its implementation; the budget", keep="values")
def test_routed_model_in_ram_equals_plain(
    kind: str, implementation: str, percent: int, disk_dir: Path
) -> None:
    model, ids = build(kind, implementation), inputs(kind)
    expected, sequence = logits(model, ids), generate(model, ids)
    with TierStore(weight_bytes(model) * percent // 100, disk_dir, device="cpu") as store:
        dispatch_model(model, store)
        assert torch.equal(logits(model, ids), expected)
        assert torch.equal(generate(model, ids), sequence)
        stats = store.stats()
        assert stats.routed_uses > 0
        assert 0 < stats.routed_bytes_read <= stats.bytes_read
        assert_within_budgets(stats)


@needs_accelerator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percent", (15, 40))
@pytest.mark.full("the model, the budget", keep="values")
def test_routed_model_on_an_accelerator_equals_plain(
    kind: str, percent: int, disk_dir: Path
) -> None:
    model, ids = build(kind), inputs(kind)
    expected = logits(model.to(ACCELERATOR), ids.to(ACCELERATOR)).cpu()
    model.to("cpu")
    budget = weight_bytes(model) * percent // 100
    with TierStore(2 * budget, disk_dir, device=ACCELERATOR, device_budget=budget) as store:
        dispatch_model(model, store)
        for _ in range(2):
            assert torch.equal(logits(model, ids).cpu(), expected)
        stats = store.stats()
        assert stats.bytes_onloaded > 0
        assert stats.routed_uses > 0
        assert_within_budgets(stats)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.full("the model and its implementation", keep="values")
def test_routed_checkpoint_equals_plain_and_is_written_once(
    kind: str, implementation: str, tmp_path: Path
) -> None:
    model, ids = build(kind), inputs(kind)
    model.save_pretrained(tmp_path / "model")
    options = {"experts_implementation": implementation}
    plain = type(model).from_pretrained(tmp_path / "model", **options)
    expected, sequence = logits(plain, ids), generate(plain, ids)
    for start in range(2):
        with TierStore(weight_bytes(model) // 4, tmp_path / "store", device="cpu") as store:
            ours = from_pretrained(type(model), tmp_path / "model", store, **options)
            assert torch.equal(logits(ours, ids), expected)
            assert torch.equal(generate(ours, ids), sequence)
            stats = store.stats()
            assert stats.routed_bytes_read > 0
            if start:
                assert stats.bytes_written == 0
            assert_within_budgets(stats)


# Bytes read ---------------------------------------------------------------------------------------


class Misses:
    """Sums the bytes of experts that were chosen and not in RAM when they were needed."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.used = 0
        self.store: TierStore | None = None
        self.key_of: dict[str, str] = {}

    def watch(self, model: nn.Module) -> None:
        """Register hooks; call this before the model is offloaded."""
        for name, module in model.named_modules():
            if name.endswith("experts"):
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)

    def start(self, store: TierStore, handle: OffloadHandle) -> None:
        self.store = store
        self.nbytes = self.used = 0
        self.key_of = {names[0]: key for key, names in handle.groups.items()}

    def _before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.store is None:
                return
            index = next(t for t in (*args, *kwargs.values()) if not t.is_floating_point())
            groups = {group.key: group for group in self.store.snapshot().groups}
            for own, stack in module.named_parameters():
                if stack.dim() == 3:
                    for i in index.unique().tolist():
                        group = groups[self.key_of[f"{name}.{own}[{i}]"]]
                        self.used += group.nbytes
                        self.nbytes += 0 if "HOST" in group.tiers else group.nbytes

        return count


def decode(model: Any, tokens: list[int], past: Any = None) -> Any:
    """Run tokens one by one, as in generation. Return the cache."""
    with torch.no_grad():
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
    return past


@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.full("the model", keep=["qwen"])
def test_routed_reads_are_the_chosen_experts_that_missed(kind: str, disk_dir: Path) -> None:
    model = build(kind, layers=4)
    tokens = torch.randperm(128, generator=torch.Generator().manual_seed(0)).tolist()[:24]
    misses = Misses()
    misses.watch(model)
    with (
        TierStore(weight_bytes(model) // 4, disk_dir, device="cpu") as store,
        enable_group_offload(model, store) as handle,
    ):
        past = decode(model, tokens[:6])
        misses.start(store, handle)
        before = store.stats()
        decode(model, tokens[6:], past)
        after = store.stats()
        read = after.bytes_read - before.bytes_read
        assert 0 < misses.nbytes < misses.used
        assert read <= 1.1 * misses.nbytes
        assert after.routed_bytes_read - before.routed_bytes_read == read  # dense weights stay


def test_experts_chosen_often_stay_resident(disk_dir: Path) -> None:
    model = Deep()
    draw = random.Random(0)
    uses = missed = 0
    with (
        TierStore(weight_bytes(model) // 4, disk_dir, device="cpu") as store,
        enable_group_offload(model, store),
        torch.no_grad(),
    ):
        for step in range(60):
            # Two of sixteen are chosen four times in five each, and one of the others every time.
            often = [e for e in (3, 7) if draw.random() < 0.8]
            other = draw.choice([e for e in range(EXPERTS) if e not in (3, 7)])
            before = store.stats().routed_bytes_read
            model(rows(1), torch.tensor([[*often, other]]))
            if step >= 20:
                uses += len(often) * len(model.layers)
                read = (store.stats().routed_bytes_read - before) // EXPERT_BYTES
                missed += max(0, read - len(model.layers))
        assert store.stats().plans_followed == 0, "data decide which expert comes next"
    assert uses > 150
    assert missed < uses / 10


# Other operations on the model --------------------------------------------------------------------


CHOSEN = torch.tensor([[0, 5], [3, 5], [15, 0], [7, 3]])


def run(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(rows() if x is None else x, CHOSEN)
    return found


@contextmanager
def offloaded(
    model: nn.Module, disk_dir: Path, device: str = "cpu", budget: int = 6 * EXPERT_BYTES
) -> Iterator[tuple[TierStore, OffloadHandle]]:
    with (
        open_store(disk_dir, budget, device) as store,
        enable_group_offload(model, store) as handle,
    ):
        yield store, handle


def assert_true_values(model: nn.Module, true: nn.Module) -> None:
    found = model.state_dict()
    assert found.keys() == true.state_dict().keys()
    for name, value in true.state_dict().items():
        assert torch.equal(found[name].cpu(), value), name


def test_stack_larger_than_the_budget_shows_true_values(disk_dir: Path) -> None:
    model = Routed()
    true = copy.deepcopy(model)
    expected = run(model)
    parameters = dict(model.named_parameters())
    with offloaded(model, disk_dir) as (store, _):
        assert model.experts.w.nbytes > 2 * 6 * EXPERT_BYTES
        assert torch.equal(run(model), expected)
        assert store.stats().routed_uses == 5
        assert_within_budgets(store.stats())
        assert dict(model.named_parameters()).keys() == parameters.keys()
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
            assert type(parameter) is nn.Parameter
        assert_true_values(model, true)
        alike = copy.deepcopy(model)
        assert torch.equal(run(model), expected)
    assert_true_values(alike, true)
    assert torch.equal(run(alike), expected)


def test_save_pretrained_while_offloaded_saves_the_model(tmp_path: Path) -> None:
    model, ids = build("mixtral"), inputs("mixtral")
    true = {name: value.clone() for name, value in model.state_dict().items()}
    with TierStore(weight_bytes(model) // 4, tmp_path / "store", device="cpu") as store:
        dispatch_model(model, store)
        logits(model, ids)
        model.save_pretrained(tmp_path / "saved")
        disable_offload(model)
    for name, value in type(model).from_pretrained(tmp_path / "saved").state_dict().items():
        assert torch.equal(value, true[name]), name


def attributes_of(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return the attributes of every module, except those that a run sets."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full("the model", keep=["gptoss"])
def test_disabled_routed_model_is_ordinary(kind: str, disk_dir: Path) -> None:
    model, ids = build(kind), inputs(kind)
    expected = logits(model, ids)
    before = attributes_of(model)
    with TierStore(weight_bytes(model) // 4, disk_dir, device="cpu") as store:
        dispatch_model(model, store)
        logits(model, ids)
        disable_offload(model)
        after = attributes_of(model)
        assert after.keys() == before.keys()
        for name, attributes in after.items():
            assert attributes.keys() == before[name].keys(), name
        assert torch.equal(logits(model, ids), expected)
        assert not [key for key in store if not key.startswith("weights/")]


class Held:
    """A way to use experts that waits for a gate after the first of them."""

    def __init__(self) -> None:
        self.gate = Gate()

    def __call__(self, experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
        first = experts.w[0]
        self.gate.hold()
        assert torch.equal(first, experts.w[0])
        return one_by_one(experts, x, index, weights)

    def __deepcopy__(self, memo: object) -> Held:
        return self


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_read_by_another_thread_are_true(device: str, disk_dir: Path) -> None:
    held = Held()
    model = Routed(held)
    true = Routed()
    parameter = model.experts.w
    found: list[torch.Tensor] = []
    with offloaded(model, disk_dir, device):
        thread = start_thread(lambda: found.append(run(model)))
        assert held.gate.reached.wait(PATIENCE)
        try:
            assert dict(model.named_parameters())["experts.w"] is parameter
            shown = model.experts.w
            assert torch.equal(shown[4].cpu(), true.experts.w[4])
            assert torch.equal(torch.mul(shown, 2).cpu(), true.experts.w * 2)
            assert torch.equal((shown * 2).cpu(), true.experts.w * 2)
            assert shown.shape == parameter.shape
            assert shown.device == parameter.device
            assert_true_values(model, true)
            alike = copy.deepcopy(model)
        finally:
            held.gate.open()
            thread.join(PATIENCE)
        assert torch.equal(found[0].cpu(), run(true.to(device), rows().to(device)).cpu())
    true.to("cpu")
    assert_true_values(alike, true)
    assert alike.experts.w is alike.experts.get_parameter("w")
    assert "w" not in model.experts.__dict__
    assert "w" not in alike.experts.__dict__


def test_two_threads_run_a_routed_model(disk_dir: Path) -> None:
    model = Deep()
    inputs_of = [rows(), rows() * 2]
    expected = [run(model, x) for x in inputs_of]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            try:
                same = torch.equal(run(model, inputs_of[number]), expected[number])
            except BaseException:
                wrong.append(number)
                raise
            if not same:
                wrong.append(number)

    with offloaded(model, disk_dir, budget=10 * EXPERT_BYTES) as (store, handle):
        threads = [start_thread(lambda n=n: work(n)) for n in range(2)]  # type: ignore[misc]
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert store.stats().routed_uses == 2 * 10 * 4 * 5
        assert_nothing_is_leased(store, handle)
    assert all("w" not in layer.experts.__dict__ for layer in model.layers)


@pytest.mark.parametrize("error", (ZeroDivisionError, KeyboardInterrupt))
@pytest.mark.parametrize("device", DEVICES)
def test_error_in_an_expert_leaves_no_lease(
    error: type[BaseException], device: str, disk_dir: Path
) -> None:
    failing = True

    def way(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
        if failing:
            kept = experts.w[5] * 2
            raise error(kept)
        return one_by_one(experts, x, index, weights)

    model = Routed(way)
    expected = run(Routed().to(device), rows().to(device)).cpu()
    parameter = model.experts.w
    with offloaded(model, disk_dir, device) as (store, handle):
        with pytest.raises(error):
            run(model)
        assert model.experts.w is parameter
        assert "w" not in model.experts.__dict__
        assert_nothing_is_leased(store, handle)
        failing = False
        assert torch.equal(run(model, rows().to(device)).cpu(), expected)


# Changes ------------------------------------------------------------------------------------------


def counted(model: Routed) -> None:
    with torch.no_grad():
        model.experts.w[3].mul_(2)


def uncounted(model: Routed) -> None:
    model.experts.w.data[3] += 1


def other_memory(model: Routed) -> None:
    model.experts.w.data = model.experts.w.detach() * 3


def wider(model: Routed) -> None:
    model.to(torch.float64)


def narrower(model: Routed) -> None:
    model.half()


@pytest.mark.parametrize("change", (counted, uncounted, other_memory, wider, narrower))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.full("the change, the device", keep="any device")
def test_changed_stack_takes_effect_in_the_next_forward(
    change: Callable[[Routed], None], device: str, disk_dir: Path
) -> None:
    model, reference = Routed(), Routed()
    before = run(reference)
    change(reference)
    x = rows().to(reference.dense.weight.dtype)
    expected = run(reference.to(device), x.to(device)).cpu()
    assert not torch.equal(expected, before)
    with offloaded(model, disk_dir, device, 20 * EXPERT_BYTES) as (store, handle):
        assert torch.allclose(run(model, rows().to(device)).cpu(), before)
        old = set(store)
        change(model)
        for _ in range(2):
            assert torch.allclose(run(model, x.to(device)).cpu(), expected, rtol=1e-5)
        mine = {key for key in store if not key.startswith("weights/")}
        assert mine == {key for key in handle.groups if not key.endswith("/resident")}
        slices = {key for key in mine if key.endswith("]")}
        assert len(slices) == EXPERTS
        assert slices.isdisjoint(old)
    assert torch.equal(model.experts.w, reference.cpu().experts.w)


@pytest.mark.parametrize("change", (counted, uncounted, wider, narrower))
@pytest.mark.full("the change", keep=["counted", "wider"])
def test_stack_larger_than_ram_can_be_changed(
    change: Callable[[Routed], None], disk_dir: Path
) -> None:
    model, reference = Routed(), Routed()
    change(reference)
    x = rows().to(reference.dense.weight.dtype)
    expected = run(reference, x)
    with offloaded(model, disk_dir, budget=8 * EXPERT_BYTES) as (store, _):
        run(model)
        change(model)
        assert torch.allclose(run(model, x), expected, rtol=1e-5)
        assert_within_budgets(store.stats())


# Experts used together ----------------------------------------------------------------------------


def by_einsum(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    every = torch.einsum("eoi,ni->neo", experts.w, x)
    found: torch.Tensor = (every.gather(1, index[..., None].expand(-1, -1, x.shape[1]))).sum(1)
    return found


def by_method(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    found: torch.Tensor = x * experts.w.sum()
    return found


def by_operator(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    found: torch.Tensor = ((experts.w * 2 + 1) @ x.T).sum(0).T - (3 - (-experts.w)).sum()
    return found


def by_slice(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    found: torch.Tensor = x @ experts.w[2:5].sum(0)
    return found


def by_mask(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    chosen = torch.zeros(EXPERTS, dtype=torch.bool, device=x.device)
    chosen[index.flatten()] = True
    found: torch.Tensor = x @ experts.w[chosen].sum(0)
    return found


@pytest.mark.parametrize("way", (by_einsum, by_method, by_operator, by_slice, by_mask))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.full("the way, the device", keep="any device")
def test_all_experts_at_once_are_right_and_logged_once(
    way: Any, device: str, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Routed(way)
    name = f"Stacked_{way.__name__}_{device}"  # each class is logged once
    model.experts.__class__ = type(name, (Stacked,), {})
    expected = run(model.to(device), rows().to(device)).cpu()
    model.to("cpu")
    with (
        caplog.at_level(logging.WARNING, "tierstore"),
        offloaded(model, disk_dir, device) as (store, handle),
    ):
        for _ in range(2):
            assert torch.equal(run(model, rows().to(device)).cpu(), expected)
        assert store.stats().routed_bytes_read > 0
        assert_nothing_is_leased(store, handle)
    assert len([r for r in caplog.records if name in r.getMessage()]) == 1


def by_gathering(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    found: torch.Tensor = (experts.w[index] @ x[:, None, :, None]).sum(1)[..., 0]
    return found


def by_iterating(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    found: torch.Tensor = x
    for w in experts.w:
        found = found @ w
    return found


def from_the_end(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    assert len(experts.w) == experts.w.size(0) == experts.w.shape[0] == EXPERTS
    assert experts.w.dim() == 3 and experts.w.dtype == x.dtype
    with pytest.raises(IndexError):
        experts.w[EXPERTS]
    found: torch.Tensor = x @ experts.w.mT[-2]
    return found


@pytest.mark.parametrize("way", (by_gathering, by_iterating, from_the_end))
def test_experts_indexed_in_other_ways_are_right(
    way: Any, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Routed(way)
    expected = run(model)
    with offloaded(model, disk_dir) as (store, _):
        assert torch.equal(run(model), expected)
        assert store.stats().routed_uses >= 1
        assert_within_budgets(store.stats())
    assert not [r for r in caplog.records if "needs all experts" in r.getMessage()]


def collected(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
    slices = {int(i): experts.w[i] for i in index.unique()}
    out = torch.zeros_like(x)
    for expert, w in slices.items():
        chosen, at = torch.where(index == expert)
        out[chosen] += (x[chosen] @ w.T) * weights[chosen, at, None]
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_collected_slices_keep_their_values(device: str, disk_dir: Path) -> None:
    model = Routed(collected)
    expected = run(Routed().to(device), rows().to(device)).cpu()
    with offloaded(model, disk_dir, device, 8 * EXPERT_BYTES) as (store, handle):
        for _ in range(3):
            assert torch.equal(run(model, rows().to(device)).cpu(), expected)
        assert store.stats().bytes_read > 0
        assert_within_budgets(store.stats())
        assert_nothing_is_leased(store, handle)


def test_slices_beyond_the_budget_raise(disk_dir: Path) -> None:
    def all_of_them(experts: Stacked, x: Any, index: Any, weights: Any) -> torch.Tensor:
        found: torch.Tensor = x @ sum(list(experts.w))
        return found

    model = Routed(all_of_them)
    with offloaded(model, disk_dir) as (store, handle):
        with pytest.raises(BudgetError):
            run(model)
        assert_nothing_is_leased(store, handle)


def test_backward_through_routed_experts_raises(disk_dir: Path) -> None:
    model = Routed()
    with offloaded(model, disk_dir):
        loss = model(rows(), CHOSEN).sum()
        with pytest.raises(RuntimeError, match="have left the device"):
            loss.backward()


def test_expert_larger_than_the_budget_raises(disk_dir: Path) -> None:
    model = Routed()
    with (
        TierStore(EXPERT_BYTES // 2, disk_dir, device="cpu") as store,
        pytest.raises(BudgetError, match="raise ram_budget to at least"),
    ):
        enable_group_offload(model, store)
    assert run(model).shape == (4, WIDTH)
