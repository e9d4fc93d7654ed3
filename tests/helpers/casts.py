"""Casts of weights that are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Context that tracks casts of tensors with one of these shapes, and their live bytes.

    `peak` is the most bytes at once, `total` the number of casts.
    """

    def __init__(self, shapes: Iterable[torch.Size]) -> None:
        super().__init__()
        self.peak = 0
        self.total = 0
        self._shapes = set(shapes)
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape in self._shapes:
            self._alive.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            self.total += result.nbytes
            self.peak = max(self.peak, self.alive)
        return result

    @property
    def alive(self) -> int:
        """Return the live bytes."""
        self._alive = [(ref, nbytes) for ref, nbytes in self._alive if not ref.expired()]
        return sum(nbytes for _, nbytes in self._alive)
