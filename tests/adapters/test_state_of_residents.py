"""The state of an offloaded model whose small tensors stay on the accelerator."""

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


@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_state_dict_is_on_the_cpu_and_writes_to_the_model(
    device: str, offload: Callable[..., Any], tmp_path: Path
) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()

    plain, model, x = made(), made(), torch.randn(2, WIDTH)
    with open_store(tmp_path, 1 << 20, device) as store:
        offload(model, store)
        read = store.stats().hits + store.stats().misses
        before = model(x).cpu()
        assert torch.equal(before, plain(x))
        assert store.stats().hits + store.stats().misses > read
        assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
        for each in (plain, model):
            each.state_dict()["1.running_mean"].copy_(torch.arange(WIDTH))
            each.state_dict()["1.running_var"].numpy()[:] = 2
            each.state_dict()["0.bias"].fill_(1)
        assert not torch.equal(plain(x), before)
        assert torch.equal(model(x).cpu(), plain(x))
        for each in (plain, model):
            each[1].running_mean.zero_()  # type: ignore[operator,union-attr]
        assert torch.equal(model(x).cpu(), plain(x))
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name])
