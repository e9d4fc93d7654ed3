"""A model that is dropped or disabled leaves nothing behind in its store."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from tests.accelerator import ACCELERATOR, DEVICES, pretend
from tests.adapters.test_unsupported_weights import NBYTES, Mixed
from tests.adapters.test_unsupported_weights import X as MIXED_X
from tests.helpers.engine import core_of
from tests.helpers.tensors import parameter_bytes
from tests.store.helpers import PAGE, open_store, pages, wait_until
from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
)
from tierstore.adapters.device_resident import is_resident
from tierstore.model.locks import under

WIDTH, LAYERS = 128, 8
WEIGHT = 4 * WIDTH * WIDTH
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def build(layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    model.register_buffer("resident", torch.ones(3))
    return model.eval()


def run(model: Any, device: str = "cpu") -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(X.to(device))
    return found.cpu()


def dispatched(store: TierStore) -> list[Any]:
    model = dispatch_model(build(), store)
    run(model)
    return [model]


def offloaded(store: TierStore) -> list[Any]:
    model = build()
    enable_group_offload(model, store)
    run(model)
    return [model]


def in_pipeline(store: TierStore) -> list[Any]:
    class Pipeline:
        def __init__(self) -> None:
            self.components = {"one": build(), "two": build()}

    pipe = Pipeline()
    enable_group_offload(pipe, store)
    for each in pipe.components.values():
        run(each)
    return [pipe]


def trained(store: TierStore) -> list[Any]:
    offloaded = OffloadModel(build(2).train(), store)
    optimizer = OffloadOptimizer(offloaded, store, torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        offloaded(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [offloaded, optimizer]


def finetuned(store: TierStore) -> list[Any]:
    model = build().requires_grad_(False)
    model[0].requires_grad_(True)
    dispatch_model(model, store)
    optimizer = torch.optim.AdamW(model[0].parameters())
    model(X).square().mean().backward()
    optimizer.step()
    return [model, optimizer]


MAKERS = (dispatched, offloaded, in_pipeline, trained, finetuned)


@pytest.fixture(params=DEVICES)
def store(request: pytest.FixtureRequest, disk_dir: Path) -> Iterator[TierStore]:
    with open_store(disk_dir, 24 * WEIGHT, request.param) as store:
        yield store


def in_memory(store: TierStore) -> dict[str, int]:
    """Return the bytes of memory that a store holds, by tier.

    Counts slots, and pages kept for one.
    """
    tiers = core_of(store).tiers
    arenas = {tier.tier.name: tier.arena for tier in (tiers.top, tiers.host)}
    pages = {name: getattr(arena.make, "__self__", None) for name, arena in arenas.items()}
    return {
        name: max(arena.bytes_held, getattr(pages[name], "held", 0))
        for name, arena in arenas.items()
    }


def assert_nothing_is_left(store: TierStore) -> None:
    """Check that no group holds memory except the files of weights that are still shown.

    Host memory is freed beside the calls, and with the files.
    """
    used = store.stats().used_bytes
    assert not used.get("DEVICE") and not in_memory(store).get("DEVICE")
    assert not list(core_of(store).tiers.top.detached)
    wait_until(lambda: in_memory(store)["HOST"] <= used_in_host(store), "memory is kept")


def used_in_host(store: TierStore) -> int:
    return store.stats().used_bytes["HOST"]


def drop(models: list[Any]) -> None:
    """Drop the models, and wait until a thread of autograd has freed its last backward pass."""
    references = [weakref.ref(each) for each in models]
    models.clear()

    def is_dropped() -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    wait_until(is_dropped, "the model is still referenced")


@pytest.mark.full("the model, the way to drop it", keep="a third")
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_dropped_model_leaves_no_memory(
    make: Callable[[TierStore], list[Any]], store: TierStore
) -> None:
    hooks = set(torch_optimizer._global_optimizer_pre_hooks)
    threads = threading.active_count()
    before = store.stats().budget_bytes
    models = make(store)
    taken = in_memory(store)
    assert all(taken.values()), "there is no memory to release"
    groups = store.snapshot().groups
    staying = sum(group.nbytes for group in groups if is_resident(group.key))
    drop(models)
    assert in_memory(store).get("DEVICE", 0) <= staying, "a call was needed"
    assert_nothing_is_left(store)
    wait_until(lambda: not used_in_host(store), "a group is kept")
    assert not store.keys()
    assert store.stats().budget_bytes == before
    assert set(torch_optimizer._global_optimizer_pre_hooks) <= hooks  # others may go, too
    assert threading.active_count() <= threads
    assert torch.equal(run(dispatched(store)[0]), run(build()))


def undone_dispatch(store: TierStore) -> Callable[[], object]:
    (model,) = dispatched(store)
    return lambda: disable_offload(model)


def disabled_handle(store: TierStore) -> Callable[[], object]:
    model = build()
    handle = enable_group_offload(model, store)
    run(model)
    return lambda: disable_offload(handle)


def disabled_training(store: TierStore) -> Callable[[], object]:
    models = trained(store)
    drop([models.pop()])
    done: Callable[[], object] = models[0].disable
    return done


@pytest.mark.full("the control of each model", keep="a third")
@pytest.mark.parametrize("begin", [undone_dispatch, disabled_handle, disabled_training])
def test_disabled_model_leaves_no_memory(
    begin: Callable[[TierStore], Callable[[], object]], store: TierStore
) -> None:
    end = begin(store)
    assert all(in_memory(store).values()), "there is no memory to release"
    end()
    assert_nothing_is_left(store)


@pytest.mark.pretend_only("bytes")
def test_dropped_model_frees_device_and_pinned_memory(disk_dir: Path) -> None:
    with open_store(disk_dir, 24 * WEIGHT, ACCELERATOR) as store:
        before = pretend.memory_allocated(), pretend.pinned_bytes()
        models = dispatched(store)
        torch.accelerator.synchronize(ACCELERATOR)
        assert pretend.memory_allocated() > before[0] + 6 * WEIGHT
        assert pretend.pinned_bytes() > before[1] + WEIGHT
        drop(models)
        assert pretend.memory_allocated() <= before[0] + PAGE, "of resident tensors"
        assert_nothing_is_left(store)
        assert pretend.memory_allocated() <= before[0]
        wait_until(lambda: pretend.pinned_bytes() - before[1] <= used_in_host(store), "it is kept")


def test_dropped_model_leaves_other_models_unchanged(store: TierStore) -> None:
    """The control: memory in use stays, and no other model's values change."""
    is_dropped, (stays,) = dispatched(store), dispatched(store)
    expected = run(build())
    read = store.stats().bytes_read
    drop(is_dropped)
    assert torch.equal(run(stays), expected)
    assert store.stats().used_bytes[core_of(store).tiers.top.tier.name] >= parameter_bytes(stays)
    assert store.stats().bytes_read == read, "weights of the other model were evicted"


