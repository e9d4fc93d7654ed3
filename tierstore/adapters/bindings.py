"""What a tensor of a model shows while it is away and while it is used; noticing its changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from tierstore.adapters.codecs.memory import address_of
from tierstore.adapters.codecs.plain import assign
from tierstore.system.views import blocks_of
from tierstore.torch_private import keep_found, version_of

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
        return self.user is None and not self._is_as(self.home)

    @property
    def was_given_memory(self) -> bool:
        """Whether somebody gave it other memory, which is not empty."""
        tensor = self.tensor
        return tensor.numel() > 0 and address_of(tensor) != self._address

    def _is_as(self, expected: torch.Tensor) -> bool:
        """Whether it shows its home, unchanged, in the form of `expected`."""
        tensor = self.tensor
        return (
            address_of(tensor) == self._address
            and version_of(tensor) == self.version
            and tensor.shape == expected.shape
            and tensor.stride() == expected.stride()
            and tensor.dtype is expected.dtype
            and not tensor.is_conj()
        )

    def show(self, use: object, leased: torch.Tensor, *, unless_edited: bool) -> bool:
        """Let the tensor show the leased bytes while `use` lasts. False if it was edited."""
        if self.user is not None:
            self.others = {use} if self.others is None else {*self.others, use}
            return True
        if unless_edited and not self._is_as(leased):
            return False
        self._shown_at = address_of(leased)
        self.user = use  # before anything is shown: wherever this ends, put_back undoes it
        tensor = self.tensor
        assign(tensor, leased)
        self.version = version_of(tensor)
        return True

    def put_back(self, use: object, *, with_grad: bool) -> None:
        """Let it show its home again, when the last use ends. May be repeated if interrupted.

        `with_grad` tells whether autograd may have saved it.
        """
        if self.others:
            self._leave_to_others(use, self.others)
        if self.user is use:
            self._put_back(with_grad)
            self.user = None

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

    def _put_back(self, with_grad: bool) -> None:
        tensor = self.tensor
        if address_of(tensor) not in (self._shown_at, self._address):
            # The forward itself gave it other memory: the tensor keeps that, on the CPU.
            self.give(tensor.detach().cpu())
            return
        if version_of(tensor) != self.version:
            # The forward itself changed it. The home is where the change is kept, and noticed.
            self.home.copy_(tensor.detach())
            assign(tensor, self.home)
            self.version = -1
            return
        self._bring_home()
        if with_grad and not tensor.is_inference():
            # What autograd saved shows memory that is used again: a backward must raise. It saves
            # frozen weights too, where the gradient of an input goes through them.
            torch.autograd.graph.increment_version(tensor)
            self.version = version_of(tensor)


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
