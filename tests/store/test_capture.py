"""Graphs of device work: a store cannot be part of one, and raises before it does anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR
from tests.device.states import captured
from tests.store.helpers import PAGE, assert_at_rest, assert_same, open_store, pages
from tierstore import (
    OffloadModel,
    dispatch_model,
    enable_group_offload,
    offload_activations,
)
from tierstore.errors import CaptureError
from tierstore.lease import make_revocable, resume

pytestmark = pytest.mark.floor


@pytest.mark.pretend_only("captures")
def test_store_call_in_a_capture_raises_and_recovers(disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("a", pages(1))
        resting, open_lease = store.acquire("a"), store.acquire("a")
        assert make_revocable(resting)
        with captured():
            for act in (
                lambda: store.put("b", pages(2)),
                lambda: store.acquire("a"),
                lambda: store.get("a"),
                lambda: resume(resting),
                open_lease.release,
            ):
                with pytest.raises(CaptureError, match="before and after the capture"):
                    act()
        assert store.keys() == ["a"]
        assert resume(resting)
        assert_same(resting.tensor.cpu(), pages(1))
        resting.release()
        store.put("b", pages(2))
        assert_same(store.get("b").cpu(), pages(2))
        assert_at_rest(store)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


@pytest.mark.pretend_only("captures")
@pytest.mark.parametrize("how", [dispatch_model, enable_group_offload, OffloadModel])
def test_model_call_in_a_capture_raises(how: Any, disk_dir: Path) -> None:
    net, given = layers(), torch.ones(2, 64, device=ACCELERATOR)
    expected = layers().to(ACCELERATOR)(given)
    with open_store(disk_dir, 8 * 5 * PAGE, device=ACCELERATOR) as store, torch.no_grad():
        attached = how(net, store)
        model = attached if how is OffloadModel else net
        for _ in range(2):
            assert torch.equal(model(given), expected)
            with captured(), pytest.raises(CaptureError):
                model(given)
        assert torch.equal(model(given), expected)


@pytest.mark.pretend_only("captures")
def test_saved_activations_in_a_capture_raise(disk_dir: Path) -> None:
    net, given = layers().to(ACCELERATOR), torch.ones(64, 64, device=ACCELERATOR)
    with (
        open_store(disk_dir, device=ACCELERATOR) as store,
        offload_activations(store, min_size=1),
        captured(),
        pytest.raises(CaptureError),
    ):
        net(given)
