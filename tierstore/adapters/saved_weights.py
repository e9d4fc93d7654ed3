"""Weights in what autograd saves: not their memory, but what brings them back.

Whoever lends memory to weights while a module runs turns `WeightHooks` on for as long. Of what
autograd saves meanwhile, a view of a lent weight is replaced by an `Unpack`: which weight it was,
and how it was looked at. The backward pass, which wants it back, calls that, and the weight is
borrowed again. So the memory of a weight serves others between the passes, and gradients are the
same to the last bit: what comes back has the same bytes, the same strides, and an alignment as
good.

(FSDP2 of PyTorch frees and refills the storages themselves, `torch.distributed.fsdp`. That is as
exact, but wants memory that can be resized, which neither a pool of pinned memory nor a map is.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tierstore.adapters.activations import Unpack, packed_in_place
from tierstore.adapters.codecs.memory import Geometry, geometry_of
from tierstore.adapters.codecs.wrapper import WrapperCodec, is_wrapper
from tierstore.adapters.compat import PackView
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.store import TierStore
from tierstore.torch_private import (
    after_backward,
    base_of,
    in_backward,
    saved_tensor_hooks,
    version_of,
)

_CAST = "ToCopyBackward0"
"""What autograd calls a cast."""


class WeightHooks:
    """Takes the weights out of what autograd saves, and hands the rest on to those before it."""

    def __init__(self, pack_view: PackView) -> None:
        self._pack_view = pack_view
        self._outer = saved_tensor_hooks()

    @property
    def hooks(self) -> Any:
        """Hooks to enter. Kept nowhere: they keep us, and what was around us."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: torch.Tensor) -> Unpack:
        with torch.no_grad():
            found = self._pack_weight(tensor)
        if found is not None:
            return found
        if self._outer is not None:
            pack, unpack = self._outer
            return functools.partial(unpack, pack(tensor))
        return packed_in_place(tensor)

    def _pack_weight(self, tensor: torch.Tensor) -> Unpack | None:
        """What brings a saved tensor back, if it is a view of a weight that is lent, or of such
        a weight's cast, as autocast makes them: that is cast again when it is wanted."""
        if is_wrapper(tensor):
            return self._pack_parts(tensor)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        found = self._pack_view(tensor)
        if found is not None or (made := _cast_in(tensor)) is None:
            return found
        leaf, cast = made
        weight = self._pack_view(leaf)
        if weight is None:
            return None
        return functools.partial(_cast_again, weight, geometry_of(cast), geometry_of(tensor))

    def _pack_parts(self, tensor: torch.Tensor) -> Unpack | None:
        """What brings a tensor back that consists of others, if a weight that is lent is in it."""
        codec = WrapperCodec()
        parts = codec.flatten(tensor)
        found = {name: self._pack_weight(part) for name, part in parts.items()}
        if not any(found.values()):
            return None
        rebuild = codec.rebuilder(tensor)
        each = {name: found[name] or packed_in_place(part) for name, part in parts.items()}
        return lambda: rebuild({name: unpack() for name, unpack in each.items()})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpack(self, unpack: Unpack) -> torch.Tensor:
        return unpack()


def other_hooks_are_on() -> bool:
    """Whether somebody else's hooks are on for what autograd saves. A module around this one whose
    own weights are in use has ours on."""
    top = saved_tensor_hooks()
    while top is not None and isinstance(getattr(top[0], "__self__", None), WeightHooks):
        outer: WeightHooks = top[0].__self__  # type: ignore[attr-defined]
        top = outer._outer
    return top is not None


def _cast_in(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The leaf that a saved tensor is a cast of, or a view of one, and the cast."""
    base = base_of(tensor)
    cast = tensor if base is None else base
    node = cast.grad_fn
    if node is None or node.name() != _CAST or version_of(cast):  # it was changed since
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.device != cast.device:
        return None
    return leaf, cast


@torch.no_grad()
def _cast_again(weight: Unpack, cast: Geometry, geometry: Geometry) -> torch.Tensor:
    """A view of a weight's cast: the same bytes, laid out in the same way."""
    return geometry.within(cast.empty().copy_(weight()))


class LastLease:
    """The group that a backward pass used last: leased until it uses another one, or is over.

    It is let go of before another is asked for, so that a backward pass never waits for itself.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._held: tuple[str, ViewLease] | None = None
        self._lock = threading.RLock()

    def tensors(self, key: str) -> Mapping[str, torch.Tensor]:
        """The tensors of a group, on the device for as long as anybody looks at them.

        Raises what `acquire` raises.
        """
        with self._lock:
            if self._held is not None and self._held[0] == key:
                return self._held[1].tensors
        self.give_back()
        lease = ViewLease(self._store.acquire(key))
        tensors = lease.tensors
        if in_backward():
            after_backward(self.give_back)
            with self._lock:
                self._held, lease_before = (key, lease), self._held
            if lease_before is not None:
                lease_before[1].end()
        return tensors

    def give_back(self) -> None:
        """Let go of it. What somebody looks at stays until nobody does."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held[1].end()
