"""Helpers of the store's tests: open one, compare tensors, and prove that bytes moved."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.accelerator import on_both as on_both
from tests.helpers.engine import core_of
from tests.helpers.threads import PATIENCE
from tierstore import TierStore
from tierstore.model.events import Event, Leased, Released
from tierstore.model.groups import GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, Tier
from tierstore.plan.planner import Planner

PAGE = 4096
FLOATS_PER_PAGE = PAGE // 4

Tensors = Mapping[str, torch.Tensor]


def open_store(
    disk_dir: Path, ram: int = 64 * PAGE, device: str = "cpu", **options: Any
) -> TierStore:
    """Open a store with small budgets; an accelerator gets as much memory as RAM."""
    if device != "cpu":
        options.setdefault("device_budget", ram)
    return TierStore(ram, disk_dir, device=device, **options)


def pages(value: float, count: int = 1) -> torch.Tensor:
    """A float32 tensor that fills exactly `count` pages."""
    return torch.full((FLOATS_PER_PAGE * count,), float(value))


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in logical order, which compares NaN, too."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.dtype is torch.float4_e2m1fn_x2:  # which torch 2.8 cannot copy
        plain = plain.view(torch.uint8)
    row = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    return row.view(torch.uint8).numpy().tobytes()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that dtype, shape, stride and bits are the same."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert bits(found) == bits(expected)


def assert_group(found: Any, expected: Tensors | torch.Tensor) -> None:
    """Check that `get` returns the value that was put: tensor for tensor, or dict for dict."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert_same(found, expected)
        return
    assert isinstance(found, dict)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same(found[name], tensor)


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random bits of any dtype, including NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def tiers_of(store: TierStore, key: str) -> tuple[str, ...]:
    """Return the tiers that have a complete copy of a group."""
    return next(group.tiers for group in store.snapshot().groups if group.key == key)


def push_out(store: TierStore, *keys: str) -> None:
    """Fill every faster tier with another group, so that these are on disk only."""
    budget = store.stats().budget_bytes["HOST"]
    assert budget is not None
    store.put("filler", pages(0, budget // PAGE), durable=False)
    # Check under a lease: once there is space, the store may prefetch the expected groups.
    with nullcontext() if store.device.type == "cpu" else store.acquire("filler"):
        for key in keys:
            assert tiers_of(store, key) == ("DISK",), f"{key} is still nearer than the disk"
    store.discard("filler")


def files_below(directory: Path) -> set[str]:
    """Return every file and directory below a directory, by relative path."""
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*")}


def memory_held(store: TierStore) -> dict[str, int]:
    """Return the bytes of memory that exist now, by tier."""
    return {tier.tier.name: tier.arena.bytes_held for tier in memory_tiers(store)}


def memory_tiers(store: TierStore) -> list[Any]:
    """Return the drivers of the tiers whose copies take memory."""
    return [
        tier
        for tier in (core_of(store).tiers.device, core_of(store).tiers.host)
        if tier is not None
    ]


def assert_sound(store: TierStore) -> None:
    """Check every promise of the planner, and that existing memory is within the budgets."""
    with core_of(store).lock:
        core_of(store).planner.check()
        for driver in memory_tiers(store):
            arena, name = driver.arena, driver.tier.name
            budget = core_of(store).planner.budgets[driver.tier]
            assert budget is not None
            assert arena.bytes_held <= budget, f"{name} holds {arena.bytes_held} of {budget}"
            assert arena.bytes_there() <= budget, f"{name} has {arena.bytes_there()} of {budget}"
            assert arena.peak_held <= budget, f"{name} held {arena.peak_held} of {budget}"


def assert_at_rest(store: TierStore) -> None:
    """Check that nothing is leased, requested or moving, and the accounting equals the groups."""
    with core_of(store).lock:
        core_of(store).run_deferred()
    wait_until_idle(store)  # discarded groups may still be on their way to the disk
    assert_sound(store)
    core_of(store).mover.drain()
    planner = core_of(store).planner
    with core_of(store).lock:
        assert not core_of(store).dirty, "a transaction was interrupted and not rebuilt"
        assert not core_of(store).leases, "a lease is not released"
        assert not core_of(store).queue._held, "an owner still holds a lease"
        assert not core_of(store).queue.requests(), "a request is still waiting"
        assert not core_of(store).unpublished, "a put is still running"
        planner.check()
        assert not planner.waited_for(), "a request is left"
        assert not planner.leased()
        known = set(core_of(store).current.values())
        assert planner.groups() == known, "an unreachable generation is left"
        assert set(core_of(store).mover._entries) == known


def wait_until_idle(store: TierStore) -> None:
    """Wait until nothing is moving."""
    wait_until(lambda: core_of(store).planner.idle(), "it never ends")


def wait_until(there: Callable[[], bool], otherwise: str) -> None:
    """Poll until a condition holds. Fails if it never does."""
    ends = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < ends, otherwise
        time.sleep(0.001)


def run_threads(targets: list[Callable[[], None]]) -> list[BaseException]:
    """Run callables at once, each on its own thread. Returns their errors."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            try:
                target()
            except BaseException as error:
                errors.append(error)

        return body

    threads = [threading.Thread(target=guarded(target), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    return errors


def join(thread: threading.Thread, seconds: float = PATIENCE) -> None:
    """Join a thread; if it never ends, print the stacks of all threads."""
    thread.join(seconds)
    if thread.is_alive():
        import faulthandler

        faulthandler.dump_traceback()
        pytest.fail(f"{thread.name} never ended; the stacks of all threads were printed")


def disk_bytes(store: TierStore) -> int:
    """Return the bytes that the planner counts on disk."""
    return core_of(store).planner.used[Tier.DISK]


def is_root() -> bool:
    """Return whether this process may mount file systems and change any file."""
    return os.geteuid() == 0


class DeafToChanges:
    """A planner that treats every lease as a read: old copies still count after a change."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def __contains__(self, group: GroupId) -> bool:
        return group in self._planner

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, Leased | Released) and event.access is Access.UPDATE:
            event = replace(event, access=Access.READ)
        return self._planner.handle(event, now)


def make_deaf_to_changes(store: TierStore) -> None:
    """Install a fault for controls: see `DeafToChanges`."""
    core_of(store).planner = cast(Planner, DeafToChanges(core_of(store).planner))
