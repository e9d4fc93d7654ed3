"""Tensors that backward reads lie in the store's memory and count against its budget."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.activations.helpers import (
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
from tests.store.helpers import PAGE, assert_sound, memory_held, pages
from tierstore.errors import BudgetError

PIECE = 4 * PAGE
"""Bytes of a matrix of 64 x 64."""


def read_all(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that the nodes of a graph have saved, in backward order."""
    found: list[torch.Tensor] = []
    node: Any = loss.grad_fn
    while node is not None:
        saved = [getattr(node, name, None) for name in ("_saved_result", "_saved_self")]
        found += [tensor for tensor in saved if tensor is not None]
        node = node.next_functions[0][0] if node.next_functions else None
    return found


@on_both
def test_backward_views_kept_are_in_budget_or_copies(device: str, disk_dir: Path) -> None:
    x, *weights = random_matrices(9, device)
    wanted = [tensor.clone() for tensor in read_all(chain(x, weights))]
    with open_store(disk_dir, 10 * PIECE, device) as store:
        with offloading(store):
            loss = chain(x, weights)
        found = read_all(loss)
        with core_of(store).lock:
            leased = len(core_of(store).leases)
        assert 0 < leased < len({tensor.data_ptr() for tensor in found})
        assert_equal(found, wanted)
        assert_sound(store)
        del found
        for key in store:
            store.get(key)  # all leased memory is reclaimed for the next group
        assert_sound(store)
        del loss
        assert_nothing_left(store)


@on_both
def test_backward_view_memory_is_not_reused_while_viewed(device: str, disk_dir: Path) -> None:
    (x,) = random_matrices(1, device)
    with open_store(disk_dir, 4 * PIECE, device) as store:
        with offloading(store):
            value = (x * 2).sin()
        viewed = value.grad_fn._saved_self.t()
        addresses = set()
        for number in range(8):
            store.put("other", pages(number, 4))
            with store.acquire("other") as lease:
                addresses.add(lease.tensor.data_ptr())
                assert (lease.tensor == number).all()
        assert addresses and viewed.data_ptr() not in addresses
        assert_equal([viewed], [(x * 2).detach().t()])
        del viewed, value
        assert_nothing_left_but(store, "other")


def assert_nothing_left_but(store: Any, key: str) -> None:
    assert list(store) == [key]
    store.discard(key)
    assert_nothing_left(store)


@on_both
@pytest.mark.parametrize("used_before", [True, False])
def test_backward_views_leave_space_for_the_largest_group(
    used_before: bool, device: str, disk_dir: Path
) -> None:
    """For example the weights that the same graph node reads."""
    (x,) = random_matrices(1, device)
    with open_store(disk_dir, 4 * PIECE, device) as store:
        store.put("weights", pages(1, 16))
        if used_before:
            store.get("weights")
        with offloading(store):
            value = (x * 2).sin()
        found = value.grad_fn._saved_self
        if used_before:
            with store.acquire("weights") as lease:
                assert (lease.tensor == 1).all()
        else:  # the control: then it is leased
            with pytest.raises(BudgetError):
                store.acquire("weights", timeout=20)
        assert_equal([found], [(x * 2).detach()])


@needs_accelerator
def test_forward_does_not_wait_for_copies(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, *weights = leaves = random_matrices(17, ACCELERATOR, size=128)
    wanted = plain_gradients(lambda: chain(x, weights), leaves)
    waited: list[str] = []

    class Watched(torch.Event):
        def synchronize(self) -> None:
            waited.append(threading.current_thread().name)
            super().synchronize()

    with open_store(disk_dir, 256 * PIECE, ACCELERATOR, device_budget=32 * PIECE) as store:
        monkeypatch.setattr(torch, "Event", Watched)
        for _ in range(2):  # by the second, memory was used before
            with offloading(store):
                loss = chain(x, weights)
            assert "MainThread" not in waited
            assert_equal(torch.autograd.grad(loss, leaves), wanted)
            del loss
            assert_nothing_left(store)
        event = Watched(ACCELERATOR)
        event.record()
        event.synchronize()
        assert waited.count("MainThread") == 1, "the control did not wait"
        assert memory_held(store)["DEVICE"] <= 32 * PIECE
