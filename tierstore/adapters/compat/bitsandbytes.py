"""bitsandbytes: quantised weights, and the tensors that its functions save for backward.

A 4-bit weight (`Params4bit`) has a `quant_state`, which may contain a nested one. An 8-bit weight
(`Int8Params`) has its values and scales in attributes until its first run; after that, they are in
the `state` of the module, and the weight shares their memory. Written for bitsandbytes 0.50.

The library's autograd functions save packed weights and quantisation states in attributes of graph
nodes, where no hook sees them. The nodes of a unit are searched after its run, and each view of
leased memory is replaced by a reference. A node gets its tensors back while it runs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from tierstore.adapters.codecs.plain import PlainCodec
from tierstore.adapters.compat import Library, PackView, Unpack
from tierstore.adapters.nested import tensors_in
from tierstore.torch_private import like

_STATE = ("quant_state.absmax", "quant_state.code", "quant_state.offset")
_INNER_STATE = ("quant_state.state2.absmax", "quant_state.state2.code")
_BESIDE = {"Params4bit": (*_STATE, *_INNER_STATE), "Int8Params": ("CB", "SCB")}
"""Attribute paths of further tensors of a weight, by class name."""


class BitsandbytesCodec(PlainCodec):
    """Codec for quantised weights: the values, and the tensors of the quantisation state."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a quantised weight of bitsandbytes."""
        return (
            is_of_bitsandbytes(tensor)
            and super().accepts(tensor)
            and any(True for _ in _beside(tensor))
        )

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the values under an empty name, and the state's tensors by attribute path."""
        return {"": tensor.detach(), **dict(_beside(tensor))}

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a weight of the same class over other parts, with a copied state."""
        made: Any = like(tensor, parts[""])
        if hasattr(made, "quant_state"):
            made.quant_state = copy.copy(made.quant_state)
            made.quant_state.state2 = copy.copy(made.quant_state.state2)
        for name, _ in _beside(tensor):
            *path, last = name.split(".")
            setattr(attrgetter(".".join(path))(made) if path else made, last, parts[name])
        return made  # type: ignore[no-any-return]


def is_of_bitsandbytes(value: object) -> bool:
    """Return whether the class of a weight or state belongs to bitsandbytes."""
    return type(value).__module__.startswith("bitsandbytes.")


def _beside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name in _BESIDE.get(type(tensor).__name__, ()):
        found: Any = tensor
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, torch.Tensor):
            yield name, found


class Bitsandbytes(Library):
    """Support for bitsandbytes. Recognizes its weights by the module of their class."""

    name = "bitsandbytes"
    codecs = (BitsandbytesCodec(),)

    def hidden_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the values and scales that `Linear8bitLt` moves to its state in its first run."""
        state = getattr(module, "state", None) if type(module).__name__ == "Linear8bitLt" else None
        found = {f"state.{name}": getattr(state, name, None) for name in ("CB", "SCB")}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def saves_weights(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a weight of bitsandbytes."""
        return is_of_bitsandbytes(tensor)

    def release_saved(
        self, results: Iterable[torch.Tensor], given: Any, pack_view: PackView
    ) -> None:
        """Replace views of leased memory in the library's graph nodes by references."""

        def noted(tensor: torch.Tensor) -> object:
            unpack = pack_view(tensor)
            return tensor if unpack is None else _Note(unpack)

        for node in _python_nodes(results, given):
            notes = {
                name: changed
                for name, value in vars(node).items()
                if (changed := _with_each(value, torch.Tensor, noted)) is not value
            }
            if notes:
                vars(node).update(notes)
                _bring_back(node, notes)


@dataclass(frozen=True)
class _Note:
    """A reference in place of a saved tensor, which `unpack` restores."""

    unpack: Unpack


def _python_nodes(results: Iterable[torch.Tensor], given: Any) -> Iterator[Any]:
    """Yield the Python-defined graph nodes between a unit's arguments and its results."""
    seen: set[Any] = {t.grad_fn for t in tensors_in(list(given)) if t.grad_fn is not None}
    waiting: list[Any] = [t.grad_fn for t in results if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        waiting.extend(following for following, _ in node.next_functions if following is not None)


def _bring_back(node: Any, notes: dict[str, Any]) -> None:
    """Set a node's attributes to tensors while it runs, and to `notes` otherwise."""
    found = weakref.ref(node)  # weak, as the node holds the hooks

    def before(gradients: Any) -> None:
        tensors = {n: _with_each(v, _Note, lambda note: note.unpack()) for n, v in notes.items()}
        vars(found()).update(tensors)

    def after(*gradients: Any) -> None:
        vars(found()).update(notes)

    node.register_prehook(before)
    node.register_hook(after)


def _with_each(value: Any, kind: type, change: Callable[[Any], object]) -> Any:
    """Return a value with `change` applied to each instance of `kind` inside it.

    Descends into lists, tuples and bitsandbytes states. Returns the same value if nothing changes.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [_with_each(item, kind, change) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if is_of_bitsandbytes(value) and hasattr(value, "__dict__"):
        fields = {name: _with_each(field, kind, change) for name, field in vars(value).items()}
        if any(field is not getattr(value, name) for name, field in fields.items()):
            value = copy.copy(value)  # do not change the model's own state
            vars(value).update(fields)
    return value
