"""Core behaviour: saved tensors leave the device, return unchanged, and leave nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.accelerator import ACCELERATOR
from tests.activations.helpers import (
    assert_equal,
    assert_nothing_left,
    chain,
    offloading,
    on_both,
    open_store,
    plain_gradients,
    random_matrices,
    saved_by,
)
from tests.store.helpers import PAGE, assert_sound

pytestmark = [
    pytest.mark.floor,
    pytest.mark.full("test_training_steps.py covers both devices", keep="any device"),
]


@on_both
@pytest.mark.parametrize("pages", [5, 20, 200], ids="{} pages".format)
def test_gradients_match_and_leave_nothing(device: str, pages: int, disk_dir: Path) -> None:
    x, *weights = random_matrices(9, device)
    wanted = plain_gradients(lambda: chain(x, weights), [x, *weights])
    options = {} if device == "cpu" else {"device_budget": 20 * PAGE}
    with open_store(disk_dir, pages * PAGE, device, **options) as store:
        for _ in range(3):
            found = plain_gradients(lambda: chain(x, weights), [x, *weights], offloading(store))
            assert_equal(found, wanted)
        stats = store.stats()
        assert stats.activations.shipped_bytes >= 3 * 16 * x.nbytes
        assert stats.activations.skipped["parameter"] > 0
        if pages < 64:
            assert stats.bytes_written > 0
        assert_nothing_left(store)
        assert_sound(store)


@on_both
def test_views_share_one_copy_and_keep_their_strides(device: str, disk_dir: Path) -> None:
    (x,) = random_matrices(1, device)
    with open_store(disk_dir, 64 * PAGE, device) as store:
        with saved_by() as saved, offloading(store):
            h = x * 2
            y = h @ h.t()
        node = y.grad_fn
        assert node is not None
        mine, other = node._saved_self, node._saved_mat2
        assert mine.stride() == (64, 1) and other.stride() == (1, 64)
        assert torch.equal(mine, h) and torch.equal(other, h.t())
        assert store.stats().activations.shipped_bytes == h.nbytes
        assert store.stats().activations.deduplicated_bytes == h.nbytes
        assert saved.tensors == 0  # the innermost hooks are the store's


@on_both
def test_in_place_change_of_a_saved_tensor_raises(device: str, disk_dir: Path) -> None:
    x, weight = random_matrices(2, device)
    with open_store(disk_dir, 64 * PAGE, device) as store:
        with offloading(store):
            h = torch.exp(x)
            loss = (h @ weight).sum()
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
            loss.backward()
        with offloading(store):
            h = torch.exp(x)
        h.add_(1)
        with pytest.raises(RuntimeError, match="output 0 of Exp, is at version 1"):
            h.sum().backward()
        del h, loss
        assert_nothing_left(store)


@on_both
def test_checkpoint_offloads_keyword_and_closure_inputs(device: str, disk_dir: Path) -> None:
    x, one, other = random_matrices(3, device)

    def run() -> torch.Tensor:
        h = x * 2
        scale = x + 1

        def region(a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
            return torch.tanh(a @ one) * torch.sin(b @ other) * scale.exp()

        return tierstore.checkpoint_activations(region, h, b=h.cos()).sum()

    wanted = plain_gradients(run, [x, one, other])
    with open_store(disk_dir, 64 * PAGE, device) as store:
        with offloading(store):
            loss = run()
        # h, h.cos() and scale; cos saves h, too
        assert store.stats().activations.shipped_bytes == 3 * x.nbytes
        assert_equal(torch.autograd.grad(loss, [x, one, other]), wanted)
        del loss
        assert_nothing_left(store)


@on_both
def test_version_counters_of_one_memory_have_separate_copies(device: str, disk_dir: Path) -> None:
    """Gates that an LSTM splits from one tensor.

    They share memory; each is at version 1, at different times.
    """

    def run() -> torch.Tensor:
        first, second = (x * 2).unsafe_chunk(2)
        return (first.sigmoid_() * 3).sum() + (second.tanh_() * 5).sum()

    (x,) = random_matrices(1, device)
    wanted = plain_gradients(run, [x])
    with open_store(disk_dir, 64 * PAGE, device) as store:
        assert_equal(plain_gradients(run, [x], offloading(store)), wanted)
        assert store.stats().activations.shipped_bytes > 0


@on_both
def test_small_slice_does_not_hold_its_large_base(device: str, disk_dir: Path) -> None:
    (x,) = random_matrices(1, device, size=128)

    def run() -> torch.Tensor:
        large = x * 2
        return large[3:5].sin().sum() + large[5:, 0].cos().sum() + large[9:9].sin().sum()

    wanted = plain_gradients(run, [x])
    with open_store(disk_dir, 64 * PAGE, device) as store:
        with offloading(store):
            loss = run()
        stats = store.stats().activations
        assert stats.shipped_bytes == 0
        assert 0 < stats.skipped["small"] < x.nbytes / 4
        assert_equal(torch.autograd.grad(loss, [x]), wanted)


@pytest.mark.pretend_only("bytes")
def test_device_memory_is_released_during_the_forward(pretend: Any, disk_dir: Path) -> None:
    x, *weights = random_matrices(33, ACCELERATOR, size=128)
    pretend.synchronize()
    pretend.reset_counters()
    before = pretend.memory_allocated()
    with open_store(disk_dir, 4 << 20, ACCELERATOR) as store:
        with offloading(store):
            loss = chain(x, weights)
            waiting = pretend.memory_allocated() - before
        left = pretend.memory_allocated() - before
        saved = store.stats().activations.shipped_bytes
        assert saved >= 64 * x.nbytes
        assert waiting <= 4 * x.nbytes, "the forward ran far ahead of the copies"
        assert left <= 0.05 * saved
        loss.backward()
        del loss
        assert_nothing_left(store)
        assert pretend.stale_copies() == 0


@on_both
def test_store_shared_by_threads_trains(device: str, disk_dir: Path) -> None:
    leaves = [random_matrices(5, device, seed=seed) for seed in range(3)]
    wanted = [plain_gradients(lambda m=m: chain(m[0], m[1:]), m) for m in leaves]
    with open_store(disk_dir, 12 * PAGE, device) as store, ThreadPoolExecutor(3) as threads:

        def steps(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
            for _ in range(5):
                found = plain_gradients(
                    lambda: chain(matrices[0], matrices[1:]), matrices, offloading(store)
                )
            return found

        for found, right in zip(threads.map(steps, leaves), wanted, strict=True):
            assert_equal(found, right)
        assert_nothing_left(store)
        assert_sound(store)


class ReturnsSaved(torch.autograd.Function):
    """Its gradient is the tensor that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        saved: torch.Tensor = ctx.saved_tensors[0]
        return saved


@on_both
@pytest.mark.parametrize("changed", [True, False])
def test_returned_gradient_changed_in_place_is_detected(
    changed: bool, device: str, disk_dir: Path
) -> None:
    x = torch.randn(64, 1024, device=device, requires_grad=True)
    wanted = 2 * x.detach()
    with open_store(disk_dir, 16 * PAGE * PAGE, device) as store:
        with offloading(store):
            loss = ReturnsSaved.apply(x).sum()
        loss.backward(retain_graph=True)
        assert x.grad is not None
        assert torch.equal(x.grad, wanted)
        if changed:
            with torch.no_grad():
                x.grad.mul_(0.5)
        x.grad = None
        if changed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("share", [0.5, "50%"])
def test_min_size_given_as_a_fraction_raises(share: object, disk_dir: Path) -> None:
    with (
        open_store(disk_dir, 16 * PAGE * PAGE, "cpu") as store,
        pytest.raises(ValueError, match="bytes"),
    ):
        tierstore.offload_activations(store, min_size=share)  # type: ignore[arg-type]
