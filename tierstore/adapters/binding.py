"""Bind tensors of a model to leased bytes while they are used, and to their host views otherwise.

Inference and training share this: a `ParameterBinding` for each tensor, whose `BindingPolicy` says
what becomes of a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto

import torch
from torch import nn

from tierstore.adapters.codecs.memory import address_of
from tierstore.adapters.codecs.plain import assign
from tierstore.system.views import blocks_of
from tierstore.torch_private import counted_version, keep_found, version_of

OFTEN = 2
"""How often a buffer is stored by its content before it counts as one that every use changes, such
as a cache of keys and values, or running statistics."""


class BindingPolicy(Enum):
    """How a binding treats a change of its tensor."""

    READ_ONLY = auto()
    """The store registers the group again, under another key. A backward pass through the old
    value raises, and so does one that wants a gradient of the tensor."""
    WRITE_BACK = auto()
    """Every use changes it: its host view is a mutable group of the store."""
    MUTABLE = auto()
    """The host view is part of the training state: it is changed in place, at any time."""


class ParameterBinding:
    """A tensor of the model, the group that it is in, and its host view, which it shows while away.

    `user` is the use during which it shows leased memory, one of them if there are `others`.
    `edited` tells whether somebody gave it other memory or wrote to it by a torch operation since
    it was unbound. (Writes that torch does not count, such as to `tensor.data`, show in the pages
    of the host view: see `WriteWatch`.) `times_stored` counts how often it was stored again.

    A binding does not keep the tensor alive: a parameter that was deleted or replaced goes at once,
    as in plain torch. From then on `tensor` is another one over the host view, and the binding is
    `detached`. `number` is the id of the first tensor, which others may have then.

    Args:
        find: where to look up a tensor that is replaced from time to time (the local tensor of a
            DTensor); by default the binding refers to `tensor` weakly.

    Note: all of this runs for every tensor in every step, between computations that fill the
    processor's caches. The cost is in the number of objects touched.
    """

    __slots__ = (
        "_address",
        "_bound_to",
        "_reference",
        "detached",
        "host_view",
        "key",
        "name",
        "number",
        "others",
        "policy",
        "times_stored",
        "user",
        "version",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        key: str,
        name: str,
        host_view: torch.Tensor,
        policy: BindingPolicy = BindingPolicy.READ_ONLY,
        find: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self._reference: Callable[[], torch.Tensor | None] = find or weakref.ref(tensor)
        self._bound_to = 0
        self.detached = False
        self.number = id(tensor)
        self.name = name
        self.user: object = None
        self.others: set[object] | None = None
        self.policy = policy
        self.times_stored = 0
        self.move_to(key, host_view)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of the model, or another one over the host view if that is gone."""
        found = self._reference()
        if found is None:
            return self._replacement()
        keep_found(found)
        return found

    def _replacement(self) -> torch.Tensor:
        made = self.host_view.detach()
        self._reference = lambda: made
        self.detached = True
        self.version = version_of(made)
        return made

    @property
    def alive(self) -> bool:
        """Whether the model's tensor is not gone."""
        return not self.detached and self._reference() is not None

    def move_to(self, key: str, host_view: torch.Tensor) -> None:
        """Put the tensor into group `key` from now on. If it is away, it shows `host_view`."""
        self.key = key
        self.host_view = host_view
        self._address = address_of(host_view)
        if self.user is None:
            self._show_host_view()

    def is_in_place(self, value: torch.Tensor) -> bool:
        """Tell whether a value lies in the memory of the host view, in its form."""
        host_view = self.host_view
        return (
            address_of(value) == self._address
            and value.shape == host_view.shape
            and value.stride() == host_view.stride()
            and value.dtype is host_view.dtype
            and not value.is_conj()
        )

    def _show_host_view(self) -> None:
        tensor = self.tensor
        assign(tensor, self.host_view)
        self.version = version_of(tensor)

    def accept(self) -> None:
        """Count the tensor as unchanged, whatever torch has counted."""
        self.version = version_of(self.tensor)

    @property
    def edited(self) -> bool:
        """Whether it is away and not what it was."""
        return bool(edited_among((self,), {self.name: self.host_view}))

    @property
    def was_given_memory(self) -> bool:
        """Whether somebody gave it other memory, which is not empty."""
        tensor = self.tensor
        return tensor.numel() > 0 and address_of(tensor) != self._address

    def _leave_to_others(self, use: object, others: set[object]) -> None:
        others.discard(use)
        if self.user is use and others:
            self.user = next(iter(others))
            others.discard(self.user)

    def is_bound_on(self, thread: int) -> bool:
        """Tell whether a use on a thread (or one without any) has bound it to leased memory."""
        if self.user is None:
            return False
        users = (self.user, *(self.others or ()))
        return any(getattr(user, "thread", thread) == thread for user in users)

    def value(self, shown: torch.Tensor) -> torch.Tensor:
        """Return its value in memory that nobody uses again: the host view if it is in use, else
        what it shows. A change that its current use makes counts when that is over."""
        return (
            shown
            if self.user is None and address_of(shown) == address_of(self.tensor)
            else self.host_view
        )

    def leave(self, use: object) -> None:
        """Show the host view again; what the tensor showed during `use` is ignored."""
        if self.user is use:
            self.user = self.others.pop() if self.others else None
            self._show_host_view()

    def give(self, value: torch.Tensor) -> None:
        """Let the tensor show other memory, of the CPU: from now on it counts as edited."""
        assign(self.tensor, value)
        self.version = -1

    def _keep_change(self, tensor: torch.Tensor) -> None:
        """Keep what the forward itself did to the tensor: other memory that it was given, on the
        CPU; or a change, in the host view, where it is noticed."""
        if address_of(tensor) not in (self._bound_to, self._address):
            self.give(tensor.detach().cpu())
            return
        self.host_view.copy_(tensor.detach())
        assign(tensor, self.host_view)
        self.version = -1


