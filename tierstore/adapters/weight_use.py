"""Using weights of an offloaded model: for one run of a unit, and for a call of the whole model.

Both are a `UnitUse`, which tells what goes on around the call of a method. While gradients are
enabled, nothing of the weights gets into the graph: see `tierstore.adapters.saved_weights`. A
backward pass through weights that are frozen brings them in again; through others, it raises.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tierstore.adapters.activations import Unpack
from tierstore.adapters.activations.in_place import described, refuse_changed
from tierstore.adapters.autocast_cache import CastCache
from tierstore.adapters.bindings import Binding, edited_among, put_back_all, show_all
from tierstore.adapters.codecs.memory import (
    Geometry,
    address_of,
    geometry_of,
    span,
)
from tierstore.adapters.compat import any_answer, notify_all
from tierstore.adapters.nested import tensors_in
from tierstore.adapters.operations import OperationMode
from tierstore.adapters.saved_weights import LastLease, WeightHooks
from tierstore.adapters.unit_use import Arguments, refuse_backward, refuse_to_go_back
from tierstore.adapters.weight_groups import HeldLease, WeightGroups
from tierstore.adapters.wrapped import WrappedTensor
from tierstore.engine.loop_runner import StepLease
from tierstore.engine.loops import ThreadSteps
from tierstore.lease import Lease, make_revocable, resume
from tierstore.model.errors import UnknownKeyError
from tierstore.model.locks import under
from tierstore.observe.passes import FORWARD, ModelPass, PassesOf
from tierstore.torch_private import hooks_are_allowed, in_backward, version_of


@dataclass(eq=False)
class ModelRun:
    """One call of the whole model: while it goes on, leases may be held from unit to unit.

    `over` is called after one that is not inside of another, and that did not raise. It is noted
    in `passes`, as what it `does`. Meanwhile `touching` is on. `ended` is called after any, with
    what it raised.
    """

    held: HeldLease
    last_lease: LastLease
    over: Callable[[], None]
    passes: PassesOf
    does: str = FORWARD
    touching: OperationMode | None = None
    ended: Callable[[BaseException | None], None] | None = None
    _noted: ModelPass | None = None
    _begun: OperationMode | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """A call inside of another one changes nothing."""
        if self.held.run is None:
            self.held.run = self
            if not in_backward():
                self.last_lease.give_back()  # of a backward that raised
            self._noted = self.passes.begin(self.does)
            if self.touching is not None:
                self.touching.begin()
                self._begun = self.touching
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Leave nothing leased. What units return is theirs to look at."""
        outermost = self.held.run is self
        self._end(failed=False)
        if outermost:
            self.over()
        return result

    def end(self) -> None:
        """Leave nothing leased. To be called again if it was interrupted."""
        self._end(failed=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *, failed: bool) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.end()
        if self.held.run is self:
            if self.ended is not None:
                self.ended(sys.exc_info()[1] if failed else None)
            self.held.let_go()
            self.held.run = None
        self.passes.end(self._noted, failed=failed)


