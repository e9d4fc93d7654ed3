"""Saved-tensor hooks that replace saved weights by references, leased again in backward.

While a module runs with leased weights, `WeightHooks` are active. They replace each view of a
leased weight that autograd saves by an `Unpack`, which records the weight and the view's geometry.
The backward pass calls it, and the weight is leased again (`BackwardLeases`). The weight's memory
is free for other groups between the passes, and gradients are bit-equal: the restored tensor has
the same bytes and strides, and at least the same alignment.

Used for inference and training; a `LeaseOwner` leases the weights again.

(PyTorch's FSDP2, `torch.distributed.fsdp`, frees and refills the storages themselves. That is also
exact, but needs resizable memory; neither a pool of pinned memory nor a map is resizable.)
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tierstore.adapters.activations import Unpack, packed_in_place
from tierstore.adapters.activations.in_place import check_unchanged, described
from tierstore.adapters.binding import BindingPolicy, ParameterBinding
from tierstore.adapters.codecs.memory import Geometry, address_of, geometry_of, span
from tierstore.adapters.codecs.wrapper import WrapperCodec, is_wrapper
from tierstore.adapters.compat import PackView
from tierstore.adapters.view_lifetime import TensorLease
from tierstore.torch_private import (
    after_backward,
    base_of,
    in_backward,
    saved_tensor_hooks,
    version_of,
)

_CAST = "ToCopyBackward0"
"""Name of the autograd node of a cast."""


class WeightHooks:
    """Hooks that replace weights among saved tensors, and pass other tensors to the outer hooks."""

    def __init__(self, pack_view: PackView) -> None:
        self._pack_view = pack_view
        self._outer = saved_tensor_hooks()

    @property
    def hooks(self) -> Any:
        """New hooks to enter. Not cached: they hold a reference to this object."""
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
        """Return an `Unpack` for a view of a leased weight, or of its cast; else None.

        Autocast makes such casts; the `Unpack` casts the weight again.
        """
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
        """Return an `Unpack` for a wrapper tensor with a leased weight inside; else None."""
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


def other_hooks_active() -> bool:
    """Return whether saved-tensor hooks of another library are active.

    Hooks of this library are skipped: an enclosing module whose weights are in use has them active.
    """
    top = saved_tensor_hooks()
    while top is not None and isinstance(getattr(top[0], "__self__", None), WeightHooks):
        outer: WeightHooks = top[0].__self__  # type: ignore[attr-defined]
        top = outer._outer
    return top is not None


def _cast_in(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the leaf and its cast if a saved tensor is a cast of a leaf, or a view of one."""
    base = base_of(tensor)
    cast = tensor if base is None else base
    node = cast.grad_fn
    if node is None or node.name() != _CAST or version_of(cast):  # changed since the cast
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.device != cast.device:
        return None
    return leaf, cast


@torch.no_grad()
def _cast_again(weight: Unpack, cast: Geometry, geometry: Geometry) -> torch.Tensor:
    """Cast a weight again, and return a view with the same bytes and layout as the saved one."""
    return geometry.within(cast.empty().copy_(weight()))


# Views of weights ---------------------------------------------------------------------------------


class LeasedMemory(NamedTuple):
    """Memory of a leased tensor: `name` in group `key`, and the binding of the weight."""

    start: int
    stop: int
    binding: ParameterBinding
    key: str
    name: str

    @staticmethod
    def of(tensor: torch.Tensor, binding: ParameterBinding, key: str, name: str) -> LeasedMemory:
        """Return the memory of a tensor, which must not be empty."""
        start = address_of(tensor)
        return LeasedMemory(start, start + span(tensor), binding, key, name)


