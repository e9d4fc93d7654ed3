"""Training with more activations than the memory holds: what autograd saves goes to a store.

    with tierstore.offload_activations(store):
        loss = model(x)
    loss.backward()

Built on `torch.autograd.graph.saved_tensors_hooks`. Any such hook switches autograd's own check for
changes in place off, so it is made here. What comes back has the same bytes, strides, dtype and
device (with its index) as what was saved; gradients are the same to the last bit.

What is put aside is copied once per storage and version, however many saved tensors look at it. It
stays in the store as long as the graph that saved it: unpacking twice (`retain_graph`) is fine, and
a graph that is dropped leaves nothing behind. On an accelerator, copies run beside the forward
pass; in the backward pass the store is told what comes next, which is what was packed before.

What stays where it is, and why, is counted in `store.stats().activations.skipped`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tierstore.adapters.activations.cache import SavedPiece, SavedTensorCache
from tierstore.adapters.activations.in_place import described, refuse_changed
from tierstore.adapters.codecs.memory import Geometry, geometry_of, has_address, storage_id_of
from tierstore.adapters.compat import Unpack as Unpack
from tierstore.adapters.contents import tensors_of
from tierstore.model.formatting import size
from tierstore.model.sizes import parse_size
from tierstore.observe.report import Shown, shown_by
from tierstore.observe.stats import facts_of
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import (
    base_of,
    in_backward,
    is_functorch_wrapped,
    storage_id,
    version_of,
)

PLAIN = (torch.Tensor, nn.Parameter)
HELD = (nn.Parameter, nn.Buffer)

_caches: weakref.WeakKeyDictionary[TierStore, weakref.ref[SavedTensorCache]] = (
    weakref.WeakKeyDictionary()
)
_caches_lock = threading.RLock()


class _Active(threading.local):
    """What the running thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[tuple[ActivationOffload, Any]] = []


_active = _Active()


def _cache_of(store: TierStore) -> SavedTensorCache:
    with _caches_lock:
        known = _caches.get(store)
        cache = None if known is None else known()
        if cache is None:
            cache = SavedTensorCache(store)
            _caches[store] = weakref.ref(cache)
        return cache


def packed_in_place(tensor: torch.Tensor, piece: SavedPiece | None = None) -> Unpack:
    """Pack a tensor that stays where it is. `piece` is counted once, as long as there is one.

    Not the tensor itself: an output that its own graph holds would be held for ever.
    """
    what = tensor.detach(), version_of(tensor), described(tensor)
    return functools.partial(_unpacked_in_place, *what, piece)


def _unpacked_in_place(
    tensor: torch.Tensor, version: int, description: str, piece: SavedPiece | None
) -> torch.Tensor:
    refuse_changed(description, version_of(tensor), version)
    return tensor


def _unpacked(piece: SavedPiece, geometry: Geometry, description: str) -> torch.Tensor:
    """The tensor that was put aside, as it was."""
    piece.watch.check(description)
    return piece.build(geometry)


