"""Group offloading for diffusers pipelines and any single model, through a store.

The idea of group offloading, and the names of its arguments, are those of diffusers'
`enable_group_offload`. What diffusers has flags for (streams, pinning, a directory), the store has.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import nn

from tierstore.adapters.grouping import Cutting, unique_bytes
from tierstore.adapters.modules import OffloadedModule, usual_target
from tierstore.adapters.owners import MARKER, refuse_other_offloading
from tierstore.metrics import Stats
from tierstore.model.outline import OFFLOAD_TYPES
from tierstore.model.sizes import parse_size
from tierstore.settings import resolve_device
from tierstore.store import TierStore

logger = logging.getLogger("tierstore")

_CHANGES_WEIGHTS = (
    "load_lora_weights",
    "unload_lora_weights",
    "fuse_lora",
    "unfuse_lora",
    "delete_adapters",
    "load_lora_adapter",
    "unload_lora",
    "load_ip_adapter",
    "unload_ip_adapter",
    "load_textual_inversion",
    "unload_textual_inversion",
    "load_attn_procs",
    "fuse_qkv_projections",
    "unfuse_qkv_projections",
    "load_state_dict",
    "enable_layerwise_casting",
    "add_adapter",
)
"""Methods of pipelines and models that change weights or modules: they run suspended."""

_REPLACED = {
    "offload_to_disk_path": "the store's disk_dir: TierStore(ram_budget, disk_dir)",
    "offload_device": "the store, which decides between RAM and disk by its budgets",
}
_HARMLESS = ("use_stream", "record_stream", "low_cpu_mem_usage", "non_blocking")

# Weak both ways: what keeps a handle alive are the wrapped methods of what it offloads.
_handles: weakref.WeakKeyDictionary[Any, weakref.ref[OffloadHandle]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


class OffloadHandle:
    """An offloaded pipeline or model. Also a context manager that disables at its end."""

    def __init__(self, target: Any, store: TierStore, settings: dict[str, Any]) -> None:
        self.store = store
        self._target = weakref.ref(target)
        self._settings = settings
        self._suspensions = 0
        self._offloaded: dict[str, OffloadedModule] = {}
        self._entries: list[tuple[Any, str]] = []
        self._number = next(_numbers)
        self._enabled = False
        self._chosen: dict[str, nn.Module] = {}
        self._enable()

    @property
    def enabled(self) -> bool:
        """Whether weights are offloaded now."""
        return self._enabled

    @property
    def groups(self) -> dict[str, list[str]]:
        """The keys of the groups and the names of the tensors in each."""
        return {key: names for o in self._offloaded.values() for key, names in o.groups.items()}

    def stats(self) -> Stats:
        """The store's numbers so far."""
        return self.store.stats()

    def disable(self) -> None:
        """Undo the offloading: the weights are ordinary CPU tensors again, bit-equal."""
        target = self._target()
        if target is not None and _handle_of(target) is self:
            del _handles[target]
        self._disable()
        for owner, name in self._entries:
            owner.__dict__.pop(name, None)
        self._entries.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the weights are ordinary CPU tensors and may be changed, replaced or added to.

        Afterwards they are offloaded again: what changed is stored anew, the rest is not.
        """
        self._suspensions += 1
        if self._suspensions == 1:
            self._disable()
        try:
            yield
        finally:
            self._suspensions -= 1
            if self._suspensions == 0 and not self.store.closed:
                self._enable()

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()

    def _enable(self) -> None:
        target = self._target()
        name = type(target).__name__
        before = self.store.stats().bytes_written
        self._chosen = _components(target, self._settings["exclude_modules"] or [], self.store)
        try:
            for component, module in self._chosen.items():
                prefix = (
                    f"{name}-{self._number}/{component}" if component else f"{name}-{self._number}"
                )
                self._offloaded[component] = self._offload(module, prefix)
                _mark(module, self.store.device)
        except BaseException:
            self._disable()
            raise
        self._enabled = True
        if not self._entries:
            for owner in (target, *self._chosen.values()):
                self._wrap_changes(owner)
        sizes = sum(unique_bytes(m.parameters()) for m in self._chosen.values())
        logger.info(
            "%s: %d components, %d groups, %d bytes of weights; %d bytes written",
            name,
            len(self._chosen),
            len(self.groups),
            sizes,
            self.store.stats().bytes_written - before,
        )

    def _offload(self, module: nn.Module, prefix: str) -> OffloadedModule:
        settings = self._settings
        skip = settings["exclude_kwargs"]
        if skip is None:
            skip = getattr(module, "_skip_keys", None) or []
        blocks = settings["block_modules"]
        if blocks is None:
            blocks = getattr(module, "_group_offload_block_modules", None) or []
        cutting = Cutting(
            settings["offload_type"],
            settings["group_size"] or usual_target(settings["offload_type"], self.store, module),
            tuple(blocks),
            settings["num_blocks_per_group"],
        )
        return OffloadedModule(module, self.store, prefix, cutting, skip=frozenset(skip))

    def _disable(self) -> None:
        for offloaded in self._offloaded.values():
            _unmark(offloaded.root)
            offloaded.disable()
        self._offloaded.clear()
        self._enabled = False

    def _wrap_changes(self, owner: Any) -> None:
        for name in _CHANGES_WEIGHTS:
            method = getattr(owner, name, None)
            if method is None or not inspect.ismethod(method):
                continue
            object.__setattr__(owner, name, SuspendingMethod(self, method))
            self._entries.append((owner, name))


class SuspendingMethod:
    """Stands in for a method that changes weights: it runs while the offloading is suspended.

    A deep copy of its owner gets the ordinary method back.
    """

    def __init__(self, handle: OffloadHandle, method: types.MethodType) -> None:
        self._handle = handle
        self._function = method.__func__
        self._owner = weakref.ref(method.__self__)
        functools.update_wrapper(self, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._handle.suspended():
            return self._function(self._owner(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = self._owner()
        return types.MethodType(self._function, memo.get(id(owner), owner))


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

    Args:
        target: a diffusers pipeline (every component, under one budget) or any `nn.Module`.
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

    Weights that still are a checkpoint's own bytes are read from it; others are written to the
    store once. A weight that is away shows its true value on the CPU. `use_stream`,
    `record_stream`, `low_cpu_mem_usage` and `non_blocking` are accepted and have no effect: the
    store prefetches on streams of its own and keeps its budget. A second call with the same
    arguments returns the same handle; with others, it starts anew.

    Raises TypeError for arguments that the store replaces, ValueError for ones that cannot be,
    BudgetError if a group is larger than a budget; the model is as it was then.
    """
    _refuse_replaced(replaced)
    settings: dict[str, Any] = {
        "offload_type": offload_type,
        "num_blocks_per_group": num_blocks_per_group,
        "group_size": None if group_size is None else parse_size(group_size),
        "exclude_modules": [exclude_modules]
        if isinstance(exclude_modules, str)
        else exclude_modules,
        "exclude_kwargs": exclude_kwargs,
        "block_modules": block_modules,
    }
    _check_settings(settings, store, onload_device)
    if not isinstance(target, nn.Module) and not hasattr(target, "components"):
        raise TypeError(
            f"a {type(target).__name__} cannot be offloaded: pass a diffusers pipeline or a module"
        )
    handle = _handle_of(target)
    if handle is not None:
        if handle.store is store and handle._settings == settings and handle.enabled:
            return handle
        handle.disable()
    handle = OffloadHandle(target, store, settings)
    _handles[target] = weakref.ref(handle)
    return handle


