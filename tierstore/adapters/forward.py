"""Patch methods of a module to run within a context, for inference and training.

A *unit* is a module with the weights that its forward needs. A `ForwardContext` encloses one call
of it: `begin` leases the weights before the forward; `finish` releases them after it, or `end` if
it raised. The backward pass leases the weights that it needs again (see
`tierstore.adapters.saved`), and a recomputed forward has its own context.

A `MethodPatch` is an attribute of one module object. A deep copy or a pickle of the module is an
ordinary module with its original method.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.adapters.nested import tensors_in
from tierstore.adapters.saved import raise_on_backward
from tierstore.torch_private import CALL, COMPILED_CALL

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MethodPatch:
    """Replaces the method `name` of one module from `install` until `remove`.

    Calling it calls `run` with the patch itself, the arguments and the keyword arguments. Like any
    method patched on one object, it is stored in the module's own dictionary.
    """

    superseded = False
    """True if the patch stays only until a new one is installed in its place."""
    successor: MethodPatch | None = None
    """The patch with the same `run` that wraps a foreign patch around this one."""

    def __init__(
        self, module: nn.Module, name: str, run: Callable[[MethodPatch, Any, Any], Any]
    ) -> None:
        self.module = module
        self.name = name
        self.run: Callable[[MethodPatch, Any, Any], Any] | None = run
        self.kind = type(module)
        self._of_class: Any = None
        self._method: Any = None
        self.replaced: Any = module.__dict__.get(name)
        while isinstance(self.replaced, MethodPatch) and self.replaced.inactive:
            self.replaced = self.replaced.replaced
        original: Any = self.original
        for attribute in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(original, attribute):
                setattr(self, attribute, getattr(original, attribute))

    def install(self) -> None:
        """Replace the method. Register the patch first: an interrupt may follow at once."""
        # A module's `__setattr__` may reject the attribute, or set it on another module.
        self.module.__dict__[self.name] = self

    @property
    def original(self) -> Callable[..., Any]:
        """The method that Python would find without this patch.

        Either the entry of the module's dictionary that the patch replaced, or the method of the
        module's current class.
        """
        if self.replaced is not None:
            replaced: Callable[..., Any] = self.replaced
            return replaced
        # torch.compile can trace this comparison, but not a walk through the bases of a class.
        if getattr(type(self.module), self.name, None) is not self._of_class:
            self._look_up()
        method: Callable[..., Any] = self._method
        return method

    def _look_up(self) -> None:
        self._of_class = getattr(type(self.module), self.name, None)
        self._method = method_of_class(self.module, self.name)

    @property
    def unpatched(self) -> Callable[..., Any]:
        """The method without any patch."""
        found = self.original
        while isinstance(found, MethodPatch):
            found = found.original
        return found

    @property
    def inactive(self) -> bool:
        """True if the patch has been removed or is superseded."""
        return self.superseded or self.run is None

    @property
    def displaced(self) -> bool:
        """True if calls may bypass the patch.

        The method was patched again, a foreign patch was removed together with this one, or the
        module's class has changed.
        """
        if type(self.module) is not self.kind:
            return True
        found = self.module.__dict__.get(self.name)
        while isinstance(found, MethodPatch) and found is not self:
            found = found.replaced
        return found is not self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        # An export contains the ordinary model, with its current weights.
        if run is None or torch.compiler.is_exporting() or self._is_compiled():
            return self.original(*args, **kwargs)
        return run(self, args, kwargs)

    def _is_compiled(self) -> bool:
        """Return whether the module itself is being compiled.

        The patch of the compiled call then does all the work, outside the compiled code.
        """
        if not torch.compiler.is_dynamo_compiling() or self.name == COMPILED_CALL:
            return False
        entry = getattr(self.module, COMPILED_CALL)
        return isinstance(entry, MethodPatch) and isinstance(entry.run, ForwardRunner)

    def __repr__(self) -> str:
        what = f"{self.name} of {type(self.module).__name__}"
        return f"<{what}, {'as it was' if self.run is None else 'with weights in a tierstore'}>"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original method, whose arguments `inspect.signature` reads."""
        return self.original

    @property
    def __code__(self) -> types.CodeType:
        """The code object of the original method, which torch.export reads."""
        original: Any = self.original
        code: types.CodeType = original.__code__
        return code

    def remove(self) -> None:
        """Restore the module's method. A patch that others have wrapped only passes calls on."""
        self.run = None
        attributes = self.module.__dict__
        if attributes.get(self.name) is not self:
            return
        if self.replaced is None:
            del attributes[self.name]
        else:
            attributes[self.name] = self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self.original
        if self.replaced is not None:
            return copy.deepcopy(self.replaced, memo)
        return method_of_class(module, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.replaced is not None:
            return same, (self.replaced,)
        return getattr, (self.module, self.name)  # unpickled before the module's attributes


def method_of_class(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of an object as if its own dictionary did not have it."""
    kind = type(owner)
    found: Any = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    if found is None:
        found = owner.__getattr__(name)
    elif (bind := getattr(type(found), "__get__", None)) is not None:
        found = bind(found, owner, kind)
    method: Callable[..., Any] = found
    return method


def same(value: Any) -> Any:
    """Return the value itself, or a shallow copy of the model for a `CopiedAs`.

    Pickles of models refer to this function by name.
    """
    return value.shallow() if type(value) is CopiedAs else value


class CopiedAs:
    """Placeholder for a model in the state that its `__reduce_ex__` returns.

    A deep copy is made by `copied`, given the copy's memo; a pickle contains `pickled()`.
    """

    def __init__(self, copied: Callable[[dict[int, Any]], Any], pickled: Callable[[], Any]) -> None:
        self._copied = copied
        self._pickled = pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copied(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return same, (self._pickled(),)

    def shallow(self) -> Any:
        """Return a copy that shares the weights, as for a pickle."""
        return self._pickled()


def has_method(module: nn.Module, name: str) -> bool:
    """Return whether a module has a method `name`; a submodule of that name does not count."""
    return name not in module._modules and callable(getattr(module, name, None))


def entry_methods(module: nn.Module) -> tuple[str, str]:
    """Return the methods to patch so that every call of a module is intercepted.

    A `forward` that is a property cannot be patched; `__call__` is patched instead.
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    return CALL if hasattr(type(forward), "__set__") else "forward", COMPILED_CALL


class ForwardContext(Protocol):
    """Context around one call of a method: of a unit, or of a whole model."""

    def begin(self) -> bool:
        """Enter the context. Return False if the caller must look the method up again.

        The caller must call `finish` or `end` in any case, even if this raises.
        """

    def finish(self, result: Any, given: Arguments) -> Any:
        """Leave the context after the call, and return the result to hand to the caller."""

    def end(self) -> None:
        """Leave the context in any state. Called again if it was interrupted."""


@dataclass(eq=False)
class ForwardRunner:
    """Runs a patched method within a context, which `make_context` creates for each call.

    `refresh` is called first, and may install another patch in this one's place. If `make_context`
    returns None, the call has no context. `before` maps the arguments; `after` maps the result,
    given the original arguments. `call`, if given, calls the method with its arguments.
    """

    make_context: Callable[[], ForwardContext | None]
    refresh: Callable[[], None] | None = None
    _: KW_ONLY
    before: Callable[[Any, Any], Arguments] | None = None
    after: Callable[[Any, Any, Any], Any] | None = None
    call: Callable[[Any, Any, Any], Any] | None = None

    def __call__(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:  # noqa: C901 - no call more for each unit
        given = args, kwargs
        if self.refresh is not None:
            self.refresh()
            if method.run is not self and not self._has_active_successor(method):
                # The model was repartitioned, and has other patches now.
                return getattr(method.module, method.name)(*args, **kwargs)
        if self.before is not None:
            args, kwargs = self.before(args, kwargs)
        context = self.make_context()
        if context is None:
            result = method.original(*args, **kwargs)
        else:
            try:
                begun = context.begin()
                if begun:
                    call, original = self.call, method.original
                    result = call(original, args, kwargs) if call else original(*args, **kwargs)
                    result = context.finish(result, given)
            except BaseException:
                _end(context)
                raise
            if not begun:
                return getattr(method.module, method.name)(*given[0], **given[1])
        if type(result) is types.GeneratorType:
            return self._steps(method, result, given)
        return result if self.after is None else self.after(result, *given)

    def _steps(
        self, method: MethodPatch, generator: Generator[Any, Any, Any], given: Arguments
    ) -> Generator[Any, Any, Any]:
        """Run a generator that the method returned, with a separate context for each step.

        Between two steps, anything may happen to the model.
        """
        step: Callable[[Any], Any] = generator.send
        value: Any = None
        try:
            while True:
                run = functools.partial(_step, step, value)
                begun, (done, result) = run_within(self.make_context(), run, (), {}, given)
                if not begun:
                    raise RuntimeError(
                        f"{type(method.module).__name__} was changed, or is no longer offloaded, "
                        f"but a generator returned by its {method.name} has not finished: call "
                        f"{method.name} again"
                    )
                if done:
                    return result
                step, value = generator.send, None
                try:
                    value = yield result if self.after is None else self.after(result, *given)
                except GeneratorExit:
                    raise
                except BaseException as error:  # the consumer threw it into the generator
                    step, value = generator.throw, error
        finally:
            generator.close()

    def _has_active_successor(self, method: MethodPatch) -> bool:
        """Return whether the call came through a foreign patch around this one.

        Looking the method up again would then run the foreign patch twice. The next call reaches
        the successor first.
        """
        return method.successor is not None and method.successor.run is self


def _step(step: Callable[[Any], Any], value: Any) -> tuple[bool, Any]:
    """Resume a generator. Return whether it has finished, and the value returned or yielded."""
    try:
        return False, step(value)
    except StopIteration as stop:
        return True, stop.value


def run_within(
    context: ForwardContext | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Arguments | None = None,
) -> tuple[bool, Any]:
    """Call a function within a context. Return whether the context began, and the result."""
    if context is None:
        return True, function(*args, **kwargs)
    try:
        if not context.begin():
            _end(context)
            return False, (False, None)
        return True, context.finish(function(*args, **kwargs), given or (args, kwargs))
    except BaseException:
        _end(context)
        raise


def _end(context: ForwardContext) -> None:
    try:
        context.end()
    except BaseException:  # interrupted while unbinding: do it again
        context.end()
        raise


def forbid_backward(tensors: Iterable[torch.Tensor], given: Arguments) -> None:
    """Make a backward pass through a module's results raise: its weights have been released.

    `tensors` are the tensors of the result. Arguments that the module returned unchanged are
    skipped.
    """
    passed_on = {id(tensor.grad_fn) for tensor in tensors_in(list(given))}
    for tensor in tensors:
        if tensor.grad_fn is not None and id(tensor.grad_fn) not in passed_on:
            tensor.grad_fn.register_prehook(raise_on_backward)
