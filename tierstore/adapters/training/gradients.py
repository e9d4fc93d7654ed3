"""Gradients on their way out: from where autograd leaves them to the store, as soon as they are
final.

While the backward pass runs, a parameter has no gradient that autograd knows of: each time it
leaves one, that is stored, or added to what is stored, in the order in which autograd would have
added it. Afterwards `parameter.grad` shows what is stored, as a CPU tensor; whatever somebody does
with it there (clips it, zeroes it, sets it to None, gives another one) is found by the next pass.

Of a sharded parameter, FSDP2 leaves the gradient, after all processes have reduced it. It tells of
none before that: so all of theirs are hidden as a backward pass begins.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstore.adapters.training.sharded import (
    distributed_like,
    is_distributed,
    memory_of,
    own_copy,
)
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.model.tiers import HostAccess
from tierstore.observe.passes import ModelPass, PassesOf
from tierstore.store import TierStore
from tierstore.torch_private import after_backward

_numbers = itertools.count()

OPEN = 2
"""Groups of gradients, beside the newest, that are kept open: they are written as they close. A
block's gradients come in another order than it has its parameters."""


@dataclass(slots=True)
class _Copy:
    """A gradient that is being copied from the device, kept until it is `copied`.

    `made_on` is the stream on which it was made; `gradient` is None once that waits for the copy.
    """

    copied: torch.Event
    made_on: torch.Stream
    gradient: torch.Tensor | None


class Gradients:
    """The gradients of one group of parameters. `buffer` is None until there was one."""

    def __init__(self, store: TierStore, key: str, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._tierstore = store
        self._key = key
        self.buffer: StateBuffer | None = None
        self._stored: set[str] = set()  # names of those that have a gradient
        self._shown: dict[str, torch.Tensor] = {}  # what we gave them as their `grad`
        self._open: dict[str, torch.Tensor] | None = None
        self._closing = ExitStack()
        self._copies: list[_Copy] = []

    @property
    def sharded(self) -> bool:
        """Whether they are those of shards."""
        return any(map(is_distributed, self.parameters.values()))

    def take_back(self, name: str, parameter: nn.Parameter) -> None:
        """Before autograd leaves a gradient: see what became of the last one, and hide it."""
        gone = {n for n in self._shown if self.parameters[n].grad is None}
        self._stored -= gone  # somebody set these to None
        for each in gone:
            del self._shown[each]
        shown = self._shown.pop(name, None)
        if parameter.grad is not None:
            if parameter.grad is not shown:
                self._store(name, memory_of(parameter.grad), add=False)
            parameter.grad = None

    def shown_as(self, name: str) -> torch.Tensor | None:
        """What a parameter's `grad` is, if it is what is stored."""
        return self._shown.get(name)

    def others(self) -> bool:
        """Whether any gradient is not what is stored."""
        parameters = self.parameters.items()
        return any(p.grad is not None and p.grad is not self.shown_as(n) for n, p in parameters)

    def hide(self) -> None:
        """Before any gradient is left: `take_back` all."""
        for name, parameter in self.parameters.items():
            self.take_back(name, parameter)

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Autograd has left a gradient: store it."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._store(name, memory_of(gradient), add=name in self._stored)

    def _store(self, name: str, gradient: torch.Tensor, *, add: bool) -> None:
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {name!r} is {gradient.layout}: only dense ones can be stored; "
                "build the module with sparse=False"
            )
        target = self.opened()[name]
        if gradient.dtype is not target.dtype:
            raise RuntimeError(
                f"the gradient of {name!r} is {gradient.dtype}, but it is stored as "
                f"{target.dtype}: set grad_dtype={gradient.dtype} for this parameter before its "
                "first gradient"
            )
        assert self.buffer is not None
        with torch.no_grad():
            copied = self.buffer.fill(target, gradient.detach(), add=add)
        self.release_copied(wait=False)
        if copied is not None:
            made_on = torch.accelerator.current_stream(gradient.device)
            self._copies.append(_Copy(copied, made_on, gradient))
        self._stored.add(name)

    def release_copied(self, *, wait: bool = True) -> None:
        """Keep no gradients on the device that are copied; if others are to `wait`, none at all.

        The streams that made them then go on once they are copied, and may get their memory next.
        The caller does not wait.
        """
        for copy in self._copies:
            if copy.gradient is None:
                continue
            if not copy.copied.query():
                if not wait:
                    return  # later ones are copied later
                copy.made_on.wait_event(copy.copied)
            copy.gradient = None

    def _wait_for_copies(self) -> None:
        """Wait for what is on its way, before it is changed or read here."""
        while self._copies:
            self._copies[-1].copied.synchronize()
            self._copies.pop()

    def opened(self) -> dict[str, torch.Tensor]:
        """The stored gradients, to be changed, until `close`."""
        if self._open is None:
            if self.buffer is None or not self._trained().keys() <= set(self.buffer.names):
                self.buffer = self._made()
            purpose = HostAccess.UPDATE if self._stored else HostAccess.RENEW
            self._open = self.buffer.enter(self._closing, purpose)
        return self._open

    def _trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.parameters.items() if p.requires_grad}

    def _made(self) -> StateBuffer:
        """A buffer for the gradients of all that want one now, with those that there are."""
        before, trained = self.buffer, self._trained()
        if before is not None:
            before.put_away()
            before.ready()
        stored = {n: before.tensors[n] for n in self._stored} if before is not None else {}
        values = {
            name: stored[name] if name in stored else _empty_gradient(p)
            for name, p in {**trained, **{n: self.parameters[n] for n in stored}}.items()
        }
        key = f"{self._key}/gradient.{next(_numbers)}"
        made = StateBuffer(self._tierstore, key, values, with_values=bool(stored))
        if before is not None:
            made.ready()
            for name in self._shown:
                self._give(name, made)
            before.discard()
        return made

    def close(self) -> None:
        """Nobody adds to them for now."""
        if self._open is not None:
            self._wait_for_copies()
            self._open = None
            self._closing.close()

    def show(self) -> None:
        """Let parameters have what is stored as their gradients."""
        self.close()
        if self.buffer is None:
            return
        self.buffer.put_away()
        self.buffer.ready()
        for name in self._stored - self._shown.keys():
            self._give(name, self.buffer)

    def _give(self, name: str, buffer: StateBuffer) -> None:
        parameter = self.parameters[name]
        shown = distributed_like(parameter, buffer.tensors[name])
        parameter.grad = self._shown[name] = shown

    def discard(self) -> None:
        """They are not needed any more."""
        self.close()
        for name in self._shown:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                parameter.grad = own_copy(parameter.grad)
        self._shown.clear()  # nobody looks at the buffer any more
        self._stored.clear()
        if self.buffer is not None:
            self.buffer.discard()
            self.buffer = None


