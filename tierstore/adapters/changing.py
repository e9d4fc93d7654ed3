"""Change an offloaded model as a whole: convert, copy, load and save it.

Any change of a weight is detected before its next use. The code here also stores changes of all
weights group by group, so that models of any size can be changed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.adapters.codecs import leaves_of, rebuilt
from tierstore.adapters.codecs.memory import geometry_at
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.contents import modules_of, tensors_of
from tierstore.adapters.forward import CopiedAs, MethodPatch, same
from tierstore.adapters.owners import owner_of
from tierstore.adapters.weight_groups import Change
from tierstore.errors import ClosedError
from tierstore.torch_private import like, move_state_dict_hook_first

if TYPE_CHECKING:
    from tierstore.adapters.offloaded import OffloadedModel

T = TypeVar("T")


def cast_weights(root: nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Cast parameters and buffers (by id) of a model: offloaded ones by group, others in place."""
    owner = owner_of(root)
    offloaded: Collection[int] = ()
    if owner is not None and dtypes:
        owner.weights.cast(dtypes)
        offloaded = owner.weights.tensor_ids()
    for tensor in tensors_of(root):
        if id(tensor) in dtypes and id(tensor) not in offloaded:
            assign(tensor, tensor.detach().to(dtypes[id(tensor)]))


