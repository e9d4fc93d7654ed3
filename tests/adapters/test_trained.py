"""Trained weights of an offloaded model, from the first gradients to merging or resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.adapters.test_frozen import llama, loss_of, trained
from tests.dispatch import models
from tests.helpers.tensors import parameter_bytes
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model

pytestmark = pytest.mark.parametrize("device", DEVICES)


def logits(model: Any, device: str) -> torch.Tensor:
    ids = models.tokens(7, (2, 7), 96).to(device)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.cpu()


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, device: str) -> None:
    loss_of(model, number, device).backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model).values(), lr=1e-2)


def pair(disk_dir: Path, device: str) -> tuple[Any, Any, TierStore]:
    """Yield a model with an adapter, plain and on a store."""
    plain, model = llama().train(), llama().train()
    store = open_store(disk_dir, parameter_bytes(model) // 2, device)
    dispatch_model(model, store)
    return plain.to(device), model, store


def devices_of_adapters(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in trained(model).values()}


def test_adapter_moves_until_it_is_trained(device: str, disk_dir: Path) -> None:
    """An adapter that is only used is offloaded like all weights."""
    plain, model, store = pair(disk_dir, device)
    with store:
        for _ in range(2):
            assert torch.equal(logits(model, device), logits(plain, device))
        assert devices_of_adapters(model) == {"cpu"}
        for each in (plain, model):
            step(each, adam(each), 1, device)
        assert devices_of_adapters(model) == {device}
        assert torch.equal(logits(model, device), logits(plain, device))
        assert devices_of_adapters(model) == {device}  # it will be trained again
        assert store.stats().bytes_read > 0
        disable_offload(model)
        assert devices_of_adapters(model) == {"cpu"}


def test_trained_adapter_is_merged(device: str, disk_dir: Path) -> None:
    plain, model, store = pair(disk_dir, device)
    with store:
        for each in (plain, model):
            optimizer = adam(each)
            for number in range(2):
                step(each, optimizer, number, device)
        ordinary = plain.cpu().merge_and_unload()  # an offloaded one is merged on the CPU
        before = store.stats().bytes_written
        merged = model.merge_and_unload()
        found = logits(merged, device)
        changed = sum(
            module.weight.nbytes
            for name, module in merged.named_modules()
            if name.endswith(("q_proj", "v_proj"))
        )
        assert store.stats().bytes_written - before >= changed
        assert torch.equal(found, logits(ordinary.to(device), device))


def test_adapter_merged_and_unmerged_trains_on(device: str, disk_dir: Path) -> None:
    plain, model, store = pair(disk_dir, device)
    with store:
        optimizers = [adam(plain), adam(model)]
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, 0, device)
        for each in (plain.cpu(), model):
            each.merge_adapter()
            each.unmerge_adapter()
        plain.to(device)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each, optimizer, 1, device)
        for one, other in zip(trained(plain).values(), trained(model).values(), strict=True):
            assert torch.equal(one, other)
        assert store.stats().bytes_read > 0


def test_resumed_training_equals_plain(device: str, disk_dir: Path) -> None:
    """The optimizer may load its states before the adapter is on the device."""
    first = llama().train()
    optimizer = adam(first)
    for number in range(2):
        step(first, optimizer, number, "cpu")
    saved = optimizer.state_dict(), peft.get_peft_model_state_dict(first)
    plain, model, store = pair(disk_dir, device)
    with store:
        for each in (plain, model):
            optimizer = adam(each)
            peft.set_peft_model_state_dict(each, saved[1])
            optimizer.load_state_dict(copy.deepcopy(saved[0]))
            for number in range(2, 4):
                step(each, optimizer, number, device)
        for one, other in zip(trained(plain).values(), trained(model).values(), strict=True):
            assert torch.equal(one, other)
        assert store.stats().bytes_read > 0