@dataclass(eq=False)
class UnitWeights:
    """What one unit needs of a model's groups while it runs: the tensors of `bindings`.

    Those of `wrapped` consist of some of these, and have to say that they are on an accelerator.
    `wrappers` are all that consist of some. `known_keys` is what `keys` told the last time.
    """

    groups: WeightGroups
    bindings: list[Binding]
    wrapped: list[WrappedTensor]
    wrappers: list[WrappedTensor] = field(default_factory=list)
    known_keys: tuple[int, tuple[str, ...]] = (-1, ())

    @classmethod
    def of(cls, groups: WeightGroups, bindings: list[Binding]) -> UnitWeights:
        """Return the weights of a unit with these tensors."""
        wrapped = groups.wrapped_of(bindings)
        on_cpu = groups.store.device.type == "cpu"
        return cls(groups, bindings, [] if on_cpu else wrapped, wrapped)

    def keys(self) -> tuple[int, tuple[str, ...]]:
        """The groups that the tensors are in, each once, as of which renewal. With the lock."""
        if self.known_keys[0] != self.groups.renewals:
            keys = dict.fromkeys(binding.key for binding in self.bindings)
            self.known_keys = self.groups.renewals, tuple(keys)
        return self.known_keys

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own tensors, which say whether they want gradients."""
        return [b.tensor for b in self.bindings] + [w.tensor for w in self.wrappers]

    @functools.cached_property
    def saved_unseen(self) -> bool:
        """Whether functions of a library keep some of them past saved-tensor hooks."""
        return any(any_answer("saves_weights", each) for each in self.parameters)

    @property
    def frozen(self) -> bool:
        """Whether none of them wants a gradient."""
        return not any(tensor.requires_grad for tensor in self.parameters)


class LeasedMemory(NamedTuple):
    """Memory that is lent: which tensor of which group it shows, and the weight this is of."""

    start: int
    stop: int
    binding: Binding
    key: str
    name: str

    @staticmethod
    def of(tensor: torch.Tensor, binding: Binding, key: str, name: str) -> LeasedMemory:
        """That of a tensor that is not empty."""
        start = address_of(tensor)
        return LeasedMemory(start, start + span(tensor), binding, key, name)


class SavedViews:
    """Tells the views of what is lent in one use of a unit, as autograd saves them."""

    def __init__(
        self, groups: WeightGroups, bindings: list[Binding], leased: Mapping[str, torch.Tensor]
    ) -> None:
        self._groups = groups
        shown = [(b, leased[b.name]) for b in bindings if leased[b.name].numel()]
        self._lent = [LeasedMemory.of(t, b, b.key, b.name) for b, t in shown]
        self._device = shown[0][1].device if shown else None
        self._start = min((lent.start for lent in self._lent), default=0)
        self._stop = max((lent.stop for lent in self._lent), default=0)

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        """What brings a saved tensor back, if it is a view of a weight that is lent."""
        if not self._start <= address_of(tensor) < self._stop or tensor.device != self._device:
            return None
        return pack_view(self._groups, self._lent, tensor)


def pack_view(
    groups: WeightGroups, lent: Iterable[LeasedMemory], tensor: torch.Tensor
) -> Unpack | None:
    """What brings a saved tensor back, if it is a view of what is lent, on the same device."""
    address = address_of(tensor)
    for each in lent:
        if each.start <= address < each.stop:
            geometry = geometry_of(tensor)
            origin = geometry.offset * tensor.element_size() - (address - each.start)
            return functools.partial(_view_again, groups, each, origin, geometry, described(tensor))
    return None


@torch.no_grad()
def _view_again(
    groups: WeightGroups, lent: LeasedMemory, origin: int, geometry: Geometry, description: str
) -> torch.Tensor:
    """A view of a weight, as it was saved: `origin` is where the weight began in the storage that
    the view looked at. Raises RuntimeError if the weight is not what it was."""
    binding = lent.binding
    if binding.tensor.requires_grad:
        refuse_backward()
    refuse_changed(description, version_of(binding.tensor), binding.version)
    try:
        if groups.over or lent.key not in groups.groups:
            raise UnknownKeyError(lent.key)
        leased = groups.last_lease.tensors(lent.key)
    except UnknownKeyError:
        raise RuntimeError(
            f"this backward needs {binding.name}, which no tierstore has any more as it was in the "
            "forward: weights were changed since, or the model was cut into groups anew. Run the "
            "forward again"
        ) from None
    return geometry.within(leased[lent.name], origin)


class WeightUse:
    """One run of a unit. `begin` brings its tensors in; `end`, whatever happened, undoes that.

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
        self._leases: list[Lease | StepLease] = []
        self._steps: ThreadSteps | None = None  # where its step began, until that ends
        self._depth = 0  # units that were open before
        self._viewed = False
        self._hooks: Any = None
        self._casts = CastCache()
        self._with_grad = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Bring the tensors in. In any case, `end` has to be called.

        False if the model is not cut into these groups any more.
        """
        self.thread = threading.get_ident()
        self._viewed = torch.is_grad_enabled() and hooks_are_allowed()
        edited = self._show(unless_edited=True)
        if edited:
            self._release_all()
            self._weights.groups.renew(edited)
        while edited is None or edited:
            self._release_all()  # groups were renewed, by us or on another thread
            if self._weights.groups.over:
                self._weights.groups.wait_until_renewed()
                return False
            edited = self._show(unless_edited=False)
        self._casts.stop()
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, result: Any, given: Arguments) -> Any:
        """After the forward: put everything back. Returns its result."""
        tensors = [result] if type(result) is torch.Tensor else list(tensors_in(result))
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._with_grad = True  # it may have turned gradients on by itself
                if self._hooks is None or not self._weights.frozen:
                    refuse_to_go_back(tensors, given)
                elif self._weights.saved_unseen:
                    notify_all("release_saved", tensors, given, self._saved.pack)
                break
        self._end()
        return result

    def _show(self, *, unless_edited: bool) -> list[Binding] | None:
        """Let the tensors show leased memory. Returns those that do not, as they were edited; then
        nor do the others. None if groups were renewed meanwhile."""
        weights, groups, leases = self._weights, self._weights.groups, self._leases
        as_of, keys = weights.known_keys  # of the latest renewal: found out with the lock
        if as_of != groups.renewals:
            as_of, keys = under(groups.lock, weights.keys)
        try:
            if not self._begin_step(keys):
                if groups.held.lease is not None:
                    self._take_over(groups.held, keys)
                for key in keys[len(leases) :]:
                    leases.append(groups.store.acquire(key))
        except UnknownKeyError:
            if groups.renewals == as_of and not groups.over:
                raise
            return None
        if len(leases) == 1:
            leased = leases[0].tensors
        else:
            leased = {name: t for lease in leases for name, t in lease.tensors.items()}
        show = functools.partial(self._show_leased, leased, unless_edited, as_of)
        return under(groups.lock, show)

    def _begin_step(self, keys: tuple[str, ...]) -> bool:
        """Say that a step of a loop begins. Returns whether that has all the tensors."""
        loops = self._weights.groups.loops
        if self._viewed or self._steps is not None:
            return False
        steps = loops.steps()
        self._depth = len(steps.open)
        self._steps = steps  # before it begins: it has to end
        step = loops.begin(steps, keys)
        if step is None:
            return False
        self._leases.append(step)
        return True

    def _show_leased(
        self, leased: Mapping[str, torch.Tensor], unless_edited: bool, as_of: int
    ) -> list[Binding] | None:
        if self._weights.groups.renewals != as_of or self._weights.groups.over:
            return None
        bindings = self._weights.bindings
        if unless_edited and (edited := edited_among(bindings, leased)):
            return edited
        show_all(bindings, self, leased)
        for wrapped in self._weights.wrapped:
            wrapped.show(self)
        if self._viewed:
            self._saved = SavedViews(self._weights.groups, bindings, leased)
            hooks = WeightHooks(self._saved.pack).hooks
            hooks.__enter__()
            self._hooks = hooks
        return []

    def _put_back(self) -> None:
        for wrapped in self._weights.wrapped:
            wrapped.put_back(self)
        with_grad = not self._viewed and (self._with_grad or torch.is_grad_enabled())
        put_back_all(self._weights.bindings, self, with_grad=with_grad)

    def _take_over(self, held: HeldLease, keys: tuple[str, ...]) -> None:
        """Use the lease that was held if it is the one that is needed; else let it go first."""
        lease = held.lease
        if lease is None or keys != (lease.key,) or not resume(lease):
            held.let_go()
            return
        self._leases.append(lease)
        held.lease = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Put everything back. To be called again if it was interrupted."""
        self._end()

    def _end(self) -> None:
        self._casts.resume()
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        groups, held = self._weights.groups, self._weights.groups.held
        under(groups.lock, self._put_back)
        if held.run is not None and held.lease is None and len(self._leases) == 1:
            self._leave(held)
        self._release_all()

    def _leave(self, held: HeldLease) -> None:
        lease = self._leases[0]
        if isinstance(lease, Lease) and make_revocable(lease):
            held.lease = lease
            self._leases.pop()

    def _release_all(self) -> None:
        while self._leases:
            self._leases[-1].release()
            self._leases.pop()
        if self._steps is not None:
            self._weights.groups.loops.end(self._steps, self._depth)
            self._steps = None
