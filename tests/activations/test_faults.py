"""A disk that fails in a training step: it raises, nothing hangs, and the next step works."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.activations.helpers import (
    MIB,
    assert_equal,
    assert_nothing_left,
    chain,
    offloading,
    on_both,
    open_store,
    plain_gradients,
    random_matrices,
)
from tests.helpers.engine import core_of
from tests.helpers.system_calls import system_call
from tests.store.helpers import assert_sound, is_root, wait_until_idle
from tierstore import CorruptDataError, TierStore, TierStoreError, TransferError
from tierstore.errors import DiskFullError

SIZE = 256  # a matrix is 256 KiB
LAYERS = 6
RAM = MIB  # a step saves about three times as much
LIMIT = 20  # seconds after which a step that hangs prints the stacks of all threads

pytestmark = [
    pytest.mark.full("test_training_steps.py covers both devices", keep="any device"),
    pytest.mark.timeout(LIMIT * 6),
]


class Step:
    """A step that saves about three times the RAM budget, with its correct gradients."""

    def __init__(self, device: str) -> None:
        self.x, *self.weights = self.leaves = random_matrices(LAYERS + 1, device, SIZE)
        self.wanted = plain_gradients(self.loss, self.leaves)

    def loss(self) -> torch.Tensor:
        return chain(self.x, self.weights)

    def forward(self, store: TierStore) -> torch.Tensor:
        with offloading(store):
            return self.loss()

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, self.leaves))

    def works(self, store: TierStore) -> None:
        """Check that a whole step gives the right gradients, spills to disk, and leaves nothing."""
        before = store.stats().bytes_written
        assert_equal(self.gradients(self.forward(store)), self.wanted)
        assert store.stats().bytes_written > before, "the disk was not needed"
        assert_nothing_left(store)
        assert_sound(store)


@on_both
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_spill_write_fails_raises(call: str, number: int, device: str, disk_dir: Path) -> None:
    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        with system_call(call, fails_with=number) as failed:
            with pytest.raises(TransferError) as error:
                step.gradients(step.forward(store))
            assert isinstance(error.value, DiskFullError) == (number != errno.EIO)
            assert len(failed) > 0
            del error
        assert_nothing_left(store)
        step.works(store)  # the control: no fault


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that makes a file system of this many bytes."""
    if not is_root() or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    mounts: list[Path] = []

    def make(nbytes: int) -> Path:
        place = tmp_path / f"disk{len(mounts)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine does not allow mounting a file system")
        mounts.append(place)
        return place

    yield make
    for place in mounts:
        subprocess.run(["umount", "-l", str(place)], check=True)


@on_both
def test_full_disk_raises_and_later_steps_work(
    device: str, full_disk: Callable[[int], Path], disk_dir: Path
) -> None:
    step = Step(device)
    with open_store(full_disk(MIB) / "store", RAM, device) as store:
        for _ in range(2):
            with pytest.raises(DiskFullError):
                step.gradients(step.forward(store))
            assert_nothing_left(store)
        small = random_matrices(2, device, SIZE)  # a smaller step still fits
        with offloading(store):
            loss = chain(small[0], small[1:])
        wanted = plain_gradients(lambda: chain(small[0], small[1:]), small)
        assert_equal(torch.autograd.grad(loss, small), wanted)
    with open_store(full_disk(16 * MIB) / "store", RAM, device) as store:  # the control
        step.works(store)


@on_both
def test_spill_read_fails_raises(device: str, disk_dir: Path) -> None:
    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        loss = step.forward(store)
        wait_until_idle(store)
        with system_call("preadv", fails_with=errno.EIO) as failed:
            with pytest.raises(TransferError) as error:
                step.gradients(loss)
            assert isinstance(error.value.__cause__, OSError)
            assert len(failed) > 0
            del loss, error
            assert_nothing_left(store)
        step.works(store)  # the control: no fault


@on_both
def test_backward_after_a_failed_read_can_be_repeated(device: str, disk_dir: Path) -> None:
    """The graph is still intact: with retain_graph the same backward works once the disk does."""
    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        loss = step.forward(store)
        wait_until_idle(store)
        with system_call("preadv", fails_with=errno.EIO), pytest.raises(TransferError):
            torch.autograd.grad(loss, step.leaves, retain_graph=True)
        # A failed prefetch raises again for the reader that needs the tensor.
        for _ in range(4 * LAYERS):
            try:
                found = torch.autograd.grad(loss, step.leaves, retain_graph=True)
                break
            except TransferError:
                continue
        assert_equal(found, step.wanted)


def damage(store: TierStore) -> int:
    """Change every byte that was spilled; return how many there are."""
    spill = core_of(store).tiers.disk.spill
    assert spill is not None, "nothing was spilled"
    with open(spill.path, "r+b", buffering=0) as file:
        there = os.pread(file.fileno(), spill.usage()[0], 0)
        os.pwrite(file.fileno(), bytes(byte ^ 0x10 for byte in there), 0)
        os.fsync(file.fileno())
    return len(there)


@on_both
def test_spilled_bytes_damaged_raises_corrupt_data_error(device: str, disk_dir: Path) -> None:
    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        loss = step.forward(store)
        wait_until_idle(store)
        assert damage(store) >= MIB // 2
        with pytest.raises(CorruptDataError):
            step.gradients(loss)
        del loss
        assert_nothing_left(store)
        step.works(store)


@on_both
def test_spilled_bytes_damaged_without_checksums_are_used(device: str, disk_dir: Path) -> None:
    """The control: the gradients are wrong, and only the checksums would show it."""
    step = Step(device)
    with open_store(disk_dir, RAM, device, verify="never") as store:
        loss = step.forward(store)
        wait_until_idle(store)
        damage(store)
        found = step.gradients(loss)
        same = [torch.equal(a, b) for a, b in zip(found, step.wanted, strict=True)]
        assert not all(same)


@on_both
def test_disk_budget_used_up_raises(device: str, disk_dir: Path) -> None:
    step = Step(device)
    with open_store(disk_dir, RAM, device, disk_budget=MIB) as store:
        with pytest.raises(TierStoreError, match="budget"):
            step.gradients(step.forward(store))
        assert_nothing_left(store)
    with open_store(disk_dir, RAM, device, disk_budget=16 * MIB) as store:  # the control
        step.works(store)


@on_both
def test_backward_error_elsewhere_leaves_nothing(device: str, disk_dir: Path) -> None:
    """Another part of the backward pass raises: tensors that were not read yet are still freed."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise MemoryError("as in the middle of a backward pass")

    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        with offloading(store):
            middle = Fails.apply(torch.tanh(step.x @ step.weights[0]))
            loss = chain(middle, step.weights[1:])
        with pytest.raises(MemoryError):
            loss.backward()
        del middle, loss
        assert_nothing_left(store)
        step.works(store)
