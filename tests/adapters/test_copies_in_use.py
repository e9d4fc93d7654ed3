"""Copies and pickles of a model that another thread is running."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import same
from tests.helpers.tensors import pickled, saved
from tests.store.helpers import PATIENCE, on_both, open_store
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

WIDTH = 256
LAYER = 4 * (WIDTH + 1) * WIDTH


class Pausing(nn.Module):
    """A layer that waits in its forward while its weights are leased."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH, WIDTH))
        self.inside: Any = None
        self.go_on: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is not None:
            self.inside.set()
            assert self.go_on.wait(PATIENCE)
        return x @ self.weight + self.shift[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inside": None, "go_on": None}


def copied_at_once(value: Any) -> Any:
    """Copy a value in two threads at the same time."""
    found: list[Any] = []

    def copy_it() -> None:
        found.append(copy.deepcopy(value))

    threads = [threading.Thread(target=copy_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    first, second = found
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    return first


@pytest.mark.full("seconds; tests/dispatch has a copy of a model")
@on_both
@pytest.mark.parametrize("made", [copy.deepcopy, pickled, saved, copied_at_once])
@torch.no_grad()
def test_copy_of_a_running_model_holds_its_weights(
    made: Callable[[Any], Any], device: str, disk_dir: Path
) -> None:
    torch.manual_seed(0)
    pausing = Pausing()
    pausing.again = pausing.weight  # tied
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = nn.Sequential(*layers[:3], pausing, *layers[3:])
    plain = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    wanted = plain(x)
    with open_store(disk_dir, 3 * LAYER, device) as store:
        enable_group_offload(model, store, offload_type="leaf_level")
        pausing.inside, pausing.go_on = threading.Event(), threading.Event()
        results: list[torch.Tensor] = []
        running = threading.Thread(target=lambda: results.append(model(x.to(device))))
        running.start()
        assert pausing.inside.wait(PATIENCE)
        other = made(model)
        pausing.go_on.set()
        running.join(PATIENCE)
        pausing.inside = None
        for layer in model:  # the leased memory is reused
            layer(x.to(device))
        assert store.stats().bytes_read > 2 * LAYER
        for name, tensor in plain.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
        assert other[3].again is other[3].weight
        assert all(type(p) is nn.Parameter and p.requires_grad for p in other.parameters())
        assert torch.equal(other(x), wanted)
        next(other.parameters()).zero_()
        assert torch.equal(model(x.to(device)).cpu(), results[0].cpu())
    assert same(results[0], wanted, device)
