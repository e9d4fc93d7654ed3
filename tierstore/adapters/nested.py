"""Find and replace the tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def to_device(value: Any, device: torch.device, skip: frozenset[str] = frozenset()) -> Any:
    """Return a value with its tensors moved to `device`. Entries named in `skip` are unchanged."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=False)

    return map_tensors(value, moved, skip)


def are_on_device(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Return True if a quick check finds no argument that could be on another device.

    Runs before each run of a unit, whose arguments nearly always come from another unit.
    """
    for item in (*args, *kwargs.values()):
        kind = type(item)
        if kind is torch.Tensor:
            if item.device != device:
                return False
        elif kind not in _LEAVES:
            return False
    return True


def map_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], skip: frozenset[str] = frozenset()
) -> Any:
    """Return a value with `change` applied to its tensors. Entries named in `skip` are unchanged.

    A container is copied only if an item in it changes, as it may be a cache that the model updates
    in place. Containers may contain themselves.
    """
    try:
        return _with_tensors(value, change, skip, ())
    except _Circular:
        return _CyclicRebuild(change, value, skip).rebuilt(value)


class _Circular(Exception):
    """A container contains itself."""


def _with_tensors(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    skip: frozenset[str],
    around: tuple[int, ...],
) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in _LEAVES or not _is_container(value):
        return value
    if id(value) in around:
        raise _Circular
    around = (*around, id(value))
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, change, frozenset(), around) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    items_before = {key: item for key, item in _items_of(value).items() if key not in skip}
    after = {key: _with_tensors(item, change, skip, around) for key, item in items_before.items()}
    changed = {key: item for key, item in after.items() if item is not items_before[key]}
    if not changed:
        return value
    value = copy.copy(value)  # it may have attributes besides its items
    _set_items(value, changed)
    return value


def _set_items(container: Any, items: Mapping[Any, Any]) -> None:
    """Set items of a list or mapping, or fields of a dataclass."""
    for key, item in items.items():
        if isinstance(container, (list, MutableMapping)):  # a dataclass may also be one
            container[key] = item
        else:
            object.__setattr__(container, key, item)  # the dataclass may be frozen


class _CyclicRebuild:
    """Rebuild of a value whose containers contain themselves."""

    def __init__(
        self, change: Callable[[torch.Tensor], torch.Tensor], value: Any, skip: frozenset[str]
    ) -> None:
        self._items: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._changed: dict[int, Any] = {}  # new tensors by old id; then rebuilt containers
        self._inside: dict[int, list[int]] = {}  # ids of the containers of an item, by its id
        self._changing: set[int] = set()
        self._collect(value, change, skip)
        pending = list(self._changed)
        while pending:
            for outer in self._inside.get(pending.pop(), ()):
                if outer not in self._changing:
                    self._changing.add(outer)
                    pending.append(outer)

    def _collect(
        self, value: Any, change: Callable[[torch.Tensor], torch.Tensor], skip: frozenset[str]
    ) -> None:
        """Collect the items of all containers, and the tensors that change."""
        pending = [(value, skip)]
        while pending:
            container, names = pending.pop()
            if id(container) in self._items:
                continue
            items = {k: v for k, v in _items_of(container).items() if k not in names}
            self._items[id(container)] = container, items
            below = frozenset[str]() if isinstance(container, (list, tuple)) else names
            for item in items.values():
                self._inside.setdefault(id(item), []).append(id(container))
                if isinstance(item, torch.Tensor) and id(item) not in self._items:
                    self._items[id(item)] = item, {}
                    if (changed := change(item)) is not item:
                        self._changed[id(item)] = changed
                elif _is_container(item):
                    pending.append((item, below))

    def rebuilt(self, value: Any) -> Any:
        """Return the rebuilt form of a value."""
        if id(value) in self._changed:
            return self._changed[id(value)]
        if id(value) not in self._changing:
            return value
        items = self._items[id(value)][1]
        if isinstance(value, tuple):
            parts = [self.rebuilt(item) for item in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        made = copy.copy(value)  # it may have attributes besides its items
        self._changed[id(value)] = made  # before its items, which may lead back to it
        _set_items(made, {key: self.rebuilt(item) for key, item in items.items()})
        return made


_LEAVES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Common types that are neither tensors nor containers, to skip slower checks."""


def _is_container(value: object) -> bool:
    kind = type(value)
    known = kind is tuple or kind is list or kind is dict
    return known or isinstance(value, (list, tuple, MutableMapping)) or is_record(value)


def _items_of(container: Any) -> dict[Any, Any]:
    """Return the items of a container by key, field name or index."""
    if isinstance(container, (list, tuple)):
        return dict(enumerate(container))
    if isinstance(container, MutableMapping):
        return dict(container.items())
    return {f.name: getattr(container, f.name, None) for f in dataclasses.fields(container)}


def is_record(value: object) -> bool:
    """Return whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and its containers, which may contain themselves."""
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in _LEAVES or not _is_container(value) or id(value) in seen:
            continue
        else:
            seen.add(id(value))
            items = value if isinstance(value, (list, tuple)) else [*_items_of(value).values()]
            pending += reversed(items)


def device_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor in a value; None if there is none."""
    first = next(tensors_in(value), None)
    return None if first is None else first.device
