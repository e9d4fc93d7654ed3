"""Tensors in a value, whatever containers they are in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def to_device(value: Any, device: torch.device, skip: frozenset[str] = frozenset()) -> Any:
    """Tensors in a value moved to `device`. Keys in `skip` stay as they are."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=False)

    return with_tensors(value, moved, skip)


def are_there(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether arguments are seen at a glance to be no tensors elsewhere. Those of a unit are looked
    at before each run, and nearly always come from another one."""
    for item in (*args, *kwargs.values()):
        kind = type(item)
        if kind is torch.Tensor:
            if item.device != device:
                return False
        elif kind not in _LEAVES:
            return False
    return True


def with_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], skip: frozenset[str] = frozenset()
) -> Any:
    """A value with its tensors as `change` returns them. Keys in `skip` stay as they are.

    Containers are rebuilt only if something in them is another: some are caches that the model
    changes in place. They may contain themselves.
    """
    try:
        return _with_tensors(value, change, skip, ())
    except _Circular:
        return _Rebuilding(change, value, skip).rebuilt(value)


class _Circular(Exception):
    """A container is in itself."""


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
    value = copy.copy(value)  # there may be more to it than its items
    _give(value, changed)
    return value


def _give(container: Any, items: Mapping[Any, Any]) -> None:
    """Have a list, a mapping or a record have other items."""
    for key, item in items.items():
        if isinstance(container, (list, MutableMapping)):  # which a record may be, too
            container[key] = item
        else:
            object.__setattr__(container, key, item)  # it may be frozen


class _Rebuilding:
    """A value with containers that are in themselves: which of them have to be rebuilt, and what
    has become of them."""

    def __init__(
        self, change: Callable[[torch.Tensor], torch.Tensor], value: Any, skip: frozenset[str]
    ) -> None:
        self._items: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._changed: dict[int, Any] = {}  # tensors by id; containers once they are rebuilt
        self._inside: dict[int, list[int]] = {}  # containers, by what is in them
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
        """Note what is in a container, and which of the tensors become others."""
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
        """What has become of a value."""
        if id(value) in self._changed:
            return self._changed[id(value)]
        if id(value) not in self._changing:
            return value
        items = self._items[id(value)][1]
        if isinstance(value, tuple):
            parts = [self.rebuilt(item) for item in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        made = copy.copy(value)  # there may be more to it than its items
        self._changed[id(value)] = made  # before what is in it, which may lead back to it
        _give(made, {key: self.rebuilt(item) for key, item in items.items()})
        return made


_LEAVES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Types of most values that are neither tensors nor containers: to ask what else one is takes
longer."""


def _is_container(value: object) -> bool:
    kind = type(value)
    known = kind is tuple or kind is list or kind is dict
    return known or isinstance(value, (list, tuple, MutableMapping)) or is_record(value)


def _items_of(container: Any) -> dict[Any, Any]:
    """What is in a container, by keys, names or places."""
    if isinstance(container, (list, tuple)):
        return dict(enumerate(container))
    if isinstance(container, MutableMapping):
        return dict(container.items())
    return {f.name: getattr(container, f.name, None) for f in dataclasses.fields(container)}


def is_record(value: object) -> bool:
    """Whether a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, in its containers too, which may contain themselves."""
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
    """The device of the first tensor in a value; None if there is none."""
    first = next(tensors_in(value), None)
    return None if first is None else first.device
