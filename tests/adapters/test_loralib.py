"""A library with one file of support, used as in its own examples."""

from __future__ import annotations

import copy
from pathlib import Path

import loralib
import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, needs_accelerator, on_both
from tierstore import TierStore, enable_group_offload
from tierstore.adapters import compat
from tierstore.adapters.compat import loralib as support

pytestmark = pytest.mark.full("a small library", keep="any device")


def with_lora() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [loralib.Linear(64, 64, r=4, lora_alpha=8) for _ in range(6)]
    for layer in layers:
        nn.init.normal_(layer.lora_B, std=0.02)
    model = nn.Sequential(*layers)
    loralib.mark_only_lora_as_trainable(model)
    return model


def train(model: nn.Module, device: str) -> torch.Tensor:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(8, 64).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach().cpu()


def predict(model: nn.Module, device: str) -> torch.Tensor:
    torch.manual_seed(2)
    with torch.no_grad():
        return model(torch.randn(8, 64).to(device)).cpu()


@on_both
def test_training_and_merging_equal_plain(device: str, tmp_path: Path) -> None:
    plain = with_lora()
    model = copy.deepcopy(plain)
    plain.to(device)
    kwargs = {} if device == "cpu" else {"device_budget": "64KB"}
    with TierStore("256KB", tmp_path, device=device, **kwargs) as store:
        enable_group_offload(model, store)
        for _ in range(2):
            model.train(), plain.train()
            torch.testing.assert_close(train(model, device), train(plain, device))
            model.eval(), plain.eval()
            assert all(layer.merged for layer in model)
            # The model merged its updates on the CPU, and the plain one on the device.
            torch.testing.assert_close(predict(model, device), predict(plain, device))
        assert store.stats().hits + store.stats().misses > 12
        assert store.stats().bytes_written > 0


@needs_accelerator
def test_merge_without_library_support_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support.Loralib, "merges", compat.Library.merges)
    monkeypatch.setattr(compat, "_overrides", compat._overrides.__wrapped__)
    model = with_lora()
    with TierStore("256KB", tmp_path, device=ACCELERATOR, device_budget="64KB") as store:
        enable_group_offload(model, store)
        train(model, ACCELERATOR)
        with pytest.raises(RuntimeError, match="device"):
            model.eval()
