"""Group offloading of diffusers pipelines and single models through a store.

Group offloading and the argument names follow diffusers' `enable_group_offload`. The store manages
streams, pinning and the directory, which diffusers configures with flags.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from tierstore.adapters.compat import hints_of
from tierstore.adapters.memory_warning import warn_of_little_memory
from tierstore.adapters.offloaded import OffloadedModel
from tierstore.adapters.owners import (
    add_handle,
    handle_of,
    handles_with,
    offloading_of,
    remove_handle,
    trainer_of,
)
from tierstore.adapters.pipelines import models_in, patch_methods
from tierstore.adapters.settings import OffloadSettings, check_arguments
from tierstore.engine.settings import resolve_device
from tierstore.model.formatting import count
from tierstore.model.outline import OFFLOAD_TYPES
from tierstore.model.sizes import parse_size
from tierstore.observe.report import Description, display_methods
from tierstore.observe.stats import Stats
from tierstore.store import TierStore, check_store, engine_of

logger = logging.getLogger("tierstore.adapters")

_REPLACED = {
    "offload_to_disk_path": "the store's disk_dir: TierStore(ram_budget, disk_dir)",
    "offload_device": "the store, which decides between RAM and disk by its budgets",
}
_IGNORED = ("use_stream", "record_stream", "low_cpu_mem_usage", "non_blocking")

_numbers = itertools.count()

Target = TypeVar("Target")


def _describe(handle: OffloadHandle) -> Description:
    if "_enabled" not in vars(handle):  # a debugger may print the handle during __init__
        return Description("OffloadHandle, not initialized yet")
    target, parts = handle._target(), len(handle._parts)
    groups = sum(len(model.groups) for model in handle._models())
    what = "a deleted target" if target is None else type(target).__name__
    state = "enabled" if handle.enabled else "not enabled"
    if parts:
        state += f", {count(parts, 'model')} in {count(groups, 'group')}"
    store = engine_of(handle.store).reporting.overview()
    return Description(f"OffloadHandle of {what}, {state}; {store.title}", store.stats)


class OffloadHandle:
    """An offloaded pipeline or model, as returned by `enable_group_offload`.

    Use it as a context manager to call `disable_offload` on exit.

    Attributes:
        store: the store that holds the weights.
    """

    def __init__(self, target: Any, store: TierStore, settings: OffloadSettings) -> None:
        self.store = store
        self._target = weakref.ref(target)
        self._settings = settings
        self._suspensions = 0
        self._parts: list[weakref.ref[nn.Module]] = []
        self._enabled = False
        self._enable()

    @property
    def enabled(self) -> bool:
        """True if all models of the target are offloaded now."""
        if not self._enabled or self._suspensions:
            return False
        found = [offloading_of(module) for module in self._modules()]
        return all(model is not None and model.enabled for model in found)

    @property
    def groups(self) -> dict[str, list[str]]:
        """Tensor names in each group, by group key.

        The groups of a component shared by several pipelines are listed only by the first
        pipeline's handle.
        """
        own = [m for m in self._models() if next(iter(handles_with(m)), self) is self]
        return {key: names for model in own for key, names in model.groups.items()}

    def stats(self) -> Stats:
        """Return the store's statistics so far."""
        return self.store.stats()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend offloading within a `with` block: the weights are ordinary CPU tensors there.

        Inside the block, weights and modules may be changed, replaced or added. On exit the model
        is offloaded again, and only changed weights are written.

            with handle.suspended():
                model.head = nn.Linear(256, 10)

        Raises:
            TierStoreError: on exit, for the same reasons as in `enable_group_offload`.
        """
        with ExitStack() as stack:
            for model in self._models():
                stack.enter_context(model.suspended())
            self._suspensions += 1
            stack.callback(self._end_suspension)  # runs first: replaced models stay unoffloaded
            yield

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self._disable()

    __repr__, __rich__, _repr_html_ = display_methods(_describe)

    def _modules(self) -> list[nn.Module]:
        """Return the offloaded modules that still exist."""
        return [module for part in list(self._parts) if (module := part()) is not None]

    def _models(self) -> list[OffloadedModel]:
        found = map(offloading_of, self._modules())
        return [model for model in found if model is not None]

    def _disable(self) -> None:
        self._enabled = False
        remove_handle(self._target(), self)
        models, self._parts = self._models(), []
        _end_unused(models)

    def _end_suspension(self) -> None:
        self._suspensions -= 1
        self._resume()

    def _resume(self) -> None:
        if self._enabled and self._suspensions == 0 and not self.store.closed:
            self._enable()

    def _enable(self) -> None:
        """Offload the target's current components. On failure the previous ones stay offloaded."""
        target = self._target()
        if target is None:
            return  # remaining components manage their own offloading
        chosen, staying = _select_models(target, self._settings)
        before, models = self._models(), []
        # Unique: other pipelines may still hold a component of the same name.
        prefix = f"{type(target).__name__}-{next(_numbers)}"
        try:
            for name, module in chosen.items():
                model = _reusable(module, self.store) or OffloadedModel(
                    module, self.store, f"{prefix}/{name}" if name else prefix, self._settings
                )
                models.append(model)
                model.resume()
            for name, module in staying.items():
                if name not in self._settings.exclude_modules:
                    logger.warning(
                        "%s does not support group offloading: it stays on the device", name
                    )
                module.to(self.store.device)
        except BaseException:
            _end_unused(models)
            raise
        self._parts = [weakref.ref(module) for module in chosen.values()]
        self._enabled = True
        add_handle(target, self, self._parts)
        _end_unused(before)
        if not isinstance(target, nn.Module):
            patch_methods(type(target))


