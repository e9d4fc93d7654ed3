"""Batches cut into small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.torch_private import (
    fills_all_gradients,
    keeps_graph,
    tree_flatten,
    tree_unflatten,
)

Call = Callable[..., Any]


@dataclass(eq=False)
class Microbatches:
    """Calls a model on parts of a batch, one after the other, and goes back in the same order.

    So gradients are added up as a loop over the parts would: forward and backward for each. `begin`
    is called when a backward pass comes to it.
    """

    run: Call
    count: int
    begin: Callable[[], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        batch = next((x.size(0) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
        if batch < self.count:
            raise ValueError(
                f"a batch of {batch} cannot be cut into {self.count} microbatches: give a tensor "
                "whose first dimension is the batch, or lower num_microbatches"
            )
        cut = [
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == batch
            for leaf in leaves
        ]
        parts = [
            leaf.tensor_split(self.count) if whole else [leaf] * self.count
            for leaf, whole in zip(leaves, cut, strict=True)
        ]
        calls = [_Part(self.run, [part[i] for part in parts], structure) for i in range(self.count)]
        if not torch.is_grad_enabled():
            return joined([call.run(call.leaves) for call in calls])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        way_back = torch.empty(0, requires_grad=True)
        outputs = _InParts.apply(way_back, self, calls, leaves, cut, *tensors)
        return tree_unflatten(list(outputs), calls[0].shape)


@dataclass(eq=False)
class _Part:
    """The call for one part of the batch."""

    model: Call
    leaves: list[Any]
    structure: Any
    shape: Any = None
    found: list[Any] = field(default_factory=list)

    def run(self, leaves: list[Any]) -> Any:
        """Call the model."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.model(*args, **kwargs)

    def go_back(self, gradients: Sequence[Any], before: list[int], *, again: bool) -> None:
        """Go back through this part; `again` if there may be another time.

        `before` tells how many rows of each gradient are those of earlier parts, and is counted on.
        """
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None  # what an earlier time left
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
    """The results of parts of a batch as that of the whole batch."""
    flat = [tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_joined(column) for column in columns], flat[0][1])


def _joined(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return first
    if not first.dim():
        raise TypeError(
            "with num_microbatches, every tensor that a model returns must have the batch as its "
            "first dimension; this one returns a single number: compute the loss outside of it"
        )
    return torch.cat(column)


class _InParts(torch.autograd.Function):
    """Runs the parts, each with a graph of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        way_back: torch.Tensor,
        whole: Microbatches,
        calls: list[_Part],
        leaves: list[Any],
        cut: list[bool],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.whole, ctx.calls = whole, calls
        ctx.cut = [c for c, leaf in zip(cut, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
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
        if not fills_all_gradients():
            raise RuntimeError(
                "microbatches cannot be differentiated by torch.autograd.grad() or with inputs=: "
                "use loss.backward(), or num_microbatches=1"
            )
        if not all(call.found for call in ctx.calls):
            raise RuntimeError(
                "this backward goes through the graph of microbatches a second time: give "
                "retain_graph=True to the backward before it"
            )
        ctx.whole.begin()
        again = keeps_graph()
        before = [0] * len(gradients)
        for call in ctx.calls:
            call.go_back(gradients, before, again=again)
        rows = [[x.grad for x in c.leaves if isinstance(x, torch.Tensor)] for c in ctx.calls]
        found = [
            _input_gradient(list(column), cut)
            for column, cut in zip(zip(*rows, strict=True), ctx.cut, strict=True)
        ]
        return (None, None, None, None, None, *found)


def _input_gradient(parts: list[torch.Tensor | None], cut: bool) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return torch.cat(found) if cut else sum(found[1:], found[0])
