"""Autocast over weights in a store: casts are freed when their module is done."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, pretend
from tests.device import autocast
from tests.dispatch import models
from tests.dispatch.conftest import store_for
from tests.helpers.casts import Casts
from tests.helpers.tensors import parameter_bytes
from tierstore import dispatch_model

SHARE = 0.3
LAYER = models.WIDTH * models.WIDTH * 2
"""Bytes of one layer's weight, cast."""
WEIGHTS = [torch.Size((models.WIDTH, models.WIDTH))]


def half(**how: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **how)


@pytest.mark.parametrize("grad", (False, True))
def test_casts_do_not_outlive_their_module(grad: bool, disk_dir: Path) -> None:
    """Without a graph of the output, no cast is kept."""
    plain, model = models.Tower(), models.Tower()
    with store_for(model, disk_dir, "cpu", SHARE) as store, torch.set_grad_enabled(grad):
        dispatch_model(model, store)
        with half():
            expected = plain(models.rows())
            with Casts(WEIGHTS) as casts:
                for _ in range(2):
                    found = model(models.rows()).detach()
        assert torch.equal(found, expected)
        assert casts.total == 2 * 8 * LAYER
        assert casts.alive == 0
        if not grad:
            assert casts.peak == LAYER
        assert store.stats().bytes_read > 0


def test_casts_of_a_plain_model_live_until_autocast_ends() -> None:
    """The control of counting casts."""
    model = models.Tower()
    with torch.no_grad(), half(), Casts(WEIGHTS) as casts:
        for _ in range(2):
            model(models.rows())
    assert casts.total == casts.peak == 8 * LAYER


@pytest.mark.pretend_only("kernels")
@pytest.mark.full("builds kernels; casts are counted on the CPU above")
def test_device_memory_is_budget_activations_and_one_cast(disk_dir: Path) -> None:
    autocast.load()
    model, layers = models.Tower(40), 40
    weights = parameter_bytes(model)
    budget = int(weights * SHARE)
    with store_for(model, disk_dir, ACCELERATOR, SHARE) as store, torch.no_grad():
        dispatch_model(model, store)
        x = models.rows().to(ACCELERATOR)
        torch.accelerator.synchronize(ACCELERATOR)
        pretend.reset_peak_memory_stats()
        before = pretend.memory_allocated() - store.stats().used_bytes["DEVICE"]
        with torch.autocast(ACCELERATOR, torch.bfloat16):
            for _ in range(2):
                found = model(x)
                assert found.dtype is torch.bfloat16 or found.dtype is torch.float32
        torch.accelerator.synchronize(ACCELERATOR)
        peak = pretend.max_memory_allocated() - before
        assert store.stats().bytes_onloaded > 2 * (weights - budget)
    # The device runs behind the program: casts of a few layers may wait for their kernels.
    assert layers * LAYER > 8 * LAYER
    assert peak <= budget + 8 * LAYER


class RecordsCache(nn.Linear):
    """Records whether autocast would keep casts while it runs."""

    seen: ClassVar[list[bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.is_autocast_cache_enabled())
        if x.shape[0] == 1:
            raise ValueError("one row")
        return super().forward(x)


def test_autocast_cache_setting_is_restored(disk_dir: Path) -> None:
    """Covers errors, a disabled cache, nested autocasts and other threads."""
    model = nn.Sequential(*(RecordsCache(models.WIDTH, models.WIDTH) for _ in range(3)))
    with store_for(model, disk_dir, "cpu", 0.5) as store, torch.no_grad():
        dispatch_model(model, store)
        RecordsCache.seen.clear()
        for on in (True, False):
            with half(cache_enabled=on):
                model(models.rows())
                assert torch.is_autocast_cache_enabled() is on
                with pytest.raises(ValueError, match="one row"):
                    model(models.rows(count=1))
                assert torch.is_autocast_cache_enabled() is on
                with half(cache_enabled=not on):
                    model(models.rows())
                    assert torch.is_autocast_cache_enabled() is not on
                assert torch.is_autocast_cache_enabled() is on
        found: list[bool] = []

        def elsewhere() -> None:
            with torch.no_grad():
                model(models.rows())
            found.append(torch.is_autocast_cache_enabled())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert found == [True]
        assert torch.is_autocast_cache_enabled()
        assert RecordsCache.seen and not any(RecordsCache.seen)


def test_edits_between_two_runs_in_one_autocast_are_used(disk_dir: Path) -> None:
    """Its cache would return the cast of the old weight."""
    plain, model = models.Tower(), models.Tower()
    with store_for(model, disk_dir, "cpu", SHARE) as store, torch.no_grad():
        dispatch_model(model, store)
        with half():
            model(models.rows())
            for each in (plain, model):
                each.layers[3].weight.mul_(2)
            assert torch.equal(model(models.rows()), plain(models.rows()))
        assert store.stats().bytes_read > 0
