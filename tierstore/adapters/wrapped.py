"""Wrapper tensors, such as quantised weights, whose inner tensors are offloaded.

See `tierstore.adapters.codecs`. The wrapper stays the same object with the same inner tensors,
which show leased memory while in use. If the store's device is the CPU, the wrapper needs no
change. On an accelerator it would still report the CPU as its device, so it is exchanged with a new
wrapper around the same memory while in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch
from torch import nn

from tierstore.adapters.codecs import leaves_of, movable_leaves, rebuilt
from tierstore.adapters.codecs.wrapper import exchange, is_wrapper
from tierstore.adapters.contents import tensors_of


class WrappedTensor:
    """A wrapper tensor, and its `leaves` by name."""

    __slots__ = ("_getters", "_other", "_users", "leaves", "tensor")

    def __init__(self, tensor: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        self.tensor = tensor
        self.leaves = leaves
        self._getters = [(attrgetter(name), leaf) for name, leaf in leaves.items() if name]
        self._users: set[object] = set()
        self._other: torch.Tensor | None = None

    @property
    def valid(self) -> bool:
        """True if the wrapper is in use, or still has these very leaves."""
        if self._users:
            return True
        try:
            return all(get(self.tensor) is leaf for get, leaf in self._getters)
        except AttributeError:
            return False

    def bind(self, user: object) -> None:
        """Exchange the wrapper for one on the accelerator, for the context `user`."""
        if not self._users and is_wrapper(self.tensor):
            self._other = rebuilt(self.tensor, leaves_of(self.tensor))
            exchange(self.tensor, self._other)
        self._users.add(user)

    def unbind(self, user: object) -> None:
        """Restore the wrapper when its last context ends. Can be repeated if interrupted."""
        self._users.discard(user)
        if self._users or self._other is None:
            return
        if self.tensor.device.type != "cpu":  # else an interrupted call has exchanged it already
            exchange(self.tensor, self._other)
        self._other = None


def wrapped_tensors(tensors: Iterable[torch.Tensor]) -> list[WrappedTensor]:
    """Return the wrapper tensors whose leaves a store can hold, each once."""
    found = []
    for tensor in dict((id(t), t) for t in tensors).values():
        leaves = movable_leaves(tensor)
        if leaves and leaves.keys() != {""}:
            found.append(WrappedTensor(tensor, leaves))
    return found


def leaf_ids(module: nn.Module, *, recurse: bool) -> set[int]:
    """Return the ids of the leaves of a module's parameters and buffers."""
    return {
        id(leaf)
        for tensor in tensors_of(module, recurse=recurse)
        for leaf in leaves_of(tensor).values()
    }
