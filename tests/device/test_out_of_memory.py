"""The memory of a device is full: the store releases memory that is not in use."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.device import pretend
from tierstore import TierStore, dispatch_model
from tierstore.model.sizes import PAGE
from tierstore.observe.observer import reserved_bytes
from tierstore.store import engine_of
from tierstore.system.streams import empty_cache
from tierstore.tiers.arena import device_arena

pytestmark = pytest.mark.pretend_only("limits")

DEVICE = "pretend:0"
WIDTH, COUNT = 256, 8
LAYER_BYTES = 4 * WIDTH * WIDTH
SCRATCH = 3 * LAYER_BYTES
"""Bytes that the failing unit takes beside its weights: less than the weights of all others."""


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    gc.collect()
    torch.get_device_module(DEVICE).empty_cache()
    yield
    pretend.set_memory_limit(None)


class Plain(nn.Module):
    """Takes no memory beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Hungry(Plain):
    """Takes `nbytes` more, for a moment. `act` is called before."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.runs = 0
        self.act: Callable[..., Any] = lambda *given: 0.0

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        self.runs += 1
        added = self.act(x, *more)
        torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        return x @ self.weight + added


class Model(nn.Module):
    """Runs its layers one after the other; the last also gets the model's other arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([*(Plain() for _ in range(COUNT - 1)), Hungry()])

    @property
    def hungry(self) -> Hungry:
        layer = self.layers[-1]
        assert isinstance(layer, Hungry)
        return layer

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        *first, last = self.layers
        for layer in first:
            x = layer(x)
        return last(x, *more)


def rows() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.fixture
def model() -> Model:
    return Model().eval()


@pytest.fixture
def store(model: Model, disk_dir: Path) -> Iterator[TierStore]:
    """Return a store that holds all of the model on the device, and leaves no free memory."""
    with TierStore("64MB", disk_dir, device=DEVICE, device_budget="16MB") as store:
        dispatch_model(model, store)
        with torch.no_grad():
            model(rows())
            model(rows()).cpu()
        assert store.stats().used_bytes["DEVICE"] >= COUNT * LAYER_BYTES, (
            "the model is not resident"
        )
        x = rows()  # includes the memory of the passes themselves
        pretend.set_memory_limit(pretend.memory_reserved() + LAYER_BYTES)
        del x
        model.hungry.runs = 0
        model.hungry.nbytes = SCRATCH
        yield store


@torch.no_grad()
def expected(*more: Any, act: Callable[..., Any] = lambda *given: 0.0) -> torch.Tensor:
    alone = Model().eval()
    alone.hungry.act = act
    return alone.to(DEVICE)(rows(), *more).cpu()


