"""Lease the weights of a model around calls of one unit and of the whole model.

Both contexts implement `ForwardContext`, for inference and training. While gradients are enabled,
autograd saves no weights: see `tierstore.adapters.saved`. In inference, a backward pass through
frozen weights leases them again; a backward pass through other weights raises.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tierstore.adapters.autocast_cache import CastCache
from tierstore.adapters.binding import ParameterBinding, bind_all, edited_among, unbind_all
from tierstore.adapters.compat import Library, any_answer, notify_all
from tierstore.adapters.forward import Arguments, forbid_backward
from tierstore.adapters.nested import tensors_in
from tierstore.adapters.operations import OperationMode
from tierstore.adapters.saved import LeaseOwner, SavedViews, WeightHooks
from tierstore.adapters.view_lifetime import TensorLease
from tierstore.adapters.wrapped import WrappedTensor
from tierstore.engine.loops import Loops, ThreadSteps
from tierstore.errors import UnknownKeyError
from tierstore.lease import Lease, make_revocable, resume
from tierstore.model.locks import under
from tierstore.observe.passes import FORWARD, ModelPass, ModelPasses
from tierstore.store import TierStore
from tierstore.torch_private import saved_tensor_hooks_allowed


class CurrentPass(threading.local):
    """The current pass of a model on this thread, and the lease of the group used last.

    Consecutive units often share a group, so its lease is retained for the next unit while
    `context` (a call of the whole model) runs. A retained lease is revocable: a request that would
    have to wait for the memory gets it.
    """

    context: object = None
    lease: Lease | None = None

    def release(self) -> None:
        """Release the retained lease. Can be repeated if interrupted."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class WeightOwner(LeaseOwner, Protocol):
    """The groups of one model, which its units lease.

    `lock` guards the bindings of the tensors. `generation` increases each time tensors move to
    other groups. Once the groups are `invalidated`, nothing is bound any more.
    """

    store: TierStore
    lock: threading.RLock
    generation: int
    invalidated: bool
    current: CurrentPass
    loops: Loops

    def lease(self, key: str, /) -> TensorLease:
        """Lease a group on the device."""

    def rewrite(self, edited: list[ParameterBinding]) -> None:
        """Rewrite the groups of edited tensors."""

    def wait_for_rewrite(self) -> None:
        """Wait while the model is being repartitioned, or made an ordinary one."""


@dataclass(eq=False)
class PassContext:
    """Context of one call of the whole model, in which a lease may be retained between units.

    A nested call on the same thread does nothing. For the outermost call, `on_begin` is called
    first; if it returns True, `passes` records the pass as an `operation`. `on_success` is called
    after the call if it did not raise, and `on_end` in any case, with the exception or None. `mode`
    is active during the call.
    """

    current: CurrentPass
    passes: ModelPasses
    on_begin: Callable[[], bool]
    operation: str = FORWARD
    on_success: Callable[[], None] | None = None
    mode: OperationMode | None = None
    on_end: Callable[[BaseException | None], None] | None = None
    _noted: ModelPass | None = None
    _active_mode: OperationMode | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Begin the pass."""
        if self.current.context is None:
            self.current.context = self
            if self.on_begin():
                self._noted = self.passes.begin(self.operation)
            if self.mode is not None:
                self.mode.begin()
                self._active_mode = self.mode
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Release the retained lease, and return the result unchanged."""
        outermost = self.current.context is self
        self._end(failed=False)
        if outermost and self.on_success is not None:
            self.on_success()
        return result

    def end(self) -> None:
        """Release the retained lease. Called again if it was interrupted."""
        self._end(failed=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *, failed: bool) -> None:
        mode, self._active_mode = self._active_mode, None
        if mode is not None:
            mode.end()
        if self.current.context is self:
            self.current.release()
            self.current.context = None
            if self.on_end is not None:
                self.on_end(sys.exc_info()[1] if failed else None)
        self.passes.end(self._noted, failed=failed)


@dataclass(eq=False)
class UnitWeights:
    """The tensors of `bindings`, which one unit leases from its `owner` while it runs.

    `wrappers` are all wrapper tensors made of some of these; `wrapped` are those that must be
    exchanged to report an accelerator as their device. `mutable` weights are trained. `known_keys`
    caches the result of `keys`.
    """

    owner: WeightOwner
    bindings: list[ParameterBinding]
    wrapped: list[WrappedTensor] = field(default_factory=list)
    wrappers: list[WrappedTensor] = field(default_factory=list)
    mutable: bool = False
    known_keys: tuple[int, tuple[str, ...]] = (-1, ())

    def keys(self) -> tuple[int, tuple[str, ...]]:
        """Return the generation and the keys of the tensors' groups. The caller holds the lock."""
        if self.known_keys[0] != self.owner.generation:
            keys = dict.fromkeys(binding.key for binding in self.bindings)
            self.known_keys = self.owner.generation, tuple(keys)
        return self.known_keys

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own tensors, which have the `requires_grad` flags."""
        return [b.tensor for b in self.bindings] + [w.tensor for w in self.wrappers]

    @functools.cached_property
    def saved_past_hooks(self) -> bool:
        """True if a library's autograd functions save some tensors outside saved-tensor hooks."""
        return any(any_answer(Library.saves_weights, each) for each in self.parameters)

    @property
    def frozen(self) -> bool:
        """True if none of them requires a gradient."""
        return not any(tensor.requires_grad for tensor in self.parameters)