class ActivationOffload:
    """Puts what autograd saves inside of it into a store. `offload_activations` makes it.

    It may be entered any number of times, one after the other, in one another, and by several
    threads: hooks are a thread's own, so a forward pass in a worker thread enters it there.

    Attributes:
        store: where it goes.
        min_size: bytes; smaller pieces of memory stay where they are.
    """

    def __init__(self, store: TierStore, min_size: int, modules: Iterable[nn.Module]) -> None:
        self.store = store
        self.min_size = min_size
        self._modules = tuple(modules)
        self._cache = _cache_of(store)
        # Weak references: as long as there is one, nobody else gets the address of a storage.
        self._parameters: dict[int, StorageWeakRef] = {}

    __repr__, __rich__, _repr_html_ = shown_by(lambda offload: _look(offload))

    def __enter__(self) -> ActivationOffload:
        for cdata in [cdata for cdata, ref in self._parameters.items() if ref.expired()]:
            self._parameters.pop(cdata, None)
        for tensor in _tensors_of(self._modules):
            self._remember(tensor)
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        _active.entered.append((self, hooks))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _, hooks = _active.entered.pop()
        hooks.__exit__(kind, *error)
        self._cache.release_copied(but=None if kind else 0)

    # Packing -----------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Unpack:
        with torch.no_grad():
            if not _is_plain(tensor):
                self._cache.counts.kept("unsupported", _nbytes(tensor))
                return packed_in_place(tensor)
            reason = self._why_skipped(tensor)
            if reason == "other_device" and (other := self._offload_for(tensor.device)):
                return other._pack(tensor)
            return self._skipped(tensor, reason) if reason else self._saved(tensor)

    def _why_skipped(self, tensor: torch.Tensor) -> str:
        if in_backward():
            return "recomputed"  # by a checkpoint, or to be differentiated again: used at once
        if self._is_parameter(tensor):
            return "parameter"
        return "" if tensor.device == self.store.device else "other_device"

    def _offload_for(self, device: torch.device) -> ActivationOffload | None:
        """The innermost of those around this one whose store is on `device`."""
        around = [offload for offload, _ in _active.entered if offload.store.device == device]
        return around[-1] if around else None

    def _skipped(self, tensor: torch.Tensor, reason: str) -> Unpack:
        storage = tensor.untyped_storage()
        piece = self._cache.piece(tensor, (0, storage.nbytes()))
        self._cache.skip(piece, reason)
        return packed_in_place(tensor, piece)

    def _saved(self, tensor: torch.Tensor) -> Unpack:
        storage, geometry = tensor.untyped_storage(), geometry_of(tensor)
        piece = self._cache.piece(tensor, geometry.span(storage.nbytes()))
        self._cache.save(piece, geometry, self.min_size)
        return functools.partial(_unpacked, piece, geometry, described(tensor))

    # Parameters --------------------------------------------------------------------------------

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether the memory is a parameter's, a buffer's, or a leaf's that wants a gradient.

        `nn.Linear` saves a view of its weight, which is a plain tensor: so look at the memory.
        """
        if storage_id_of(tensor) in self._parameters:
            return True
        for held in (tensor, base_of(tensor)):
            if isinstance(held, HELD):
                self._remember(held)
                return True
            # The graph's node for the gradient of a leaf holds the leaf.
            if held is not None and held.is_leaf and held.requires_grad:
                return True
        return False

    def _remember(self, tensor: torch.Tensor) -> None:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            self._parameters.setdefault(storage_id(storage), StorageWeakRef(storage))


def _look(offload: ActivationOffload) -> Shown:
    if "_cache" not in vars(offload):
        return Shown("ActivationOffload, not made yet")
    store = engine_of(offload.store).reporting.look()
    title = f"ActivationOffload of {size(offload.min_size)} and more; {store.title}"
    return Shown(title, facts=facts_of(offload._cache.counts.glance()))


def offload_activations(
    store: TierStore,
    *,
    min_size: int | str = "1MB",
    model: nn.Module | Iterable[nn.Module] | None = None,
) -> ActivationOffload:
    """Put what autograd saves in a forward pass into `store`, until the backward pass wants it.

        with offload_activations(store, model=model):
            loss = model(x)
        loss.backward()

    Use it around the forward pass of any model; the backward pass may be inside or outside. What
    comes back has the same bytes, shape, strides, dtype and device: gradients are the same to the
    last bit. What stays where it is, `store.stats().activations` counts by reason. Built on
    `torch.autograd.graph.saved_tensors_hooks`: of several such hooks only the innermost apply.

    A forward pass raises what `TierStore.put` raises (BudgetError if the disk budget is used up), a
    backward pass what `TierStore.acquire` raises, and torch's own RuntimeError for a saved tensor
    that was changed in place, also if a backward pass gave it away as a gradient.

    Args:
        store: where it goes. A store serves one device: for a model on several devices, enter one
            for each, in one another.
        min_size: bytes (an int, or like `"1MB"`); smaller pieces of memory stay where they are.
        model: a module, or several, whose parameters and buffers are recognised in any disguise.
            Without it, frozen parameters that were detached, and buffers, count as activations.

    Returns:
        A context manager, to be entered for one step or for many.

    Raises:
        ValueError: `min_size` is no number of bytes.
    """
    modules = [model] if isinstance(model, nn.Module) else model or ()
    return ActivationOffload(store, _bytes_of(min_size), modules)


def _bytes_of(min_size: int | str) -> int:
    if isinstance(min_size, float) or (isinstance(min_size, str) and "%" in min_size):
        raise ValueError(f"min_size={min_size!r} is a share of nothing: give bytes, or like '1MB'")
    return parse_size(min_size) if min_size else 0


@torch.no_grad()
def _unpack(unpack: Unpack) -> torch.Tensor:
    return unpack()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is bytes with strides, and nothing else."""
    return (
        type(tensor) in PLAIN
        and has_address(tensor)
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not is_functorch_wrapped(tensor)
    )


def _tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from tensors_of(module)


def _nbytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.nbytes
    except (RuntimeError, NotImplementedError):
        return 0  # compressed sparse tensors do not tell
