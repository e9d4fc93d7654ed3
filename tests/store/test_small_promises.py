"""Promises about rare cases, each small enough for one test."""

from __future__ import annotations

import errno
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.faults.interrupting import at_call
from tests.helpers.engine import core_of, mutable
from tests.helpers.system_calls import held_calls, system_call
from tests.helpers.threads import Gate
from tests.store import traces
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_at_rest,
    assert_group,
    assert_same,
    assert_sound,
    join,
    on_both,
    open_store,
    pages,
    wait_until,
    wait_until_idle,
)
from tierstore import Access, TierStore, TransferError
from tierstore.errors import (
    BudgetError,
    ClosedError,
    DuplicateKeyError,
    LeaseError,
    StoreTimeoutError,
)
from tierstore.model.locks import under
from tierstore.model.tiers import HostAccess
from tierstore.store import engine_of


class Caller(threading.Thread):
    """Runs a function on a separate thread, and keeps its result or error."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self._act = act
        self.start()

    def run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:
            self.result = error

    def ended(self) -> Any:
        """Return its result or raise its error, once it has ended."""
        join(self)
        return self.result


def wait_for_a_request(store: TierStore) -> None:
    """Wait until a request is blocked."""
    wait_until(lambda: bool(core_of(store).queue.requests()), "nobody waits")


@pytest.fixture
def must_be_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling: waiters must be notified."""
    monkeypatch.setattr("tierstore.engine.request_loop.POLL_SECONDS", 100 * PATIENCE)


# Groups that change ------------------------------------------------------------------------------


