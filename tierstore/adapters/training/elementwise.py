"""Whether an optimizer does the same to each number, whichever others are beside it.

Of a sharded parameter each process has some rows, and steps these. An optimizer that looks at more
than single numbers (at the mean of a row, at the norm of a matrix) would compute something else
from a part, without any error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, COLUMNS, STEPS = 6, 4, 2


def is_elementwise(optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> bool:
    """Whether a few steps of a small matrix are those of its parts. `kwargs` is what the class
    takes besides parameters."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)

    value, gradients = drawn(), [drawn() for _ in range(STEPS)]
    whole, in_parts = (
        _changed(optimizer_class, kwargs, value.split(rows), [g.split(rows) for g in gradients])
        for rows in (ROWS, ROWS // 3)
    )
    return torch.allclose(whole, in_parts, rtol=1e-4, atol=0)


@torch.no_grad()
def _changed(
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
    values: tuple[torch.Tensor, ...],
    gradients: list[tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    """By how much values are changed, one parameter after the other."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter, own in zip(parameters, zip(*gradients, strict=True), strict=True):
        optimizer = optimizer_class([parameter], **kwargs)
        for gradient in own:
            parameter.grad = gradient.clone()
            optimizer.step()
    return torch.cat([after - before for after, before in zip(parameters, values, strict=True)])
