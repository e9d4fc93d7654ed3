"""Any PyTorch model through a store, its weights inside the module: accelerate's dispatch, again.

The names and meanings are those of accelerate's big model inference. There, a weight that is away
is a meta tensor, and each module has a fixed place. Here it is a CPU tensor of its true value that
costs no memory, whatever a user does with the module finds it, and the store decides by its budgets
what stays where. What accelerate's pull request 2214 set out to do.
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
from tierstore.adapters.owners import forget, offloading_of
from tierstore.adapters.settings import (
    ANYWHERE,
    IN_RAM,
    ON_DEVICE,
    OffloadSettings,
    check_arguments,
    place_of,
)
from tierstore.engine.settings import resolve_device
from tierstore.errors import DeviceError
from tierstore.store import TierStore, check_store

ModuleType = TypeVar("ModuleType", bound=nn.Module)
DeviceMap = str | Mapping[str, Any] | None

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Accelerate's ways to compute a map. With one device and hard budgets they all mean the same."""

_IN_THE_STORE = "the store's disk_dir, TierStore(ram_budget, disk_dir)"
_REPLACED = {
    "offload_dir": _IN_THE_STORE,
    "offload_folder": _IN_THE_STORE,
    "offload_index": "the store, which uses checkpoints where they lie",
    "state_dict": "the weights in the model: load them into it first",
    "max_memory": "the store's budgets, TierStore(ram_budget, disk_dir, device_budget=...)",
    "offload_state_dict": "the store, which never has all weights in memory",
}
_HARMLESS = (
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
    """Run a model with its weights in `store`.

        dispatch_model(model, store)
        output = model.generate(**inputs)

    Names and meanings are those of accelerate's `dispatch_model`. Parameter objects stay the same.
    A weight is on the store's device while its module runs; otherwise it is a CPU tensor of its
    true value that takes no memory: a map of the file that has it. Weights that still are a
    checkpoint's own bytes are read from there; others are written to the store once. Inputs come to
    the device by themselves, and what the model returns goes to where its inputs came from. Changes
    of weights, and new ones, are noticed when the model runs next. A model that is dispatched
    already is dispatched anew; a part of it may be dispatched by itself, to another store too.

    Args:
        model: any module on the CPU, with values.
        store: where the weights go.
        device_map: None or `"auto"`: the store decides by its budgets what stays where. Or a dict
            of module names (`""` for the whole model; the longest name counts) to: the
            store's device (an index, `"cuda:0"`, a torch.device): stays there for good, within
            the device budget; `"cpu"`: stays in RAM, given up last; `"disk"`: wherever the store
            finds it best.
        main_device: the store's device, if given at all.
        skip_keys: names of keyword arguments, and of values that the model returns, which are not
            moved between devices: caches that the model changes in place.
        preload_module_classes: names of classes that use weights of the modules in them without
            calling those: all of theirs come when they run.
        **replaced: accelerate's other arguments, which have no effect or are refused.

    Returns:
        The same model.

    Raises:
        ValueError: the map does not fit, a weight is on meta, or the model is offloaded already.
        TypeError: an argument that the store replaces, such as `max_memory`; no module.
        BudgetError: a weight is larger than a budget.
        TransferError: weights have to be written, and cannot be (DiskFullError: the disk is full).
            Whatever is raised, the model is as it was.
    """
    check_arguments("dispatch_model", replaced, _REPLACED, _HARMLESS)
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
    OffloadedModel(model, store, prefix, settings)  # which the model keeps


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
    """Give a model, usually on the meta device, a checkpoint's weights, and dispatch it.

    Nothing is read, and nothing is written: the weights become maps of the checkpoint's files, and
    the store reads them there when they are used. What was on the meta device takes the dtype that
    it has in the checkpoint; what was not keeps its own. Weights that have to be cast for that, or
    to `dtype`, are cast group by group, and written to the store once.

    Args:
        model: made under `accelerate.init_empty_weights()`, `torch.device("meta")`, or neither.
        checkpoint: a safetensors file, a directory with one or with shards, an index file, or a
            URL of one of these in an object store (`s3://`, `gs://`, `az://`, `https://`). What
            lies there is fetched to the store's directory, once: `disk_budget` must have room.
        store: where the weights go.
        device_map: as for `dispatch_model`.
        main_device: the store's device, if given at all.
        dtype: what floating-point weights are cast to, if anything.
        strict: whether names in the checkpoint that the model lacks are an error. Names that the
            checkpoint lacks always are.
        skip_keys: names of values that are not moved between devices.
        preload_module_classes: names of classes whose weights all come when they run.
        **replaced: accelerate's other arguments, which have no effect or are refused.

    Returns:
        The same model.

    Raises:
        ValueError: names or shapes do not fit; what `dispatch_model` raises.
        TransferError: a file cannot be used (InvalidHeaderError, StaleCheckpointError).
        BudgetError: a weight is larger than a budget. Whatever is raised, what was on the meta
            device is there again; other weights may have the checkpoint's values.
    """
    check_arguments("load_checkpoint_and_dispatch", replaced, _REPLACED, _HARMLESS)
    _check(model, store, main_device)
    resolve_device_map(model, store, device_map)
    if offloading_of(model) is not None:
        raise ValueError(
            f"{type(model).__name__} is offloaded already: call disable_offload of it first, "
            "or load other weights into it with load_state_dict()"
        )
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
    """The same model, dispatched so that weights stay in RAM between uses as far as that goes.

    Args:
        model: as for `dispatch_model`, which says what is raised, too.
        store: where the weights go.
        execution_device: the store's device, if given at all.
        preload_module_classes: as for `dispatch_model`.
        **replaced: accelerate's other arguments, which have no effect or are refused.
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
    """The same model, dispatched with all weights on disk; budgets say what stays above it.

    Args:
        model: as for `dispatch_model`, which says what is raised, too.
        store: where the weights go.
        execution_device: the store's device, if given at all.
        preload_module_classes: as for `dispatch_model`.
        **replaced: accelerate's other arguments, which have no effect or are refused.
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
    check_arguments(f"{place}_offload", replaced, _REPLACED, _HARMLESS)
    _check(model, store, device, "execution_device")
    return dispatch_model(model, store, {"": place}, preload_module_classes=preload_module_classes)


# Where things go -------------------------------------------------------------------------------


def resolve_device_map(model: nn.Module, store: TierStore, device_map: DeviceMap) -> dict[str, str]:
    """The place of each named module. Raises ValueError if the map cannot be meant."""
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
            f"device_map says nothing of {len(bare)} parameters, such as {bare[:3]}: name their "
            "modules too, or '' for all the rest"
        )
    return places


