"""Methods of a module that run differently while it is offloaded, and are ordinary in its copies.

What stands in for a method is an attribute of the one module object. A deep copy or a pickle of the
module is an ordinary module: it gets its ordinary method back.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StandIn:
    """Stands in for the method `name` of a module until `remove`."""

    outdated = False
    """Whether it stands only until another takes its place, and stands in for what it did."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.replaced: Any = module.__dict__.get(name)
        self.original: Callable[..., Any] = getattr(module, name)
        while isinstance(self.replaced, StandIn) and self.replaced.outdated:
            self.original = self.replaced.original
            self.replaced = self.replaced.replaced
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


def has_method(module: nn.Module, name: str) -> bool:
    """Whether a module has such a method. A part of it may have that name, too."""
    return name not in module._modules and callable(getattr(module, name, None))


class Run(Protocol):
    """What goes on around one call of a method."""

    def begin(self) -> bool:
        """Before it. False if it is another's turn: the method is to be looked up anew."""

    def finish(self, result: Any, given: Arguments) -> Any:
        """After it: end, and return the result as others may have it."""

    def end(self) -> None:
        """End, whatever happened before. Called again if it was interrupted."""


class OffloadedForward(StandIn):
    """A method that needs the weights: `visit()` is begun before each call, and ended after it.

    `look` is called first, and may put others in this one's place. `visit` may return None: then
    there is nothing to do around this call. `before` changes the arguments, `after` the result,
    given the arguments as they came. `call` is given the method and its arguments, to call it.
    """

    def __init__(  # noqa: PLR0913 - half of them are optional
        self,
        module: nn.Module,
        name: str,
        look: Callable[[], None],
        visit: Callable[[], Run | None],
        before: Callable[[Any, Any], Arguments] | None = None,
        after: Callable[[Any, Any, Any], Any] | None = None,
        call: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        self.look = look
        self.visit: Callable[[], Run | None] | None = visit
        self.before = before
        self.after = after
        self.call = call
        super().__init__(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        visit, before, after, given = self.visit, self.before, self.after, (args, kwargs)
        if visit is None:
            return self.original(*args, **kwargs)
        self.look()
        if self.visit is not visit:  # the model was cut anew, and has other wrappers now
            return getattr(self.module, self.name)(*args, **kwargs)
        if before is not None:
            args, kwargs = before(args, kwargs)
        run = visit()
        if run is None:
            result = self.original(*args, **kwargs)
        else:
            try:
                begun = run.begin()
                if begun:
                    call, method = self.call, self.original
                    result = call(method, args, kwargs) if call else method(*args, **kwargs)
                    result = run.finish(result, given)
            except BaseException:
                _end(run)
                raise
            if not begun:
                return getattr(self.module, self.name)(*given[0], **given[1])
        return result if after is None else after(result, *given)

    def remove(self) -> None:
        self.visit = self.before = self.after = self.call = None
        self.look = _nothing
        super().remove()


def _nothing() -> None:
    pass


def _end(run: Run) -> None:
    try:
        run.end()
    except BaseException:  # an interrupt in the middle of putting back: do it again
        run.end()
        raise


def refuse_to_go_back(tensors: Iterable[torch.Tensor], given: Arguments) -> None:
    """After a module ran: nobody may go back through weights that are away.

    `tensors` are of its result. What it was given, and passed on, is none of its own.
    """
    passed_on = {id(tensor.grad_fn) for tensor in tensors_in(list(given))}
    for tensor in tensors:
        if tensor.grad_fn is not None and id(tensor.grad_fn) not in passed_on:
            tensor.grad_fn.register_prehook(_refuse_backward)


def _refuse_backward(gradients: Any) -> None:
    raise RuntimeError(
        "this backward needs weights that have left the device since the forward: they are in a "
        "tierstore. Run the forward under torch.no_grad() if no gradient is wanted; to train, make "
        "it an ordinary model first (tierstore.undispatch(model), or handle.disable())"
    )


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
