"""Lease the weights of a model around its calls: of one unit, and of the whole model.

Both kinds are a `ForwardContext`, in inference and in training. While gradients are enabled,
nothing of the weights gets into the graph: see `tierstore.adapters.saved`. In inference, a backward
pass through frozen weights leases them again; through others, it raises.
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
from tierstore.adapters.forward import Arguments, refuse_to_go_back
from tierstore.adapters.nested import tensors_in
from tierstore.adapters.operations import OperationMode
from tierstore.adapters.saved import LeaseOwner, SavedViews, WeightHooks
from tierstore.adapters.view_lifetime import TensorLease
from tierstore.adapters.wrapped import WrappedTensor
from tierstore.engine.loops import Loops, ThreadSteps
from tierstore.errors import UnknownKeyError
from tierstore.lease import Lease, make_revocable, resume
from tierstore.model.locks import under
from tierstore.observe.passes import FORWARD, ModelPass, PassesOf
from tierstore.store import TierStore
from tierstore.torch_private import hooks_are_allowed


class CurrentPass(threading.local):
    """The pass of a model that goes on on this thread, and the lease of the group used last.

    Units that follow each other often share a group. So its lease is kept for the next unit, while
    `context` (a call of the whole model) goes on. It rests: whoever would have to wait for the
    group gets it.
    """

    context: object = None
    lease: Lease | None = None

    def release(self) -> None:
        """Release the lease. May be repeated if interrupted."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class WeightOwner(LeaseOwner, Protocol):
    """The groups of one model, which its units lease.

    `lock` guards what the tensors show; `renewals` counts how often any of them went to other
    groups. Once it is `invalidated`, nothing is bound any more.
    """

    store: TierStore
    lock: threading.RLock
    renewals: int
    invalidated: bool
    current: CurrentPass
    loops: Loops

    def lease(self, key: str, /) -> TensorLease:
        """Lease a group on the device."""

    def renew(self, edited: list[ParameterBinding]) -> None:
        """Store the groups of edited tensors again."""

    def wait_until_renewed(self) -> None:
        """Wait until the model is not being partitioned again, or made an ordinary one."""


@dataclass(eq=False)
class PassContext:
    """One call of the whole model. While it goes on, a lease may be kept from unit to unit.

    A call inside of another one on the same thread changes nothing. For the outermost, `begun` is
    called first, and tells whether to note a pass of the model in `passes`, as what it `does`;
    `finished` after it, if it did not raise; `ended` in any case, with what it raised. Meanwhile
    `touching` is on.
    """

    current: CurrentPass
    passes: PassesOf
    begun: Callable[[], bool]
    does: str = FORWARD
    finished: Callable[[], None] | None = None
    touching: OperationMode | None = None
    ended: Callable[[BaseException | None], None] | None = None
    _noted: ModelPass | None = None
    _touching: OperationMode | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Begin the pass."""
        if self.current.context is None:
            self.current.context = self
            if self.begun():
                self._noted = self.passes.begin(self.does)
            if self.touching is not None:
                self.touching.begin()
                self._touching = self.touching
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Release everything. The result of a unit stays as it is."""
        outermost = self.current.context is self
        self._end(failed=False)
        if outermost and self.finished is not None:
            self.finished()
        return result

    def end(self) -> None:
        """Release everything. To be called again if it was interrupted."""
        self._end(failed=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *, failed: bool) -> None:
        touching, self._touching = self._touching, None
        if touching is not None:
            touching.end()
        if self.current.context is self:
            self.current.release()
            self.current.context = None
            if self.ended is not None:
                self.ended(sys.exc_info()[1] if failed else None)
        self.passes.end(self._noted, failed=failed)


