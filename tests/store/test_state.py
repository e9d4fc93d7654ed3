"""Mutable groups: leased in host memory, and viewed in their place on disk."""

from __future__ import annotations

import errno
import gc
import os
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.device.states import pageable
from tests.helpers.engine import core_of, mutable
from tests.helpers.system_calls import system_call
from tests.helpers.threads import Gate, hold_calls, start_thread
from tests.store.helpers import (
    FLOATS_PER_PAGE,
    PAGE,
    PATIENCE,
    Tensors,
    assert_group,
    assert_same,
    assert_sound,
    bits,
    join,
    on_both,
    open_store,
    pages,
    run_threads,
    tiers_of,
    wait_until,
    wait_until_idle,
)
from tierstore import Access, TierStore, TransferError
from tierstore.errors import (
    BudgetError,
    ClosedError,
    DiskFullError,
    DuplicateKeyError,
    UnknownKeyError,
)
from tierstore.model.tiers import HostAccess
from tierstore.tiers.hops import HostToDevice
from tierstore.tiers.reading import DiskToHost

ROUNDS = 20


def several(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a transposed matrix, a scalar, half precision, no elements, and a tied pair."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(48, 40, generator=random)
    tied = torch.randn(700, generator=random)
    return {
        "transposed": matrix.t(),
        "scalar": torch.randn((), generator=random),
        "half": torch.randn(33, generator=random).bfloat16(),
        "nothing": torch.empty(0, 5),
        "tied": tied,
        "tied too": tied,
    }


def settled(store: TierStore, key: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Move the group to disk, and return views of it there."""
    mutable(store).create(key, tensors)
    mutable(store).move_to_disk([key])
    return mutable(store).view_on_disk(key)


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def held_values(
    store: TierStore, key: str, purpose: HostAccess = HostAccess.READ
) -> dict[str, torch.Tensor]:
    with mutable(store).lease_in_host(key, purpose) as lease:
        return copies(lease.tensors)


def assert_values(found: Tensors, expected: Tensors) -> None:
    """Check that bits and shapes are equal, whatever the device and strides."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def fill(tensors: Tensors, value: float) -> None:
    for tensor in tensors.values():
        tensor.fill_(value)


def places(store: TierStore) -> tuple[int, int]:
    """Return the end of the last slot in the spill file, and the length of that file."""
    spill = core_of(store).tiers.disk.spill
    assert spill is not None
    return spill.usage()[0], os.stat(spill.path).st_size


# Values ------------------------------------------------------------------------------------------


@on_both
def test_state_values_are_equal_on_every_path(device: str, disk_dir: Path) -> None:
    expected = several()
    with open_store(disk_dir, device=device) as store:
        mutable(store).create("key", expected)
        assert "DISK" not in tiers_of(store, "key")
        assert_values(held_values(store, "key", HostAccess.UPDATE), expected)
        assert_values(store.get("key"), expected)
        mutable(store).move_to_disk(["key"])
        assert tiers_of(store, "key") == ("DISK",)
        shown = mutable(store).view_on_disk("key")
        for name, tensor in expected.items():
            assert shown[name].device.type == "cpu"
            assert_same(shown[name], tensor)
        read = store.stats().bytes_read
        assert_values(held_values(store, "key", HostAccess.READ), expected)
        assert_values(store.get("key"), expected)
        assert_group(store.get("key"), expected)
        assert store.stats().bytes_read > read
        assert_sound(store)


@on_both
def test_state_tied_tensors_are_one_while_leased(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", several())
        with mutable(store).lease_in_host("key", HostAccess.UPDATE) as lease:
            lease.tensors["tied"][7] = 99.0
            assert lease.tensors["tied too"][7] == 99.0
        mutable(store).move_to_disk(["key"])
        assert shown["tied"][7] == shown["tied too"][7] == 99.0
        shown["tied too"][8] = 55.0
        assert shown["tied"][8] == 55.0
        assert held_values(store, "key")["tied"][8] == 55.0


@on_both
def test_state_changes_are_visible_on_both_sides(device: str, disk_dir: Path) -> None:
    tensors = several()
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", tensors)
        for number in range(ROUNDS):
            with mutable(store).lease_in_host("key", HostAccess.UPDATE) as lease:
                assert (lease.tensors["half"] == shown["half"]).all()
                fill(lease.tensors, number)
            mutable(store).write_back("key")
            mutable(store).move_to_disk(["key"])
            assert all((tensor == number).all() for tensor in shown.values())
            with store.acquire("key") as lease:
                assert (lease.tensors["transposed"] == number).all()
            mutable(store).move_to_disk(["key"])
            fill(shown, number + 0.5)
            assert all(
                (tensor == number + 0.5).all() for tensor in held_values(store, "key").values()
            )
            mutable(store).move_to_disk(["key"])
        assert_sound(store)


@on_both
def test_state_renewed_is_not_read(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", {"a": pages(1, 3)})
        read = store.stats().bytes_read
        with mutable(store).lease_in_host("key", HostAccess.RENEW) as lease:
            lease.tensors["a"].fill_(2)
        mutable(store).move_to_disk(["key"])
        assert store.stats().bytes_read == read
        assert (shown["a"] == 2).all()
        held_values(store, "key", HostAccess.UPDATE)  # the control
        assert store.stats().bytes_read == read + 3 * PAGE


@on_both
def test_state_only_read_is_not_written(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        settled(store, "key", {"a": pages(1, 3)})
        written = store.stats().bytes_written
        for purpose, more in ((HostAccess.READ, 0), (HostAccess.UPDATE, 3 * PAGE)):
            held_values(store, "key", purpose)
            mutable(store).move_to_disk(["key"])
            assert store.stats().bytes_written == written + more


@on_both
def test_state_on_disk_only_behaves_like_others(device: str, disk_dir: Path) -> None:
    values = several(1)
    with open_store(disk_dir, device=device) as store:
        mutable(store).create_on_disk("key", several(0))
        assert tiers_of(store, "key") == ("DISK",)
        shown = mutable(store).view_on_disk("key")
        for name, tensor in values.items():
            shown[name].copy_(tensor)
            assert shown[name].stride() == tensor.stride()
        assert store.stats().bytes_written == 0
        assert_values(store.get("key"), values)
        assert_values(held_values(store, "key"), values)


@on_both
def test_state_empty_group_works(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", {"nothing": torch.empty(0, 3)})
        assert shown["nothing"].shape == (0, 3)
        assert held_values(store, "key", HostAccess.UPDATE)["nothing"].shape == (0, 3)
        mutable(store).move_to_disk(["key"])
        assert_sound(store)


# Places -------------------------------------------------------------------------------------------


@on_both
def test_state_group_keeps_its_address(device: str, disk_dir: Path) -> None:
    """Far more is written than fits into memory, but the file does not grow."""
    with open_store(disk_dir, 8 * PAGE, device) as store:
        keys = [f"g{i}" for i in range(6)]
        shown = {key: settled(store, key, {"a": pages(0, 3)})["a"] for key in keys}
        before, addresses = places(store), {key: t.data_ptr() for key, t in shown.items()}
        for number in range(1, ROUNDS):
            for key in keys:
                with mutable(store).lease_in_host(key, HostAccess.UPDATE) as lease:
                    lease.tensors["a"].fill_(number)
                mutable(store).write_back(key)
            mutable(store).move_to_disk(keys)
            assert all((tensor == number).all() for tensor in shown.values())
            assert {key: mutable(store).view_on_disk(key)["a"].numel() for key in keys} == {
                key: 3 * FLOATS_PER_PAGE for key in keys
            }
        assert places(store) == before
        assert {key: t.data_ptr() for key, t in shown.items()} == addresses
        assert store.stats().bytes_written >= ROUNDS * len(keys) * 3 * PAGE


@on_both
def test_state_discarded_keeps_values_while_viewed(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "old", {"a": pages(1, 2)})
        end, _ = places(store)
        store.discard("old")
        assert "old" not in store
        with pytest.raises(UnknownKeyError):
            mutable(store).view_on_disk("old")
        others = [settled(store, f"new {i}", {"a": pages(2, 2)}) for i in range(5)]
        assert (shown["a"] == 1).all()
        grown, _ = places(store)
        assert grown == end + 5 * 2 * PAGE
        del shown  # no view is left: now its space is free
        gc.collect()
        again = settled(store, "again", {"a": pages(3, 2)})
        assert places(store)[0] == grown
        assert (again["a"] == 3).all()
        assert all((other["a"] == 2).all() for other in others)


@on_both
def test_state_views_outlive_the_store(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", several())
    assert_values(shown, several())
    fill(shown, 3)
    assert (shown["transposed"] == 3).all()


# Waiting ------------------------------------------------------------------------------------------


def wait_for_a_request(store: TierStore) -> None:
    """Wait until a request is blocked."""
    wait_until(lambda: bool(core_of(store).queue.requests()), "nobody waits")


@on_both
@pytest.mark.parametrize("purpose", [HostAccess.UPDATE, HostAccess.RENEW, HostAccess.PERMANENT])
def test_state_update_waits_for_readers(purpose: HostAccess, device: str, disk_dir: Path) -> None:
    order: list[str] = []
    with open_store(disk_dir, device=device) as store:
        mutable(store).create("key", {"a": pages(1)})
        lease = store.acquire("key")

        def change() -> None:
            with mutable(store).lease_in_host("key", purpose) as held:
                order.append("held")
                held.tensors["a"].fill_(2)

        thread = start_thread(change)
        wait_for_a_request(store)
        assert (lease.tensors["a"] == 1).all()
        order.append("released")
        lease.release()
        join(thread)
        assert order == ["released", "held"]
        assert (store.get("key")["a"] == 2).all()
        assert_sound(store)


@on_both
def test_state_host_leases_are_exclusive(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", {"a": pages(0)})

        def change() -> None:
            for _ in range(ROUNDS):
                with mutable(store).lease_in_host("key", HostAccess.UPDATE) as lease:
                    lease.tensors["a"].add_(1)

        assert run_threads([change] * 3) == []
        mutable(store).move_to_disk(["key"])
        assert (shown["a"] == 3 * ROUNDS).all()
        assert_sound(store)


@needs_accelerator
def test_state_is_read_on_the_device_while_host_leased(disk_dir: Path) -> None:
    """The caller knows that it does not change meanwhile. Later reads see later changes."""
    with open_store(disk_dir, device=ACCELERATOR) as store:
        shown = settled(store, "key", {"a": pages(1)})
        kept = mutable(store).lease_in_host("key", HostAccess.PERMANENT)
        for number in (2, 3):
            kept.tensors["a"].fill_(number)
            with store.acquire("key") as lease:
                assert lease.tensors["a"].device.type == ACCELERATOR
                assert (lease.tensors["a"].cpu() == number).all()
                assert (kept.tensors["a"] == number).all()
            store.offload("key")
            wait_until_idle(store)
            assert tiers_of(store, "key") == ("HOST",)
        assert_sound(store)
        kept.release()
        mutable(store).move_to_disk(["key"])
        assert (shown["a"] == 3).all()


# Room ---------------------------------------------------------------------------------------------


@on_both
def test_state_held_permanently_stays_in_place(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, 8 * PAGE, device) as store:
        mutable(store).create("kept", {"a": pages(7, 4)})
        kept = mutable(store).lease_in_host("kept", HostAccess.PERMANENT)
        address = kept.tensors["a"].data_ptr()
        for number in range(ROUNDS):
            store.put(f"other {number}", pages(number, 3), durable=False)
            assert (store.get(f"other {number // 2}") == number // 2).all()
            assert "HOST" in tiers_of(store, "kept")
        assert store.stats().bytes_written >= (ROUNDS - 2) * 3 * PAGE, "everything fitted in RAM"
        assert kept.tensors["a"].data_ptr() == address
        assert (kept.tensors["a"] == 7).all()
        assert_sound(store)
        kept.release()


@on_both
@pytest.mark.parametrize("how", ["hold", "settle", "put"])
def test_state_held_permanently_blocks_with_an_error(how: str, device: str, disk_dir: Path) -> None:
    def ask(store: TierStore) -> None:
        if how == "hold":
            mutable(store).lease_in_host("large", HostAccess.UPDATE).release()
        elif how == "settle":
            mutable(store).create("new", {"a": pages(2, 6)})
        else:
            store.put("new", pages(2, 6), durable=False)

    with open_store(disk_dir, 8 * PAGE, device) as store:
        settled(store, "large", {"a": pages(2, 6)})
        mutable(store).create("kept", {"a": pages(1, 4)})
        kept = mutable(store).lease_in_host("kept", HostAccess.PERMANENT)
        with pytest.raises(BudgetError, match="permanently") as error:
            ask(store)
        assert error.value.nbytes == 6 * PAGE
        assert (kept.tensors["a"] == 1).all()
        mutable(store).create("small", {"a": pages(3, 4)})  # smaller groups still fit
        kept.release()
        ask(store)
        assert_sound(store)


@on_both
def test_state_larger_than_the_budget_raises(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, 4 * PAGE, device) as store:
        with pytest.raises(BudgetError):
            mutable(store).create("key", {"a": pages(1, 5)})
        assert "key" not in store
        mutable(store).create_on_disk("key", {"a": pages(1, 5)})
        with pytest.raises(BudgetError, match="ram_budget"):
            mutable(store).lease_in_host("key", HostAccess.UPDATE)
        mutable(store).view_on_disk("key")["a"].fill_(4)
        assert (mutable(store).view_on_disk("key")["a"] == 4).all()
        assert_sound(store)


@on_both
def test_state_respects_the_disk_budget(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, 16 * PAGE, device, disk_budget=8 * PAGE) as store:
        settled(store, "a", {"a": pages(1, 4)})
        with pytest.raises(BudgetError, match="disk_budget"):
            mutable(store).create_on_disk("b", {"a": pages(2, 5)})
        assert "b" not in store
        mutable(store).create("b", {"a": pages(2, 5)})
        with pytest.raises(BudgetError, match="disk_budget"):
            mutable(store).move_to_disk(["b"])
        assert (held_values(store, "b")["a"] == 2).all()
        store.discard("a")
        mutable(store).move_to_disk(["b"])
        assert (mutable(store).view_on_disk("b")["a"] == 2).all()
        assert_sound(store)


# Mistakes and faults --------------------------------------------------------------------------


@on_both
def test_state_key_is_bound_once(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", {"a": pages(1)})
        for settle in (
            mutable(store).create,
            mutable(store).create_on_disk,
        ):
            with pytest.raises(DuplicateKeyError):
                settle("key", {"a": pages(2)})
        assert (shown["a"] == 1).all()
        with pytest.raises(UnknownKeyError):
            mutable(store).lease_in_host("another", HostAccess.UPDATE)
        with pytest.raises(UnknownKeyError):
            mutable(store).move_to_disk(["another"])
        assert_sound(store)


@on_both
def test_state_in_a_closed_store_raises(device: str, disk_dir: Path) -> None:
    store = open_store(disk_dir, device=device)
    mutable(store).create("key", {"a": pages(1)})
    lease = mutable(store).lease_in_host("key", HostAccess.UPDATE)
    store.close()
    lease.release()
    for act in (
        lambda: mutable(store).create("b", {"a": pages(1)}),
        lambda: mutable(store).create_on_disk("b", {"a": pages(1)}),
        lambda: mutable(store).lease_in_host("key", HostAccess.UPDATE),
        lambda: mutable(store).write_back("key"),
        lambda: mutable(store).move_to_disk(["key"]),
        lambda: mutable(store).view_on_disk("key"),
        lambda: mutable(store).prefetch(["key"]),
        lambda: mutable(store).prefetch_to_host(["key"]),
    ):
        with pytest.raises(ClosedError):
            act()


@on_both
def test_state_leaves_nothing_after_close(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        settled(store, "key", {"a": pages(1)})
    with open_store(disk_dir, device=device) as store:
        assert "key" not in store


@on_both
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_state_failed_save_keeps_the_group(number: int, device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        shown = settled(store, "key", {"a": pages(1, 2)})
        with mutable(store).lease_in_host("key", HostAccess.UPDATE) as lease:
            lease.tensors["a"].fill_(2)
        with system_call("pwrite", fails_with=number) as failed:
            mutable(store).write_back("key")
            for _ in range(2):
                with pytest.raises(TransferError) as error:
                    mutable(store).move_to_disk(["key"])
                assert isinstance(error.value, DiskFullError) == (number == errno.ENOSPC)
                assert (held_values(store, "key")["a"] == 2).all()
            assert len(failed) >= 2
        mutable(store).move_to_disk(["key"])
        assert (shown["a"] == 2).all()
        assert_sound(store)


@on_both
def test_state_without_disk_space_raises(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        with system_call("posix_fallocate", fails_with=errno.ENOSPC) as failed:
            with pytest.raises(DiskFullError):
                mutable(store).create_on_disk("a", {"a": pages(1)})
            assert "a" not in store
            mutable(store).create("b", {"a": pages(1)})
            with pytest.raises(DiskFullError):
                mutable(store).move_to_disk(["b"])
            assert len(failed) >= 2
        mutable(store).create_on_disk("a", {"a": pages(1)})
        mutable(store).move_to_disk(["b"])
        assert (mutable(store).view_on_disk("b")["a"] == 1).all()
        assert_sound(store)


@on_both
@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
def test_state_lost_lease_is_reclaimed(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, 8 * PAGE, device) as store:
        mutable(store).create("key", {"a": pages(1, 6)})
        for purpose in HostAccess:
            lease = mutable(store).lease_in_host(key="key", purpose=purpose)
            lease.tensors["a"].fill_(5)
            del lease
            gc.collect()
            assert (held_values(store, "key", HostAccess.UPDATE)["a"] == 5).all()
        mutable(store).create("other", {"a": pages(2, 6)})  # its space is free, too
        assert_sound(store)


# Hints -------------------------------------------------------------------------------------------


@on_both
def test_state_prefetch_goes_to_the_requested_tier(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        for key in ("held", "acquired"):
            settled(store, key, {"a": pages(1)})
        mutable(store).prefetch_to_host(["held", "no such key"])
        mutable(store).prefetch(["acquired", "no such key"])
        wait_until_idle(store)
        assert tiers_of(store, "held") == ("HOST", "DISK")
        top = ("HOST", "DISK") if device == "cpu" else ("DEVICE", "HOST", "DISK")
        assert tiers_of(store, "acquired") == top
        read = store.stats().bytes_read
        held_values(store, "held")
        store.get("acquired")
        assert store.stats().bytes_read == read


@on_both
def test_state_arriving_during_flush_is_ignored(device: str, disk_dir: Path) -> None:
    """It was read before a write to its view on disk."""
    gate = Gate()
    reads = system_call("preadv", after=gate.hold)
    with open_store(disk_dir, device=device) as store, reads:
        shown = settled(store, "key", {"a": pages(1)})
        mutable(store).prefetch_to_host(["key"])
        assert gate.reached.wait(PATIENCE)
        found = []

        def work() -> None:
            mutable(store).move_to_disk(["key"])
            shown["a"].fill_(2)
            found.append(store.get("key"))

        thread = start_thread(work)
        wait_for_a_request(store)  # to move it to disk, or to get it
        gate.open()
        join(thread)
        assert (found[0]["a"] == 2).all()


@on_both
def test_state_arrival_can_be_awaited_without_demand(
    device: str, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it takes space. Resident and unknown groups are not waited for."""
    last_hop = DiskToHost if device == "cpu" else HostToDevice
    memory = nullcontext() if device == "cpu" else pageable()
    with memory, open_store(disk_dir, device=device) as store:  # the store's threads queue copies
        for key in ("there", "away", "coming"):
            settled(store, key, {"a": pages(1)})
        with store.acquire("there"):
            gate = hold_calls(monkeypatch, last_hop, "copy")
            mutable(store).wait_for_arrivals(["there", "away", "no such key"])
            mutable(store).prefetch(["coming"])
            assert gate.reached.wait(PATIENCE)
            store.offload("coming")
            thread = start_thread(lambda: mutable(store).wait_for_arrivals(["away", "coming"]))
            wait_for_a_request(store)
            assert thread.is_alive()
            gate.open()
            join(thread)
            top = "HOST" if device == "cpu" else "DEVICE"
            assert top not in tiers_of(store, "coming")
            assert top in tiers_of(store, "there")


# Many at once --------------------------------------------------------------------------------


@on_both
def test_state_threads_update_separate_groups(device: str, disk_dir: Path) -> None:
    """The promises are checked continuously, with memory for a quarter of the groups."""
    groups, size = 8, 3
    with open_store(disk_dir, groups * size * PAGE // 2, device) as store:
        check = core_of(store).planner.check

        def work(thread: int) -> None:
            mine = [f"{thread} {i}" for i in range(groups // 4)]
            shown = {key: settled(store, key, {"a": pages(0, size)})["a"] for key in mine}
            chosen = random.Random(thread)
            values = dict.fromkeys(mine, 0)
            for number in range(1, ROUNDS):
                for key in mine:
                    act = chosen.choice(["hold", "show", "read", "expect"])
                    if act == "hold":
                        with mutable(store).lease_in_host(
                            key, chosen.choice([HostAccess.UPDATE, HostAccess.RENEW])
                        ) as lease:
                            values[key] = number
                            lease.tensors["a"].fill_(number)
                        mutable(store).write_back(key)
                    elif act == "show":
                        mutable(store).move_to_disk([key])
                        assert (shown[key] == values[key]).all()
                        values[key] = -number
                        shown[key].fill_(-number)
                    elif act == "read":
                        with store.acquire(key, Access.READ) as lease:
                            assert (lease.tensors["a"].cpu() == values[key]).all()
                    else:
                        chosen.choice(
                            [
                                mutable(store).prefetch,
                                mutable(store).prefetch_to_host,
                            ]
                        )([key])
                    with core_of(store).lock:
                        check()
            mutable(store).move_to_disk(mine)
            assert all((shown[key] == values[key]).all() for key in mine)

        errors = run_threads([lambda thread=thread: work(thread) for thread in range(4)])
        assert errors == []
        assert store.stats().bytes_read > groups * size * PAGE
        assert_sound(store)
