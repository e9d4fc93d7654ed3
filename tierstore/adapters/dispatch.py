"""Dispatch any PyTorch model to a store, with the interface of accelerate's big model inference.

In accelerate, an offloaded weight is a meta tensor and each module has a fixed place. Here an
offloaded weight is a CPU tensor that holds its true value and takes no memory, so any code that
reads the module works, and the store's budgets decide what stays where. This is the goal of
accelerate's pull request 2214.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from tierstore.adapters.changing import cast_weights
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.contents import (
    named_buffers_of,
    named_modules_of,
    named_parameters_of,
    named_weights_of,
)
from tierstore.adapters.loading import load_weights
from tierstore.adapters.memory_warning import warn_of_little_memory
from tierstore.adapters.offloaded import OffloadedModel
from tierstore.adapters.other_offloading import check_not_offloaded
from tierstore.adapters.owners import forget, offloading_of
from tierstore.adapters.settings import (
    ANYWHERE,
    ON_DEVICE,
    STICKY,
    OffloadSettings,
    check_arguments,
    place_of,
)
from tierstore.engine.settings import resolve_device
from tierstore.errors import DeviceError
from tierstore.model.formatting import count
from tierstore.store import TierStore, check_store

ModuleType = TypeVar("ModuleType", bound=nn.Module)
DeviceMap = str | Mapping[str, Any] | None

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Accelerate's strategies for a device map: equivalent with one device and hard budgets."""

_DISK_DIR = "the store's disk_dir, TierStore(ram_budget, disk_dir)"
_REPLACED = {
    "offload_dir": _DISK_DIR,
    "offload_folder": _DISK_DIR,
    "offload_index": "the store, which reads checkpoints in place",
    "state_dict": "the weights in the model: load them into it first",
    "max_memory": "the store's budgets, TierStore(ram_budget, disk_dir, device_budget=...)",
    "offload_state_dict": "the store, which never has all weights in memory",
}
_IGNORED = (
    "offload_buffers",
    "force_hooks",
    "no_split_module_classes",
    "full_state_dict",
    "broadcast_from_rank0",
    "non_blocking",
)
_numbers = itertools.count()


def dispatch_model(
    model: ModuleType,
    store: TierStore,
    device_map: DeviceMap = None,
    *,
    main_device: str | int | torch.device | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    **replaced: Any,
) -> ModuleType:
    """Offload a model to `store` and run it as before.

        dispatch_model(model, store)
        output = model.generate(**inputs)

    Takes the arguments of accelerate's `dispatch_model`. Parameter objects are never replaced: a
    weight is on the store's device while its module runs, and otherwise a CPU tensor with the true
    value that is mapped from a file and takes no memory. A weight that is still backed by its
    checkpoint file is read from that file; any other weight is written to the store once. Inputs
    are moved to the device, and outputs to the device that the inputs came from. Changed and added
    weights are detected on the next run. Dispatching a model again applies the new settings. A part
    of a model can be dispatched separately, even to another store.

    Args:
        model: any module on the CPU, without meta tensors.
        store: the store that holds the weights.
        device_map: None or `"auto"` lets the budgets decide what stays where. Otherwise a dict from
            module names (`""` is the whole model; the longest matching name applies) to one of:
            the store's device (an index, `"cuda:0"` or a torch.device), where the weights stay
            permanently, within the device budget; `"cpu"`, to evict the weights from RAM last;
            `"disk"`, to let the store choose.
        main_device: must be the store's device if given.
        skip_keys: names of keyword arguments and of returned values that are not moved between
            devices, such as caches that the model updates in place.
        preload_module_classes: names of classes that use the weights of their submodules without
            calling them: all weights inside are loaded before such a module runs.
        **replaced: accelerate's other arguments; they are ignored or raise TypeError.

    Returns:
        The same model.

    Raises:
        ValueError: the map does not match the model, a weight is on the meta device, or the model
            is already offloaded.
        TypeError: `model` is not a module, or an argument is one that the store replaces, such as
            `max_memory`.
        BudgetError: a weight is larger than a budget.
        TransferError: weights cannot be written (DiskFullError if the disk is full). After any
            error, the model is unchanged.
    """
    check_arguments("dispatch_model", replaced, _REPLACED, _IGNORED)
    _check(model, store, main_device)
    _check_no_meta(model)
    settings = OffloadSettings(
        dispatched=True,
        places=tuple(resolve_device_map(model, store, device_map).items()),
        exclude_kwargs=frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ()),
        whole=frozenset(preload_module_classes or ()),
    )
    before = offloading_of(model)
    if before is None or not before.settings.dispatched:
        warn_of_little_memory([model])
        _dispatch(model, store, settings)
    elif not (before.enabled and before.store is store and before.settings == settings):
        before.disable()
        try:
            _dispatch(model, store, settings)
        except BaseException:
            if before.enabled and not before.store.closed:
                before.enable()
            raise
        forget(before)
    return model