def _empty_gradient(parameter: nn.Parameter) -> torch.Tensor:
    memory = memory_of(parameter)
    dtype = _dtype_of_gradient(parameter)
    return torch.empty_strided(memory.size(), memory.stride(), dtype=dtype)


def _dtype_of_gradient(parameter: nn.Parameter) -> torch.dtype:
    """That of the parameter, if nobody says otherwise. (torch before 2.9 lets nobody do that.)"""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if chosen is None else chosen


def _afterwards(
    streamer: GradientStreamer, gradients: Gradients, name: str
) -> Callable[[Any], None]:
    """Return what to call when autograd has left a gradient.

    torch keeps it where Python's collector does not look, so it must not keep anything.
    """
    references = weakref.ref(streamer), weakref.ref(gradients)

    def add(parameter: nn.Parameter) -> None:
        streamer, gradients = references[0](), references[1]()
        if streamer is not None and gradients is not None:
            streamer.add(gradients, name, parameter)

    return add


class GradientStreamer:
    """What the gradients of one model go through in a backward pass.

    `done` is called when that is over, and all of them are shown again. It is noted in `passes`,
    from its first gradient on.
    """

    def __init__(self, groups: list[Gradients], done: Callable[[], None], passes: PassesOf) -> None:
        self._groups = groups
        self._done = done
        self._passes = passes
        self._pass: ModelPass | None = None
        self._lock = threading.RLock()
        self._open: deque[Gradients] = deque()
        self._under_way = False
        self._handles: list[Any] = []
        self._watched: set[int] = set()
        self.watch()

    def watch(self) -> None:
        """See that every parameter that wants a gradient is looked after."""
        for gradients in self._groups:
            for name, parameter in gradients.parameters.items():
                if parameter.requires_grad and id(parameter) not in self._watched:
                    self._watched.add(id(parameter))
                    before = functools.partial(self._before, gradients, name, parameter)
                    after = _afterwards(self, gradients, name)
                    self._handles.append(parameter.register_hook(before))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(after))

    def begin(self) -> None:
        """A backward pass is under way: be told of its end."""
        with self._lock:
            if not self._under_way:
                self._under_way = True
                after_backward(self.finish)
                self._pass = self._passes.begin("backward")
                for gradients in self._groups:
                    if gradients.sharded:
                        self._hide(gradients)

    @torch.no_grad()
    def _hide(self, gradients: Gradients) -> None:
        if gradients.others():
            self._turn_to(gradients)
        gradients.hide()

    def _before(
        self, gradients: Gradients, name: str, parameter: nn.Parameter, gradient: torch.Tensor
    ) -> None:
        with self._lock:
            self.begin()
            self._turn_to(gradients)
            gradients.take_back(name, parameter)

    def add(self, gradients: Gradients, name: str, parameter: nn.Parameter) -> None:
        """Autograd has left a gradient."""
        with self._lock:
            if is_distributed(parameter):
                there = gradients.shown_as(name) is parameter.grad
                self.begin()
                if there:  # nobody told of this pass: FSDP2 has added to what was shown
                    return
                self._turn_to(gradients)
            gradients.add(name, parameter)

    def _turn_to(self, gradients: Gradients) -> None:
        for other in self._open:
            if other is not gradients:
                other.release_copied()
        if gradients in self._open:
            return
        self._open.append(gradients)
        while len(self._open) > 1 + OPEN:
            self._open.popleft().close()

    def make_room(self) -> None:
        """Keep no gradients open."""
        with self._lock:
            while self._open:
                self._open.popleft().close()

    def finish(self) -> None:
        """The backward pass is over, or was given up."""
        with self._lock:
            if not self._under_way:
                return
            self._under_way = False
            self.make_room()
            self._done()
            for gradients in self._groups:
                gradients.show()
            self._passes.end(self._pass)

    def stop(self) -> None:
        """Autograd may leave gradients where it likes."""
        while self._handles:
            self._handles.pop().remove()