def _place(place: Any, store: TierStore) -> str:
    if place in (IN_RAM, ANYWHERE):
        return str(place)
    try:
        device = _device(place)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"device_map has {place!r}: use the store's device ({store.device}), 'cpu' or 'disk'"
        ) from error
    if device != store.device:
        raise ValueError(
            f"device_map has {place!r}, but the store serves {store.device}: one store "
            "serves one device"
        )
    return IN_RAM if device.type == "cpu" else ON_DEVICE


def _is_of(store: TierStore, device: Any) -> bool:
    """Whether a device is the store's; one that is not there is not."""
    try:
        return _device(device) == store.device
    except DeviceError:
        return False


def _device(place: Any) -> torch.device:
    if place is None:
        raise TypeError("None is no device")
    if isinstance(place, int) and not isinstance(place, bool):
        kind = torch.accelerator.current_accelerator()
        return torch.device("cpu" if kind is None else kind.type, place)
    return resolve_device(place)


# Checks --------------------------------------------------------------------------------------


def _check(model: Any, store: Any, device: Any, name: str = "main_device") -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a {type(model).__name__} cannot be dispatched: pass a torch module (for a pipeline "
            "of diffusers there is enable_group_offload)"
        )
    check_store(store)
    if device is not None and not _is_of(store, device):
        raise ValueError(
            f"{name}={device!r}, but the store serves {store.device}: make the store with "
            f"TierStore(..., device={str(device)!r})"
        )


def _check_no_meta(model: nn.Module) -> None:
    named = [*named_parameters_of(model), *named_buffers_of(model)]
    empty = [name for name, tensor in named if tensor.device.type == "meta"]
    if empty:
        raise ValueError(
            f"{len(empty)} weights of {type(model).__name__} have no values yet (they are on the "
            f"meta device), such as {empty[:3]}: use load_checkpoint_and_dispatch"
        )


def _state(model: nn.Module) -> list[torch.Tensor]:
    """Its parameters and persistent buffers: what a checkpoint holds."""
    return list({id(tensor): tensor for _, tensor in named_weights_of(model)}.values())
