"""Methods of a module that run differently while it is offloaded, and are ordinary in its copies.

What stands in for a method is an attribute of the one module object. A deep copy or a pickle of the
module is an ordinary module: it gets its ordinary method back.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StandIn:
    """Stands in for the method `name` of a module until `remove`."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.replaced = module.__dict__.get(name)
        self.original: Callable[..., Any] = getattr(module, name)
        # Not its attributes: it may be another of our wrappers, and each has its own.
        wrapper: Any = self
        functools.update_wrapper(wrapper, self.original, updated=())
        setattr(module, name, self)

    def remove(self) -> None:
        """Give the module its own method back; where others wrapped this one, only pass through."""
        if self.module.__dict__.get(self.name) is not self:
            return
        if self.replaced is None:
            delattr(self.module, self.name)
        else:
            setattr(self.module, self.name, self.replaced)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self.original
        method = getattr(type(module), self.name)
        return (
            copy.deepcopy(self.replaced, memo)
            if self.replaced
            else types.MethodType(method, module)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.replaced is not None:
            return same, (self.replaced,)
        return getattr, (self.module, self.name)  # of a module whose attributes come later


def same(value: Any) -> Any:
    """The value itself: what a pickle calls to get it."""
    return value


class Run(Protocol):
    """What goes on around one call of a method."""

    def begin(self) -> None:
        """Before it. If it raises, `end` still is called."""

    def end(self) -> None:
        """After it, whatever happened. Called again if it was interrupted."""


class OffloadedForward(StandIn):
    """A method that needs the weights: `visit()` is begun before each call, and ended after it.

    `before` changes the arguments, `after` the result, given the arguments as they came.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        visit: Callable[[], Run],
        before: Callable[[Any, Any], Arguments] | None = None,
        after: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        self.visit: Callable[[], Run] | None = visit
        self.before = before
        self.after = after
        super().__init__(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin, after, given = self.visit, self.after, (args, kwargs)
        if self.before is not None:
            args, kwargs = self.before(args, kwargs)
        if begin is None:
            return self.original(*args, **kwargs)
        if self.visit is None:  # the model was cut anew, and has other wrappers now
            return getattr(self.module, self.name)(*given[0], **given[1])
        visit = begin()
        try:
            visit.begin()
            result = self.original(*args, **kwargs)
        finally:
            try:
                visit.end()
            except BaseException:  # an interrupt in the middle of putting back: do it again
                visit.end()
                raise
        if torch.is_grad_enabled():
            _refuse_to_go_back(result)
        return result if after is None else after(result, *given)

    def remove(self) -> None:
        self.visit = self.before = self.after = None
        super().remove()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_to_go_back(result: Any) -> None:
    """After a module ran: nobody may go back through weights that are away."""
    for tensor in tensors_in(result):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_refuse_backward)


def _refuse_backward(gradients: Any) -> None:
    raise RuntimeError(
        "this backward needs weights that have left the device since the forward: they are in a "
        "tierstore. Run the forward under torch.no_grad() if no gradient is wanted; to train, make "
        "it an ordinary model first (tierstore.undispatch(model), or handle.disable())"
    )


def to_device(value: Any, device: torch.device, skip: frozenset[str] = frozenset()) -> Any:
    """Tensors in a value moved to `device`. Containers are rebuilt only if something in them moved:
    some are caches that the model changes in place. Keys in `skip` stay as they are."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=False)
    if isinstance(value, (list, tuple)):
        moved = [to_device(item, device) for item in value]
        if all(new is old for new, old in zip(moved, value, strict=True)):
            return value
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, MutableMapping):
        return _mapping_to_device(value, device, skip)
    return value


def _mapping_to_device(
    value: MutableMapping[Any, Any], device: torch.device, skip: frozenset[str]
) -> MutableMapping[Any, Any]:
    moved = {k: item if k in skip else to_device(item, device) for k, item in value.items()}
    changed = {key: item for key, item in moved.items() if item is not value[key]}
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


def device_of(value: Any) -> torch.device | None:
    """The device of the first tensor in a value; None if there is none."""
    first = next(tensors_in(value), None)
    return None if first is None else first.device
