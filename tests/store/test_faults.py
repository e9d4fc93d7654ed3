"""Devices and disks that fail: the error reaches its caller, and the store continues to work."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from tests.accelerator import ACCELERATOR, pretend
from tests.device.states import pageable
from tests.helpers.engine import core_of
from tests.helpers.files import object_file
from tests.helpers.system_calls import system_call
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_at_rest,
    assert_group,
    files_below,
    open_store,
    pages,
    push_out,
    run_threads,
    wait_until_idle,
)
from tierstore import Access, TransferError
from tierstore.engine.wait_queue import Request, RequestKind, WaitQueue
from tierstore.errors import DiskFullError
from tierstore.system.files import DISK_THREADS
from tierstore.tiers.workers import URGENT


def test_read_failure_raises_and_can_be_retried(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1, 3))
        push_out(store, "key")
        with system_call("preadv", fails_with=errno.EIO) as failed:
            for access in Access:
                with pytest.raises(TransferError) as error:
                    store.acquire("key", access)
                assert isinstance(error.value.__cause__, OSError)
                assert (error.value.key, error.value.path) == (
                    "key",
                    str(object_file(disk_dir, "key")),
                )
            assert len(failed) >= len(Access)
        assert_group(store.get("key"), pages(1, 3))
        assert_at_rest(store)


def test_prefetch_failure_raises_in_acquire(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("key", pages(1, 3))
        push_out(store, "key")
        with system_call("preadv", fails_with=errno.EIO) as failed:
            store.prefetch("key")
            wait_until_idle(store)
            assert len(failed) > 0
        with pytest.raises(TransferError) as error:
            store.get("key")
        assert error.value.key == "key"
        assert_group(store.get("key"), pages(1, 3))
        assert_at_rest(store)


@pytest.mark.parametrize("call", ["fsync", "pwrite", "rename", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_write_failure_loses_neither_old_nor_new(call: str, number: int, disk_dir: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.flush()
    store.put("key", pages(2))
    with system_call(call, fails_with=number) as failed:
        for _ in range(2):
            with pytest.raises(TransferError) as error:
                store.flush()
            assert isinstance(error.value, DiskFullError) == (number != errno.EIO)
            assert error.value.key == "key"
            assert error.value.__cause__.errno == number
            assert_group(store.get("key"), pages(2))
        assert len(failed) >= 2
    store.flush()
    assert not list((disk_dir / "tmp").iterdir()), "a temporary file was left behind"
    assert_at_rest(store)
    store.close()
    with open_store(disk_dir) as store:
        assert_group(store.get("key"), pages(2))


def test_file_with_failed_fsync_is_never_trusted(disk_dir: Path) -> None:
    """A second fsync of the same file would succeed, although the data is lost."""
    store = open_store(disk_dir)
    before = files_below(disk_dir / "objects")
    store.put("key", pages(1))
    with system_call("fsync", fails_with=errno.EIO) as failed:
        with pytest.raises(TransferError):
            store.flush()
        assert len(failed) == 1, "it was tried again on the same file"
        assert {name for name in files_below(disk_dir) if name.endswith(".safetensors")} == before
    store.close()
    with open_store(disk_dir) as store:
        assert_group(store.get("key"), pages(1))


# Accelerators ------------------------------------------------------------------------------------


@pytest.mark.pretend_only("limits")
def test_device_memory_taken_by_others_raises(disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("key", pages(1, 8))
        pretend.set_memory_limit(pretend.memory_allocated() + 4 * PAGE)
        try:
            for _ in range(2):
                with pytest.raises(TransferError) as error:
                    store.acquire("key")
                assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
                for part in ("'key'", "HOST", "DEVICE"):
                    assert part in str(error.value)
        finally:
            pretend.set_memory_limit(None)
        assert_group(store.get("key"), pages(1, 8))
        assert_at_rest(store)


@pytest.mark.pretend_only("limits")
def test_page_locking_unavailable_uses_pageable_memory(disk_dir: Path) -> None:
    with pageable(), open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("key", pages(1, 8))
        push_out(store, "key")
        assert_group(store.get("key"), pages(1, 8))
        assert store.stats().bytes_read >= 8 * PAGE
        assert store.stats().peak_bytes["HOST"] >= 8 * PAGE


def test_flush_with_nothing_to_do_needs_no_disk(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        again = threading.Event()
        disk = core_of(store).tiers.disk.workers
        for _ in range(DISK_THREADS):
            disk.submit(URGENT, again.wait)
        try:
            assert not run_threads([lambda: store.flush(timeout=PATIENCE)])
        finally:
            again.set()


# Errors ------------------------------------------------------------------------------------------


def quarrelling(room: WaitQueue) -> list[Request]:
    room.add_lease("one", "a\0001")
    room.add_lease("two", "b\0001")
    wanted = (("b", "one"), ("a", "two"), ("c", "three"))
    return [Request(key, RequestKind.LEASE, owner=owner) for key, owner in wanted]


def quarrel(kind: type[WaitQueue]) -> list[str]:
    """Let two holders wait for each other; a third caller, without leases, retries last.

    Returns the keys of the refused requests.
    """
    idle = threading.Event()
    refused: list[str] = []

    def refuse(request: Request, held: set[str]) -> None:
        refused.append(request.key)

    room = kind(lambda request: True, lambda interrupted: idle.is_set(), refuse)
    requests = quarrelling(room)

    def all_look() -> None:
        for request in requests:
            if not refused:
                room.enqueue_request(request)

    all_look()
    assert refused == []  # a copy is still moving
    idle.set()
    room.notify_change()
    assert all(request.wakeup.wait(0) for request in requests)
    all_look()
    if not refused:  # then one was woken to be refused
        assert any(request.wakeup.wait(0) for request in requests)
        all_look()
    return refused


def test_caller_without_leases_is_spared_in_a_deadlock() -> None:
    assert quarrel(WaitQueue) in (["a"], ["b"])


def test_blocked_wakeup_reaches_holders_last() -> None:
    idle, ready = threading.Event(), set[str]()
    refused: list[str] = []
    room = WaitQueue(
        lambda request: request.key in ready,
        lambda interrupted: idle.is_set(),
        lambda request, held: refused.append(request.key),
    )
    requests = quarrelling(room)
    for request in requests:
        room.enqueue_request(request)

    def woken() -> list[str]:
        return [request.key for request in requests if request.wakeup.wait(0)]

    room.notify_change()
    assert woken() == []
    ready.add("c")
    room.notify_change()
    assert woken() == ["c"]
    room.enqueue_request(requests[2])
    ready.clear()
    idle.set()
    room.notify_change()
    assert woken() == ["b", "a"]  # the holders
    assert refused == []
    room.enqueue_request(requests[1])
    assert refused == ["a"]


def test_last_blocked_caller_is_the_one_refused() -> None:
    """The control: without the check for leases held."""

    class Blunt(WaitQueue):
        def enqueue_request(self, request: Request) -> None:
            super().enqueue_request(request)
            if self._idle([]) and all(
                queued.tried_epoch == self._epoch for queued in self._queued.values()
            ):
                self._fail_blocked(request, set())

    assert quarrel(Blunt) == ["c"]
