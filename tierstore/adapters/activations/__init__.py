"""Offload saved activations to a store, to train with more activations than memory holds.

    with tierstore.offload_activations(store):
        loss = model(x)
    loss.backward()

Built on `torch.autograd.graph.saved_tensors_hooks`. Such hooks disable autograd's own check for
in-place changes, so the check is repeated here. Restored tensors have the same bytes, strides,
dtype and device (with index) as the saved ones, and gradients are bit-equal.

Bytes are copied once per storage and version, however many saved tensors view them. They stay in
the store as long as the graph exists: unpacking twice (`retain_graph`) works, and a dropped graph
leaves nothing behind. On an accelerator, copies overlap the forward pass. In the backward pass,
tensors are prefetched in reverse order of packing.

Tensors that are not offloaded are counted by reason in `store.stats().activations.skipped`.
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
from tierstore.adapters.activations.in_place import check_unchanged, described
from tierstore.adapters.codecs.memory import Geometry, geometry_of, has_address, storage_id_of
from tierstore.adapters.compat import Unpack as Unpack
from tierstore.adapters.contents import tensors_of
from tierstore.model.formatting import size
from tierstore.model.sizes import parse_size
from tierstore.observe.report import Description, display_methods
from tierstore.observe.stats import activation_facts
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import (
    base_of,
    in_backward,
    is_functorch_wrapped,
    storage_id,
    version_of,
)

PLAIN_TYPES = (torch.Tensor, nn.Parameter)
PARAMETER_TYPES = (nn.Parameter, nn.Buffer)

_caches: weakref.WeakKeyDictionary[TierStore, weakref.ref[SavedTensorCache]] = (
    weakref.WeakKeyDictionary()
)
_caches_lock = threading.RLock()


class _Active(threading.local):
    """The contexts entered on the current thread, the innermost last."""

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
    """Return an `Unpack` for a tensor that stays in memory; it keeps `piece` alive.

    It holds a detached tensor: an output held by its own graph would never be freed.
    """
    what = tensor.detach(), version_of(tensor), described(tensor)
    return functools.partial(_unpacked_in_place, *what, piece)


def _unpacked_in_place(
    tensor: torch.Tensor, version: int, description: str, piece: SavedPiece | None
) -> torch.Tensor:
    check_unchanged(description, version_of(tensor), version)
    return tensor


def _unpacked(piece: SavedPiece, geometry: Geometry, description: str) -> torch.Tensor:
    """Return the offloaded tensor. Raises RuntimeError if it was changed in place."""
    piece.watch.check(description)
    return piece.build(geometry)


class ActivationOffload:
    """Context that offloads saved activations to a store, as returned by `offload_activations`.

    It can be entered repeatedly, nested, and from several threads. Saved-tensor hooks are local to
    a thread, so a forward pass in a worker thread must enter the context in that thread.

    Attributes:
        store: the store that holds the activations.
        min_size: minimum size in bytes; smaller pieces are not offloaded.
    """

    def __init__(self, store: TierStore, min_size: int, modules: Iterable[nn.Module]) -> None:
        self.store = store
        self.min_size = min_size
        self._modules = tuple(modules)
        self._cache = _cache_of(store)
        # A storage's address is not reused while there is a weak reference to it.
        self._parameters: dict[int, StorageWeakRef] = {}

    __repr__, __rich__, _repr_html_ = display_methods(lambda offload: _describe(offload))

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
        self._cache.release_copied(keep_newest=None if kind else 0)

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
            return "recomputed"  # by a checkpoint, or for double backward: used at once
        if self._is_parameter(tensor):
            return "parameter"
        return "" if tensor.device == self.store.device else "other_device"

    def _offload_for(self, device: torch.device) -> ActivationOffload | None:
        """Return the innermost active context whose store is on `device`; None if none."""
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
        """Return whether a tensor's memory is that of a parameter, a buffer or a leaf with grad.

        Compares memory, not objects: `nn.Linear` saves a view of its weight, a plain tensor.
        """
        if storage_id_of(tensor) in self._parameters:
            return True
        for held in (tensor, base_of(tensor)):
            if isinstance(held, PARAMETER_TYPES):
                self._remember(held)
                return True
            # The graph holds such a leaf in its AccumulateGrad node anyway.
            if held is not None and held.is_leaf and held.requires_grad:
                return True
        return False

    def _remember(self, tensor: torch.Tensor) -> None:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            self._parameters.setdefault(storage_id(storage), StorageWeakRef(storage))


def _describe(offload: ActivationOffload) -> Description:
    if "_cache" not in vars(offload):
        return Description("ActivationOffload, not initialized yet")
    store = engine_of(offload.store).reporting.overview()
    title = f"ActivationOffload of {size(offload.min_size)} and more; {store.title}"
    return Description(title, facts=activation_facts(offload._cache.counts.sample()))


def offload_activations(
    store: TierStore,
    *,
    min_size: int | str = "1MB",
    model: nn.Module | Iterable[nn.Module] | None = None,
) -> ActivationOffload:
    """Offload saved activations to `store` until the backward pass needs them.

        with offload_activations(store, model=model):
            loss = model(x)
        loss.backward()

    Enclose the forward pass of any model; the backward pass can run inside or outside the
    block. Restored tensors have the same bytes, shape, strides, dtype and device, so gradients are
    bit-equal. `store.stats().activations` counts tensors that are not offloaded, by reason. Built
    on `torch.autograd.graph.saved_tensors_hooks`: if several such hooks are nested, only the
    innermost applies.

    The forward pass raises the errors of `TierStore.put` (BudgetError if the disk budget is used
    up). The backward pass raises the errors of `TierStore.acquire`, and torch's RuntimeError for a
    saved tensor that was changed in place, including one that a backward pass had returned as a
    gradient.

    Args:
        store: the store that holds the activations. A store serves one device; for a model on
            several devices, nest one context per store.
        min_size: minimum bytes, as an int or a string such as `"1MB"`; smaller pieces are not
            offloaded.
        model: one or more modules whose parameters and buffers are never offloaded, however they
            are viewed. Without it, buffers and detached frozen parameters count as activations.

    Returns:
        A context manager, which can be entered for one step or for many.

    Raises:
        ValueError: `min_size` is not a number of bytes.
    """
    modules = [model] if isinstance(model, nn.Module) else model or ()
    return ActivationOffload(store, _bytes_of(min_size), modules)


def _bytes_of(min_size: int | str) -> int:
    if isinstance(min_size, float) or (isinstance(min_size, str) and "%" in min_size):
        raise ValueError(f"min_size={min_size!r}: pass a number of bytes, or a string like '1MB'")
    return parse_size(min_size) if min_size else 0


@torch.no_grad()
def _unpack(unpack: Unpack) -> torch.Tensor:
    return unpack()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary strided one, of no special class or kind."""
    return (
        type(tensor) in PLAIN_TYPES
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
        return 0  # compressed sparse tensors have no `nbytes`
