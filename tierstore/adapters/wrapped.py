"""Tensors of a model that consist of others, such as quantised weights: the others are offloaded.

See `tierstore.adapters.codecs`. The tensor stays the same object and consists of the same ones,
which show other memory while they are in use. Nothing has to be done to it where the store's device
is the CPU. On an accelerator it would still say that it is on the CPU, so that another one, around
the same memory, takes its place meanwhile.
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
    """One of them, and its `leaves` by their names."""

    __slots__ = ("_looks", "_other", "_users", "leaves", "tensor")

    def __init__(self, tensor: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> None:
        self.tensor = tensor
        self.leaves = leaves
        self._looks = [(attrgetter(name), leaf) for name, leaf in leaves.items() if name]
        self._users: set[object] = set()
        self._other: torch.Tensor | None = None

    @property
    def intact(self) -> bool:
        """Whether it is in use, or still consists of these very leaves."""
        if self._users:
            return True
        try:
            return all(look(self.tensor) is leaf for look, leaf in self._looks)
        except AttributeError:
            return False

    def show(self, use: object) -> None:
        """Its leaves are on an accelerator while `use` lasts."""
        if not self._users and is_wrapper(self.tensor):
            self._other = rebuilt(self.tensor, leaves_of(self.tensor))
            exchange(self.tensor, self._other)
        self._users.add(use)

    def put_back(self, use: object) -> None:
        """The use is over, and the leaves go back. May be repeated if interrupted."""
        self._users.discard(use)
        if self._users or self._other is None:
            return
        if self.tensor.device.type != "cpu":  # otherwise an interrupt came after the exchange
            exchange(self.tensor, self._other)
        self._other = None


def wrapped_tensors(tensors: Iterable[torch.Tensor]) -> list[WrappedTensor]:
    """Those that consist of others which a store can hold, each once."""
    found = []
    for tensor in dict((id(t), t) for t in tensors).values():
        leaves = movable_leaves(tensor)
        if leaves and leaves.keys() != {""}:
            found.append(WrappedTensor(tensor, leaves))
    return found


def leaf_ids(module: nn.Module, *, recurse: bool) -> set[int]:
    """The ids of the leaves of a module's parameters and buffers."""
    return {
        id(leaf)
        for tensor in tensors_of(module, recurse=recurse)
        for leaf in leaves_of(tensor).values()
    }
