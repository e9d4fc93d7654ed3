"""Register a group that is larger than RAM.

Its file is written without ever holding all of it in memory.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.helpers.system_calls import system_call
from tests.store.helpers import PAGE, open_store, pages
from tierstore import TierStore, TransferError
from tierstore.errors import BudgetError, ClosedError, DiskFullError
from tierstore.model.tiers import UseOrder
from tierstore.store import engine_of

RAM = 8 * PAGE


def stack() -> dict[str, torch.Tensor]:
    """Return a tensor twice as large as RAM, and one with an unaligned size."""
    return {
        "stack": torch.cat([pages(i) for i in range(2 * RAM // PAGE)]),
        "bias": torch.arange(77.0),
    }


def register(store: TierStore, key: str = "experts") -> dict[str, torch.Tensor]:
    groups = engine_of(store).groups
    return groups.register(key, stack(), use_order=UseOrder.ROUTED)


def assert_right(homes: dict[str, torch.Tensor]) -> None:
    assert homes.keys() == stack().keys()
    for name, value in stack().items():
        assert torch.equal(homes[name], value), name


@contextmanager
def nothing_is_left(store: TierStore, disk_dir: Path) -> Iterator[None]:
    """A refused call leaves no group, no file, and no counted byte."""
    before = {path.name for path in disk_dir.rglob("*") if path.is_file()}
    used = store.stats().used_bytes
    yield
    assert list(store) == []
    assert {path.name for path in disk_dir.rglob("*") if path.is_file()} == before
    assert store.stats().used_bytes == used


def test_large_model_is_written_once_and_found_again(disk_dir: Path) -> None:
    nbytes = sum(tensor.nbytes for tensor in stack().values())
    for start in range(2):
        with open_store(disk_dir, RAM) as store:
            homes = register(store)
            assert_right(homes)
            written = store.stats().bytes_written
            if start:
                assert written == 0
            else:
                assert nbytes <= written < nbytes + 2 * PAGE
            assert_right(register(store, "the same once more"))
            assert store.stats().bytes_written == written
            assert store.stats().peak_bytes["HOST"] <= RAM


def test_unrouted_group_must_fit(disk_dir: Path) -> None:
    with open_store(disk_dir, RAM) as store:
        with nothing_is_left(store, disk_dir), pytest.raises(BudgetError, match="ram_budget"):
            engine_of(store).groups.register("weights", stack())
        assert_right(register(store))


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EIO))
@pytest.mark.parametrize("call", ("posix_fallocate", "pwrite", "fsync", "rename"))
def test_disk_failure_leaves_nothing(call: str, number: int, disk_dir: Path) -> None:
    with open_store(disk_dir, RAM) as store:
        with (
            nothing_is_left(store, disk_dir),
            system_call(call, fails_with=number) as failed,
            pytest.raises(TransferError) as error,
        ):
            register(store)
        assert failed
        assert isinstance(error.value, DiskFullError) == (number == errno.ENOSPC)
        assert_right(register(store))


def test_disk_budget_is_enforced(disk_dir: Path) -> None:
    with (
        open_store(disk_dir, RAM, disk_budget=2 * RAM) as store,
        nothing_is_left(store, disk_dir),
        pytest.raises(BudgetError, match="disk_budget"),
    ):
        register(store)
    with open_store(disk_dir, RAM, disk_budget=3 * RAM) as store:
        assert_right(register(store))
        assert 2 * RAM < store.stats().used_bytes["DISK"] <= 3 * RAM


def test_closed_store_raises(disk_dir: Path) -> None:
    store = open_store(disk_dir, RAM)
    store.close()
    with pytest.raises(ClosedError):
        register(store)
