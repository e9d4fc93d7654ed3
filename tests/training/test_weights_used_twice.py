"""A weight that is used more than once in a pass has one gradient: the sum over all uses.

Compared with the plain model, bit for bit, with budgets that hold all of it or little.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import same
from tests.helpers.tensors import parameter_bytes
from tests.store.helpers import open_store
from tests.training.conftest import DEVICES, Traffic
from tierstore.adapters.training import OffloadModel

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

WIDTH, WORDS = 64, 100


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


class Repeating(nn.Module):
    """One layer, used three times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rest = layers(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.rest(x)


class Words(nn.Module):
    """A language model whose embedding shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = layers(4)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x[:, 0] * WORDS).long().abs() % WORDS
        return self.head(self.blocks(self.embedding(words)))


def once(model: Callable[..., Any], one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return model(one).square().mean()


def twice(model: Callable[..., Any], one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Siamese models do this: one loss of two forward passes."""
    return (model(one) - model(other)).square().mean()


CASES = {
    "a layer in a row": (Repeating, once),
    "tied to the head": (Words, once),
    "two passes": (lambda: layers(6), twice),
    "two passes of a layer in a row": (Repeating, twice),
}


@pytest.mark.parametrize("share", [0.5, 8.0], ids=["most leaves", "all stays"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_weight_used_twice_gets_the_summed_gradient(
    case: str, device: str, recomputed: bool, share: float, disk_dir: Path
) -> None:
    build, loss = CASES[case]
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    one, other = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    loss(plain, one, other).backward()
    budget = int(share * 4 * parameter_bytes(plain))
    with open_store(disk_dir, budget, device) as store:
        traffic = Traffic(store)
        offloaded = OffloadModel(model, store, checkpoint_activation=recomputed)
        loss(offloaded, one.to(device), other.to(device)).backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            assert parameter.grad is not None, name
            assert same(parameter.grad, expected, device), name
        if share < 1:
            assert traffic.read > 0
        if device != "cpu":
            assert traffic.onloaded > 0