def test_running_model_keeps_its_memory(disk_dir: Path) -> None:
    """The control: no memory is released between the groups of a model that does not fit."""
    with open_store(disk_dir, 5 * WEIGHT, ACCELERATOR) as store:
        is_dropped, (stays,) = dispatched(store), dispatched(store)
        drop(is_dropped)
        for _ in range(6):  # by then its loop is followed, in memory made for it
            run(stays)
        arena = core_of(store).tiers.top.arena
        made, moved = arena.allocations, store.stats().bytes_onloaded
        for _ in range(3):
            run(stays)
        assert store.stats().bytes_onloaded > moved + 3 * WEIGHT
        assert arena.allocations == made


def test_model_dropped_in_a_critical_section_is_freed_later(store: TierStore) -> None:
    """A finalizer that runs in a critical section cannot free it: the next call does."""
    models = dispatched(store)
    under(core_of(store).lock, lambda: (models.clear(), gc.collect()))
    assert all(in_memory(store).values()), "it was freed in the critical section"
    store.stats()
    assert_nothing_is_left(store)


def test_model_dropped_on_another_thread_is_freed_later(store: TierStore) -> None:
    models = dispatched(store)
    has, over = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        under(core_of(store).lock, lambda: (has.set(), over.wait(20)))

    thread = threading.Thread(target=hold_the_lock)
    thread.start()
    assert has.wait(20)
    models.clear()
    gc.collect()  # does not wait
    assert all(in_memory(store).values())
    over.set()
    thread.join()
    store.stats()
    assert_nothing_is_left(store)


def test_view_outlives_its_model_and_is_then_freed(store: TierStore) -> None:
    views: list[torch.Tensor] = []

    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            views.append(self.weight.detach())
            return super().forward(x)

    model = build()
    model[3] = Keeping(WIDTH, WIDTH)
    true = model[3].weight.detach().clone()
    dispatch_model(model, store)
    run(model)
    del model
    gc.collect()
    store.put("other", pages(1.0))  # a call that needs memory
    assert torch.equal(views[0].cpu(), true)
    left = core_of(store).tiers.top.detached
    wait_until(lambda: list(left) != [], "the view has no memory")
    views.clear()
    store.stats()
    wait_until(lambda: list(left) == [], "its memory is kept")


def test_dropped_model_restores_the_budget(disk_dir: Path) -> None:
    """A weight of a type that cannot be stored had reduced it."""
    with open_store(disk_dir, 1 << 20) as store:
        before = store.stats().budget_bytes
        model = dispatch_model(Mixed(), store)
        with torch.no_grad():
            model(MIXED_X)
        assert store.stats().budget_bytes["HOST"] == (1 << 20) - NBYTES
        del model
        gc.collect()
        assert store.stats().budget_bytes == before
