"""Methods that are patched after a model was offloaded run as plain Python would run them."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.store.helpers import open_store
from tierstore import (
    OffloadModel,
    TierStore,
    dispatch_model,
    enable_group_offload,
)

WIDTH = 64
BLOCKS = 24
PATCHED = 3
Change = Callable[[nn.Sequential], None]


class Block(nn.Linear):
    """A linear layer of a separate class, whose forward gets patched."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Tripled(Block):
    """A block with another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * 3


def doubled(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute twice the forward of a block; tests patch blocks with it."""
    return nn.functional.linear(x, block.weight, block.bias) * 2


def patch_class(model: nn.Sequential) -> None:
    Block.forward = doubled  # type: ignore[method-assign]


def take_class_patch_back(model: nn.Sequential) -> None:
    Block.forward = FORWARD  # type: ignore[method-assign]


def change_class(model: nn.Sequential) -> None:
    model[PATCHED].__class__ = Tripled


def patch_module(model: nn.Sequential) -> None:
    model[PATCHED].forward = types.MethodType(doubled, model[PATCHED])


def wrap_module(model: nn.Sequential) -> None:
    forward = model[PATCHED].forward
    model[PATCHED].forward = lambda x: forward(x) * 5


def wrap_model(model: nn.Sequential) -> None:
    forward = model.forward
    model.forward = lambda x: forward(x) * 7  # type: ignore[method-assign]


def take_module_patch_back(model: nn.Sequential) -> None:
    del model[PATCHED].__dict__["forward"]


FORWARD = Block.forward
NOTHING: Change = lambda model: None  # noqa: E731
CHANGES: dict[str, tuple[Change, Change]] = {
    "class patched": (NOTHING, patch_class),
    "class patch taken back": (patch_class, take_class_patch_back),
    "class changed": (NOTHING, change_class),
    "module patched": (NOTHING, patch_module),
    "module patch taken back": (patch_module, take_module_patch_back),
    "module wrapped": (NOTHING, wrap_module),
    "model wrapped": (NOTHING, wrap_model),
}


@pytest.fixture(autouse=True)
def ordinary_class() -> Iterator[None]:
    yield
    Block.forward = FORWARD  # type: ignore[method-assign]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).eval()


def small_store(device: str, tmp_path: Path) -> TierStore:
    return open_store(tmp_path, 80_000, device)


def assert_runs_as(model: nn.Module, plain: nn.Module, store: TierStore) -> None:
    """Run both three times; check the outputs, and that the offloaded one reads from the store."""
    x = torch.randn(2, WIDTH)
    for _ in range(3):
        read = store.stats().bytes_read
        assert torch.equal(model(x).cpu(), plain(x))
        assert store.stats().bytes_read > read


@pytest.mark.full("the change, the way to offload", keep="a third")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_patched_forward_runs_as_plain_python_would(
    device: str, offload: Callable[..., Any], change: str, tmp_path: Path
) -> None:
    before, after = CHANGES[change]
    x = torch.randn(2, WIDTH)
    model, plain = blocks(), blocks()
    before(model), before(plain)  # type: ignore[func-returns-value]
    with small_store(device, tmp_path) as store:
        offload(model, store)
        assert_runs_as(model, plain, store)
        earlier = plain(x)
        after(model), after(plain)  # type: ignore[func-returns-value]
        assert not torch.equal(plain(x), earlier), "the change makes a difference"
        assert_runs_as(model, plain, store)


@torch.no_grad()
def test_copy_of_offloaded_model_follows_its_class(tmp_path: Path) -> None:
    with small_store("cpu", tmp_path) as store:
        model = blocks()
        dispatch_model(model, store)
        copied, x = copy.deepcopy(model), torch.randn(2, WIDTH)
        assert "forward" not in copied[0].__dict__
        before = copied(x)
        Block.forward = doubled  # type: ignore[method-assign]
        plain = blocks()
        assert torch.equal(copied(x), plain(x))
        assert not torch.equal(plain(x), before)


@pytest.mark.full("the change, the recomputation", keep="a third")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recompute", [False, True])
def test_patched_forward_trains_as_plain_python_would(
    change: str, recompute: bool, tmp_path: Path
) -> None:
    before, after = CHANGES[change]
    x = torch.randn(2, WIDTH)
    module, plain = blocks(), blocks()
    before(module), before(plain)  # type: ignore[func-returns-value]
    with small_store("cpu", tmp_path) as store:
        model = OffloadModel(module, store, checkpoint_activation=recompute)
        for _ in range(2):
            for each in (model, plain):
                each.zero_grad()
                each(x).square().mean().backward()
            assert torch.equal(model(x), plain(x))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None
                assert torch.equal(ours.grad, theirs.grad)
            after(module), after(plain)  # type: ignore[func-returns-value]
            after = NOTHING
        assert store.stats().bytes_read > 0


def test_recomputed_sequential_runs_children_used_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(shared, nn.ReLU(), shared)
    x = torch.randn(2, WIDTH)
    expected = module(x)
    with small_store("cpu", tmp_path) as store:
        model = OffloadModel(module, store, checkpoint_activation=True)
        assert torch.equal(model(x), expected)
        module[1] = other
        assert torch.equal(model(x), shared(other(shared(x))))
        assert not torch.equal(model(x), expected)
