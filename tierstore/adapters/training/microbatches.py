"""Split batches into microbatches, and accumulate their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.torch_private import (
    accumulates_all_gradients,
    retains_graph,
    tree_flatten,
    tree_unflatten,
)

Call = Callable[..., Any]


@dataclass(eq=False)
class Microbatches:
    """Runs a model on the parts of a batch in sequence, and their backward passes in that order.

    So gradients accumulate as in a loop that runs forward and backward for each part. `begin` is
    called when a backward pass reaches the outputs.
    """

    run: Call
    count: int
    begin: Callable[[], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        batch = next((x.size(0) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
        if batch < self.count:
            raise ValueError(
                f"a batch of {batch} cannot be split into {self.count} microbatches: pass tensors "
                "whose first dimension is the batch, or lower num_microbatches"
            )
        is_split = [
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == batch
            for leaf in leaves
        ]
        parts = [
            leaf.tensor_split(self.count) if whole else [leaf] * self.count
            for leaf, whole in zip(leaves, is_split, strict=True)
        ]
        calls = [_Part(self.run, [part[i] for part in parts], structure) for i in range(self.count)]
        if not torch.is_grad_enabled():
            return joined([call.run(call.leaves) for call in calls])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        outputs = _RunParts.apply(anchor, self, calls, leaves, is_split, *tensors)
        return tree_unflatten(list(outputs), calls[0].shape)


@dataclass(eq=False)
class _Part:
    """The call of the model for one part of the batch."""

    model: Call
    leaves: list[Any]
    structure: Any
    shape: Any = None
    found: list[Any] = field(default_factory=list)

    def run(self, leaves: list[Any]) -> Any:
        """Call the model."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.model(*args, **kwargs)

    def backward(self, gradients: Sequence[Any], before: list[int], *, again: bool) -> None:
        """Run the backward pass of this part. With `again`, keep its graph for another pass.

        `before` is the number of rows of each gradient that belong to earlier parts; this part's
        rows are added to it.
        """
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None  # from an earlier backward pass
        pairs = []
        for i, (tensor, gradient) in enumerate(zip(self.found, gradients, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                continue
            start, before[i] = before[i], before[i] + tensor.size(0)
            if gradient is not None and tensor.requires_grad:
                pairs.append((tensor, gradient[start : before[i]]))
        if not again:
            self.found = []
        if pairs:
            torch.autograd.backward(
                [t for t, _ in pairs], [g for _, g in pairs], retain_graph=again
            )


def joined(results: list[Any]) -> Any:
    """Concatenate the results of all parts into the result of the whole batch."""
    flat = [tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_joined(column) for column in columns], flat[0][1])


def _joined(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return first
    if not first.dim():
        raise TypeError(
            "with num_microbatches, every tensor that the model returns must have the batch as its "
            "first dimension, but this model returns a scalar: compute the loss outside the model"
        )
    return torch.cat(column)


class _RunParts(torch.autograd.Function):
    """Runs the parts, each with its own autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        whole: Microbatches,
        calls: list[_Part],
        leaves: list[Any],
        is_split: list[bool],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.whole, ctx.calls = whole, calls
        ctx.is_split = [
            c for c, leaf in zip(is_split, leaves, strict=True) if isinstance(leaf, torch.Tensor)
        ]
        wanted = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        ctx.set_materialize_grads(False)
        for call in calls:
            call.leaves = [
                leaf.detach().requires_grad_(wants) if isinstance(leaf, torch.Tensor) else leaf
                for leaf, wants in zip(call.leaves, wanted, strict=True)
            ]
            with torch.enable_grad():
                call.found, call.shape = tree_flatten(call.run(call.leaves))
        columns = list(zip(*(call.found for call in calls), strict=True))
        results = tuple(_joined(column) for column in columns)
        plain = [
            t
            for t, column in zip(results, columns, strict=True)
            if isinstance(t, torch.Tensor) and not column[0].requires_grad
        ]
        ctx.mark_non_differentiable(*plain)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not accumulates_all_gradients():
            raise RuntimeError(
                "microbatches cannot be differentiated by torch.autograd.grad() or with inputs=: "
                "use loss.backward(), or num_microbatches=1"
            )
        if not all(call.found for call in ctx.calls):
            raise RuntimeError(
                "backward through the graph of microbatches a second time: pass retain_graph=True "
                "to the first backward"
            )
        ctx.whole.begin()
        again = retains_graph()
        before = [0] * len(gradients)
        for call in ctx.calls:
            call.backward(gradients, before, again=again)
        rows = [[x.grad for x in c.leaves if isinstance(x, torch.Tensor)] for c in ctx.calls]
        found = [
            _input_gradient(list(column), is_split)
            for column, is_split in zip(zip(*rows, strict=True), ctx.is_split, strict=True)
        ]
        return (None, None, None, None, None, *found)


def _input_gradient(parts: list[torch.Tensor | None], is_split: bool) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return torch.cat(found) if is_split else sum(found[1:], found[0])