def _reusable(module: nn.Module, store: TierStore) -> OffloadedModel | None:
    """Return a model's existing offloading to `store`, from another pipeline or an earlier call.

    Ends the offloading if its pipelines no longer exist, or if it is suspended on another store.
    """
    model = offloading_of(module)
    if model is None or model.settings.dispatched:
        return None
    elsewhere = model.store is not store
    if not handles_with(model) or (elsewhere and not model.enabled):
        model.end()
        return None
    return None if elsewhere else model


def _end_unused(models: Iterable[OffloadedModel]) -> None:
    """End the offloading of models that no handle uses."""
    for model in models:
        if not handles_with(model):
            model.end()


def enable_group_offload(  # noqa: PLR0913 - the arguments are those of diffusers
    target: Any,
    store: TierStore,
    *,
    onload_device: str | torch.device | None = None,
    offload_type: str = "block_level",
    num_blocks_per_group: int | None = None,
    group_size: int | str | None = None,
    exclude_modules: str | list[str] | None = None,
    exclude_kwargs: list[str] | None = None,
    block_modules: list[str] | None = None,
    **replaced: Any,
) -> OffloadHandle:
    """Offload a pipeline or a model to `store`: weights move to the device as modules run.

        with enable_group_offload(pipe, store):
            image = pipe("a red boat").images[0]

    Takes the arguments of diffusers' `enable_group_offload`. A weight that is still backed by its
    checkpoint file is read from that file; any other weight is written to the store once. While a
    weight is not on the device, its parameter is a CPU tensor with the true value. Calling this
    again with the same arguments returns the same handle; different arguments replace it.

    Args:
        target: a diffusers pipeline (all components, under one budget) or any `nn.Module`.
        store: the store that holds the weights. It serves one device; inputs are moved there.
        onload_device: must be the store's device if given.
        offload_type: `"block_level"` moves each block (child of a module list) as a whole; blocks
            too large for the budget, and all other modules, move leaf by leaf. `"leaf_level"` moves
            each module that has its own weights separately.
        num_blocks_per_group: number of blocks per group; None groups by bytes.
        group_size: maximum bytes per group, as an int or a string such as `"64MB"`; None derives
            it from the budgets.
        exclude_modules: pipeline components that stay on the device, outside the store.
        exclude_kwargs: keyword arguments that are not moved to the device, such as caches that the
            model updates in place; None uses the names that the model declares.
        block_modules: children to treat as blocks; None uses the names that the model declares.
        **replaced: diffusers' other arguments. `use_stream`, `record_stream`, `non_blocking` and
            `low_cpu_mem_usage` have no effect: the store always prefetches on its own streams.

    Returns:
        A handle that undoes the offloading. It is also a context manager.

    Raises:
        TypeError: `target` is neither a pipeline nor a module, or an argument is one that the store
            replaces, such as `offload_to_disk_path`.
        ValueError: an argument is invalid, or the model is already offloaded by something else.
        BudgetError: a group is larger than a budget.
        DiskFullError: the disk is full while weights are written.
        TransferError: a file cannot be read or written. After any error, the model is unchanged.
    """
    if str(replaced.get("offload_device")) == "cpu":  # diffusers' default
        del replaced["offload_device"]
    check_arguments("enable_group_offload", replaced, _REPLACED, _IGNORED)
    settings = OffloadSettings(
        offload_type=offload_type,
        num_blocks_per_group=num_blocks_per_group,
        group_size=None if group_size is None else parse_size(group_size),
        exclude_modules=_names(exclude_modules) or (),
        exclude_kwargs=None if exclude_kwargs is None else frozenset(exclude_kwargs),
        block_modules=_names(block_modules),
    )
    _check_settings(settings, store, onload_device)
    if not isinstance(target, nn.Module) and not hasattr(target, "components"):
        raise TypeError(
            f"a {type(target).__name__} cannot be offloaded: pass a diffusers pipeline or a module"
        )
    chosen, _ = _select_models(target, settings)  # raises before anything is undone
    before: OffloadHandle | None = handle_of(target)
    if before is None:
        warn_of_little_memory(chosen.values())
        return OffloadHandle(target, store, settings)
    if before.store is store and before._settings == settings and before.enabled:
        before._resume()  # the pipeline's components may have changed
        return before
    before._disable()
    try:
        return OffloadHandle(target, store, settings)
    except BaseException:
        before._enabled = True
        before._resume()
        raise