def test_out_of_memory_unit_runs_again_after_the_store_yields(
    model: Model, store: TierStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tierstore.adapters")
    with torch.no_grad():
        found = model(rows()).cpu()
    assert model.hungry.runs == 2
    [record] = [r for r in caplog.records if "ran out of memory" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "pretend:0 ran out of memory in a Hungry: the store releases "
    )
    assert store.stats().used_bytes["DEVICE"] < COUNT * LAYER_BYTES
    pretend.set_memory_limit(None)
    assert torch.equal(found, expected())
    with torch.no_grad():  # evicted groups are loaded again
        assert torch.equal(model(rows()).cpu(), expected())


def test_enough_memory_runs_each_unit_once(model: Model, store: TierStore) -> None:
    """The control."""
    pretend.set_memory_limit(None)
    with torch.no_grad():
        model(rows())
    assert model.hungry.runs == 1
    assert store.stats().used_bytes["DEVICE"] >= COUNT * LAYER_BYTES


def test_out_of_memory_again_raises_with_advice(model: Model, store: TierStore) -> None:
    model.hungry.nbytes = 1 << 40
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        model(rows())
    assert model.hungry.runs == 2
    (note,) = caught.value.__notes__
    assert (
        f"of a budget of {store.stats().budget_bytes['DEVICE']:,}" in note
        and "device_budget" in note
    )
    model.hungry.nbytes = 0
    with torch.no_grad():
        found = model(rows()).cpu()
    pretend.set_memory_limit(None)
    assert torch.equal(found, expected())


def _writes(x: torch.Tensor, *more: Any) -> float:
    x.add_(1.0)
    return 0.0


def _grows(x: torch.Tensor, cache: list[int]) -> float:
    cache.append(1)
    return float(len(cache))


def _hooked(model: Model) -> None:
    model.hungry.register_forward_pre_hook(lambda module, given: None)


def _replaced(model: Model) -> None:
    layer = model.hungry
    inner = nn.Identity()
    inner.forward = lambda x: x  # type: ignore[method-assign]
    layer.add_module("inner", inner)


NOT_REPEATABLE: dict[str, Callable[[Model], Any]] = {
    "gradients are on": lambda model: None,
    "it is in training mode": lambda model: model.train(),
    "it wrote to what it was given": lambda model: setattr(model.hungry, "act", _writes),
    "it was given a list": lambda model: setattr(model.hungry, "act", _grows),
    "it has hooks": _hooked,
    "a forward in it was replaced": _replaced,
}


@pytest.mark.parametrize("why", NOT_REPEATABLE)
def test_out_of_memory_unit_not_repeatable_raises(why: str, model: Model, store: TierStore) -> None:
    NOT_REPEATABLE[why](model)
    more = [[]] if why == "it was given a list" else []
    inside = nullcontext() if why == "gradients are on" else torch.no_grad()
    with inside, pytest.raises(torch.OutOfMemoryError) as caught:
        model(rows(), *more)
    assert model.hungry.runs == 1
    assert "device_budget" in caught.value.__notes__[0]


def test_out_of_memory_with_nothing_to_release_raises(model: Model, store: TierStore) -> None:
    with torch.no_grad():
        model.hungry.act = lambda *given: engine_of(store).device_memory.free_idle() or 0.0
        model.hungry.nbytes = 1 << 40
        with pytest.raises(torch.OutOfMemoryError):
            model(rows())
    assert model.hungry.runs == 1


def test_out_of_memory_rerun_draws_the_same_random_numbers(model: Model, store: TierStore) -> None:
    def noise(x: torch.Tensor, *more: Any) -> torch.Tensor:
        return torch.rand_like(x) + torch.rand(4, WIDTH).to(x.device)

    model.hungry.act = noise
    torch.manual_seed(3)
    with torch.no_grad():
        found = model(rows(), (1, "plain")).cpu()
    assert model.hungry.runs == 2
    pretend.set_memory_limit(None)
    torch.manual_seed(3)
    # The reference model draws its weights before the seed is set again.
    assert torch.equal(found, expected_with(noise))


def expected_with(act: Callable[..., Any]) -> torch.Tensor:
    alone = Model().eval().to(DEVICE)
    alone.hungry.act = act
    torch.manual_seed(3)
    with torch.no_grad():
        return alone(rows(), (1, "plain")).cpu()


def test_full_device_idle_slot_of_another_size_is_freed() -> None:
    arena = device_arena(None, torch.device(DEVICE), torch.Stream(DEVICE))
    idle = arena.take(8 * PAGE)
    arena.fill(idle)
    arena.release(idle)
    pretend.set_memory_limit(pretend.memory_reserved() + 2 * PAGE)
    slot = arena.take(10 * PAGE)
    assert arena.fill(slot).numel() == 10 * PAGE
    assert (arena.allocations, arena.frees) == (2, 1)
    with pytest.raises(torch.OutOfMemoryError):
        arena.fill(arena.take(9 * PAGE))
    arena.close()


def test_full_device_lease_gets_its_group(disk_dir: Path) -> None:
    with TierStore("1MB", disk_dir, device=DEVICE, device_budget="1MB") as store:
        for name, npages in (("small", 8), ("large", 10)):
            store.put(name, {"a": torch.full((npages * PAGE,), npages, dtype=torch.uint8)})
        with store.acquire("small"):
            pass
        store.offload("small")
        store.flush()
        torch.accelerator.synchronize(DEVICE)
        pretend.set_memory_limit(pretend.memory_reserved() + 2 * PAGE)
        with store.acquire("large", timeout=10) as lease:
            assert lease.tensors["a"].cpu().unique().tolist() == [10]


def test_stats_report_memory_reserved_by_torch(disk_dir: Path) -> None:
    with TierStore("1MB", disk_dir, device=DEVICE, device_budget="1MB") as store:
        before = store.stats().reserved_bytes["DEVICE"]
        other = torch.empty(5 * PAGE, dtype=torch.uint8, device=DEVICE)
        after = store.stats().reserved_bytes
        assert after == {"DEVICE": pretend.memory_reserved()}
        assert after["DEVICE"] >= before + other.nbytes
    with TierStore("1MB", disk_dir, device="cpu") as store:
        assert store.stats().reserved_bytes == {}


def test_out_of_memory_inner_unit_outer_unit_runs_once(disk_dir: Path) -> None:
    class Around(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Hungry()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) @ self.weight

    model = nn.Sequential(*(Plain() for _ in range(COUNT)), Around()).eval()
    with TierStore("64MB", disk_dir, device=DEVICE, device_budget="16MB") as store:
        dispatch_model(model, store)
        with torch.no_grad():
            model(rows())
            inner = model[-1].inner
            inner.runs, inner.nbytes = 0, 1 << 40
            pretend.set_memory_limit(pretend.memory_reserved() + LAYER_BYTES)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                model(rows())
    assert inner.runs == 2
    assert len(caught.value.__notes__) == 1


def test_cpu_has_no_cache_to_empty() -> None:
    empty_cache(torch.device("cpu"))
    assert reserved_bytes(torch.device("cpu")) is None