class Conversion:
    """Replacement for `_apply`, through which `half()` and `to()` change a model.

    One changed group is in memory at a time. Moving the model to another device raises.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded

    def __call__(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        return self._apply(method.original, *args, **kwargs)

    def _apply(self, original: Callable[..., Any], change: Change, recurse: bool = True) -> Any:
        offloaded = self._offloaded
        moved = change(torch.empty(0, device="cpu"))
        if moved.device.type != "cpu":
            raise RuntimeError(
                f"the model cannot be moved to {moved.device}: its weights are in a tierstore, "
                f"which loads them to {offloaded.store.device} as it runs. Do not move it, or "
                "call tierstore.disable_offload(model) first"
            )
        if not recurse:  # changes are then detected as usual
            return original(change, recurse)
        offloaded.weights.convert(change)
        return original(self._change_of_the_rest(change), recurse)

    def _change_of_the_rest(self, change: Change) -> Change:
        """Return a function that changes only the tensors that are not in groups."""
        offloaded = self._offloaded
        wrapped = offloaded.weights.wrapped.keys()
        stays = offloaded.weights.tensor_ids() - wrapped
        residents = {id(tensor) for tensor in offloaded.resident.tensors}

        def change_the_rest(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in stays:
                return tensor
            changed = change(tensor)
            if id(tensor) in wrapped and not _is_same(tensor, changed):
                offloaded.changed = True  # it has other inner tensors now
            elif id(tensor) in wrapped:
                return tensor
            if id(tensor) not in residents:
                return changed
            if changed.dtype is not tensor.dtype or changed.stride() != tensor.stride():
                assign(tensor, changed.detach().to(tensor.device))
            return tensor  # it stays on the device

        return change_the_rest


def _is_same(tensor: torch.Tensor, changed: torch.Tensor) -> bool:
    """Return whether two wrapper tensors have the same dtype and memory."""
    before, after = leaves_of(tensor), leaves_of(changed)
    return changed.dtype is tensor.dtype and {n: geometry_at(t) for n, t in before.items()} == {
        n: geometry_at(t) for n, t in after.items()
    }


class Copying:
    """Makes deep copies and pickles of the model ordinary models on the CPU.

    They contain the true weights, even while another thread runs the model with weights in reused
    memory.

    A wrapper that forwards attribute lookups to the model, such as a PeftModel, must not find these
    methods, or its copy would be a copy of the model alone. Python looks up `__reduce_ex__`, which
    every class has, so the lookup is never forwarded. Python looks up `__deepcopy__` before that;
    it is installed only if the model's class has one.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        self._root = offloaded.root
        self._lock = threading.RLock()
        self._methods: dict[str, Callable[..., Any]] = {"__reduce_ex__": self._reduce}
        if hasattr(type(self._root), "__deepcopy__"):
            self._methods["__deepcopy__"] = self._copy
        self._install()

    def _install(self) -> None:
        self._root.__dict__.update(self._methods)

    def remove(self) -> None:
        """Restore the default copying and pickling of the model."""
        for name in self._methods:
            self._root.__dict__.pop(name, None)

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        return self._as_ordinary(memo, lambda shown: copy.deepcopy(shown, memo))

    def _pickled(self) -> nn.Module:
        # The weights are not copied: a model may be larger than RAM, and pickle streams it.
        return self._as_ordinary({}, lambda shown: shown)

    def _reduce(self, protocol: int) -> tuple[Any, ...]:
        return same, (CopiedAs(self._copy, self._pickled),)

    def _as_ordinary(
        self, memo: dict[int, Any], made: Callable[[torch.Tensor], torch.Tensor]
    ) -> nn.Module:
        """Return a deep copy of the model whose weights are `made` from their true values."""
        for tensor in self._offloaded.resident.tensors:
            alike: torch.Tensor = tensor.detach().to("cpu", copy=True)
            if isinstance(tensor, nn.Parameter):
                alike = nn.Parameter(alike, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = alike
        for wrapped in self._offloaded.weights.wrapped.values():
            values = self._offloaded.weights.values_of(wrapped)
            made_of = {name: made(value) for name, value in values.items()}
            memo[id(wrapped.tensor)] = rebuilt(wrapped.tensor, made_of)
        for binding in self._offloaded.weights.bindings_of(self._root, recurse=True):
            if id(binding.tensor) not in memo:
                with self._offloaded.weights.lock:
                    value = binding.value(binding.tensor).detach()
                memo[id(binding.tensor)] = made(like(binding.tensor, value))
        with self._lock, self._offloaded.weights.lock:  # keeps modules' attributes unchanged
            self.remove()
            try:
                found = copy.deepcopy(self._root, memo)
            finally:
                self._install()
        _give_ordinary_attributes(self._root, found, memo)
        return found


def _give_ordinary_attributes(root: nn.Module, found: nn.Module, memo: dict[int, Any]) -> None:
    """Remove attributes from a copy that its modules have only because of the offloading."""
    for module in modules_of(root):
        copied: Any = memo.get(id(module))
        if isinstance(copied, nn.Module):
            _leave_to_its_class(module, copied)
    for module in modules_of(found):  # a run on another thread may have replaced parameters
        for name in module._parameters.keys() & module.__dict__.keys():
            del module.__dict__[name]


def _leave_to_its_class(module: nn.Module, copied: nn.Module) -> None:
    """Delete patched methods from a copy, so that it uses those of its class."""
    for name, value in list(module.__dict__.items()):
        while isinstance(value, MethodPatch):
            value = value.replaced
            if value is None:
                copied.__dict__.pop(name, None)


class Hook:
    """Hook on modules of an offloaded model. Copies of the model have `nothing` instead."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return same, (nothing,)


class WalkPatch(Generic[T]):
    """Replacement for `named_modules`, `named_children` and `apply` that stores changes as it goes.

    Code that changes a whole model iterates with these methods (`modules()` and `parameters()` call
    the first). `own` returns the keys or tensors of a module that may have changed; they are passed
    to `store` once the iteration has reached those of another module.
    """

    def __init__(self, own: Callable[[nn.Module], set[T]], store: Callable[[set[T]], None]) -> None:
        self._own = own
        self._store = store

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        walk = self._apply if method.name == "apply" else self._named
        return walk(method.original, *args, **kwargs)

    def _named(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pending: set[T] = set()
        for name, module in original(*args, **kwargs):
            yield name, module
            pending = self._pass(module, pending)
        self._end(pending)

    def _apply(self, original: Callable[..., Any], fn: Callable[[nn.Module], Any]) -> Any:
        pending: set[T] = set()

        def fn_and_pass(module: nn.Module) -> None:
            nonlocal pending
            fn(module)
            pending = self._pass(module, pending)

        result = original(fn_and_pass)
        self._end(pending)
        return result

    def _pass(self, module: nn.Module, pending: set[T]) -> set[T]:
        own = self._own(module)
        if not own:
            return pending
        self._end(pending - own)
        return own

    def _end(self, changed: set[T]) -> None:
        if changed:
            with suppress(ClosedError):  # the weights are unchanged; the next run raises
                self._store(changed)


def walk_patch(offloaded: OffloadedModel) -> WalkPatch[str]:
    """Return a `WalkPatch` that rewrites groups of an offloaded model during an iteration."""
    weights = offloaded.weights

    def own(module: nn.Module) -> set[str]:
        return {binding.key for binding in weights.bindings_of(module, recurse=False)}

    def store(keys: set[str]) -> None:
        if weights.current.context is None:
            weights.rewrite_edited(keys)

    return WalkPatch(own, store)


class Loading:
    """State-dict hook that stores loaded weights after each module has loaded its part.

    The groups of the last module may receive more weights from the next one; all others are stored.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        self._pending: set[str] = set()
        self._lock = threading.RLock()

    def __call__(self, module: nn.Module, keys: Any) -> None:
        offloaded = self._offloaded
        last = module is offloaded.root
        own = {binding.key for binding in offloaded.weights.bindings_of(module, recurse=False)}
        if not own and not last:
            return
        with self._lock:
            due = self._pending | own if last else self._pending - own
            self._pending = set() if last else own
        if due:
            offloaded.weights.rewrite_edited(due)


def save_true_values(
    offloaded: OffloadedModel, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    """State-dict hook that replaces a module's entries by their true values on the CPU.

    A weight in use is replaced by its host view, which stays valid.
    """
    residents = {id(tensor) for tensor in offloaded.resident.tensors}
    bound = {id(b.tensor): b for b in offloaded.weights.bindings_of(module, recurse=False)}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        binding = bound.get(id(tensor))
        shown = state.get(prefix + name)
        if tensor is None or shown is None or shown is tensor:
            continue
        wrapped = offloaded.weights.wrapped.get(id(tensor))
        if wrapped is not None and is_wrapper(tensor):
            state[prefix + name] = rebuilt(tensor, offloaded.weights.values_of(wrapped)).detach()
        elif binding is not None:
            state[prefix + name] = binding.value(shown)
        elif id(tensor) in residents:
            state[prefix + name] = offloaded.resident.cpu_copy(tensor)


def after_state_dict(module: nn.Module, hook: Hook) -> RemovableHandle:
    """Register a hook to run before other state-dict hooks, which may remove or rename entries."""
    handle: RemovableHandle = module.register_state_dict_post_hook(hook)
    move_state_dict_hook_first(module, handle.id)
    return handle


def nothing(module: nn.Module, *_: Any) -> None:
    """Do nothing: the state-dict hook of copies of an offloaded model.

    Pickles of models refer to this function by name.
    """
