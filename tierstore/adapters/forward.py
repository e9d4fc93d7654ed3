"""Call methods of a module within a context: in inference and in training alike.

A *unit* is a module with the weights that its forward needs. A `ForwardContext` goes around one
call of it: `begin` leases the weights before the forward; `finish` after it, or `end` if it raised,
releases them. The backward pass leases again what it needs (see `tierstore.adapters.saved`), and a
forward that is computed again has a context of its own.

A `MethodPatch` is an attribute of the one module object. A deep copy or a pickle of the module is
an ordinary module: it gets its ordinary method back.
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
from tierstore.adapters.saved import refuse_backward
from tierstore.torch_private import CALL, COMPILED_CALL

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MethodPatch:
    """Replaces the method `name` of one module from `install` until `remove`.

    A call of it is a call of `run`, with the patch itself, the arguments, and those by name. It is
    found in the module's own dictionary, as any method that is patched on one module.
    """

    superseded = False
    """Whether it stays only until another one takes its place."""
    successor: MethodPatch | None = None
    """The one in front of what others put in front of this one. It runs the same."""

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
        """Replace the method. Note the patch before: an interrupt may follow at once."""
        # A module's `__setattr__` may refuse it, or give it to another module.
        self.module.__dict__[self.name] = self

    @property
    def original(self) -> Callable[..., Any]:
        """The method as plain Python would find it now: what the patch replaced in the module's
        dictionary, or the method of the class that the module has, as that class has it."""
        if self.replaced is not None:
            replaced: Callable[..., Any] = self.replaced
            return replaced
        # torch.compile traces this comparison, but no walk through the bases of a class.
        if getattr(type(self.module), self.name, None) is not self._of_class:
            self._look_up()
        method: Callable[..., Any] = self._method
        return method

    def _look_up(self) -> None:
        self._of_class = getattr(type(self.module), self.name, None)
        self._method = method_of_class(self.module, self.name)

    @property
    def ordinary(self) -> Callable[..., Any]:
        """The method without any patch."""
        found = self.original
        while isinstance(found, MethodPatch):
            found = found.original
        return found

    @property
    def inactive(self) -> bool:
        """Whether it does nothing any more, or will be removed when others have its place."""
        return self.superseded or self.run is None

    @property
    def displaced(self) -> bool:
        """Whether calls may pass it by: the method was patched again, or a patch was taken back
        with it; or whether the module has another class since."""
        if type(self.module) is not self.kind:
            return True
        found = self.module.__dict__.get(self.name)
        while isinstance(found, MethodPatch) and found is not self:
            found = found.replaced
        return found is not self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        # What is exported is the ordinary model, with its weights as they are.
        if run is None or torch.compiler.is_exporting() or self._is_compiled():
            return self.original(*args, **kwargs)
        return run(self, args, kwargs)

    def _is_compiled(self) -> bool:
        """Whether the module is being compiled by itself: the patch of the compiled call does all
        that is to be done, outside of what is compiled."""
        if not torch.compiler.is_dynamo_compiling() or self.name == COMPILED_CALL:
            return False
        entry = getattr(self.module, COMPILED_CALL)
        return isinstance(entry, MethodPatch) and isinstance(entry.run, ForwardRunner)

    def __repr__(self) -> str:
        what = f"{self.name} of {type(self.module).__name__}"
        return f"<{what}, {'as it was' if self.run is None else 'with weights in a tierstore'}>"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method: `inspect.signature` reads its arguments there."""
        return self.original

    @property
    def __code__(self) -> types.CodeType:
        """That of the method: torch.export looks where it is."""
        original: Any = self.original
        code: types.CodeType = original.__code__
        return code

    def remove(self) -> None:
        """Give the module its own method back; where others wrapped this one, only pass through."""
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
        return getattr, (self.module, self.name)  # of a module whose attributes come later


