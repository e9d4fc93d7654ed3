"""Tensors in a value, whatever containers they are in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch


def to_device(value: Any, device: torch.device, skip: frozenset[str] = frozenset()) -> Any:
    """Tensors in a value moved to `device`. Keys in `skip` stay as they are."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=False)

    return with_tensors(value, moved, skip)


def with_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], skip: frozenset[str] = frozenset()
) -> Any:
    """A value with its tensors as `change` returns them. Keys in `skip` stay as they are.

    Containers are rebuilt only if something in them is another: some are caches that the model
    changes in place.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        return _mapping_with(value, change, skip)
    return _record_with(value, change, skip) if is_record(value) else value


def is_record(value: object) -> bool:
    """Whether a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _record_with(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], skip: frozenset[str]
) -> Any:
    before = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    after = {n: v if n in skip else with_tensors(v, change, skip) for n, v in before.items()}
    changed = {name: item for name, item in after.items() if item is not before[name]}
    if changed:
        value = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(value, name, item)  # it may be frozen
    return value


def _mapping_with(
    value: MutableMapping[Any, Any],
    change: Callable[[torch.Tensor], torch.Tensor],
    skip: frozenset[str],
) -> MutableMapping[Any, Any]:
    items = {k: item if k in skip else with_tensors(item, change) for k, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if changed:
        value = copy.copy(value)  # of its own kind, which may have more to it than its items
        for key, item in changed.items():
            value[key] = item
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, in its containers too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, MutableMapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_record(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def device_of(value: Any) -> torch.device | None:
    """The device of the first tensor in a value; None if there is none."""
    first = next(tensors_in(value), None)
    return None if first is None else first.device