class UnitContext:
    """Context of one run of a unit: `begin` leases and binds its tensors; `end` undoes it.

    Each run holds its own leases, so runs on several threads may overlap. Views of the tensors that
    outlive the run stay valid, as for any lease (`tierstore.tiers.slot_views`).
    """

    __slots__ = (
        "_casts",
        "_depth",
        "_hooked",
        "_hooks",
        "_leases",
        "_saved",
        "_steps",
        "_weights",
        "_with_grad",
        "thread",
    )

    def __init__(self, weights: UnitWeights) -> None:
        self._weights = weights
        self.thread = 0
        self._leases: list[TensorLease] = []
        self._steps: ThreadSteps | None = None  # set between the begin and end of a loop step
        self._depth = 0  # number of units that were open before
        self._hooked = False
        self._hooks: Any = None
        self._casts = CastCache()
        self._with_grad = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Lease and bind the tensors. The caller must call `end` in any case.

        Returns False if these groups are no longer valid because the model was repartitioned.
        """
        self.thread = threading.get_ident()
        self._hooked = torch.is_grad_enabled() and saved_tensor_hooks_allowed()
        owner = self._weights.owner
        edited = self._lease(unless_edited=not self._weights.mutable)
        if edited:
            self._release_all()
            owner.rewrite(edited)
        while edited is None or edited:
            self._release_all()  # groups were rewritten, here or on another thread
            if owner.invalidated:
                owner.wait_for_rewrite()
                return False
            edited = self._lease(unless_edited=False)
        self._casts.stop()
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, result: Any, given: Arguments) -> Any:
        """Unbind and release everything after the forward, and return its result."""
        tensors = [result] if type(result) is torch.Tensor else list(tensors_in(result))
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._with_grad = True  # the forward may have enabled gradients itself
                if self._hooks is None or not (self._weights.mutable or self._weights.frozen):
                    forbid_backward(tensors, given)
                elif self._weights.saved_past_hooks:
                    notify_all(Library.release_saved, tensors, given, self._saved.pack)
                break
        self._end()
        return result

    def _lease(self, *, unless_edited: bool) -> list[ParameterBinding] | None:
        """Lease the groups and bind the tensors. Return the bindings of edited tensors.

        If any tensor was edited (with `unless_edited`), none is bound. Returns None if groups were
        rewritten meanwhile.
        """
        weights, owner, leases = self._weights, self._weights.owner, self._leases
        as_of, keys = weights.known_keys  # computed with the lock held
        if as_of != owner.generation:
            as_of, keys = under(owner.lock, weights.keys)
        try:
            if not self._begin_step(keys):
                if owner.current.lease is not None:
                    self._reuse_lease(owner.current, keys)
                for key in keys[len(leases) :]:
                    leases.append(owner.lease(key))
        except UnknownKeyError:
            if owner.generation == as_of and not owner.invalidated:
                raise
            return None
        if len(leases) == 1:
            leased = leases[0].tensors
        else:
            leased = {name: t for lease in leases for name, t in lease.tensors.items()}
        bind = functools.partial(self._bind, leased, unless_edited, as_of)
        return under(owner.lock, bind)

    def _begin_step(self, keys: tuple[str, ...]) -> bool:
        """Begin a step of a planned loop. Return whether the step provides all the tensors."""
        loops = self._weights.owner.loops
        if self._hooked or self._weights.mutable or self._steps is not None:
            return False
        steps = loops.steps()
        self._depth = len(steps.open)
        self._steps = steps  # set before the step begins, as it must be ended
        step = loops.begin(steps, keys)
        if step is None:
            return False
        self._leases.append(step)
        return True

    def _bind(
        self, leased: Mapping[str, torch.Tensor], unless_edited: bool, as_of: int
    ) -> list[ParameterBinding] | None:
        owner = self._weights.owner
        if owner.generation != as_of or owner.invalidated:
            return None
        bindings = self._weights.bindings
        if unless_edited and (edited := edited_among(bindings, leased)):
            return edited
        bind_all(bindings, self, leased)
        for wrapped in self._weights.wrapped:
            wrapped.bind(self)
        if self._hooked:
            self._saved = SavedViews(owner, bindings, leased)
            hooks = WeightHooks(self._saved.pack).hooks
            hooks.__enter__()
            self._hooks = hooks
        return []

    def _unbind(self) -> None:
        for wrapped in self._weights.wrapped:
            wrapped.unbind(self)
        with_grad = not self._hooked and (self._with_grad or torch.is_grad_enabled())
        unbind_all(self._weights.bindings, self, with_grad=with_grad)

    def _reuse_lease(self, current: CurrentPass, keys: tuple[str, ...]) -> None:
        """Reuse the retained lease if it is the one needed; otherwise release it first."""
        lease = current.lease
        if lease is None or keys != (lease.key,) or not resume(lease):
            current.release()
            return
        self._leases.append(lease)
        current.lease = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Unbind and release everything. Called again if it was interrupted."""
        self._end()

    def _end(self) -> None:
        self._casts.resume()
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        owner = self._weights.owner
        under(owner.lock, self._unbind)
        current = owner.current
        if current.context is not None and current.lease is None and len(self._leases) == 1:
            self._retain_lease(current)
        self._release_all()

    def _retain_lease(self, current: CurrentPass) -> None:
        lease = self._leases[0]
        if isinstance(lease, Lease) and make_revocable(lease):
            current.lease = lease
            self._leases.pop()

    def _release_all(self) -> None:
        while self._leases:
            self._leases[-1].release()
            self._leases.pop()
        if self._steps is not None:
            self._weights.owner.loops.end(self._steps, self._depth)
            self._steps = None
