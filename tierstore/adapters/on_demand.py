"""Lease weights on demand: weights that an operation uses without a call of their module.

A module may use the weight of another one (`linear(x, self.head.weight)`), keep its weights in a
`ParameterList`, or have more weights than fit at once. No call of a module then marks the moment at
which the weight is needed. While `OnDemandLeasing` is active, every torch operation is intercepted,
and the model's weights among its arguments that are not on the device are leased for that
operation, as a unit's weights are for its forward.

Interception costs time, so it is active only where needed: always, for a model with modules whose
weights cannot be leased otherwise; else during the first call of each entry method of a model, and
in later calls if the first one needed it.
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
from tierstore.adapters.codecs.memory import METADATA_METHODS
from tierstore.adapters.contents import modules_of
from tierstore.adapters.forward import (
    Arguments,
    ForwardRunner,
    MethodPatch,
    entry_methods,
    run_within,
)
from tierstore.adapters.grouping import is_compiled
from tierstore.adapters.operations import OperationMode, without_interception
from tierstore.adapters.unit_context import PassContext, UnitContext, UnitWeights
from tierstore.errors import BudgetError
from tierstore.model.formatting import first_of
from tierstore.torch_private import COMPILED_CALL

if TYPE_CHECKING:
    from tierstore.adapters.offloaded import OffloadedModel

_ENTRY = re.compile(r"(encode|decode)(_\w+)?|get_\w+_features")

_FUSING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that skip their fused operations, and so round differently, under interception.

They use only their own weights, and call their submodules.
"""

_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that give access to its elements."""
_NEED_NO_ELEMENTS = METADATA_METHODS | {
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
    "tierstore: {} may use a weight that is not on the device, without a call of the module that "
    "has it. {}"
)
_NEXT = {
    True: "Earlier calls of this method did not do so. From the next call on, such weights are "
    "loaded on demand: call it again",
    False: "Weights passed to torch operations are loaded on demand, but not in compiled "
    "functions: run these in tierstore.edit_weights(module), with the module that has the weight",
}


def other_entries(root: nn.Module) -> list[str]:
    """Return a model's entry methods besides its forward.

    Examples are `encode` and `decode` of autoencoders, `encode_image` and `get_text_features`.
    """
    names = dict.fromkeys([*dir(type(root)), *vars(root)])
    return [name for name in names if _ENTRY.fullmatch(name) and _is_method(root, name)]


def _is_method(root: nn.Module, name: str) -> bool:
    found = vars(root).get(name)
    if found is None:
        found = next((vars(c)[name] for c in type(root).__mro__ if name in vars(c)), None)
    return callable(found) and not isinstance(found, (type, nn.Module))


@dataclass(eq=False)
class ModelEntry:
    """An entry method of a model, or of a part of it.

    With `always`, modules inside it need interception. Otherwise, `settled` is the count of foreign
    patches (`Attachment.patched`) at which a call was found not to need it; -1 if unknown.
    """

    owner: OffloadedModel
    always: bool
    settled: int = -1
    _units: dict[tuple[int, ...], UnitWeights] = field(default_factory=dict)

    def prepare(self, run: PassContext, patched: int) -> None:
        """Set up interception for a call, if it is needed."""
        mode = None
        if self.always or self.settled != patched:
            mode = run.mode = OnDemandLeasing(self.owner, self._units)
        run.on_end = functools.partial(self._ended, mode, patched)

    def _ended(
        self, mode: OnDemandLeasing | None, patched: int, error: BaseException | None
    ) -> None:
        if error is None:
            if mode is not None and not mode.leased_any:
                self.settled = patched
        elif _is_device_error(error) and self.owner.store.device.type != "cpu":
            error.add_note(_ADVICE.format(type(self.owner.root).__name__, _NEXT[mode is None]))
            self.settled = -1


def _is_device_error(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "device" in str(error)


class _WithoutInterception:
    """Context of one run of a module in which operations are not intercepted."""

    def __init__(self) -> None:
        self._context: AbstractContextManager[None] | None = None

    def begin(self) -> bool:
        """Pause interception."""
        self._context = without_interception()
        self._context.__enter__()
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Resume interception, and return the result unchanged."""
        self.end()
        return result

    def end(self) -> None:
        """Resume interception. Can be repeated."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


class OnDemandLeasing(OperationMode):
    """Leases the weights of one model that operations use, on one thread, while it is active.

    `leased_any` is True once an operation needed a lease.
    """

    def __init__(self, owner: OffloadedModel, units: dict[tuple[int, ...], UnitWeights]) -> None:
        super().__init__()
        self.leased_any = False
        self._owner = owner
        self._units = units
        self._pauses: list[MethodPatch] = []

    def begin(self) -> None:
        """Start to intercept operations on this thread."""
        for module in modules_of(self._owner.root):
            if isinstance(module, _FUSING) or is_compiled(module):
                compiled = getattr(module, COMPILED_CALL, None) is not None
                name = COMPILED_CALL if compiled else entry_methods(module)[0]
                patch = MethodPatch(module, name, ForwardRunner(_WithoutInterception))
                self._pauses.append(patch)
                patch.install()
        super().begin()

    def end(self) -> None:
        """Stop intercepting."""
        super().end()
        while self._pauses:
            self._pauses.pop().remove()

    def __torch_function__(
        self,
        func: Any,
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or read a tensor's attribute, with the weights that it needs leased."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # inside a compiled function that the model calls
            return func(*args, **kwargs)
        if type(func) is types.MethodWrapperType:  # an attribute access
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
        self.leased_any = True
        try:
            begun, result = run_within(UnitContext(self._unit(bindings)), func, args, kwargs)
        except BudgetError as error:
            name = getattr(func, "__name__", func)
            names = first_of([binding.name for binding in bindings])
            error.add_note(f"tierstore: {name} needs {names} on the device at the same time")
            raise
        return result if begun else self.__torch_function__(func, kinds, args, kwargs)

    def _away(self, values: Any) -> list[ParameterBinding]:
        """Return bindings of weights in nested values that are not bound on this thread."""
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