@dataclass(eq=False)
class UnitWeights:
    """The tensors of `bindings`, which one unit needs of its `owner` while it runs.

    Those of `wrapped` consist of some of these, and have to say that they are on an accelerator.
    `wrappers` are all that consist of some. `mutable` ones are trained. `known_keys` is what `keys`
    returned the last time.
    """

    owner: WeightOwner
    bindings: list[ParameterBinding]
    wrapped: list[WrappedTensor] = field(default_factory=list)
    wrappers: list[WrappedTensor] = field(default_factory=list)
    mutable: bool = False
    known_keys: tuple[int, tuple[str, ...]] = (-1, ())

    def keys(self) -> tuple[int, tuple[str, ...]]:
        """Return as of which renewal, and the groups that the tensors are in, each once. Call it
        with the lock."""
        if self.known_keys[0] != self.owner.renewals:
            keys = dict.fromkeys(binding.key for binding in self.bindings)
            self.known_keys = self.owner.renewals, tuple(keys)
        return self.known_keys

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own tensors, which say whether they want gradients."""
        return [b.tensor for b in self.bindings] + [w.tensor for w in self.wrappers]

    @functools.cached_property
    def saved_unseen(self) -> bool:
        """Tell whether functions of a library keep some of them past saved-tensor hooks."""
        return any(any_answer(Library.saves_weights, each) for each in self.parameters)

    @property
    def frozen(self) -> bool:
        """Tell whether none of them requires a gradient."""
        return not any(tensor.requires_grad for tensor in self.parameters)


class UnitContext:
    """One run of a unit: `begin` leases and binds its tensors; `end`, whatever happened, undoes it.

    Every use holds leases of its own, so that uses on several threads may overlap. Views of the
    tensors that somebody keeps stay right, as those of any lease (`tierstore.tiers.slot_views`).
    """

    __slots__ = (
        "_casts",
        "_depth",
        "_hooks",
        "_leases",
        "_saved",
        "_steps",
        "_viewed",
        "_weights",
        "_with_grad",
        "thread",
    )

    def __init__(self, weights: UnitWeights) -> None:
        self._weights = weights
        self.thread = 0
        self._leases: list[TensorLease] = []
        self._steps: ThreadSteps | None = None  # where its step began, until that ends
        self._depth = 0  # units that were open before
        self._viewed = False
        self._hooks: Any = None
        self._casts = CastCache()
        self._with_grad = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Lease and bind the tensors. In any case, `end` has to be called.

        False if the model is not partitioned into these groups any more.
        """
        self.thread = threading.get_ident()
        self._viewed = torch.is_grad_enabled() and hooks_are_allowed()
        owner = self._weights.owner
        edited = self._lease(unless_edited=not self._weights.mutable)
        if edited:
            self._release_all()
            owner.renew(edited)
        while edited is None or edited:
            self._release_all()  # groups were renewed, by us or on another thread
            if owner.invalidated:
                owner.wait_until_renewed()
                return False
            edited = self._lease(unless_edited=False)
        self._casts.stop()
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, result: Any, given: Arguments) -> Any:
        """Unbind and release everything after the forward. Returns its result."""
        tensors = [result] if type(result) is torch.Tensor else list(tensors_in(result))
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._with_grad = True  # it may have turned gradients on by itself
                if self._hooks is None or not (self._weights.mutable or self._weights.frozen):
                    refuse_to_go_back(tensors, given)
                elif self._weights.saved_unseen:
                    notify_all(Library.release_saved, tensors, given, self._saved.pack)
                break
        self._end()
        return result

    def _lease(self, *, unless_edited: bool) -> list[ParameterBinding] | None:
        """Lease the groups and bind the tensors. Returns those that are not bound, as they were
        edited; then the others are not, either. None if groups were renewed meanwhile."""
        weights, owner, leases = self._weights, self._weights.owner, self._leases
        as_of, keys = weights.known_keys  # of the latest renewal: found out with the lock
        if as_of != owner.renewals:
            as_of, keys = under(owner.lock, weights.keys)
        try:
            if not self._begin_step(keys):
                if owner.current.lease is not None:
                    self._take_over(owner.current, keys)
                for key in keys[len(leases) :]:
                    leases.append(owner.lease(key))
        except UnknownKeyError:
            if owner.renewals == as_of and not owner.invalidated:
                raise
            return None
        if len(leases) == 1:
            leased = leases[0].tensors
        else:
            leased = {name: t for lease in leases for name, t in lease.tensors.items()}
        bind = functools.partial(self._bind, leased, unless_edited, as_of)
        return under(owner.lock, bind)

    def _begin_step(self, keys: tuple[str, ...]) -> bool:
        """Begin a step of a loop. Returns whether that has all the tensors."""
        loops = self._weights.owner.loops
        if self._viewed or self._weights.mutable or self._steps is not None:
            return False
        steps = loops.steps()
        self._depth = len(steps.open)
        self._steps = steps  # before it begins: it has to end
        step = loops.begin(steps, keys)
        if step is None:
            return False
        self._leases.append(step)
        return True

    def _bind(
        self, leased: Mapping[str, torch.Tensor], unless_edited: bool, as_of: int
    ) -> list[ParameterBinding] | None:
        owner = self._weights.owner
        if owner.renewals != as_of or owner.invalidated:
            return None
        bindings = self._weights.bindings
        if unless_edited and (edited := edited_among(bindings, leased)):
            return edited
        bind_all(bindings, self, leased)
        for wrapped in self._weights.wrapped:
            wrapped.show(self)
        if self._viewed:
            self._saved = SavedViews(owner, bindings, leased)
            hooks = WeightHooks(self._saved.pack).hooks
            hooks.__enter__()
            self._hooks = hooks
        return []

    def _unbind(self) -> None:
        for wrapped in self._weights.wrapped:
            wrapped.put_back(self)
        with_grad = not self._viewed and (self._with_grad or torch.is_grad_enabled())
        unbind_all(self._weights.bindings, self, with_grad=with_grad)

    def _take_over(self, current: CurrentPass, keys: tuple[str, ...]) -> None:
        """Use the lease that was kept if it is the one that is needed; else release it first."""
        lease = current.lease
        if lease is None or keys != (lease.key,) or not resume(lease):
            current.release()
            return
        self._leases.append(lease)
        current.lease = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Unbind and release everything. To be called again if it was interrupted."""
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
            self._keep(current)
        self._release_all()

    def _keep(self, current: CurrentPass) -> None:
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