# Note: every use of a unit does the following to each of its tensors, in loops that call nothing
# that is written in Python. A block has twenty tensors, and each such call costs as much as a
# kernel.


def edited_among(
    bindings: Iterable[ParameterBinding], expected: Mapping[str, torch.Tensor]
) -> list[ParameterBinding]:
    """Return those that are away and do not show their host views, unchanged, in the form of the
    tensors `expected` by their names."""
    edited = []
    for binding in bindings:
        if binding.user is not None:
            continue
        tensor = binding._reference()
        if tensor is None:
            tensor = binding.tensor
        keep_found(tensor)
        try:
            version = counted_version(tensor)
        except RuntimeError:  # of inference: see `version_of`
            version = 0
        form = expected[binding.name]
        if (
            tensor.data_ptr() != binding._address
            or version != binding.version
            or tensor.shape != form.shape
            or tensor.stride() != form.stride()
            or tensor.dtype is not form.dtype
            or tensor.is_conj()
        ):
            edited.append(binding)
    return edited


def bind_all(
    bindings: Iterable[ParameterBinding], use: object, leased: Mapping[str, torch.Tensor]
) -> None:
    """Let tensors show the leased bytes, by their names, while `use` lasts."""
    for binding in bindings:
        if binding.user is not None:
            binding.others = {use} if binding.others is None else {*binding.others, use}
            continue
        value = leased[binding.name]
        tensor = binding._reference()
        if tensor is None:
            tensor = binding.tensor
        keep_found(tensor)
        binding._bound_to = value.data_ptr()
        binding.user = use  # before anything is bound: wherever this ends, unbind_all undoes it
        try:
            tensor.data = value
        except RuntimeError:
            assign(tensor, value)
        try:
            binding.version = counted_version(tensor)
        except RuntimeError:
            binding.version = 0


def unbind_all(  # noqa: C901 - no call more for each tensor
    bindings: Iterable[ParameterBinding], use: object, *, with_grad: bool
) -> None:
    """Let tensors show their host views again, when their last use ends. To be repeated if
    interrupted.

    `with_grad` tells whether autograd may have saved them.
    """
    for binding in bindings:
        if binding.others:
            binding._leave_to_others(use, binding.others)
        if binding.user is not use:
            continue
        tensor = binding._reference()
        if tensor is None:
            tensor = binding.tensor
        keep_found(tensor)
        try:
            version = counted_version(tensor)
        except RuntimeError:
            version = 0
        address = tensor.data_ptr()
        if version != binding.version or (
            address != binding._bound_to and address != binding._address
        ):
            binding._keep_change(tensor)
            binding.user = None
            continue
        try:
            tensor.data = binding.host_view
        except RuntimeError:
            assign(tensor, binding.host_view)
        if with_grad and not tensor.is_inference():
            # What autograd saved shows memory that is used again: a backward must raise. It saves
            # frozen weights too, where the gradient of an input goes through them.
            torch.autograd.graph.increment_version(tensor)
        try:
            binding.version = counted_version(tensor)
        except RuntimeError:
            binding.version = 0
        binding.user = None


def note_changes(
    edited: Iterable[ParameterBinding],
    members: Iterable[ParameterBinding],
    values: Mapping[str, torch.Tensor],
) -> None:
    """Count that tensors of a group with these `values` were edited, and write back from now on
    those that change all the time.

    Buffers may, and what shares memory with them. Parameters are edited by somebody, once.
    """
    often = set()
    for binding in edited:
        binding.times_stored += 1
        if binding.times_stored > OFTEN and not isinstance(binding.tensor, nn.Parameter):
            often.add(binding.name)
    if often:
        blocks = [{view.name for view in block.views} for block, _ in blocks_of(values)]
        together = {name for names in blocks if names & often for name in names}
        for binding in members:
            if binding.name in together:
                binding.policy = BindingPolicy.WRITE_BACK
