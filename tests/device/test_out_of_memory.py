"""What happens when the memory of a device is all taken: the store gives back what nobody uses."""

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
"""What the unit that runs out takes beside its weights: less than the weights of all others."""


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
    """Runs its layers one after the other; the last gets what the model is given beside `x`."""

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
    """Holds all of the model on the device, which has no room for anything beside."""
    with TierStore("64MB", disk_dir, device=DEVICE, device_budget="16MB") as store:
        dispatch_model(model, store)
        with torch.no_grad():
            model(rows())
            model(rows()).cpu()
        assert store.stats().used_bytes["DEVICE"] >= COUNT * LAYER_BYTES, "all of it is there"
        x = rows()  # what the passes themselves take is there, too
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


def test_a_unit_that_runs_out_runs_again_when_the_store_has_given_way(
    model: Model, store: TierStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tierstore.adapters")
    with torch.no_grad():
        found = model(rows()).cpu()
    assert model.hungry.runs == 2
    [told] = [r for r in caplog.records if "ran out of memory" in r.getMessage()]
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith("pretend:0 ran out of memory in a Hungry: the store gives ")
    assert store.stats().used_bytes["DEVICE"] < COUNT * LAYER_BYTES
    pretend.set_memory_limit(None)
    assert torch.equal(found, expected())
    with torch.no_grad():  # what was given up comes back
        assert torch.equal(model(rows()).cpu(), expected())


def test_with_all_memory_there_nothing_runs_twice(model: Model, store: TierStore) -> None:
    """The control."""
    pretend.set_memory_limit(None)
    with torch.no_grad():
        model(rows())
    assert model.hungry.runs == 1
    assert store.stats().used_bytes["DEVICE"] >= COUNT * LAYER_BYTES


def test_who_runs_out_again_gets_the_error_and_advice(model: Model, store: TierStore) -> None:
    model.hungry.nbytes = 1 << 40
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        model(rows())
    assert model.hungry.runs == 2
    (note,) = caught.value.__notes__
    assert f"may have {store.stats().budget_bytes['DEVICE']:,}" in note and "device_budget" in note
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


NOT_AGAIN: dict[str, Callable[[Model], Any]] = {
    "gradients are on": lambda model: None,
    "it is in training mode": lambda model: model.train(),
    "it wrote to what it was given": lambda model: setattr(model.hungry, "act", _writes),
    "it was given a list": lambda model: setattr(model.hungry, "act", _grows),
    "it has hooks": _hooked,
    "a forward in it is somebody else's": _replaced,
}


@pytest.mark.parametrize("why", NOT_AGAIN)
def test_nothing_runs_again_that_may_then_be_another(
    why: str, model: Model, store: TierStore
) -> None:
    NOT_AGAIN[why](model)
    more = [[]] if why == "it was given a list" else []
    inside = nullcontext() if why == "gradients are on" else torch.no_grad()
    with inside, pytest.raises(torch.OutOfMemoryError) as caught:
        model(rows(), *more)
    assert model.hungry.runs == 1
    assert "device_budget" in caught.value.__notes__[0]


def test_nothing_runs_again_where_there_is_nothing_to_give(model: Model, store: TierStore) -> None:
    with torch.no_grad():
        model.hungry.act = lambda *given: engine_of(store).device_memory.give_back() or 0.0
        model.hungry.nbytes = 1 << 40
        with pytest.raises(torch.OutOfMemoryError):
            model(rows())
    assert model.hungry.runs == 1


def test_random_numbers_are_the_same_again(model: Model, store: TierStore) -> None:
    def noise(x: torch.Tensor, *more: Any) -> torch.Tensor:
        return torch.rand_like(x) + torch.rand(4, WIDTH).to(x.device)

    model.hungry.act = noise
    torch.manual_seed(3)
    with torch.no_grad():
        found = model(rows(), (1, "plain")).cpu()
    assert model.hungry.runs == 2
    pretend.set_memory_limit(None)
    torch.manual_seed(3)
    # The weights of the model that it is compared with are drawn before the seed is set again.
    assert torch.equal(found, expected_with(noise))


def expected_with(act: Callable[..., Any]) -> torch.Tensor:
    alone = Model().eval().to(DEVICE)
    alone.hungry.act = act
    torch.manual_seed(3)
    with torch.no_grad():
        return alone(rows(), (1, "plain")).cpu()


def test_a_slot_of_another_size_gives_way_where_the_device_is_full() -> None:
    arena = device_arena(None, torch.device(DEVICE), torch.Stream(DEVICE))
    idle = arena.take(8 * PAGE)
    arena.fill(idle)
    arena.give(idle)
    pretend.set_memory_limit(pretend.memory_reserved() + 2 * PAGE)
    slot = arena.take(10 * PAGE)
    assert arena.fill(slot).numel() == 10 * PAGE
    assert (arena.made, arena.unmade) == (2, 1)
    with pytest.raises(torch.OutOfMemoryError):
        arena.fill(arena.take(9 * PAGE))
    arena.close()


def test_a_lease_gets_its_group_where_the_device_is_full(disk_dir: Path) -> None:
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


def test_stats_tell_what_torch_has_reserved(disk_dir: Path) -> None:
    with TierStore("1MB", disk_dir, device=DEVICE, device_budget="1MB") as store:
        before = store.stats().reserved_bytes["DEVICE"]
        other = torch.empty(5 * PAGE, dtype=torch.uint8, device=DEVICE)
        after = store.stats().reserved_bytes
        assert after == {"DEVICE": pretend.memory_reserved()}
        assert after["DEVICE"] >= before + other.nbytes
    with TierStore("1MB", disk_dir, device="cpu") as store:
        assert store.stats().reserved_bytes == {}


def test_a_unit_around_one_that_ran_out_does_not_run_again(disk_dir: Path) -> None:
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


def test_a_device_without_a_cache_has_none_to_empty() -> None:
    empty_cache(torch.device("cpu"))
    assert reserved_bytes(torch.device("cpu")) is None
