"""A LoRA on the attention of a mixture of frozen experts, which move one by one in both passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.adapters.conftest import DEVICES
from tests.adapters.test_frozen import trained
from tests.routed_models import IMPLEMENTATIONS, STACKED, Routed, build, inputs, rows, weight_bytes
from tests.store.helpers import open_store
from tierstore import dispatch_model

ON_BOTH = [name for name in IMPLEMENTATIONS if name != "grouped_mm"]
"""Implementations for both devices.

The pretend accelerator has no histogram, which transformers' grouped_mm needs.
"""


def adapted(kind: str, implementation: str) -> Any:
    model = build(kind, implementation)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def train(model: Any, kind: str, device: str) -> list[torch.Tensor]:
    """Return losses and gradients of two steps, and the adapter afterwards."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    ids = inputs(kind).to(device)
    found = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found += [each.detach().cpu().clone() for each in (loss, *gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return found + [parameter.detach().cpu().clone() for parameter in trained(model).values()]


def gradients(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in trained(model).values()]
    assert all(gradient is not None for gradient in found)
    return found


@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.parametrize("implementation", ON_BOTH)
@pytest.mark.parametrize("recomputed", (False, True))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.full("model, implementation and device", keep="a third")
@pytest.mark.long("these are independent of each other", keep="values")
def test_expert_training_steps_equal_plain(
    device: str, recomputed: bool, implementation: str, kind: str, disk_dir: Path
) -> None:
    assert_steps_are_the_same(kind, implementation, device, disk_dir, recomputed=recomputed)


@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.full("the model", keep=["qwen"])
def test_expert_training_with_grouped_products_equals_plain(kind: str, disk_dir: Path) -> None:
    assert_steps_are_the_same(kind, "grouped_mm", "cpu", disk_dir, recomputed=False)


def assert_steps_are_the_same(
    kind: str, implementation: str, device: str, disk_dir: Path, *, recomputed: bool
) -> None:
    plain, model = adapted(kind, implementation), adapted(kind, implementation)
    for each in (plain, model):
        each.train()
        if recomputed:
            each.gradient_checkpointing_enable({"use_reentrant": False})
    expected = train(plain.to(device), kind, device)
    with open_store(disk_dir, weight_bytes(model) // 3, device) as store:
        dispatch_model(model, store)
        before = store.stats()
        found = train(model, kind, device)
        after = store.stats()
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
        assert after.routed_uses > before.routed_uses
        assert after.bytes_written == before.bytes_written
        for tier, budget in after.budget_bytes.items():
            assert budget is None or after.peak_bytes[tier] <= budget


def by_torch(stack: torch.Tensor) -> None:
    with torch.no_grad():
        stack.mul_(2)


def unfrozen(stack: torch.Tensor) -> None:
    stack.requires_grad_(True)


@pytest.mark.parametrize("change", (by_torch, unfrozen))
@pytest.mark.parametrize("device", DEVICES)
def test_expert_stack_changed_before_the_backward_raises(
    device: str, change: Any, disk_dir: Path
) -> None:
    """It raises instead of giving a wrong gradient. The next step is right."""
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3]]).to(device)
    plain, model = (Routed().requires_grad_(False) for _ in range(2))
    plain.to(device)
    with open_store(disk_dir, weight_bytes(model) // 2, device) as store:
        dispatch_model(model, store)
        x = rows().to(device).requires_grad_()
        expected = torch.autograd.grad(plain(x, chosen).square().sum(), x)[0]
        stack = next(p for p in model.parameters() if p.dim() == 3)
        assert torch.equal(torch.autograd.grad(model(x, chosen).square().sum(), x)[0], expected)
        loss = model(x, chosen).square().sum()
        change(stack)
        with pytest.raises(RuntimeError, match=r"tierstore|modified by an inplace"):
            torch.autograd.grad(loss, x)
        for each in (plain, model):
            each.requires_grad_(False)
        if change is by_torch:
            change(next(p for p in plain.parameters() if p.dim() == 3))
        again = torch.autograd.grad(plain(x, chosen).square().sum(), x)[0]
        assert torch.equal(again, expected) == (change is unfrozen)  # control
        assert torch.equal(torch.autograd.grad(model(x, chosen).square().sum(), x)[0], again)
        assert store.stats().bytes_read > 0
