"""Storages that are viewed in more than one way, or saved in overlapping passes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.activations.helpers import (
    MIB,
    assert_equal,
    assert_nothing_left,
    offloading,
    on_both,
    open_store,
)
from tierstore.adapters.activations import cache

pytestmark = pytest.mark.full("test_training_steps.py covers both devices", keep="any device")

LENGTH = 2000
TRAIL = 2000
"""Far more storages than are alive at a time."""


@on_both
def test_slice_below_and_above_min_size_is_counted_once(device: str, disk_dir: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(512 * 512, generator=generator).to(device)
    weight = torch.randn(LENGTH, generator=generator).to(device).requires_grad_()
    (expected,) = torch.autograd.grad((large[:LENGTH] * weight).sum() * 3, weight)
    with open_store(disk_dir, 8 * MIB, device=device) as store:
        total = torch.zeros((), device=device)
        for min_size in ("1MB", 4096, "1MB"):
            with offloading(store, min_size):
                total = total + (large[:LENGTH] * weight).sum()
        saved = store.stats().activations
        assert saved.saved_bytes == saved.shipped_bytes + saved.kept_bytes
        del large
        assert_equal(torch.autograd.grad(total, weight), [expected])
        del total
        assert_nothing_left(store)


@on_both
def test_overlapping_passes_leave_no_records(device: str, disk_dir: Path) -> None:
    weight = torch.randn(16, 16).to(device).requires_grad_()
    with open_store(disk_dir, 8 * MIB, device=device) as store:
        context = offloading(store, 1)

        def forward() -> torch.Tensor:
            with context:
                value = weight * 1
                for _ in range(10):
                    value = (value * weight).sin()
                return value.sum()

        first = forward()  # lives to the end
        before = forward()
        for _ in range(TRAIL // 20):
            now = forward()
            before.backward()
            before = now
        assert len(context._cache._local.order._pieces) < TRAIL // 4
        first.backward()
        del first, before, now
        assert_nothing_left(store)


def test_saved_piece_failed_init_raises_only_its_error(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalizer of a half-made object must not raise.

    Pytest fails a test with an unraisable exception.
    """

    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("no watch")

    monkeypatch.setattr(cache, "VersionWatch", refuse)
    with open_store(disk_dir) as store:
        with pytest.raises(RuntimeError, match="no watch"), offloading(store):
            torch.randn(256, 256, requires_grad=True).exp().sin()
        gc.collect()
