"""Test whether an optimizer is element-wise, so that it can step shards.

Each process steps its own rows of a sharded parameter. An optimizer that also depends on other
elements (the mean of a row, the norm of a matrix) would silently compute a different result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, COLUMNS, STEPS = 6, 4, 2


def is_elementwise(optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> bool:
    """Return True if stepping a small matrix gives the same result as stepping its rows in parts.

    `kwargs` are the arguments of `optimizer_class` besides the parameters.
    """
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
    """Return the change of the values by a few steps, with one parameter per part."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter, own in zip(parameters, zip(*gradients, strict=True), strict=True):
        optimizer = optimizer_class([parameter], **kwargs)
        for gradient in own:
            parameter.grad = gradient.clone()
            optimizer.step()
    return torch.cat([after - before for after, before in zip(parameters, values, strict=True)])