def _handle_of(target: Any) -> OffloadHandle | None:
    reference = _handles.get(target)
    return None if reference is None else reference()


def _refuse_replaced(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name in _REPLACED:
            if value is None or (name == "offload_device" and str(value) == "cpu"):
                continue
            raise TypeError(f"{name} is replaced by {_REPLACED[name]}; leave it out")
        if name not in _HARMLESS:
            raise TypeError(f"enable_group_offload() got an unexpected keyword argument {name!r}")


def _check_settings(
    settings: dict[str, Any], store: TierStore, onload_device: str | torch.device | None
) -> None:
    if not isinstance(store, TierStore):
        raise TypeError(
            f"store is a {type(store).__name__}: pass a TierStore(ram_budget, disk_dir)"
        )
    if settings["offload_type"] not in OFFLOAD_TYPES:
        raise ValueError(
            f"offload_type={settings['offload_type']!r} is not one of {', '.join(OFFLOAD_TYPES)}"
        )
    count = settings["num_blocks_per_group"]
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"num_blocks_per_group={count!r}: pass a positive int, or None")
    if count is not None and settings["group_size"] is not None:
        raise ValueError("num_blocks_per_group and group_size exclude each other: pass one")
    if onload_device is not None and resolve_device(onload_device) != store.device:
        raise ValueError(
            f"onload_device={onload_device!r}, but the store serves {store.device}: make the "
            f"store with TierStore(..., device={str(onload_device)!r})"
        )


def _components(target: Any, excluded: list[str], store: TierStore) -> dict[str, nn.Module]:
    if isinstance(target, nn.Module):
        found: dict[str, nn.Module] = {"": target}
    else:
        found = {n: m for n, m in target.components.items() if isinstance(m, nn.Module)}
    unknown = [name for name in excluded if name not in found]
    if unknown:
        raise ValueError(f"exclude_modules names {unknown}, but there are only {sorted(found)}")
    chosen = {}
    for name, module in found.items():
        if name in excluded or not getattr(module, "_supports_group_offloading", True):
            if name not in excluded:
                logger.warning("%s cannot be offloaded in groups: it stays on the device", name)
            module.to(store.device)
        elif not _is_shared(module, store):
            refuse_other_offloading(name or type(module).__name__, module)
            chosen[name] = module
    return chosen


def _is_shared(module: nn.Module, store: TierStore) -> bool:
    """Another pipeline with the same component has offloaded it to this store already."""
    return any(
        handle.store is store and any(o.root is module for o in handle._offloaded.values())
        for handle in [reference() for reference in list(_handles.values())]
        if handle is not None
    )


def _mark(module: nn.Module, device: torch.device) -> None:
    """Let diffusers see that the model is offloaded, and to where."""
    try:
        from diffusers.hooks import HookRegistry
    except ImportError:
        return  # without diffusers nobody asks
    # Not register_hook: its wrapper around forward would make a deep copy run this model's weights.
    HookRegistry.check_if_exists_or_initialize(module).hooks[MARKER] = _Mark(device)


def _unmark(module: nn.Module) -> None:
    registry = getattr(module, "_diffusers_hook", None)
    if registry is not None and isinstance(registry.get_hook(MARKER), _Mark):
        del registry.hooks[MARKER]


class _Mark:
    """What diffusers looks for. A deep copy of the model is an ordinary model: it has no mark."""

    def __init__(self, device: torch.device) -> None:
        self.config = SimpleNamespace(onload_device=device, offload_device=torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None
