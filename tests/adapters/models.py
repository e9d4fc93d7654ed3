"""Small modules whose groups can be counted by hand."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # a float32 weight and its bias


class Tower(nn.Module):
    """A head, `count` blocks in a list, a tail; each a linear layer of `BLOCK_BYTES` bytes."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(count)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.tail = nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).div_(WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.head, *self.blocks, self.tail):
            x = torch.tanh(layer(x))
        return x


class Enclosing(nn.Module):
    """Blocks that run while a weight of the module around them is in use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) @ self.scale
        return x


class Caching(nn.Module):
    """Appends to a cache from its caller, as video autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, **caches: object) -> torch.Tensor:
        self.seen = caches
        return self.layer(x)


def given() -> torch.Tensor:
    """Return the input of all these models."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
