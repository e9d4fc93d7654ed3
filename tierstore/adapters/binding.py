"""Bind tensors of a model to leased bytes while they are used, and to their host views otherwise.

Used for inference and training: each tensor has a `ParameterBinding`, and the `BindingPolicy`
determines how changes are handled.
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
from tierstore.torch_private import revive_object, unchecked_version, version_of

FREQUENT_EDITS = 2
"""Number of writes to a buffer after which it is treated as changed by every use.

Such buffers are key-value caches and running statistics.
"""


class BindingPolicy(Enum):
    """Handling of changes to a bound tensor."""

    READ_ONLY = auto()
    """A changed group is registered again under a new key.

    A backward pass that needs the old value, or a gradient of the tensor, raises.
    """
    WRITE_BACK = auto()
    """Every use may change the tensor: its host view is a mutable group of the store."""
    MUTABLE = auto()
    """The host view is part of the training state and may be changed in place at any time."""


class ParameterBinding:
    """Binding of one model tensor to leased memory while in use, and to its host view otherwise.

    `user` is the context for which the tensor shows leased memory; `others` are further contexts
    that use it at the same time. `edited` is True if the tensor was pointed at other memory, or
    written by a torch operation, since it was unbound. (Writes that torch does not count, such as
    to `tensor.data`, are detected by the pages of the host view: see `WriteWatch`.)
    `times_stored` counts how often the tensor was stored again.

    A binding does not keep the tensor alive: a deleted or replaced parameter is freed at once, as
    in plain torch. From then on `tensor` is a new tensor over the host view, and the binding is
    `detached`. `number` is the id of the original tensor, which Python may then reuse.

    Args:
        find: returns the current tensor, for one that is replaced from time to time (the local
            tensor of a DTensor); by default the binding holds a weak reference to `tensor`.

    Note: this code runs for every tensor in every step, between computations that fill the CPU
    caches. Its cost is the number of objects touched.
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
        """The model's tensor, or a new one over the host view if the model's was freed."""
        found = self._reference()
        if found is None:
            return self._replacement()
        revive_object(found)
        return found

    def _replacement(self) -> torch.Tensor:
        made = self.host_view.detach()
        self._reference = lambda: made
        self.detached = True
        self.version = version_of(made)
        return made

    @property
    def alive(self) -> bool:
        """True if the model's tensor still exists."""
        return not self.detached and self._reference() is not None

    def move_to(self, key: str, host_view: torch.Tensor) -> None:
        """Move the tensor to group `key`. If it is not in use, it shows `host_view` at once."""
        self.key = key
        self.host_view = host_view
        self._address = address_of(host_view)
        if self.user is None:
            self._bind_host_view()

    def is_in_place(self, value: torch.Tensor) -> bool:
        """Return whether a value has the memory, dtype, shape and strides of the host view."""
        host_view = self.host_view
        return (
            address_of(value) == self._address
            and value.shape == host_view.shape
            and value.stride() == host_view.stride()
            and value.dtype is host_view.dtype
            and not value.is_conj()
        )

    def _bind_host_view(self) -> None:
        tensor = self.tensor
        assign(tensor, self.host_view)
        self.version = version_of(tensor)

    def accept(self) -> None:
        """Treat the tensor as unchanged, even if its version counter has changed."""
        self.version = version_of(self.tensor)

    @property
    def edited(self) -> bool:
        """True if the tensor is not in use and has changed since it was unbound."""
        return bool(edited_among((self,), {self.name: self.host_view}))

    @property
    def was_reassigned(self) -> bool:
        """True if the tensor was pointed at other memory, which is not empty."""
        tensor = self.tensor
        return tensor.numel() > 0 and address_of(tensor) != self._address

    def _remove_user(self, user: object, others: set[object]) -> None:
        others.discard(user)
        if self.user is user and others:
            self.user = next(iter(others))
            others.discard(self.user)

    def is_bound_on(self, thread: int) -> bool:
        """Return whether a context on a thread, or one without a thread, has bound the tensor."""
        if self.user is None:
            return False
        users = (self.user, *(self.others or ()))
        return any(getattr(user, "thread", thread) == thread for user in users)

    def value(self, shown: torch.Tensor) -> torch.Tensor:
        """Return its value in memory that is not reused: `shown`, or the host view.

        Returns `shown` only if the tensor is not in use and `shown` has the same memory.

        A change made by the current use becomes visible when that use ends.
        """
        return (
            shown
            if self.user is None and address_of(shown) == address_of(self.tensor)
            else self.host_view
        )

    def unbind(self, user: object) -> None:
        """Bind the tensor to its host view again, ignoring what it showed for `user`."""
        if self.user is user:
            self.user = self.others.pop() if self.others else None
            self._bind_host_view()

    def replace_value(self, value: torch.Tensor) -> None:
        """Point the tensor at other CPU memory, and mark it as edited."""
        assign(self.tensor, value)
        self.version = -1

    def _copy_back(self, tensor: torch.Tensor) -> None:
        """Copy a change that the forward itself made to the CPU, and mark the tensor as edited.

        A tensor pointed at other memory keeps a CPU copy of it; a change in place is copied to the
        host view.
        """
        if address_of(tensor) not in (self._bound_to, self._address):
            self.replace_value(tensor.detach().cpu())
            return
        self.host_view.copy_(tensor.detach())
        assign(tensor, self.host_view)
        self.version = -1