def _dispatch(model: nn.Module, store: TierStore, settings: OffloadSettings) -> None:
    prefix = f"{type(model).__name__}-dispatched-{next(_numbers)}"
    OffloadedModel(model, store, prefix, settings)  # the model keeps it alive


def load_checkpoint_and_dispatch(  # noqa: PLR0913 - the arguments are those of accelerate
    model: ModuleType,
    checkpoint: str | os.PathLike[str],
    store: TierStore,
    device_map: DeviceMap = None,
    *,
    main_device: str | int | torch.device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    **replaced: Any,
) -> ModuleType:
    """Load a checkpoint into a model, usually on the meta device, and dispatch the model.

    No weight is read or written here: weights become mapped views of the checkpoint's files, and
    the store reads those files when the weights are used. A weight on the meta device takes the
    checkpoint's dtype; any other weight keeps its own. Weights that need a cast for that, or to
    `dtype`, are cast one group at a time and written to the store once.

    Args:
        model: a module built under `accelerate.init_empty_weights()` or `torch.device("meta")`, or
            an ordinary one.
        checkpoint: a safetensors file, a directory with one or with shards, an index file, or the
            URL of one of these in an object store (`s3://`, `gs://`, `az://`, `https://`). Remote
            files are fetched to the store's directory once and count against `disk_budget`.
        store: the store that holds the weights.
        device_map: as for `dispatch_model`.
        main_device: must be the store's device if given.
        dtype: the dtype to cast floating-point weights to; None for no cast.
        strict: raise if the checkpoint has tensors that the model does not. Tensors missing from
            the checkpoint are always an error.
        skip_keys: as for `dispatch_model`.
        preload_module_classes: as for `dispatch_model`.
        **replaced: accelerate's other arguments; they are ignored or raise TypeError.

    Returns:
        The same model.

    Raises:
        ValueError: names or shapes do not match, or `dispatch_model` raises it.
        TransferError: a file cannot be used (InvalidHeaderError, StaleCheckpointError).
        BudgetError: a weight is larger than a budget. After any error, weights that were on the
            meta device are there again; other weights may have the checkpoint's values.
    """
    check_arguments("load_checkpoint_and_dispatch", replaced, _REPLACED, _IGNORED)
    _check(model, store, main_device)
    resolve_device_map(model, store, device_map)
    if offloading_of(model) is not None:
        raise ValueError(
            f"{type(model).__name__} is already offloaded: call disable_offload(model) first, "
            "or load other weights into it with load_state_dict()"
        )
    check_not_offloaded(type(model).__name__, model)  # before any weight is changed
    meta = [(each, each.detach()) for each in _state(model) if each.device.type == "meta"]
    was_meta = {id(tensor) for tensor, _ in meta}
    real_casts: dict[int, torch.dtype] = {}
    try:
        differing = load_weights(model, checkpoint, strict=strict, store=store)
        real_casts = {n: own for n, own in differing.items() if n not in was_meta}
        casts = real_casts
        if dtype is not None:
            casts = {id(t): dtype for t in _state(model) if t.is_floating_point()}
        dispatch_model(
            model,
            store,
            device_map,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
        )
        cast_weights(model, casts)
    except BaseException:
        if (dispatched := offloading_of(model)) is not None:
            dispatched.end()
        cast_weights(model, real_casts)
        for tensor, before in meta:
            assign(tensor, before)
        raise
    return model


def cpu_offload(
    model: ModuleType,
    store: TierStore,
    *,
    execution_device: str | int | torch.device | None = None,
    preload_module_classes: Collection[str] | None = None,
    **replaced: Any,
) -> ModuleType:
    """Dispatch a model and keep its weights in RAM between uses, as far as the budget allows.

    Returns the same model, and raises the errors of `dispatch_model`.

    Args:
        model: as for `dispatch_model`.
        store: the store that holds the weights.
        execution_device: must be the store's device if given.
        preload_module_classes: as for `dispatch_model`.
        **replaced: accelerate's other arguments; they are ignored or raise TypeError.
    """
    return _dispatch_to("cpu", model, store, execution_device, preload_module_classes, replaced)


