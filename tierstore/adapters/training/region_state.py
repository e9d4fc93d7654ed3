"""What a region finds that it may change itself, as it was before its first run.

These are the buffers of its modules (statistics, the vectors of a spectral norm), and caches of
keys and values that it is given. The first run works on them, as any call does. Later runs work on
copies of what they were before it, and change nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tierstore.adapters.codecs import is_movable
from tierstore.torch_private import tree_map

SMALL = 64 << 10
"""Bytes of a buffer whose copy is kept without asking whether the buffer has changed: on an
accelerator, the answer has to be waited for."""


class Buffers:
    """The buffers of modules, as they are now."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [
            (module._buffers, name, buffer, None if buffer is None else buffer.clone())
            for part in modules
            for module in part.modules()
            for name, buffer in module._buffers.items()
        ]

    def keep_changed(self) -> None:
        """The first run is over: large buffers that it did not change need no copy."""
        self._before = [
            (buffers, name, buffer, buffer if _same(buffer, before) else before)
            for buffers, name, buffer, before in self._before
        ]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """The modules have copies of what they had then, for as long as this lasts."""
        now = [(buffers, name, buffers.get(name)) for buffers, name, _, _ in self._before]
        for buffers, name, _, before in self._before:
            buffers[name] = None if before is None else before.clone()
        try:
            yield
        finally:
            for buffers, name, buffer in now:
                buffers[name] = buffer


def _same(buffer: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    # Values are compared: what is written through `.data` has no version.
    if buffer is None or before is None or not is_movable(before) or before.nbytes < SMALL:
        return False
    return torch.equal(buffer, before)


class Caches:
    """The caches among the arguments of a call.

    Arguments are held as long as the graph. A cache is not: it gets tensors from the run, which
    hold the graph, and neither would ever go.
    """

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._before: list[Any] = []

    def taken_out_of(self, arguments: Any) -> Any:
        """The arguments, with places instead of caches."""
        return tree_map(self._place_of, arguments)

    def put_into(self, arguments: Any, *, again: bool) -> Any:
        """The arguments with the caches: their own the first time, `again` with copies."""
        found = [_copied(cache) for cache in self._before] if again else self._given
        self._given = []
        return tree_map(lambda leaf: found[leaf] if isinstance(leaf, _Place) else leaf, arguments)

    def _place_of(self, leaf: Any) -> Any:
        if not _is_cache(leaf):
            return leaf
        self._given.append(leaf)
        self._before.append(_copied(leaf))
        return _Place(len(self._given) - 1)


class _Place(int):
    """Which cache belongs here."""


def _is_cache(value: Any) -> bool:
    """Whether it is a cache as transformers has them, or one layer of it."""
    return hasattr(value, "get_seq_length") or hasattr(value, "update_conv_state")


def _copied(value: Any) -> Any:
    """A cache with layers, lists and dicts of its own, and the same tensors: new keys and values
    are joined to the old ones in new memory."""
    if type(value) is list:
        return [_copied(each) for each in value]
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    if not _is_cache(value):
        return value
    made = copy.copy(value)
    made.__dict__.update(_copied(vars(value)))
    return made
