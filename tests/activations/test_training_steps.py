"""Training steps of small real models: the same gradients, and memory within its bounds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import pipelines
from tests.accelerator import ACCELERATOR
from tests.activations.helpers import (
    FRACTIONS,
    SMALL,
    Saved,
    assert_equal,
    assert_nothing_left,
    budget_for,
    offloading,
    on_both,
    open_store,
    plain_gradients,
)
from tests.activations.models import Trained, trained
from tests.store.helpers import PAGE, assert_sound, wait_until
from tierstore.model.sizes import round_up

WAYS = [(how, fraction) for how in ("none", "ours") for fraction in FRACTIONS] + [("theirs", 0.1)]
"""Pairs of a checkpointing method and a RAM budget, as a fraction of the bytes saved with it."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a checkpoint of each model."""
    place = tmp_path_factory.mktemp("models")
    return {kind: build(place / kind, "tiny") for kind, build in pipelines.BUILDERS.items()}


@functools.lru_cache(maxsize=1)
def prepared(kind: str, checkpoint: Path, device: str) -> tuple[Trained, list[torch.Tensor]]:
    """Return a model, and its gradients without the store and without checkpointing."""
    step = trained(kind, checkpoint, device)
    step.checkpoint("none")
    wanted = plain_gradients(step.loss, step.leaves)
    again = plain_gradients(step.loss, step.leaves)
    assert_equal(again, wanted)
    return step, wanted


@functools.lru_cache(maxsize=1)
def saved_bytes(kind: str, checkpoint: Path, device: str, how: str) -> Saved:
    """Return the bytes that a step saves, except for parameters and buffers."""
    step, _ = prepared(kind, checkpoint, device)
    step.checkpoint(how)
    saved = Saved(SMALL)
    with saved.watching():
        loss = step.loss()
    saved.without(step.parameters())
    del loss
    return saved


@pytest.fixture(autouse=True, scope="module")
def nothing_kept() -> Iterator[None]:
    yield
    prepared.cache_clear()
    saved_bytes.cache_clear()


@pytest.mark.full("model, checkpointing and device are independent", keep="values")
@pytest.mark.parametrize(("how", "fraction"), WAYS)
@pytest.mark.parametrize("kind", pipelines.KINDS)
@on_both
def test_training_step_gradients_and_memory_are_right(
    device: str,
    kind: str,
    how: str,
    fraction: float,
    checkpoints: dict[str, Path],
    disk_dir: Path,
) -> None:
    step, wanted = prepared(kind, checkpoints[kind], device)
    saved = saved_bytes(kind, checkpoints[kind], device, how)
    step.checkpoint(how)
    budget = budget_for(saved, fraction)
    options = {} if device == "cpu" else {"device_budget": 4 * round_up(saved.largest, PAGE)}
    with open_store(disk_dir, budget, device, **options) as store:
        context = offloading(store, SMALL, model=step.model)
        assert_equal(plain_gradients(step.loss, step.leaves, context), wanted)
        stats = store.stats()
        # The bound excludes the bytes of parameters, so it also shows that none was offloaded.
        if how != "ours":
            assert 0 < stats.activations.shipped_bytes <= saved.nbytes
        assert stats.activations.shipped_bytes > 0
        assert stats.peak_bytes["HOST"] <= budget
        if fraction < 0.5 and how == "none":
            assert stats.bytes_written > 0
        assert_nothing_left(store)
        assert_sound(store)


@pytest.mark.full("test_pieces.py counts the same")
@pytest.mark.pretend_only("bytes")
@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_training_step_device_and_pinned_memory_are_bounded(
    kind: str, pretend: Any, checkpoints: dict[str, Path], disk_dir: Path
) -> None:
    """After the forward, 95 % of the saved bytes have left the device. RAM stays in budget."""
    step, wanted = prepared(kind, checkpoints[kind], ACCELERATOR)
    saved = saved_bytes(kind, checkpoints[kind], ACCELERATOR, "none")
    step.checkpoint("none")
    budget = budget_for(saved, 0.5)
    pretend.synchronize()
    pretend.reset_peak_pinned()
    before = pretend.memory_allocated(), pretend.pinned_bytes()
    with open_store(disk_dir, budget, ACCELERATOR, device_budget=saved.nbytes) as store:
        with offloading(store, SMALL, model=step.model):
            loss = step.loss()
        pretend.synchronize()
        most = before[0] + saved.small_bytes + loss.nbytes + saved.nbytes // 20
        wait_until(lambda: pretend.memory_allocated() <= most, "the device holds more")
        assert pretend.peak_pinned_bytes() - before[1] <= budget
        assert_equal(torch.autograd.grad(loss, step.leaves), wanted)
        assert pretend.peak_pinned_bytes() - before[1] <= budget
        # The control: without the store most of it is on the device.
        held = step.loss()
        assert pretend.memory_allocated() - before[0] > 0.8 * saved.nbytes
        del held, loss