def disk_offload(
    model: ModuleType,
    store: TierStore,
    *,
    execution_device: str | int | torch.device | None = None,
    preload_module_classes: Collection[str] | None = None,
    **replaced: Any,
) -> ModuleType:
    """Dispatch a model with its weights on disk; the budgets decide what is cached in faster tiers.

    Returns the same model, and raises the errors of `dispatch_model`.

    Args:
        model: as for `dispatch_model`.
        store: the store that holds the weights.
        execution_device: must be the store's device if given.
        preload_module_classes: as for `dispatch_model`.
        **replaced: accelerate's other arguments; they are ignored or raise TypeError.
    """
    return _dispatch_to("disk", model, store, execution_device, preload_module_classes, replaced)


def _dispatch_to(
    place: str,
    model: ModuleType,
    store: TierStore,
    device: str | int | torch.device | None,
    preload_module_classes: Collection[str] | None,
    replaced: Mapping[str, Any],
) -> ModuleType:
    check_arguments(f"{place}_offload", replaced, _REPLACED, _IGNORED)
    _check(model, store, device, "execution_device")
    return dispatch_model(model, store, {"": place}, preload_module_classes=preload_module_classes)


# Device maps -----------------------------------------------------------------------------------


def resolve_device_map(model: nn.Module, store: TierStore, device_map: DeviceMap) -> dict[str, str]:
    """Return the place of each named module. Raises ValueError if the map is invalid."""
    if device_map is None or (isinstance(device_map, str) and device_map in AUTOMATIC):
        return {"": ANYWHERE}
    if not isinstance(device_map, Mapping):
        raise ValueError(
            f"device_map={device_map!r}: pass 'auto', or a dict of module names to devices"
        )
    names = {name for name, _ in named_modules_of(model)}
    names |= {name for name, _ in named_parameters_of(model, remove_duplicate=False)}
    names |= {name for name, _ in named_buffers_of(model, remove_duplicate=False)}
    unknown = [name for name in device_map if name not in names]
    if unknown:
        raise ValueError(
            f"device_map names {unknown[:5]}, which {type(model).__name__} does not have: take "
            "names from model.named_modules()"
        )
    places = {name: _place(place, store) for name, place in device_map.items()}
    bare = [name for name, _ in named_parameters_of(model) if place_of(places, name) is None]
    if bare:
        raise ValueError(
            f"device_map has no entry for {count(len(bare), 'parameter')}, such as {bare[:3]}: "
            "name their modules too, or use '' for the rest"
        )
    return places


def _place(place: Any, store: TierStore) -> str:
    if place in (STICKY, ANYWHERE):
        return str(place)
    try:
        device = _device(place)
    except (RuntimeError, TypeError, ValueError) as error:
        own = "" if store.device.type == "cpu" else f"the store's device ({store.device}), "
        raise ValueError(f"device_map has {place!r}: use {own}'cpu' or 'disk'") from error
    if device != store.device:
        raise ValueError(
            f"device_map has {place!r}, but the store serves {store.device}: one store "
            "serves one device"
        )
    return STICKY if device.type == "cpu" else ON_DEVICE


def _is_device_of(store: TierStore, device: Any) -> bool:
    """Return whether a device is the store's; False if the device does not exist."""
    try:
        return _device(device) == store.device
    except DeviceError:
        return False


def _device(place: Any) -> torch.device:
    if place is None:
        raise TypeError("None is not a device")
    if isinstance(place, int) and not isinstance(place, bool):
        kind = torch.accelerator.current_accelerator()
        return torch.device("cpu" if kind is None else kind.type, place)
    return resolve_device(place)


# Checks --------------------------------------------------------------------------------------


def _check(model: Any, store: Any, device: Any, name: str = "main_device") -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a {type(model).__name__} cannot be dispatched: pass a torch module (for a diffusers "
            "pipeline, use enable_group_offload)"
        )
    check_store(store)
    if device is not None and not _is_device_of(store, device):
        raise ValueError(
            f"{name}={device!r}, but the store serves {store.device}: create the store with "
            f"TierStore(..., device={str(device)!r})"
        )


def _check_no_meta(model: nn.Module) -> None:
    named = [*named_parameters_of(model), *named_buffers_of(model)]
    empty = [name for name, tensor in named if tensor.device.type == "meta"]
    if empty:
        raise ValueError(
            f"{len(empty)} weights of {type(model).__name__} are on the meta device and have no "
            f"values, such as {empty[:3]}: use load_checkpoint_and_dispatch"
        )


def _state(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and persistent buffers, which are what a checkpoint holds."""
    return list({id(tensor): tensor for _, tensor in named_weights_of(model)}.values())
