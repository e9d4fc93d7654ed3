"""Group offloading for diffusers pipelines and any single model, through a store.

The idea of group offloading, and the names of its arguments, are those of diffusers'
`enable_group_offload`. What diffusers has flags for (streams, pinning, a directory), the store has.
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
)
from tierstore.adapters.pipelines import follow_methods, models_in
from tierstore.adapters.settings import OffloadSettings, check_arguments
from tierstore.engine.settings import resolve_device
from tierstore.model.formatting import count
from tierstore.model.outline import OFFLOAD_TYPES
from tierstore.model.sizes import parse_size
from tierstore.observe.report import Shown, shown_by
from tierstore.observe.stats import Stats
from tierstore.store import TierStore, check_store, engine_of

logger = logging.getLogger("tierstore.adapters")

_REPLACED = {
    "offload_to_disk_path": "the store's disk_dir: TierStore(ram_budget, disk_dir)",
    "offload_device": "the store, which decides between RAM and disk by its budgets",
}
_HARMLESS = ("use_stream", "record_stream", "low_cpu_mem_usage", "non_blocking")

_numbers = itertools.count()

Target = TypeVar("Target")


def _look(handle: OffloadHandle) -> Shown:
    if "_enabled" not in vars(handle):  # it may be asked for while a handle is made
        return Shown("OffloadHandle, not made yet")
    target, parts = handle._target(), len(handle._parts)
    groups = sum(len(model.groups) for model in handle._models())
    what = "what is gone" if target is None else type(target).__name__
    state = "enabled" if handle.enabled else "not enabled"
    if parts:
        state += f", {count(parts, 'model')} in {count(groups, 'group')}"
    store = engine_of(handle.store).reporting.look()
    return Shown(f"OffloadHandle of {what}, {state}; {store.title}", store.stats)


class OffloadHandle:
    """An offloaded pipeline or model. `enable_group_offload` makes it.

    As a context manager, it calls `disable_offload` at its end.

    Attributes:
        store: where the weights are.
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
        """Whether weights are offloaded now."""
        if not self._enabled or self._suspensions:
            return False
        found = [offloading_of(module) for module in self._modules()]
        return all(model is not None and model.enabled for model in found)

    @property
    def groups(self) -> dict[str, list[str]]:
        """The keys of the groups, and the names of the tensors in each.

        Those of a component that pipelines share are with the first of them.
        """
        own = [m for m in self._models() if next(iter(handles_with(m)), self) is self]
        return {key: names for model in own for key, names in model.groups.items()}

    def stats(self) -> Stats:
        """The numbers of the store so far."""
        return self.store.stats()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context manager, inside of which the weights are ordinary CPU tensors.

        They may be changed, replaced or added to. Afterwards they are offloaded again: what changed
        is stored anew, the rest is not.

            with handle.suspended():
                model.head = nn.Linear(256, 10)

        Raises:
            TierStoreError: at its end, what `enable_group_offload` raises.
        """
        with ExitStack() as stack:
            for model in self._models():
                stack.enter_context(model.suspended())
            self._suspensions += 1
            stack.callback(self._end_suspension)  # first: what was replaced need not come back
            yield

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self._disable()

    __repr__, __rich__, _repr_html_ = shown_by(_look)

    def _modules(self) -> list[nn.Module]:
        """Return the modules that it offloads, as far as they are not gone."""
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
        """Offload the components that the target has now. If that fails, it has those of before."""
        target = self._target()
        if target is None:
            return  # what is left of its components see to themselves
        chosen, staying = _chosen(target, self._settings)
        before, models = self._models(), []
        # Another each time: a component of that name may be there still, for other pipelines.
        prefix = f"{type(target).__name__}-{next(_numbers)}"
        try:
            for name, module in chosen.items():
                model = _shared(module, self.store) or OffloadedModel(
                    module, self.store, f"{prefix}/{name}" if name else prefix, self._settings
                )
                models.append(model)
                model.resume()
            for name, module in staying.items():
                if name not in self._settings.exclude_modules:
                    logger.warning("%s cannot be offloaded in groups: it stays on the device", name)
                module.to(self.store.device)
        except BaseException:
            _end_unused(models)
            raise
        self._parts = [weakref.ref(module) for module in chosen.values()]
        self._enabled = True
        add_handle(target, self, self._parts)
        _end_unused(before)
        if not isinstance(target, nn.Module):
            follow_methods(type(target))


def _shared(module: nn.Module, store: TierStore) -> OffloadedModel | None:
    """Return what offloads a model to a store for other pipelines, or for an earlier call.

    What did so for pipelines that are gone ends, and what is suspended on another store, too.
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
    """Make models ordinary that no handle offloads."""
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
    """Run a pipeline, or one model, with its weights in `store`.

        with enable_group_offload(pipe, store):
            image = pipe("a red boat").images[0]

    The idea, and the names of the arguments, are those of diffusers' `enable_group_offload`.
    Weights that still are a checkpoint's own bytes are read from it; others are written to the
    store once. A weight that is away is a CPU tensor of its true value. A second call with the same
    arguments returns the same handle; with others, it starts anew.

    Args:
        target: a diffusers pipeline (every component, under one budget) or any `nn.Module`.
        store: where the weights go. It serves one device, to which the inputs are moved, too.
        onload_device: the store's device, if given at all.
        offload_type: `"block_level"` moves blocks (children of module lists) whole; blocks that are
            large for the budget, and everything else, move leaf by leaf. `"leaf_level"` moves
            every module with weights of its own by itself.
        num_blocks_per_group: so many blocks move together; None to group by bytes.
        group_size: bytes (or `"64MB"`) that a group should have at most; None derives it from the
            budgets.
        exclude_modules: components of a pipeline that stay on the device, outside the store.
        exclude_kwargs: keyword arguments that are not moved to the device (caches that a model
            changes in place); None for what the model names.
        block_modules: children that count as blocks; None for what the model names.
        **replaced: diffusers' other arguments. `use_stream`, `record_stream`, `non_blocking` and
            `low_cpu_mem_usage` have no effect: the store prefetches on streams of its own.

    Returns:
        A handle that undoes it. It is a context manager, too.

    Raises:
        TypeError: an argument that the store replaces, such as `offload_to_disk_path`.
        ValueError: an argument cannot be, or something else offloads the model.
        BudgetError: a group is larger than a budget.
        DiskFullError: weights have to be written, and the disk is full.
        TransferError: a file cannot be read or written. Whatever is raised, the model is as it was.
    """
    if str(replaced.get("offload_device")) == "cpu":  # diffusers' default
        del replaced["offload_device"]
    check_arguments("enable_group_offload", replaced, _REPLACED, _HARMLESS)
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
    chosen, _ = _chosen(target, settings)  # errors are found before anything is undone
    before: OffloadHandle | None = handle_of(target)
    if before is None:
        warn_of_little_memory(chosen.values())
        return OffloadHandle(target, store, settings)
    if before.store is store and before._settings == settings and before.enabled:
        before._resume()  # components may be others now
        return before
    before._disable()
    try:
        return OffloadHandle(target, store, settings)
    except BaseException:
        before._enabled = True
        before._resume()
        raise