@on_both
def test_group_created_on_disk_is_saved_where_it_is_shown(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        mutable(store).create_on_disk("key", {"a": pages(0)})
        shown = mutable(store).view_on_disk("key")["a"]
        with mutable(store).lease_in_host("key", HostAccess.UPDATE) as lease:
            lease.tensors["a"].fill_(2)
        mutable(store).move_to_disk(["key"])
        assert_same(shown, pages(2))


@on_both
def test_groups_created_on_disk_count_against_the_budget(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device, disk_budget=8 * PAGE) as store:
        mutable(store).create_on_disk("a", {"a": pages(1, 5)})
        assert store.stats().used_bytes["DISK"] == 5 * PAGE
        with pytest.raises(BudgetError, match="disk_budget"):
            mutable(store).create_on_disk("b", {"a": pages(2, 5)})
        assert "b" not in store


def test_existing_key_raises_even_on_a_full_disk(disk_dir: Path) -> None:
    with open_store(disk_dir, disk_budget=8 * PAGE) as store:
        mutable(store).create_on_disk("key", {"a": pages(1, 5)})
        with pytest.raises(DuplicateKeyError):
            mutable(store).create_on_disk("key", {"a": pages(2, 5)})


def test_concurrent_create_on_disk_keeps_the_first(disk_dir: Path) -> None:
    with open_store(disk_dir) as store, held_calls("posix_fallocate") as gate:
        slow = Caller(lambda: mutable(store).create_on_disk("key", {"a": pages(1)}))
        assert gate.reached.wait(PATIENCE)
        mutable(store).create("key", {"a": pages(2)})
        gate.open()
        assert isinstance(slow.ended(), DuplicateKeyError)
        assert_group(store.get("key"), {"a": pages(2)})
        assert_sound(store)


def test_disk_space_lost_during_create_is_not_taken_twice(disk_dir: Path) -> None:
    store, held = open_store(disk_dir, disk_budget=8 * PAGE), held_calls("posix_fallocate")
    with store, held as gate:
        callers = [
            Caller(lambda key=key: mutable(store).create_on_disk(key, {"a": pages(1, 5)}))
            for key in "ab"
        ]
        assert gate.reached.wait(PATIENCE)
        spill = core_of(store).tiers.disk.spill
        assert spill is not None
        wait_until(lambda: spill.usage()[0] == 10 * PAGE, "one of them has not asked")
        gate.open()
        refused = [caller.result for caller in callers if caller.ended() is not None]
        assert [type(error) for error in refused] == [BudgetError]
        assert store.stats().used_bytes["DISK"] == 5 * PAGE


def test_create_in_a_store_closed_meanwhile_raises(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    with held_calls("posix_fallocate") as gate:
        slow = Caller(lambda: mutable(store).create_on_disk("key", {"a": pages(1)}))
        assert gate.reached.wait(PATIENCE)
        closing = Caller(store.close)
        wait_until(lambda: store.closed, "it is not closed")
        gate.open()
        assert isinstance(slow.ended(), ClosedError)
        assert closing.ended() is None
        assert "key" not in store


def test_closed_error_comes_before_all_others(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    mutable(store).create("key", {"a": pages(1)})
    store.close()
    for act in (
        lambda: mutable(store).create("key", {"a": pages(2)}),
        lambda: mutable(store).create_on_disk("key", {"a": pages(2)}),
        lambda: mutable(store).move_to_disk(["no such key"]),
        lambda: mutable(store).write_back("no such key"),
        lambda: mutable(store).view_on_disk("no such key"),
    ):
        with pytest.raises(ClosedError):
            act()


@on_both
def test_update_of_permanently_held_group_raises(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        mutable(store).create("key", {"a": pages(1)})
        with mutable(store).lease_in_host("key", HostAccess.PERMANENT):
            other = Caller(lambda: mutable(store).lease_in_host("key", HostAccess.UPDATE))
            error = other.ended()
        assert isinstance(error, LeaseError)
        assert "until the end of a training run" in str(error)
        assert_at_rest(store)


@needs_accelerator
def test_update_waiter_raises_when_group_becomes_permanent(
    disk_dir: Path, must_be_woken: None
) -> None:
    with open_store(disk_dir, device=ACCELERATOR, device_budget=4 * PAGE) as store:
        store.put("filler", pages(0, 4))
        mutable(store).create("key", {"a": pages(1, 2)})
        with store.acquire("filler"):  # leaves no space for it on the device
            waiting = Caller(lambda: store.acquire("key", Access.UPDATE))
            wait_for_a_request(store)
            with mutable(store).lease_in_host("key", HostAccess.PERMANENT):
                error = waiting.ended()
        assert isinstance(error, LeaseError)
        assert "until the end of a training run" in str(error)
        assert_at_rest(store)


@on_both
def test_held_group_can_be_released_twice(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, device=device) as store:
        mutable(store).create("key", {"a": pages(1)})
        lease = mutable(store).lease_in_host("key", HostAccess.UPDATE)
        lease.release()
        with mutable(store).lease_in_host("key", HostAccess.UPDATE):
            lease.release()  # this lease has ended already
            assert len(core_of(store).leases) == 1
        assert_at_rest(store)


def test_released_owner_blocks_no_refusal(disk_dir: Path) -> None:
    """No other caller holds anything: a caller that holds all space itself is blocked."""
    with open_store(disk_dir, ram=4 * PAGE) as store:
        mutable(store).create("held", {"a": pages(1)})
        mutable(store).lease_in_host("held", HostAccess.UPDATE).release()  # this thread lives on
        store.discard("held")
        for name in "abc":
            store.put(name, pages(ord(name), 2))

        def too_much() -> None:
            with store.acquire("a"), store.acquire("b"):
                store.get("c")

        assert isinstance(Caller(too_much).ended(), BudgetError)


@on_both
def test_permanent_holds_alone_shrink_the_largest_group(device: str, disk_dir: Path) -> None:
    with open_store(disk_dir, 8 * PAGE, device) as store:
        assert engine_of(store).saved_tensors.max_group_bytes() == 8 * PAGE
        mutable(store).create("key", {"a": pages(1, 3)})
        for purpose in HostAccess:
            with mutable(store).lease_in_host("key", purpose):
                kept = 3 * PAGE if purpose is HostAccess.PERMANENT else 0
                assert engine_of(store).saved_tensors.max_group_bytes() == 8 * PAGE - kept
            assert engine_of(store).saved_tensors.max_group_bytes() == 8 * PAGE


def test_interrupt_leaves_permanent_holds_known(disk_dir: Path) -> None:
    with open_store(disk_dir, ram=16 * PAGE) as store:
        for key, count in (("kept", 3), ("held", 2), ("lent", 1)):
            mutable(store).create(key, {"a": pages(1, count)})
        with (
            mutable(store).lease_in_host("kept", HostAccess.PERMANENT),
            mutable(store).lease_in_host("held", HostAccess.READ),
            store.acquire("lent"),
        ):
            interrupt = at_call(core_of(store).planner.handle)
            with interrupt, pytest.raises(KeyboardInterrupt):
                store.prefetch("lent")
            assert sorted(store.keys()) == ["held", "kept", "lent"]
            assert engine_of(store).saved_tensors.max_group_bytes() == 13 * PAGE
        assert engine_of(store).saved_tensors.max_group_bytes() == 16 * PAGE
        assert_at_rest(store)


@pytest.mark.parametrize("learned", [True, False])
def test_only_groups_in_the_learned_order_are_prefetched(learned: bool, disk_dir: Path) -> None:
    """The user prefetches mutable groups. The store learns the order of the others."""
    with open_store(disk_dir, ram=4 * PAGE) as store:
        keys = [f"g{i}" for i in range(6)]
        for key in keys:
            if learned:
                store.put(key, {"a": pages(1)}, durable=False)
            else:
                mutable(store).create(key, {"a": pages(1)})
        for key in keys * 6:
            store.acquire(key).release()
            wait_until_idle(store)
        stats = store.stats()
        assert stats.misses > 0
        assert (stats.bytes_read > stats.misses * PAGE) == learned


@on_both
def test_permanent_lease_is_never_waited_for(device: str, disk_dir: Path) -> None:
    """Its space is never freed: a request for it raises, although the holder does not wait."""
    with open_store(disk_dir, ram=4 * PAGE, device=device) as store:
        store.put("kept", pages(1, 3))
        store.put("other", pages(2, 3))
        with engine_of(store).leases.acquire_permanently("kept", Access.UPDATE) as lease:
            assert isinstance(Caller(lambda: store.get("other")).ended(), BudgetError)
            assert_same(lease.tensor.cpu(), pages(1, 3))
        assert_group(store.get("other"), pages(2, 3))
        assert_at_rest(store)


@contextmanager
def arriving(store: TierStore) -> Iterator[Gate]:
    """Prefetch a group from disk that arrives when the gate is opened."""
    mutable(store).create("coming", {"a": pages(1)})
    mutable(store).move_to_disk(["coming"])
    with held_calls("preadv") as gate:
        mutable(store).prefetch_to_host(["coming"])
        assert gate.reached.wait(PATIENCE)
        yield gate


def test_arrival_waiter_is_woken_by_close(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    with arriving(store) as gate:
        waiting = Caller(lambda: mutable(store).wait_for_arrivals(["coming"]))
        wait_for_a_request(store)
        closing = Caller(store.close)
        try:
            assert isinstance(waiting.ended(), ClosedError)
        finally:
            gate.open()
        assert closing.ended() is None


def test_flush_in_progress_completes_during_close(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("unsaved", pages(2))
    with arriving(store) as reading, held_calls("pwrite") as writing:
        away = Caller(lambda: mutable(store).move_to_disk(["coming"]))
        wait_for_a_request(store)
        closing = Caller(store.close)
        assert writing.reached.wait(PATIENCE)
        wait_until(lambda: len(core_of(store).queue.requests()) == 2, "nobody closes it")
        reading.open()
        assert away.ended() is None
        writing.open()
        assert closing.ended() is None


# Leases ------------------------------------------------------------------------------------------


def test_unobserved_lease_is_reclaimed_silently(disk_dir: Path) -> None:
    """It was lost before it reached the caller, as in an interrupt."""
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            lease = store.acquire("key")
            del lease
            gc.collect()
        assert said == []
        store.acquire("key", Access.UPDATE, timeout=PATIENCE).release()
        assert_at_rest(store)


def test_lost_lease_warning_names_its_line(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        lease = store.acquire("key")
        assert lease.tensors
        with pytest.warns(ResourceWarning, match="'key'") as said:
            del lease
        assert [warning.filename for warning in said] == [__file__]


@pytest.mark.parametrize("end", ["abandon", "release of a closed store"])
def test_released_lease_is_dropped_silently(end: str, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        lease = store.acquire("key")
        assert lease.tensors
        if "closed" in end:
            store.close()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            lease.abandon() if end == "abandon" else lease.release()
            del lease
            gc.collect()
        assert said == []


def test_abandoned_lease_is_closed(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        lease = store.acquire("key")
        assert lease.abandon(), "it had been released before"
        assert lease.released
        with pytest.raises(LeaseError):
            _ = lease.tensors
        released = store.acquire("key")
        released.release()
        assert not released.abandon()
        assert_at_rest(store)


def test_release_reports_the_file_of_a_taken_group_stays(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        lease = store.acquire("key", Access.TAKE)
        with system_call("unlink", fails_with=errno.EIO), pytest.raises(TransferError):
            lease.release()
        assert "key" not in store
        assert_at_rest(store)


def test_interrupted_release_still_happens(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        lease = store.acquire("key")
        interrupt = at_call(engine_of(store).lease_table.release)
        with interrupt, pytest.raises(KeyboardInterrupt):
            lease.release()
        assert lease.released
        store.acquire("key", Access.UPDATE, timeout=PATIENCE).release()
        assert_at_rest(store)


def test_interrupted_take_takes_nothing(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        interrupt = at_call(core_of(store).observer.acquire_granted)
        with interrupt, pytest.raises(KeyboardInterrupt):
            store.acquire("key", Access.TAKE)
        assert_group(store.get("key"), pages(1))
        assert_at_rest(store)


def test_interrupted_hold_holds_nothing(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        mutable(store).create("key", {"a": pages(1)})
        interrupt = at_call(core_of(store).tiers.host.view_for_caller)
        with interrupt, pytest.raises(KeyboardInterrupt):
            mutable(store).lease_in_host("key", HostAccess.UPDATE)
        assert_at_rest(store)
        assert_group(store.get("key"), {"a": pages(1)})


def test_hold_waiter_succeeds_after_an_interrupted_holder(disk_dir: Path) -> None:
    others: list[Caller] = []
    with open_store(disk_dir) as store:
        mutable(store).create("key", {"a": pages(1)})

        def interrupt() -> None:
            others.append(Caller(lambda: mutable(store).lease_in_host("key", HostAccess.UPDATE)))
            wait_for_a_request(store)
            raise KeyboardInterrupt

        view = core_of(store).tiers.host.view_for_caller
        with at_call(view, interrupt), pytest.raises(KeyboardInterrupt):
            mutable(store).lease_in_host("key", HostAccess.UPDATE)
        with others[0].ended() as lease:
            assert_same(lease.tensors["a"], pages(1))
        assert_at_rest(store)


@needs_accelerator
def test_waiter_gets_a_group_despite_an_interrupted_put(disk_dir: Path) -> None:
    """The put was complete; it only waited for the file of the old group."""
    others: list[Caller] = []
    with open_store(disk_dir, device=ACCELERATOR, device_budget=4 * PAGE) as store:
        store.put("filler", pages(0, 4))
        store.put("key", pages(1, 2))
        store.flush()
        filler = store.acquire("filler")

        def interrupt() -> None:
            others.append(Caller(lambda: store.get("key").cpu()))
            wait_for_a_request(store)
            raise KeyboardInterrupt

        later = at_call(core_of(store).wait_for_removal, interrupt)
        with later, pytest.raises(KeyboardInterrupt):
            store.put("key", pages(2, 2), durable=False)
        filler.release()
        assert_group(others[0].ended(), pages(2, 2))


# Saving ------------------------------------------------------------------------------------------


def test_nonblocking_flush_reports_that_it_did_not_wait(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with held_calls("pwrite") as gate:
            error = Caller(lambda: store.flush(timeout=0)).ended()
            gate.open()
            assert isinstance(error, StoreTimeoutError)
            assert error.seconds == 0
            store.flush()


def test_flush_ends_at_its_timeout(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with held_calls("pwrite") as gate:
            error = Caller(lambda: store.flush(timeout=0.05)).ended()
            gate.open()
            assert isinstance(error, StoreTimeoutError)


def test_flush_waits_for_a_removal_and_wakes(disk_dir: Path, must_be_woken: None) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        store.flush()
        with held_calls("unlink") as gate:
            discarding = Caller(lambda: store.discard("key"))
            assert gate.reached.wait(PATIENCE)
            flushing = Caller(store.flush)
            wait_for_a_request(store)
            assert flushing.is_alive()
            gate.open()
            assert discarding.ended() is None
            assert flushing.ended() is None


def test_flush_ends_when_its_group_is_discarded(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with held_calls("pwrite") as gate:
            flushing = Caller(store.flush)
            assert gate.reached.wait(PATIENCE)
            wait_for_a_request(store)
            discarding = Caller(lambda: store.discard("key"))
            wait_until(lambda: "key" not in store, "it is not discarded")
            gate.open()
            assert flushing.ended() is None
            assert discarding.ended() is None
            assert_at_rest(store)


def test_close_retries_failed_removals(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.flush()
    with system_call("unlink", fails_with=errno.EIO), pytest.raises(TransferError):
        store.discard("key")
    store.close()
    with open_store(disk_dir) as again:
        assert again.keys() == []


def test_close_waits_for_a_removal_and_retries_it(disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.flush()
    once = system_call("unlink", fails_with=errno.EIO, at=1)
    with once as failed, held_calls("unlink") as gate:
        discarding = Caller(lambda: store.discard("key"))
        assert gate.reached.wait(PATIENCE)
        closing = Caller(store.close)
        wait_for_a_request(store)
        gate.open()
        assert isinstance(discarding.ended(), TransferError)
        assert failed
        assert closing.ended() is None
        with open_store(disk_dir) as again:
            assert again.keys() == []


# Traces ------------------------------------------------------------------------------------------


def test_trace_begins_with_the_groups_present_at_open(disk_dir: Path, tmp_path: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1, 3))
    with open_store(disk_dir) as store:
        store.put("new", pages(2), durable=False)
        store.trace(tmp_path / "trace.json")
        events = traces.load(tmp_path / "trace.json")["traceEvents"]
        used = {tier: [] for tier in ("HOST", "DISK")}
        for event in events:
            if event["ph"] == "C" and "used" in event["args"]:
                used[event["name"]].append((event["ts"], event["args"]["used"]))
        assert min(used["HOST"])[1] == 0
        assert min(used["DISK"])[1] == 3 * PAGE


@pytest.mark.parametrize("way", ["register", "register_checkpoint", "put and register"])
def test_key_discarded_by_a_finalizer_is_free_at_once(
    way: str, disk_dir: Path, tmp_path: Path
) -> None:
    """The finalizer runs in the middle of a call: the next call carries out its discard."""
    save_file({"k": pages(2)}, tmp_path / "m.safetensors")
    with open_store(disk_dir) as store:
        if way == "put and register":
            store.put("k", pages(1))
        else:
            store.register("k", {"w": pages(1)})
        under(core_of(store).lock, lambda: store.discard("k"))
        if way == "register_checkpoint":
            assert store.register_checkpoint(tmp_path / "m.safetensors") == ["k"]
            assert_group(store.get("k"), pages(2))
        else:
            store.register("k", {"w": pages(2)})
            assert torch.equal(store.get("k")["w"], pages(2))  # type: ignore[call-overload]
        with pytest.raises(DuplicateKeyError):  # the control
            store.register("k", {"w": pages(3)})
        assert_at_rest(store)