class LeaseOwner(Protocol):
    """Leases the groups of one model."""

    def lease_again(self, memory: LeasedMemory) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the memory's group, on the device, for a backward pass.

        Raises RuntimeError if the weight has changed.
        """


class SavedViews:
    """Recognizes views of the weights leased for one run of a unit."""

    def __init__(
        self,
        owner: LeaseOwner,
        bindings: Iterable[ParameterBinding],
        leased: Mapping[str, torch.Tensor],
    ) -> None:
        self._owner = owner
        shown = [(b, leased[b.name]) for b in bindings if leased[b.name].numel()]
        self._leased = [LeasedMemory.of(t, b, b.key, b.name) for b, t in shown]
        self._device = shown[0][1].device if shown else None
        self._start = min((each.start for each in self._leased), default=0)
        self._stop = max((each.stop for each in self._leased), default=0)

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        """Return an `Unpack` for a saved tensor that is a view of a leased weight; else None."""
        if not self._start <= address_of(tensor) < self._stop or tensor.device != self._device:
            return None
        return pack_view(self._owner, self._leased, tensor)


def pack_view(
    owner: LeaseOwner, leased: Iterable[LeasedMemory], tensor: torch.Tensor
) -> Unpack | None:
    """Return an `Unpack` for a saved tensor that is a view of leased memory; else None."""
    address = address_of(tensor)
    for each in leased:
        if each.start <= address < each.stop:
            geometry = geometry_of(tensor)
            origin = geometry.offset * tensor.element_size() - (address - each.start)
            note = version_of(each.binding.tensor), origin, geometry, described(tensor)
            return functools.partial(_view_again, owner, each, *note)
    return None


@torch.no_grad()
def _view_again(
    owner: LeaseOwner,
    memory: LeasedMemory,
    version: int,
    origin: int,
    geometry: Geometry,
    description: str,
) -> torch.Tensor:
    """Lease a weight again, and return the view that was saved at `version`.

    `origin` is the offset of the weight in the storage of the view, in bytes. Raises RuntimeError
    if the weight has changed.
    """
    binding = memory.binding
    if binding.policy is not BindingPolicy.MUTABLE:
        if binding.tensor.requires_grad:
            raise_on_backward()
        version = binding.version  # a changed weight has another group, so `lease_again` raises
    check_unchanged(description, version_of(binding.tensor), version)
    return geometry.within(owner.lease_again(memory)[memory.name], origin)


def raise_on_backward(*gradients: Any) -> None:
    """Raise the error for a backward pass through weights that have been released."""
    raise RuntimeError(
        "this backward needs weights that have left the device since the forward: a TierStore "
        "holds them. If you need no gradient, run the forward under torch.no_grad(). To train a "
        "few weights, freeze the others first (model.requires_grad_(False)). To train all of them, "
        "call tierstore.disable_offload(model), then OffloadModel(model, store)"
    )


class BackwardLeases:
    """Leases of the groups that a backward pass used last, released when it ends.

    At most `limit` groups (None: all) stay leased. The oldest lease is released before a new one is
    taken, so a backward pass never waits for itself. Memory with live views is freed with the last
    view.
    """

    def __init__(self, lease: Callable[[str], TensorLease], limit: int | None) -> None:
        self._lease = lease
        self._limit = limit
        self._leases: OrderedDict[str, TensorLease] = OrderedDict()
        self._lock = threading.RLock()

    def tensors(self, key: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a group on the device, valid as long as any view of them exists.

        Raises the errors of the lease.
        """
        with self._lock:
            if (found := self._leases.get(key)) is not None:
                self._leases.move_to_end(key)
                return found.tensors
        while self._limit is not None and len(self._leases) >= self._limit:
            self._release_oldest()
        lease = self._lease(key)
        tensors = lease.tensors
        if in_backward():
            after_backward(self.release_all)
            with self._lock:
                before = self._leases.pop(key, None)
                self._leases[key] = lease
            if before is not None:
                before.release()
        return tensors

    def release(self, keys: Iterable[str]) -> None:
        """Release these groups."""
        with self._lock:
            leases = [self._leases.pop(key) for key in keys if key in self._leases]
        for lease in leases:
            lease.release()

    def release_all(self) -> None:
        """Release all leases."""
        while self._leases:
            self._release_oldest()

    def _release_oldest(self) -> None:
        with self._lock:
            lease = self._leases.popitem(last=False)[1] if self._leases else None
        if lease is not None:
            lease.release()