def method_of_class(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of a module, say, as if its own dictionary did not have it."""
    kind = type(owner)
    found: Any = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    if found is None:
        found = owner.__getattr__(name)
    elif (bind := getattr(type(found), "__get__", None)) is not None:
        found = bind(found, owner, kind)
    method: Callable[..., Any] = found
    return method


def same(value: Any) -> Any:
    """Return the value itself, for pickles, or the model that a `CopiedAs` stands for in a shallow
    copy."""
    return value.shallow() if type(value) is CopiedAs else value


class CopiedAs:
    """Stands for a model in what copies of it are made of, as its `__reduce_ex__` tells.

    A deep copy has what `copied` makes in its place, given the copy's memo; a pickle, `pickled`.
    """

    def __init__(self, copied: Callable[[dict[int, Any]], Any], pickled: Callable[[], Any]) -> None:
        self._copied = copied
        self._pickled = pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copied(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return same, (self._pickled(),)

    def shallow(self) -> Any:
        """Return a copy that shares the weights, as a pickle would have them."""
        return self._pickled()


def has_method(module: nn.Module, name: str) -> bool:
    """Whether a module has such a method. A part of it may have that name, too."""
    return name not in module._modules and callable(getattr(module, name, None))


def calls_of(module: nn.Module) -> tuple[str, str]:
    """The methods by which a module is called, compiled or not: what its weights have to be there
    for. A `forward` that is a property cannot be patched; what calls it can."""
    forward = inspect.getattr_static(type(module), "forward", None)
    return CALL if hasattr(type(forward), "__set__") else "forward", COMPILED_CALL


class ForwardContext(Protocol):
    """Goes around one call of a method: of a unit, or of a whole model."""

    def begin(self) -> bool:
        """Begin before the call. False if the method is to be looked up again.

        In any case, and also if it raises, `finish` or `end` has to be called.
        """

    def finish(self, result: Any, given: Arguments) -> Any:
        """End after the call, and return the result as others may have it."""

    def end(self) -> None:
        """End, whatever happened before. It is called again if it was interrupted."""


@dataclass(eq=False)
class ForwardRunner:
    """Runs a patched method within a context, which `use` makes for each call.

    `look` is called first, and may install another patch in this one's place. `use` may return
    None: then nothing goes around this call. `before` changes the arguments, `after` the result,
    given the arguments as they came. `call` is given the method and its arguments, to call it.
    """

    use: Callable[[], ForwardContext | None]
    look: Callable[[], None] | None = None
    _: KW_ONLY
    before: Callable[[Any, Any], Arguments] | None = None
    after: Callable[[Any, Any, Any], Any] | None = None
    call: Callable[[Any, Any, Any], Any] | None = None

    def __call__(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:  # noqa: C901 - no call more for each unit
        given = args, kwargs
        if self.look is not None:
            self.look()
            if method.run is not self and not self._goes_on(method):
                # The model was partitioned again, and has other patches now.
                return getattr(method.module, method.name)(*args, **kwargs)
        if self.before is not None:
            args, kwargs = self.before(args, kwargs)
        use = self.use()
        if use is None:
            result = method.original(*args, **kwargs)
        else:
            try:
                begun = use.begin()
                if begun:
                    call, original = self.call, method.original
                    result = call(original, args, kwargs) if call else original(*args, **kwargs)
                    result = use.finish(result, given)
            except BaseException:
                _end(use)
                raise
            if not begun:
                return getattr(method.module, method.name)(*given[0], **given[1])
        if type(result) is types.GeneratorType:
            return self._steps(method, result, given)
        return result if self.after is None else self.after(result, *given)

    def _steps(
        self, method: MethodPatch, generator: Generator[Any, Any, Any], given: Arguments
    ) -> Generator[Any, Any, Any]:
        """Run a generator that the method returned, each of its steps within a context of its own:
        anything may happen between two steps."""
        step: Callable[[Any], Any] = generator.send
        value: Any = None
        try:
            while True:
                run = functools.partial(_step, step, value)
                begun, (over, result) = run_within(self.use(), run, (), {}, given)
                if not begun:
                    raise RuntimeError(
                        f"{type(method.module).__name__} was built differently, or made an "
                        f"ordinary model, while a generator that its {method.name} returned was "
                        "not at its end: call it anew"
                    )
                if over:
                    return result
                step, value = generator.send, None
                try:
                    value = yield result if self.after is None else self.after(result, *given)
                except GeneratorExit:
                    raise
                except BaseException as error:  # whoever iterates threw it
                    step, value = generator.throw, error
        finally:
            generator.close()

    def _goes_on(self, method: MethodPatch) -> bool:
        """Whether a call came by what was put in front of a patch since: to begin again would call
        that twice. The next one meets the successor first."""
        return method.successor is not None and method.successor.run is self


def _step(step: Callable[[Any], Any], value: Any) -> tuple[bool, Any]:
    """Resume a generator. Returns whether it is over, and what it returned or yields."""
    try:
        return False, step(value)
    except StopIteration as stop:
        return True, stop.value


def run_within(
    use: ForwardContext | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Arguments | None = None,
) -> tuple[bool, Any]:
    """Call a function within a context: (whether that has begun, what it returned)."""
    if use is None:
        return True, function(*args, **kwargs)
    try:
        if not use.begin():
            _end(use)
            return False, (False, None)
        return True, use.finish(function(*args, **kwargs), given or (args, kwargs))
    except BaseException:
        _end(use)
        raise


def _end(use: ForwardContext) -> None:
    try:
        use.end()
    except BaseException:  # an interrupt in the middle of putting back: do it again
        use.end()
        raise


def refuse_to_go_back(tensors: Iterable[torch.Tensor], given: Arguments) -> None:
    """Have a backward pass through a module raise, after its forward: its weights are away.

    `tensors` are those of the result. Those that the module was given, and passed on, are left
    alone.
    """
    passed_on = {id(tensor.grad_fn) for tensor in tensors_in(list(given))}
    for tensor in tensors:
        if tensor.grad_fn is not None and id(tensor.grad_fn) not in passed_on:
            tensor.grad_fn.register_prehook(refuse_backward)