def disable_offload(target: Target) -> Target:
    """Undo the offloading of a pipeline or a model: its weights are CPU tensors again, bit-equal.

        disable_offload(pipe)

    Components that another offloaded pipeline has, too, stay offloaded for that one, and so do
    parts of a model that were dispatched by themselves.

    Args:
        target: what was given to `enable_group_offload` or `dispatch_model`, or the handle. A
            handle whose offloading was undone before is left as it is.

    Returns:
        The same target.

    Raises:
        ValueError: it is not offloaded, or only as a part of something else.
    """
    handle = target if isinstance(target, OffloadHandle) else handle_of(target)
    if handle is not None:
        handle._disable()
        return target
    model = offloading_of(target) if isinstance(target, nn.Module) else None
    if model is None or handles_with(model):
        raise ValueError(
            f"{type(target).__name__} is not offloaded by itself: pass the pipeline or the module "
            "that was given to enable_group_offload or dispatch_model"
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
        raise ValueError("num_blocks_per_group and group_size exclude each other: pass one")
    if onload_device is not None and resolve_device(onload_device) != store.device:
        raise ValueError(
            f"onload_device={onload_device!r}, but the store serves {store.device}: make the "
            f"store with TierStore(..., device={str(onload_device)!r})"
        )


def _chosen(
    target: Any, settings: OffloadSettings
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The models in a target that are to be offloaded, and those that stay on the device."""
    if isinstance(target, nn.Module) and not hints_of(target).supported:
        raise ValueError(
            f"{type(target).__name__} does not support group offloading: it says so with "
            "_supports_group_offloading=False. Run it on the device as it is"
        )
    found = models_in(target)
    excluded = settings.exclude_modules
    unknown = [name for name in excluded if name not in found]
    if unknown:
        raise ValueError(f"exclude_modules names {unknown}, but there are only {sorted(found)}")
    chosen, staying = {}, {}
    for name, module in found.items():
        if name not in excluded and hints_of(module).supported:
            chosen[name] = module
        else:
            staying[name] = module
    return chosen, staying
