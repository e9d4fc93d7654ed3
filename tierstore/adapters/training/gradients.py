"""Stream gradients from autograd to the store as soon as they are final.

During the backward pass, `parameter.grad` is None between accumulations. Each gradient that
autograd accumulates is stored, or added to the stored one in autograd's own order. Afterwards,
`parameter.grad` is bound to the stored gradient, as a CPU tensor. Edits made there (clipping,
zeroing, setting to None, assigning another tensor) take effect in the next pass.

For a sharded parameter, FSDP2 sets the gradient once all processes have reduced it, and runs no
hook before that. So all gradients of sharded parameters are unbound when a backward pass begins.
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
from tierstore.observe.passes import ModelPass, ModelPasses
from tierstore.store import TierStore
from tierstore.torch_private import after_backward

_numbers = itertools.count()

OPEN = 2
"""Number of groups kept open besides the newest; a group is written when it closes.

More than one is open because a block's gradients do not arrive in the order of its parameters.
"""


@dataclass(slots=True)
class _Copy:
    """A gradient that is being copied from the device, kept until the event `copied` completes.

    `made_on` is the stream that computed it. `gradient` becomes None once that stream waits for
    the copy, so its memory may be reused.
    """

    copied: torch.Event
    made_on: torch.Stream
    gradient: torch.Tensor | None


class Gradients:
    """The gradients of one group of parameters. `buffer` is None before the first gradient."""

    def __init__(self, store: TierStore, key: str, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._tierstore = store
        self._key = key
        self.buffer: StateBuffer | None = None
        self._stored: set[str] = set()  # names of parameters with a stored gradient
        self._bound: dict[str, torch.Tensor] = {}  # the tensors assigned to `grad`
        self._open: dict[str, torch.Tensor] | None = None
        self._closing = ExitStack()
        self._copies: list[_Copy] = []

    @property
    def sharded(self) -> bool:
        """True if any parameter is sharded."""
        return any(map(is_distributed, self.parameters.values()))

    def unbind(self, name: str, parameter: nn.Parameter) -> None:
        """Set `parameter.grad` to None before autograd accumulates, after storing user edits."""
        dropped = {n for n in self._bound if self.parameters[n].grad is None}
        self._stored -= dropped  # the user set these to None
        for each in dropped:
            del self._bound[each]
        bound = self._bound.pop(name, None)
        if parameter.grad is not None:
            if parameter.grad is not bound:
                self._store(name, memory_of(parameter.grad), add=False)
            parameter.grad = None

    def bound_gradient(self, name: str) -> torch.Tensor | None:
        """Return the tensor bound to a parameter's `grad`, or None if it is not bound."""
        return self._bound.get(name)

    def has_foreign(self) -> bool:
        """Return True if any parameter has a gradient other than the stored one."""
        parameters = self.parameters.items()
        return any(
            p.grad is not None and p.grad is not self.bound_gradient(n) for n, p in parameters
        )

    def unbind_all(self) -> None:
        """Unbind the gradients of all parameters, before autograd accumulates any."""
        for name, parameter in self.parameters.items():
            self.unbind(name, parameter)

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Store the gradient that autograd has just accumulated, and set `grad` to None."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._store(name, memory_of(gradient), add=name in self._stored)

    def _store(self, name: str, gradient: torch.Tensor, *, add: bool) -> None:
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {name!r} is {gradient.layout}: only dense gradients can be "
                "stored; build the module with sparse=False"
            )
        target = self.open_buffer()[name]
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
        """Release the device memory of gradients that have been copied.

        With `wait`, release the others too: the streams that computed them wait for the copies
        before they reuse the memory. The caller does not block.
        """
        for copy in self._copies:
            if copy.gradient is None:
                continue
            if not copy.copied.query():
                if not wait:
                    return  # copies finish in order
                copy.made_on.wait_event(copy.copied)
            copy.gradient = None

    def _wait_for_copies(self) -> None:
        """Block until all copies are done, before the host reads or changes the gradients."""
        while self._copies:
            self._copies[-1].copied.synchronize()
            self._copies.pop()

    def open_buffer(self) -> dict[str, torch.Tensor]:
        """Lease the stored gradients for writing until `close`, and return them by name."""
        if self._open is None:
            if self.buffer is None or not self._trained().keys() <= set(self.buffer.names):
                self.buffer = self._grown_buffer()
            purpose = HostAccess.UPDATE if self._stored else HostAccess.RENEW
            self._open = self.buffer.enter(self._closing, purpose)
        return self._open

    def _trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.parameters.items() if p.requires_grad}

    def _grown_buffer(self) -> StateBuffer:
        """Return a buffer for all parameters that now need a gradient, with the stored values."""
        before, trained = self.buffer, self._trained()
        if before is not None:
            before.flush()
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
            for name in self._bound:
                self._bind(name, made)
            before.discard()
        return made

    def close(self) -> None:
        """End the write lease. Blocks until pending copies are done."""
        if self._open is not None:
            self._wait_for_copies()
            self._open = None
            self._closing.close()

    def bind(self) -> None:
        """Bind each parameter's `grad` to its stored gradient."""
        self.close()
        if self.buffer is None:
            return
        self.buffer.flush()
        self.buffer.ready()
        for name in self._stored - self._bound.keys():
            self._bind(name, self.buffer)

    def _bind(self, name: str, buffer: StateBuffer) -> None:
        parameter = self.parameters[name]
        bound = distributed_like(parameter, buffer.tensors[name])
        parameter.grad = self._bound[name] = bound

    def discard(self) -> None:
        """Free the buffer, after moving each bound gradient to separate memory."""
        self.close()
        for name in self._bound:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                parameter.grad = own_copy(parameter.grad)
        self._bound.clear()
        self._stored.clear()
        if self.buffer is not None:
            self.buffer.discard()
            self.buffer = None