def disable_offload(target: Target) -> Target:
    """Stop offloading a pipeline or a model: its weights become CPU tensors again, bit-equal.

        disable_offload(pipe)

    A component shared with another offloaded pipeline stays offloaded for that pipeline. A part of
    the model that was dispatched separately stays dispatched.

    Args:
        target: the pipeline or module passed to `enable_group_offload` or `dispatch_model`, or the
            handle. A handle whose offloading has already ended is ignored.

    Returns:
        The same target.

    Raises:
        ValueError: the target is not offloaded, or only as part of something else.
    """
    handle = target if isinstance(target, OffloadHandle) else handle_of(target)
    if handle is not None:
        handle._disable()
        return target
    if isinstance(target, nn.Module) and trainer_of(target) is not None:
        raise ValueError(
            "an OffloadModel is undone with its own method: module = offload_model.disable()"
        )
    model = offloading_of(target) if isinstance(target, nn.Module) else None
    if model is None or handles_with(model):
        raise ValueError(
            f"{type(target).__name__} is not offloaded on its own: pass the pipeline or the module "
            "that was passed to enable_group_offload or dispatch_model"
        )
    model.end()
    return target


def _names(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return (given,) if isinstance(given, str) else None if given is None else tuple(given)


def _check_settings(
    settings: OffloadSettings, store: TierStore, onload_device: str | torch.device | None
) -> None:
    check_store(store)
    if settings.offload_type not in OFFLOAD_TYPES:
        raise ValueError(
            f"offload_type={settings.offload_type!r} is not one of {', '.join(OFFLOAD_TYPES)}"
        )
    count: Any = settings.num_blocks_per_group
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"num_blocks_per_group={count!r}: pass a positive int, or None")
    if count is not None and settings.group_size is not None:
        raise ValueError("num_blocks_per_group and group_size are mutually exclusive: pass one")
    if onload_device is not None and resolve_device(onload_device) != store.device:
        raise ValueError(
            f"onload_device={onload_device!r}, but the store serves {store.device}: create the "
            f"store with TierStore(..., device={str(onload_device)!r})"
        )


def _select_models(
    target: Any, settings: OffloadSettings
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the target's models to offload, and the models that stay on the device, by name."""
    if isinstance(target, nn.Module) and not hints_of(target).supported:
        raise ValueError(
            f"{type(target).__name__} does not support group offloading "
            "(_supports_group_offloading=False): run it on the device without offloading"
        )
    found = models_in(target)
    excluded = settings.exclude_modules
    unknown = [name for name in excluded if name not in found]
    if unknown:
        raise ValueError(f"exclude_modules names {unknown}, but the components are {sorted(found)}")
    chosen, staying = {}, {}
    for name, module in found.items():
        if name not in excluded and hints_of(module).supported:
            chosen[name] = module
        else:
            staying[name] = module
    return chosen, staying
