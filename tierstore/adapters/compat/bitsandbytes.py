"""bitsandbytes: quantised weights, and what its functions keep for the backward pass.

Four bits (`Params4bit`) have a `quant_state`, which may have one in it. Eight bits (`Int8Params`)
have their numbers and scales in attributes, too, until they have run: then these are in the `state`
of the module, which shows their memory to the weight. Written from bitsandbytes 0.50.

Its autograd functions keep packed weights, and the state that says what these mean, in attributes
of their node of the graph, where no hook sees them. So the nodes of a unit that ran are searched:
a view of leased memory becomes a note of it. A node gets its tensors back while it runs.
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
"""Where tensors may be, by the name of the class."""


class BitsandbytesCodec(PlainCodec):
    """The numbers, and the tensors of its state."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight of bitsandbytes that was quantised."""
        return (
            is_of_bitsandbytes(tensor)
            and super().accepts(tensor)
            and any(True for _ in _beside(tensor))
        )

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The numbers, with an empty name, and what is beside them."""
        return {"": tensor.detach(), **dict(_beside(tensor))}

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A weight of the same class over other parts, with a state of its own."""
        made: Any = like(tensor, parts[""])
        if hasattr(made, "quant_state"):
            made.quant_state = copy.copy(made.quant_state)
            made.quant_state.state2 = copy.copy(made.quant_state.state2)
        for name, _ in _beside(tensor):
            *path, last = name.split(".")
            setattr(attrgetter(".".join(path))(made) if path else made, last, parts[name])
        return made  # type: ignore[no-any-return]


def is_of_bitsandbytes(value: object) -> bool:
    """Whether the class of a weight, or of a state, is one of the library's."""
    return type(value).__module__.startswith("bitsandbytes.")


def _beside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name in _BESIDE.get(type(tensor).__name__, ()):
        found: Any = tensor
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, torch.Tensor):
            yield name, found


class Bitsandbytes(Library):
    """Knows its weights by the module of their class."""

    name = "bitsandbytes"
    codecs = (BitsandbytesCodec(),)

    def hidden_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the numbers and scales that `Linear8bitLt` keeps in its state once it has run."""
        state = getattr(module, "state", None) if type(module).__name__ == "Linear8bitLt" else None
        found = {f"state.{name}": getattr(state, name, None) for name in ("CB", "SCB")}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def saves_weights(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of its weights."""
        return is_of_bitsandbytes(tensor)

    def release_saved(
        self, results: Iterable[torch.Tensor], given: Any, pack_view: PackView
    ) -> None:
        """Replace views of leased memory in its nodes by notes of them."""

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
    """A note in the place of a tensor: `unpack` brings it back."""

    unpack: Unpack


def _python_nodes(results: Iterable[torch.Tensor], given: Any) -> Iterator[Any]:
    """The nodes that are written in Python, from what a unit returned to what it was given."""
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
    """Have a node's attributes be tensors while it runs, and `notes` otherwise."""
    found = weakref.ref(node)  # which holds the hooks

    def before(gradients: Any) -> None:
        tensors = {n: _with_each(v, _Note, lambda note: note.unpack()) for n, v in notes.items()}
        vars(found()).update(tensors)

    def after(*gradients: Any) -> None:
        vars(found()).update(notes)

    node.register_prehook(before)
    node.register_hook(after)


def _with_each(value: Any, kind: type, change: Callable[[Any], object]) -> Any:
    """A value with what is of a kind in it changed, in tuples and in states of bitsandbytes: itself
    if nothing is."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [_with_each(item, kind, change) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if is_of_bitsandbytes(value) and hasattr(value, "__dict__"):
        fields = {name: _with_each(field, kind, change) for name, field in vars(value).items()}
        if any(field is not getattr(value, name) for name, field in fields.items()):
            value = copy.copy(value)  # the model's own stays as it is
            vars(value).update(fields)
    return value