def _empty_gradient(parameter: nn.Parameter) -> torch.Tensor:
    memory = memory_of(parameter)
    dtype = _dtype_of_gradient(parameter)
    return torch.empty_strided(memory.size(), memory.stride(), dtype=dtype)


def _dtype_of_gradient(parameter: nn.Parameter) -> torch.dtype:
    """Return the parameter's `grad_dtype` if set (torch 2.9 and later), else its dtype."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if chosen is None else chosen


def _accumulate_hook(
    streamer: GradientStreamer, gradients: Gradients, name: str
) -> Callable[[Any], None]:
    """Return the hook to run after autograd has accumulated a gradient.

    It holds weak references only: torch keeps hooks where Python's garbage collector cannot see
    them, so strong references would leak.
    """
    references = weakref.ref(streamer), weakref.ref(gradients)

    def add(parameter: nn.Parameter) -> None:
        streamer, gradients = references[0](), references[1]()
        if streamer is not None and gradients is not None:
            streamer.add(gradients, name, parameter)

    return add


class GradientStreamer:
    """Moves the gradients of one model to the store during a backward pass.

    `done` is called when the pass is over, before the gradients are bound again. The pass is
    recorded in `passes`, from its first gradient on.
    """

    def __init__(
        self, groups: list[Gradients], done: Callable[[], None], passes: ModelPasses
    ) -> None:
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
        """Register hooks on every parameter that requires a gradient and has none yet."""
        for gradients in self._groups:
            for name, parameter in gradients.parameters.items():
                if parameter.requires_grad and id(parameter) not in self._watched:
                    self._watched.add(id(parameter))
                    before = functools.partial(self._before, gradients, name, parameter)
                    after = _accumulate_hook(self, gradients, name)
                    self._handles.append(parameter.register_hook(before))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(after))

    def begin(self) -> None:
        """Note that a backward pass has begun, and schedule `finish` at its end."""
        with self._lock:
            if not self._under_way:
                self._under_way = True
                after_backward(self.finish)
                self._pass = self._passes.begin("backward")
                for gradients in self._groups:
                    if gradients.sharded:
                        self._unbind_all(gradients)

    @torch.no_grad()
    def _unbind_all(self, gradients: Gradients) -> None:
        if gradients.has_foreign():
            self._turn_to(gradients)
        gradients.unbind_all()

    def _before(
        self, gradients: Gradients, name: str, parameter: nn.Parameter, gradient: torch.Tensor
    ) -> None:
        with self._lock:
            self.begin()
            self._turn_to(gradients)
            gradients.unbind(name, parameter)

    def add(self, gradients: Gradients, name: str, parameter: nn.Parameter) -> None:
        """Store a gradient that autograd has accumulated."""
        with self._lock:
            if is_distributed(parameter):
                in_place = gradients.bound_gradient(name) is parameter.grad
                self.begin()
                if in_place:  # no hook ran in this pass: FSDP2 has added to the bound gradient
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

    def free_memory(self) -> None:
        """Close all groups of gradients, to free their memory."""
        with self._lock:
            while self._open:
                self._open.popleft().close()

    def finish(self) -> None:
        """End the backward pass, whether it completed or was aborted, and bind all gradients."""
        with self._lock:
            if not self._under_way:
                return
            self._under_way = False
            self.free_memory()
            self._done()
            for gradients in self._groups:
                gradients.bind()
            self._passes.end(self._pass)

    def stop(self) -> None:
        """Remove all hooks, so autograd accumulates as usual."""
        while self._handles:
            self._handles.pop().remove()
