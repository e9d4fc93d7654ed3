"""Disks that fail in a training step: an error that says so, nothing hangs, the next step works."""

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
RAM = MIB  # of about three that are saved
LIMIT = 20  # seconds in which a step that hangs shows the stacks of all threads

pytestmark = [
    pytest.mark.full(
        "devices differ in what test_training_steps.py does on both", keep="any device"
    ),
    pytest.mark.timeout(LIMIT * 6),
]


class Step:
    """A step that saves about three times the RAM budget, with its right gradients."""

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
        """A whole step gives the right gradients, with bytes on the disk, and leaves nothing."""
        before = store.stats().bytes_written
        assert_equal(self.gradients(self.forward(store)), self.wanted)
        assert store.stats().bytes_written > before, "the disk was not needed"
        assert_nothing_left(store)
        assert_sound(store)


@on_both
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_disk_that_takes_no_more(call: str, number: int, device: str, disk_dir: Path) -> None:
    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        with system_call(call, fails_with=number) as failed:
            with pytest.raises(TransferError) as error:
                step.gradients(step.forward(store))
            assert isinstance(error.value, DiskFullError) == (number != errno.EIO)
            assert len(failed) > 0
            del error
        assert_nothing_left(store)
        step.works(store)  # the control too: without the fault


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many bytes."""
    if not is_root() or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    mounts: list[Path] = []

    def make(nbytes: int) -> Path:
        place = tmp_path / f"disk{len(mounts)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine lets nobody mount a file system")
        mounts.append(place)
        return place

    yield make
    for place in mounts:
        subprocess.run(["umount", "-l", str(place)], check=True)


@on_both
def test_a_disk_that_is_really_full(
    device: str, full_disk: Callable[[int], Path], disk_dir: Path
) -> None:
    step = Step(device)
    with open_store(full_disk(MIB) / "store", RAM, device) as store:
        for _ in range(2):
            with pytest.raises(DiskFullError):
                step.gradients(step.forward(store))
            assert_nothing_left(store)
        small = random_matrices(2, device, SIZE)  # what fits still works
        with offloading(store):
            loss = chain(small[0], small[1:])
        wanted = plain_gradients(lambda: chain(small[0], small[1:]), small)
        assert_equal(torch.autograd.grad(loss, small), wanted)
    with open_store(full_disk(16 * MIB) / "store", RAM, device) as store:  # the control
        step.works(store)


@on_both
def test_reads_that_fail(device: str, disk_dir: Path) -> None:
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
        step.works(store)  # the control too: without the fault


@on_both
def test_a_read_that_failed_can_be_repeated(device: str, disk_dir: Path) -> None:
    """The graph is still whole: with retain_graph the same backward works once the disk does."""
    step = Step(device)
    with open_store(disk_dir, RAM, device) as store:
        loss = step.forward(store)
        wait_until_idle(store)
        with system_call("preadv", fails_with=errno.EIO), pytest.raises(TransferError):
            torch.autograd.grad(loss, step.leaves, retain_graph=True)
        # What was fetched early and failed is told once more to who needs it.
        for _ in range(4 * LAYERS):
            try:
                found = torch.autograd.grad(loss, step.leaves, retain_graph=True)
                break
            except TransferError:
                continue
        assert_equal(found, step.wanted)


def damage(store: TierStore) -> int:
    """Change every byte that was spilled. Returns how many there are."""
    spill = core_of(store).tiers.disk.spill
    assert spill is not None, "nothing was spilled"
    with open(spill.path, "r+b", buffering=0) as file:
        there = os.pread(file.fileno(), spill.room()[0], 0)
        os.pwrite(file.fileno(), bytes(byte ^ 0x10 for byte in there), 0)
        os.fsync(file.fileno())
    return len(there)


@on_both
def test_what_was_spilled_is_not_what_was_written(device: str, disk_dir: Path) -> None:
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
def test_without_checksums_the_damage_goes_through(device: str, disk_dir: Path) -> None:
    """The control: the gradients are wrong, and only the checksums say so."""
    step = Step(device)
    with open_store(disk_dir, RAM, device, verify="never") as store:
        loss = step.forward(store)
        wait_until_idle(store)
        damage(store)
        found = step.gradients(loss)
        same = [torch.equal(a, b) for a, b in zip(found, step.wanted, strict=True)]
        assert not all(same)


@on_both
def test_a_disk_budget_that_is_used_up(device: str, disk_dir: Path) -> None:
    step = Step(device)
    with open_store(disk_dir, RAM, device, disk_budget=MIB) as store:
        with pytest.raises(TierStoreError, match="budget"):
            step.gradients(step.forward(store))
        assert_nothing_left(store)
    with open_store(disk_dir, RAM, device, disk_budget=16 * MIB) as store:  # the control
        step.works(store)


@on_both
def test_no_memory_left_for_the_gradient_of_others(device: str, disk_dir: Path) -> None:
    """An error in another part of the backward pass: what was not read is not left behind."""

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
