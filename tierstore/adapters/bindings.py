"""What a tensor of a model shows while it is away and while it is used; noticing its changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from tierstore.adapters.codecs.memory import address_of
from tierstore.adapters.codecs.plain import assign
from tierstore.system.views import blocks_of
from tierstore.torch_private import counted_version, keep_found, version_of

OFTEN = 2
"""How often a buffer is stored by its content before it counts as one that every use changes, such
as a cache of keys and values, or running statistics."""


class Binding:
    """A tensor of the model, the group it is in, and its home: what it shows while away.

    `user` is the use during which it shows leased memory, one of them if there are `others`.
    `edited` tells whether somebody gave it other memory or wrote to it by a torch operation since
    it was brought home. (Writes that torch does not count, such as to `tensor.data`, show in the
    pages of the home: see `WriteWatch`.) `times_stored` counts how often it was stored anew; once
    it is `changing`, its home is memory in which nobody notices such writes.

    It does not keep the tensor alive: a parameter that was deleted or replaced goes at once, as in
    plain torch, and nobody sees what `tensor` is from then on: another with its home. `number` is
    the tensor's id, which others may have then. `alone` says that it is such another.

    All of this runs for every tensor in every step, between computations that fill the processor's
    caches: what counts is how few objects are touched.
    """

    __slots__ = (
        "_address",
        "_reference",
        "_shown_at",
        "alone",
        "changing",
        "home",
        "key",
        "name",
        "number",
        "others",
        "times_stored",
        "user",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, key: str, name: str, home: torch.Tensor) -> None:
        self._reference: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self._shown_at = 0
        self.alone = False
        self.number = id(tensor)
        self.name = name
        self.user: object = None
        self.others: set[object] | None = None
        self.changing = False
        self.times_stored = 0
        self.move_to(key, home)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of the model, or another with its home if that is gone."""
        found = self._reference()
        if found is None:
            return self._in_its_place()
        keep_found(found)
        return found

    def _in_its_place(self) -> torch.Tensor:
        placed = self.home.detach()
        self._reference = lambda: placed
        self.alone = True
        self.version = version_of(placed)
        return placed

    @property
    def alive(self) -> bool:
        """Whether the model's tensor is not gone."""
        return not self.alone and self._reference() is not None

    def move_to(self, key: str, home: torch.Tensor) -> None:
        """The tensor is in group `key` from now on, and away."""
        self.key = key
        self.home = home
        self._address = address_of(home)
        if self.user is None:
            self._bring_home()

    def is_in_place(self, value: torch.Tensor) -> bool:
        """Whether a value lies in the memory of the home, in its form."""
        home = self.home
        return (
            address_of(value) == self._address
            and value.shape == home.shape
            and value.stride() == home.stride()
            and value.dtype is home.dtype
            and not value.is_conj()
        )

    def _bring_home(self) -> None:
        tensor = self.tensor
        assign(tensor, self.home)
        self.version = version_of(tensor)

    @property
    def edited(self) -> bool:
        """Whether it is away and not what it was."""
        return bool(edited_among((self,), {self.name: self.home}))

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

    def is_shown_on(self, thread: int) -> bool:
        """Whether a use on a thread (or one that tells no thread) has it show leased memory."""
        if self.user is None:
            return False
        users = (self.user, *(self.others or ()))
        return any(getattr(user, "thread", thread) == thread for user in users)

    def value(self, shown: torch.Tensor) -> torch.Tensor:
        """What the tensor is, in memory that nobody uses again: its home if it is in use; else what
        it shows. If it was changed in use, that is known when the use is over."""
        return (
            shown
            if self.user is None and address_of(shown) == address_of(self.tensor)
            else self.home
        )

    def leave(self, use: object) -> None:
        """Show the home again; what the tensor showed during `use` is not looked at."""
        if self.user is use:
            self.user = self.others.pop() if self.others else None
            self._bring_home()

    def give(self, value: torch.Tensor) -> None:
        """Let the tensor show other memory, of the CPU: from now on it counts as edited."""
        assign(self.tensor, value)
        self.version = -1

    def _keep_change(self, tensor: torch.Tensor) -> None:
        """The forward itself gave the tensor other memory, which it keeps, on the CPU; or changed
        it: the home is where that is kept, and noticed."""
        if address_of(tensor) not in (self._shown_at, self._address):
            self.give(tensor.detach().cpu())
            return
        self.home.copy_(tensor.detach())
        assign(tensor, self.home)
        self.version = -1


# Note: what every use of a unit does to each of its tensors, in loops that call nothing that is
# written in Python. A block has twenty tensors, and each such call costs what a kernel does.


def edited_among(
    bindings: Iterable[Binding], expected: Mapping[str, torch.Tensor]
) -> list[Binding]:
    """Those that are away and do not show their homes, unchanged, in the form of the tensors
    `expected` by their names."""
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


def show_all(bindings: Iterable[Binding], use: object, leased: Mapping[str, torch.Tensor]) -> None:
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
        binding._shown_at = value.data_ptr()
        binding.user = use  # before anything is shown: wherever this ends, put_back_all undoes it
        try:
            tensor.data = value
        except RuntimeError:
            assign(tensor, value)
        try:
            binding.version = counted_version(tensor)
        except RuntimeError:
            binding.version = 0


def put_back_all(  # noqa: C901 - no call more for each tensor
    bindings: Iterable[Binding], use: object, *, with_grad: bool
) -> None:
    """Let tensors show their homes again, when their last use ends. To be repeated if interrupted.

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
            address != binding._shown_at and address != binding._address
        ):
            binding._keep_change(tensor)
            binding.user = None
            continue
        try:
            tensor.data = binding.home
        except RuntimeError:
            assign(tensor, binding.home)
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
    edited: Iterable[Binding], members: Iterable[Binding], values: Mapping[str, torch.Tensor]
) -> None:
    """Tensors of a group with these `values` were edited: see which are changing all the time.

    Buffers may be, and what shares memory with them. Parameters are edited by somebody, once.
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
            binding.changing = binding.changing or binding.name in together