# Note: the following runs for each tensor at each use of a unit, in loops that call no Python
# functions. A block has twenty tensors, and each Python call costs as much as a kernel.


def edited_among(
    bindings: Iterable[ParameterBinding], expected: Mapping[str, torch.Tensor]
) -> list[ParameterBinding]:
    """Return the bindings that are not in use and whose tensors have been edited.

    `expected` maps names to tensors with the required shape, strides and dtype.
    """
    edited = []
    for binding in bindings:
        if binding.user is not None:
            continue
        tensor = binding._reference()
        if tensor is None:
            tensor = binding.tensor
        revive_object(tensor)
        try:
            version = unchecked_version(tensor)
        except RuntimeError:  # an inference tensor: see `version_of`
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
    bindings: Iterable[ParameterBinding], user: object, leased: Mapping[str, torch.Tensor]
) -> None:
    """Bind tensors to the leased tensors of the same names for the context `user`."""
    for binding in bindings:
        if binding.user is not None:
            binding.others = {user} if binding.others is None else {*binding.others, user}
            continue
        value = leased[binding.name]
        tensor = binding._reference()
        if tensor is None:
            tensor = binding.tensor
        revive_object(tensor)
        binding._bound_to = value.data_ptr()
        binding.user = user  # before binding: if this is interrupted, unbind_all undoes it
        try:
            tensor.data = value
        except RuntimeError:
            assign(tensor, value)
        try:
            binding.version = unchecked_version(tensor)
        except RuntimeError:
            binding.version = 0


def unbind_all(  # noqa: C901 - no extra call per tensor
    bindings: Iterable[ParameterBinding], user: object, *, with_grad: bool
) -> None:
    """Bind tensors to their host views again when their last use ends. Can be called repeatedly.

    `with_grad` says whether autograd may have saved the tensors.
    """
    for binding in bindings:
        if binding.others:
            binding._remove_user(user, binding.others)
        if binding.user is not user:
            continue
        tensor = binding._reference()
        if tensor is None:
            tensor = binding.tensor
        revive_object(tensor)
        try:
            version = unchecked_version(tensor)
        except RuntimeError:
            version = 0
        address = tensor.data_ptr()
        if version != binding.version or (
            address != binding._bound_to and address != binding._address
        ):
            binding._copy_back(tensor)
            binding.user = None
            continue
        try:
            tensor.data = binding.host_view
        except RuntimeError:
            assign(tensor, binding.host_view)
        if with_grad and not tensor.is_inference():
            # Saved tensors show memory that will be reused, so a backward pass must raise. Autograd
            # also saves frozen weights if the gradient of an input passes through them.
            torch.autograd.graph.increment_version(tensor)
        try:
            binding.version = unchecked_version(tensor)
        except RuntimeError:
            binding.version = 0
        binding.user = None


def note_changes(
    edited: Iterable[ParameterBinding],
    members: Iterable[ParameterBinding],
    values: Mapping[str, torch.Tensor],
) -> None:
    """Count edits of a group's tensors, and switch those that change often to WRITE_BACK.

    Only buffers are switched, and tensors that share memory with them. Edits of parameters are
    rare, and made by the user. `values` are the current tensors of the group, by name.
    """
    often = set()
    for binding in edited:
        binding.times_stored += 1
        if binding.times_stored > FREQUENT_EDITS and not isinstance(binding.tensor, nn.Parameter):
            often.add(binding.name)
    if often:
        blocks = [{view.name for view in block.views} for block, _ in blocks_of(values)]
        together = {name for names in blocks if names & often for name in names}
        for binding in members:
            if binding.name in together:
                binding.policy = BindingPolicy.WRITE_BACK
