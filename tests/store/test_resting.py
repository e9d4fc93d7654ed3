"""A resting lease is reused, or recalled when its space is needed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, DEVICE_0
from tests.helpers.engine import core_of, mutable
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_same,
    on_both,
    open_store,
    pages,
)
from tierstore import Access, Lease, TierStore
from tierstore.errors import BudgetError, LeaseError
from tierstore.lease import make_revocable, resume
from tierstore.model.tiers import HostAccess

HALF = 2  # pages of a group; the budget is four pages


def half_full(disk_dir: Path, device: str, **options: Any) -> TierStore:
    """Return a store with space for two of its three groups."""
    store = open_store(disk_dir, ram=2 * HALF * PAGE, device=device, **options)
    for number in range(3):
        store.put(f"g{number}", pages(number, HALF))
        store.flush()
    return store


def resting(store: TierStore, key: str) -> Lease:
    lease = store.acquire(key)
    assert make_revocable(lease)
    return lease


def two_resting(store: TierStore) -> list[Lease]:
    """Return resting leases of both resident groups."""
    leases = [store.acquire("g0"), store.acquire("g1")]
    assert all(make_revocable(lease) for lease in leases)
    return leases


def acquires(store: TierStore) -> int:
    stats = store.stats()
    return stats.hits + stats.late + stats.misses


@on_both
def test_resting_lease_is_reused_without_acquire(device: str, disk_dir: Path) -> None:
    with half_full(disk_dir, device) as store:
        lease = resting(store, "g0")
        seen = lease.tensor.data_ptr()
        asked = acquires(store)
        for _ in range(3):
            assert resume(lease)
            assert lease.tensor.data_ptr() == seen
            assert_same(lease.tensor.cpu(), pages(0, HALF))
            assert make_revocable(lease)
        assert acquires(store) == asked
        assert resume(lease)
        with pytest.raises(LeaseError):  # an ordinary lease again
            store.acquire("g0", Access.UPDATE)
        lease.release()
        store.acquire("g0", Access.UPDATE).release()


@on_both
def test_resting_lease_yields_its_space_on_demand(device: str, disk_dir: Path) -> None:
    with half_full(disk_dir, device) as store:
        leases = two_resting(store)
        with store.acquire("g2") as lease:
            assert_same(lease.tensor.cpu(), pages(2, HALF))
        assert [resume(lease) for lease in leases] == [False, False]
        assert all(lease.released for lease in leases)
        with pytest.raises(LeaseError, match="released"):
            _ = leases[0].tensors


@on_both
def test_resting_lease_in_use_keeps_its_space(device: str, disk_dir: Path) -> None:
    """The control for the test above: both take all space."""
    with half_full(disk_dir, device) as store:
        leases = two_resting(store)
        assert all(resume(lease) for lease in leases)
        with pytest.raises(BudgetError):
            store.acquire("g2")
        for lease in leases:
            lease.release()


def change(store: TierStore) -> None:
    with store.acquire("g0", Access.UPDATE) as lease:
        lease.tensor.fill_(7)


def replace(store: TierStore) -> None:
    store.put("other", pages(7, 2 * HALF), timeout=PATIENCE)


def hold(store: TierStore) -> None:
    store.get("g0")
    change(store)


@on_both
@pytest.mark.parametrize("act", [change, replace, hold])
def test_resting_lease_does_not_delay_waiters(act: Any, device: str, disk_dir: Path) -> None:
    """The holder itself makes the request: with an active lease, it would raise."""
    with half_full(disk_dir, device) as store:
        lease = resting(store, "g0")
        act(store)
        if act is not replace or device == "cpu":  # on a device, other space is needed
            assert not resume(lease)
        lease.release()


@on_both
def test_resting_leases_are_not_recalled_for_arriving_groups(device: str, disk_dir: Path) -> None:
    with half_full(disk_dir, device) as store:
        store.offload("g0")
        store.offload("g1")
        lease = resting(store, "g0")
        missed = store.stats().misses
        with store.acquire("g1"):  # there is space for it
            assert store.stats().misses == missed + 1
        assert resume(lease)
        lease.release()


@on_both
def test_resting_lease_recalled_serves_a_waiter_at_once(device: str, disk_dir: Path) -> None:
    with half_full(disk_dir, device) as store:
        used, idle = store.acquire("g0"), store.acquire("g1")
        assert make_revocable(idle)
        got = threading.Event()

        def both() -> None:
            with store.acquire("g2", timeout=PATIENCE):
                got.set()
            store.acquire("g0", Access.UPDATE, timeout=PATIENCE).release()

        thread = threading.Thread(target=both)
        thread.start()
        assert got.wait(PATIENCE), "the space of the resting lease was not used"
        while not core_of(store).queue.has_waiters():
            assert thread.is_alive()
        assert not make_revocable(used), "a request waits"
        assert not resume(idle)
        used.release()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@on_both
def test_resting_lease_can_be_released_and_lost(device: str, disk_dir: Path) -> None:
    with half_full(disk_dir, device) as store:
        lease = resting(store, "g0")
        lease.release()
        assert not resume(lease)
        lost = resting(store, "g0")
        with pytest.warns(ResourceWarning, match="dropped"):
            assert lost.tensors
            del lost
        store.acquire("g0", Access.UPDATE).release()


@on_both
def test_resting_is_for_read_leases_only(device: str, disk_dir: Path) -> None:
    with half_full(disk_dir, device) as store:
        with store.acquire("g0", Access.UPDATE) as lease:
            assert not make_revocable(lease)
        assert not make_revocable(lease), "the lease is released"
        with mutable(store).lease_in_host("g0", HostAccess.READ) as held:
            assert not make_revocable(held)
        late = store.acquire("g1")
    assert not make_revocable(late)
    assert not resume(late)


class Reader(threading.Thread):
    """Reads a group repeatedly, and lets its lease rest in between."""

    def __init__(self, store: TierStore, done: threading.Event) -> None:
        super().__init__()
        self.store, self.done = store, done
        self.rests = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.done.is_set():
                self.use(self.store.acquire("g0", timeout=PATIENCE))
        except BaseException as error:
            self.failure = error

    def use(self, lease: Lease) -> None:
        while not self.done.is_set():
            values = lease.tensor.unique()
            assert len(values) == 1, "it changed while it was read"
            if not make_revocable(lease):
                break
            self.rests += 1
            if not resume(lease):
                return
        lease.release()
        time.sleep(0.001)  # let others run


def test_resting_lease_reader_sees_no_change(disk_dir: Path) -> None:
    with half_full(disk_dir, "cpu") as store:
        done = threading.Event()
        reader = Reader(store, done)
        reader.start()
        for number in range(300):
            rested = reader.rests
            while reader.rests == rested and reader.is_alive():
                time.sleep(0)
            with store.acquire("g0", Access.UPDATE, timeout=PATIENCE) as lease:
                lease.tensor.fill_(number)
        done.set()
        reader.join(PATIENCE)
        assert not reader.is_alive()
        assert reader.failure is None
        assert_same(store.get("g0"), pages(299, HALF))


@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("guarded", [True, False])
def test_resting_lease_memory_waits_for_its_stream(
    guarded: bool, late_pretend: Any, disk_dir: Path
) -> None:
    """The download is queued on the holder's stream, and runs only when a thread waits for it.

    Without the guard, another thread, which does not know that stream, would overwrite the memory.
    """
    with half_full(disk_dir, ACCELERATOR) as store:
        if not guarded:
            core_of(store).tiers.device.used_on = lambda entry, event: None
        mine = torch.Stream(device=DEVICE_0)
        target = torch.zeros(HALF * PAGE // 4, pin_memory=True)
        with mine:
            lease = store.acquire("g1")
            target.copy_(lease.tensor, non_blocking=True)
            assert make_revocable(lease)
        with store.acquire("g0"):  # so that g1 has to be evicted
            thread = threading.Thread(target=lambda: store.get("g2").cpu())
            thread.start()
            thread.join(PATIENCE)
        assert not resume(lease)
        mine.synchronize()
        assert torch.equal(target, pages(1, HALF)) == guarded
