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
        changed = _changed(dict(value.items()), change, skip)
        value = copy.copy(value) if changed else value  # there may be more to it than its items
        for key, item in changed.items():
            value[key] = item
    elif is_record(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        changed = _changed(fields, change, skip)
        value = copy.copy(value) if changed else value
        for name, item in changed.items():
            object.__setattr__(value, name, item)  # it may be frozen
    return value


def _changed(
    items: dict[Any, Any], change: Callable[[torch.Tensor], torch.Tensor], skip: frozenset[str]
) -> dict[Any, Any]:
    """Those of the items that are others with their tensors as `change` returns them."""
    after = {k: with_tensors(v, change, skip) for k, v in items.items() if k not in skip}
    return {key: item for key, item in after.items() if item is not items[key]}


def is_record(value: object) -> bool:
    """Whether a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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
