"""torch's own samples of operators and modules, as small forwards that can be repeated."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

from tests.activations.helpers import Saved
from tests.lanes import by_lane

Gradients = list[torch.Tensor | None]
SEED = 1

# Saves memory that it fills only afterwards: a hook that copies sees the old contents
# (pytorch/pytorch#193671).
FILLED_TOO_LATE = "nn.functional.rrelu"


@dataclass
class Forward:
    """Outputs of one forward that have a gradient, and the leaves that they depend on."""

    outputs: list[torch.Tensor]
    leaves: list[torch.Tensor]

    def backward(self) -> Gradients:
        """Return the gradients of the leaves, for directions that are the same in every run."""
        directions = [direction(output) for output in self.outputs]
        return list(torch.autograd.grad(self.outputs, self.leaves, directions, allow_unused=True))


@dataclass
class Case:
    """A named forward that starts from the same numbers every time."""

    name: str
    forward: Callable[[], Forward]


@dataclass
class Plain:
    """A case with the gradients of a run without the store."""

    case: Case
    gradients: Gradients


def direction(output: torch.Tensor) -> torch.Tensor:
    """Return numbers that are neither all alike nor random."""
    row = torch.arange(1, output.numel() + 1, device=output.device) % 7 - 2.5
    return row.to(output.dtype).reshape(output.shape)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Yield every tensor in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def differentiable(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def moved(value: Any, device: str) -> Any:
    """Return the same nested containers with every tensor on the device. Leaves stay leaves."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or device == "cpu":
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(move, value)


# Sources of cases --------------------------------------------------------------------------------


def op_cases(chunk: int, chunks: int, device: str, per_op: int | None = None) -> Iterator[Case]:
    """Yield every `chunks`-th operator with its first samples, or all: float32, then float64."""
    for op in op_db[chunk::chunks]:
        if op.name != FILLED_TOO_LATE:
            yield from cases_of(op, device, per_op)


def cases_of(op: Any, device: str, per_op: int | None = None) -> Iterator[Case]:
    """Yield the samples of one operator in float32.

    Outside the default lane, one in float64 as well.
    """
    known = op.supported_dtypes("cpu") if op.supports_autograd else set()
    for dtype, most in ((torch.float32, per_op), (torch.float64, by_lane(0, 1))):
        if dtype not in known:
            continue
        torch.manual_seed(SEED)
        try:
            samples = samples_of(op, dtype, most)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue  # needs a library or device that is missing
        for i, sample in enumerate(samples):
            values = (sample.input, tuple(sample.args), dict(sample.kwargs))
            try:
                values = moved(values, device)
            except (RuntimeError, NotImplementedError):
                continue  # a layout that the device does not support
            name = f"{op.name}.{op.variant_test_name} {dtype} sample {i}"
            yield Case(name, functools.partial(op_forward, op, *values))


def samples_of(op: Any, dtype: torch.dtype, most: int | None) -> list[Any]:
    """Return the first `most` samples (None: all) of an operator on the CPU that need a gradient.

    For each operator torch reads the source of every frame on the stack, to find the unittest that
    it serves. There is none here, and the search took nine tenths of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_utils, "extract_test_fn", lambda: None)
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), most))


def op_forward(op: Any, first: Any, args: Any, kwargs: Any) -> Forward:
    torch.manual_seed(SEED)
    outputs = differentiable(op.op(first, *args, **kwargs))
    return Forward(outputs, differentiable((first, args, kwargs)))


def module_cases(chunk: int, chunks: int, device: str, per_module: int | None) -> Iterator[Case]:
    """Yield every `chunks`-th module, in training mode, with its first samples, or all."""
    for info in module_db[chunk::chunks]:
        torch.manual_seed(SEED)
        try:
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
            )
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue
        for i, sample in enumerate(samples[:per_module]):
            if sample.forward_input is None:
                continue
            inputs = (sample.forward_input.args, sample.forward_input.kwargs)
            built = (info.module_cls, sample.constructor_input, moved(inputs, device), device)
            yield Case(f"{info.name} sample {i}", functools.partial(module_forward, *built))


def module_forward(module_class: Any, made_of: Any, inputs: Any, device: str) -> Forward:
    torch.manual_seed(SEED)
    module = module_class(*made_of.args, **made_of.kwargs).to(device).train()
    args, kwargs = inputs
    outputs = differentiable(module(*args, **kwargs))
    return Forward(outputs, [*module.parameters(), *differentiable(inputs)])


# Running cases -----------------------------------------------------------------------------------


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether the numbers are the same; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.layout is not torch.strided:
        if one.layout is not other.layout:
            return False
        one, other = one.to_dense(), other.to_dense()
    facts = [(t.dtype, t.device, t.shape) for t in (one, other)]
    if facts[0] != facts[1]:
        return False
    equal = torch.equal(one, other)
    return equal or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def all_same(found: Gradients, wanted: Gradients) -> bool:
    return all(same(one, other) for one, other in zip(found, wanted, strict=True))


def difference(found: Gradients, wanted: Gradients) -> str:
    """Return the largest difference as text; empty if there is none."""
    if all_same(found, wanted):
        return ""
    pairs = [pair for pair in zip(found, wanted, strict=True) if not same(*pair)]
    one, other = pairs[0]
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return "more than numbers"
    return f"{(one.to_dense() - other.to_dense()).abs().max().item():.3g}"


def run_plainly(cases: Iterator[Case]) -> tuple[list[Plain], Saved, int]:
    """Run cases without the store; return those that run and give the same result twice.

    Also returns what they save in total except for the leaves, which are present anyway, and the
    cases' bytes.
    """
    kept: list[Plain] = []
    saved = Saved()
    graphs = []  # all alive at once, as with the store
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            try:
                first, second = case.forward(), case.forward()
                if not first.outputs or not first.leaves:
                    continue
                gradients = first.backward()
                if not all_same(second.backward(), gradients):
                    continue  # random, or reads uninitialised memory
                with saved.watching():
                    graphs.append(case.forward())
            except Exception:  # torch itself cannot run this: nothing to compare with
                continue
            kept.append(Plain(case, gradients))
    total = saved.nbytes
    for graph in graphs:
        saved.without(graph.leaves)
    return kept, saved, total


def differences(cases: list[Plain], context: AbstractContextManager[Any]) -> list[str]:
    """Return the cases whose gradients differ, and by how much, with `context` around the forwards.

    All forwards run first, then all backwards in reverse: as much is saved at once as in the layers
    of a model.
    """
    found: list[str] = []
    graphs: list[tuple[Plain, Forward]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context:
            for plain in cases:
                try:
                    graphs.append((plain, plain.case.forward()))
                except Exception as error:
                    found.append(f"{plain.case.name}: forward: {error!r}")
        while graphs:
            plain, forward = graphs.pop()
            try:
                if by := difference(forward.backward(), plain.gradients):
                    found.append(f"{plain.case.name}: the gradient differs by {by}")
            except Exception as error:
                found.append(f"{plain.case.name}: backward: {error!r}")
    return found
