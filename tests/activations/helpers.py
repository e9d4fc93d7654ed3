"""Helpers of the activation tests: small steps, a record of saved tensors, and an empty store."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import tierstore
from tests.store.helpers import PAGE, PATIENCE, on_both, open_store
from tierstore import TierStore
from tierstore.model.sizes import round_up

__all__ = [
    "FRACTIONS",
    "MIB",
    "SMALL",
    "Saved",
    "assert_equal",
    "assert_nothing_left",
    "budget_for",
    "chain",
    "forget_graphs",
    "offloading",
    "on_both",
    "open_store",
    "plain_gradients",
    "random_matrices",
    "saved_by",
]

MIB = 1 << 20
SMALL = 4096
"""The `min_size` of most tests, in bytes: their samples are small."""

FRACTIONS = (0.1, 0.5, 2.0)
"""RAM budgets, as fractions of the bytes that a step saves."""


def offloading(store: TierStore, min_size: int | str = SMALL, **options: Any) -> Any:
    """Return the context under test."""
    return tierstore.offload_activations(store, min_size=min_size, **options)


# Saved tensors -----------------------------------------------------------------------------------


@dataclass
class Saved:
    """The tensors that autograd saves in a run without the store.

    They are recorded by hooks that change nothing. `storages` maps each storage that a saved tensor
    views to its size in bytes; `small` is the part of them of which no saved tensor is as large as
    `min_size`.
    """

    min_size: int = 0
    storages: dict[tuple[torch.device, int], int] = field(default_factory=dict)
    small: dict[tuple[torch.device, int], int] = field(default_factory=dict)
    tensors: int = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pack hook. The graph keeps the returned tensor, so no address is reused."""
        if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            self.tensors += 1
            storage = tensor.untyped_storage()
            where = (tensor.device, storage.data_ptr())
            known = where in self.storages
            self.storages[where] = storage.nbytes()
            if tensor.nbytes >= self.min_size:
                self.small.pop(where, None)
            elif not known:
                self.small[where] = storage.nbytes()
        return tensor.detach()

    def without(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude the memory of these tensors: parameters, buffers, inputs."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            where = (tensor.device, tensor.untyped_storage().data_ptr())
            self.storages.pop(where, None)
            self.small.pop(where, None)

    def watching(self) -> AbstractContextManager[Any]:
        """Record the tensors that autograd saves inside the context."""
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)

    @property
    def nbytes(self) -> int:
        """Return the total bytes, counting each storage once."""
        return sum(self.storages.values())

    @property
    def small_bytes(self) -> int:
        """Return the bytes of storages that are too small to offload."""
        return sum(self.small.values())

    @property
    def largest(self) -> int:
        """Return the bytes of the largest storage."""
        return max(self.storages.values(), default=0)

    @property
    def pages(self) -> int:
        """Return the most bytes that a store needs to hold all of them in RAM.

        Each takes whole pages.
        """
        return sum(round_up(max(nbytes, 1), PAGE) for nbytes in self.storages.values())


@contextmanager
def saved_by(min_size: int = 0) -> Iterator[Saved]:
    """Record the tensors that autograd saves inside the context."""
    saved = Saved(min_size)
    with saved.watching():
        yield saved


def budget_for(saved: Saved, fraction: float) -> int:
    """Return a RAM budget: a fraction of the saved bytes, but enough for the largest storage."""
    return max(int(saved.pages * fraction), round_up(max(saved.largest, 1), PAGE))


# Steps -------------------------------------------------------------------------------------------


def random_matrices(count: int, device: str, size: int = 64, seed: int = 0) -> list[torch.Tensor]:
    """Return `count` random square matrices of float32 that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, size, generator=generator) * size**-0.5 for _ in range(count)]
    return [matrix.to(device).requires_grad_() for matrix in made]


def chain(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a loss that saves two tensors as large as `x` for each weight."""
    for weight in weights:
        x = torch.sin(torch.tanh(x @ weight))
    return x.square().mean()


def plain_gradients(
    loss: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    context: AbstractContextManager[Any] | None = None,
) -> list[torch.Tensor]:
    """Return the gradients of a loss; `context` is around its forward alone."""
    with context or nullcontext():
        value = loss()
    return list(torch.autograd.grad(value, leaves))


def assert_equal(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    """Check that the tensors are bitwise equal and on the same devices."""
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.device == other.device, f"tensor {i} is on {one.device}, not {other.device}"
        assert torch.equal(one, other), f"tensor {i} differs"


# Leaks -------------------------------------------------------------------------------------------


def forget_graphs() -> None:
    """Collect cycles, so that memory held only by dropped graphs is freed."""
    gc.collect()


def assert_nothing_left(store: TierStore) -> None:
    """Check that the store has no group and uses no bytes on any tier, once all copies are done."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        forget_graphs()  # an error holds its backward's frames until another thread drops it
        snapshot = store.snapshot()
        if not snapshot.groups and not any(snapshot.used_bytes.values()):
            return
        pause.wait(0.05)
    raise AssertionError(f"the store still holds {store.snapshot()}")
