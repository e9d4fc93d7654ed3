"""What functions of bitsandbytes keep for the backward by themselves, past what autograd saves.

They leave packed weights, and the state that says what these mean, in attributes of their node of
the graph, where no hook sees them. So the nodes of a unit that ran are looked through: what looks
at lent memory becomes a note of it. A node gets its tensors back as it runs, and not for longer.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from tierstore.adapters.activations import Unpack
from tierstore.adapters.codecs.bitsandbytes import is_of_bitsandbytes
from tierstore.adapters.nested import tensors_in
from tierstore.adapters.unit_use import Arguments


@dataclass(frozen=True)
class _Note:
    """What brings a tensor back."""

    unpack: Unpack


def take_out_weights(
    tensors: Iterable[torch.Tensor],
    given: Arguments,
    pack_view: Callable[[torch.Tensor], Unpack | None],
) -> None:
    """After a unit made `tensors` of what it was `given`, while its weights are still lent: no node
    in between keeps views of them. `pack_view` is what brings a view back; None for others."""

    def noted(tensor: torch.Tensor) -> object:
        unpack = pack_view(tensor)
        return tensor if unpack is None else _Note(unpack)

    for node in _python_nodes(tensors, given):
        notes = {
            name: changed
            for name, value in vars(node).items()
            if (changed := _with_each(value, torch.Tensor, noted)) is not value
        }
        if notes:
            vars(node).update(notes)
            _bring_back(node, notes)


def _python_nodes(tensors: Iterable[torch.Tensor], given: Arguments) -> Iterator[Any]:
    """The nodes that are written in Python, from what a unit returned to what it was given."""
    seen: set[Any] = {t.grad_fn for t in tensors_in(list(given)) if t.grad_fn is not None}
    waiting: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
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
