"""Weights that are used without a call of their module: leased when an operation is given them.

A module may use the weight of another one (`linear(x, self.head.weight)`), have its weights in a
`ParameterList`, or have more of them than fit at once. Nothing calls the module that has such a
weight at the right moment. While a `Touching` is on, every operation of torch is looked at before
it runs: the weights of the model among its arguments that are away are leased for that operation,
as a unit's are for its forward.

To look at every operation takes time, so it is on only where it is needed: always, for a model with
modules whose weights nothing else can bring in; else during the first call of each method by which
a model is entered, and if that was given weights that were away, in later ones too.
"""

from __future__ import annotations

import functools
import re
import threading
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierstore.adapters.binding import ParameterBinding
from tierstore.adapters.codecs.memory import OF_THE_FORM
from tierstore.adapters.contents import modules_of
from tierstore.adapters.forward import (
    Arguments,
    ForwardRunner,
    MethodPatch,
    calls_of,
    run_within,
)
from tierstore.adapters.grouping import is_compiled
from tierstore.adapters.operations import OperationMode, not_looked_at
from tierstore.adapters.unit_context import PassContext, UnitContext, UnitWeights
from tierstore.errors import BudgetError
from tierstore.model.formatting import first_of
from tierstore.torch_private import COMPILED_CALL

if TYPE_CHECKING:
    from tierstore.adapters.offloaded import OffloadedModel

_ENTRY = re.compile(r"(encode|decode)(_\w+)?|get_\w+_features")

_FUSING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that leave out their fused operations, and round otherwise, while operations are looked
at. They use no weights but their own, and call the modules that they have."""

_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that show its elements."""
_NEED_NO_ELEMENTS = OF_THE_FORM | {
    "__len__",
    "is_complex",
    "is_conj",
    "is_inference",
    "is_neg",
    "nelement",
    "requires_grad_",
    "size",
}

_ADVICE = (
    "tierstore: {} may use a weight without a call of the module that has it, and that weight is "
    "away. {}"
)
_NEXT = {
    True: "Earlier calls of this method did not do so. From the next call on, such weights are "
    "brought to the device, too: call it again",
    False: "That is noticed where an operation of torch is given the weight, but not in functions "
    "that are compiled: run them in tierstore.edit_weights(module), with the module that has it",
}


def other_entries(root: nn.Module) -> list[str]:
    """The methods by which a model is entered, beside its forward: `encode` and `decode` of
    autoencoders, `encode_image`, `get_text_features` and their like."""
    names = dict.fromkeys([*dir(type(root)), *vars(root)])
    return [name for name in names if _ENTRY.fullmatch(name) and _is_method(root, name)]


def _is_method(root: nn.Module, name: str) -> bool:
    found = vars(root).get(name)
    if found is None:
        found = next((vars(c)[name] for c in type(root).__mro__ if name in vars(c)), None)
    return callable(found) and not isinstance(found, (type, nn.Module))


@dataclass(eq=False)
class ModelEntry:
    """A method by which a model, or a part of it, is entered.

    With `always`, modules in it need that all operations are looked at. `settled` is as of which
    change of its methods it is known that nothing else does; -1 as long as it is not.
    """

    owner: OffloadedModel
    always: bool
    settled: int = -1
    _units: dict[tuple[int, ...], UnitWeights] = field(default_factory=dict)

    def prepare(self, run: PassContext, patched: int) -> None:
        """Have a call of it look at operations, if that is needed."""
        touching = None
        if self.always or self.settled != patched:
            touching = run.touching = Touching(self.owner, self._units)
        run.ended = functools.partial(self._ended, touching, patched)

    def _ended(self, touching: Touching | None, patched: int, error: BaseException | None) -> None:
        if error is None:
            if touching is not None and not touching.met:
                self.settled = patched
        elif _is_of_devices(error) and self.owner.store.device.type != "cpu":
            error.add_note(_ADVICE.format(type(self.owner.root).__name__, _NEXT[touching is None]))
            self.settled = -1


def _is_of_devices(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "device" in str(error)


class _Unseen:
    """One run of a module in which operations are not looked at."""

    def __init__(self) -> None:
        self._context: AbstractContextManager[None] | None = None

    def begin(self) -> bool:
        """Stop looking."""
        self._context = not_looked_at()
        self._context.__enter__()
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Go on."""
        self.end()
        return result

    def end(self) -> None:
        """Go on. May be repeated."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


class Touching(OperationMode):
    """Leases the weights of one model that operations are given, on one thread, while it is on.

    `met` tells whether there were any.
    """

    def __init__(self, owner: OffloadedModel, units: dict[tuple[int, ...], UnitWeights]) -> None:
        super().__init__()
        self.met = False
        self._owner = owner
        self._units = units
        self._unseen: list[MethodPatch] = []

    def begin(self) -> None:
        """Lease from now on."""
        for module in modules_of(self._owner.root):
            if isinstance(module, _FUSING) or is_compiled(module):
                compiled = getattr(module, COMPILED_CALL, None) is not None
                name = COMPILED_CALL if compiled else calls_of(module)[0]
                patch = MethodPatch(module, name, ForwardRunner(_Unseen))
                self._unseen.append(patch)
                patch.install()
        super().begin()

    def end(self) -> None:
        """Lease nothing any more."""
        super().end()
        while self._unseen:
            self._unseen.pop().remove()

    def __torch_function__(
        self,
        func: Any,
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or read an attribute of a tensor, with the weights that it needs."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a function that the model calls
            return func(*args, **kwargs)
        if type(func) is types.MethodWrapperType:  # an attribute is read, or written
            attribute = getattr(func.__self__, "__name__", "")
            is_read = func.__name__ == "__get__"
            if is_read and attribute == "device" and self._away(args):
                return self._owner.store.device
            needs_elements = is_read and attribute in _VIEWS
        else:
            needs_elements = getattr(func, "__name__", "") not in _NEED_NO_ELEMENTS
        bindings = self._away((args, kwargs)) if needs_elements else []
        if not bindings:
            return func(*args, **kwargs)
        self.met = True
        try:
            begun, result = run_within(UnitContext(self._unit(bindings)), func, args, kwargs)
        except BudgetError as error:
            name = getattr(func, "__name__", func)
            told = first_of([binding.name for binding in bindings])
            error.add_note(f"tierstore: {name} was given {told}, needed on the device at once")
            raise
        return result if begun else self.__torch_function__(func, kinds, args, kwargs)

    def _away(self, values: Any) -> list[ParameterBinding]:
        """The weights among some values, in whatever lists, that no use on this thread shows."""
        bindings_for, thread = self._owner.weights.bindings_for, threading.get_ident()
        found = {
            id(binding): binding
            for tensor in _tensors_among(values)
            for binding in bindings_for(tensor)
            if not binding.is_bound_on(thread)
        }
        return list(found.values())

    def _unit(self, bindings: list[ParameterBinding]) -> UnitWeights:
        key = tuple(map(id, bindings))
        unit = self._units.get(key)
        if unit is None or unit.owner is not self._owner.weights:
            self._units[key] = unit = self._owner.weights.unit_weights(bindings)
        return unit


def _tensors_among(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _tensors_among(value)
