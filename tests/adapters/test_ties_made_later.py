"""Weights that are tied by sharing memory after the model was offloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.store.helpers import open_store
from tierstore import dispatch_model, enable_group_offload

WIDTH = 64
LAYERS = 24
FIRST, LAST = 1, 22


def tie(model: nn.Sequential) -> None:
    model[LAST].weight.data = model[FIRST].weight.data  # type: ignore[operator,union-attr]


def tie_transposed(model: nn.Sequential) -> None:
    model[LAST].weight.data = model[FIRST].weight.data.t()  # type: ignore[operator,union-attr]


def tie_to_new_memory(model: nn.Sequential) -> None:
    value = torch.ones(WIDTH, WIDTH) / WIDTH
    model[LAST].weight.data = value
    model[FIRST].weight.data = value


def copy_values(model: nn.Sequential) -> None:
    """The control: equal values are not a tie."""
    model[LAST].weight.data = model[FIRST].weight.data.clone()  # type: ignore[operator,union-attr]


@pytest.mark.full("the change, the way to offload", keep="any device")
@pytest.mark.parametrize("change", [tie, tie_transposed, tie_to_new_memory, copy_values])
@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_weights_tied_through_data_stay_tied(
    device: str,
    offload: Callable[..., Any],
    change: Callable[[nn.Sequential], None],
    tmp_path: Path,
) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    plain, model, x = made(), made(), torch.randn(2, WIDTH)
    with open_store(tmp_path, 80_000, device) as store:
        offload(model, store)
        for step in (change, None, FIRST, LAST):
            for each in (plain, model):
                if callable(step):
                    step(each)
                elif step is not None:
                    each[step].weight.mul_(2)  # type: ignore[operator,union-attr]
            for _ in range(2):
                read = store.stats().bytes_read
                assert torch.equal(model(x).cpu(), plain(x))
                assert store.stats().bytes_read > read
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs)
        shared = model[FIRST].weight.data_ptr() == model[LAST].weight.data_ptr()
        assert shared == (change is not copy_values)
