"""Devices and disks that fail: the error reaches who needs it, and the store goes on."""

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


def test_a_read_that_fails_is_told_and_can_be_repeated(disk_dir: Path) -> None:
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


def test_a_prefetch_that_failed_is_told_to_who_acquires(disk_dir: Path) -> None:
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
def test_a_write_that_fails_loses_neither_the_old_nor_the_new(
    call: str, number: int, disk_dir: Path
) -> None:
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


def test_a_file_whose_fsync_failed_is_never_trusted(disk_dir: Path) -> None:
    """A second fsync of the same file would succeed, and the data would be gone."""
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
def test_an_accelerator_whose_memory_somebody_else_has(disk_dir: Path) -> None:
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
def test_without_memory_to_lock_pages_are_used_that_are_not(disk_dir: Path) -> None:
    with pageable(), open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("key", pages(1, 8))
        push_out(store, "key")
        assert_group(store.get("key"), pages(1, 8))
        assert store.stats().bytes_read >= 8 * PAGE
        assert store.stats().peak_bytes["HOST"] >= 8 * PAGE


def test_a_flush_with_nothing_to_do_needs_no_disk(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        again = threading.Event()
        disk = core_of(store).tiers.disk.workers
        for _ in range(DISK_THREADS):
            disk.submit(URGENT, again.wait)
        try:
            assert not run_threads([lambda: store.flush(timeout=PATIENCE)])
        finally:
            again.set()


# Who is told -------------------------------------------------------------------------------------


def quarrelling(room: WaitQueue) -> list[Request]:
    room.add_lease("one", "a\0001")
    room.add_lease("two", "b\0001")
    wanted = (("b", "one"), ("a", "two"), ("c", "three"))
    return [Request(key, RequestKind.LEASE, owner=owner) for key, owner in wanted]


def quarrel(kind: type[WaitQueue]) -> list[str]:
    """Two holders wait for each other. A third, who holds nothing, is the last to look.

    Returns what those asked for who were refused.
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
                room.tried_in_vain(request)

    all_look()
    assert refused == []  # something is still on its way
    idle.set()
    room.changed()
    assert all(request.wakeup.wait(0) for request in requests)
    all_look()
    if not refused:  # then somebody was woken to be refused
        assert any(request.wakeup.wait(0) for request in requests)
        all_look()
    return refused


def test_who_holds_nothing_is_not_refused_for_the_quarrel_of_others() -> None:
    assert quarrel(WaitQueue) in (["a"], ["b"])


def test_only_who_may_get_on_is_woken_and_holders_once_nobody_can() -> None:
    idle, ready = threading.Event(), set[str]()
    refused: list[str] = []
    room = WaitQueue(
        lambda request: request.key in ready,
        lambda interrupted: idle.is_set(),
        lambda request, held: refused.append(request.key),
    )
    requests = quarrelling(room)
    for request in requests:
        room.tried_in_vain(request)

    def woken() -> list[str]:
        return [request.key for request in requests if request.wakeup.wait(0)]

    room.changed()
    assert woken() == []
    ready.add("c")
    room.changed()
    assert woken() == ["c"]
    room.tried_in_vain(requests[2])
    ready.clear()
    idle.set()
    room.changed()
    assert woken() == ["b", "a"]  # who hold something
    assert refused == []
    room.tried_in_vain(requests[1])
    assert refused == ["a"]


def test_whoever_looks_last_would_be_refused() -> None:
    """The control: without the look at who holds something."""

    class Blunt(WaitQueue):
        def tried_in_vain(self, request: Request) -> None:
            super().tried_in_vain(request)
            if self._idle([]) and all(
                queued.tried == self._epoch for queued in self._queued.values()
            ):
                self._refuse(request, set())

    assert quarrel(Blunt) == ["c"]
