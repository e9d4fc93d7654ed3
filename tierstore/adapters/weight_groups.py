"""Groups of an offloaded model's tensors in a store, and the handling of changed tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from enum import Enum, auto

import torch
from torch import nn

from tierstore.adapters.binding import BindingPolicy, ParameterBinding, note_changes
from tierstore.adapters.codecs.memory import address_of, span, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.contents import tensors_of
from tierstore.adapters.grouping import GroupPlan, Unit
from tierstore.adapters.operations import without_interception
from tierstore.adapters.retained_memory import RetainedMemory
from tierstore.adapters.saved import BackwardLeases, LeasedMemory
from tierstore.adapters.unit_context import CurrentPass, UnitWeights
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.adapters.wrapped import WrappedTensor
from tierstore.engine.groups import NO_CASTS
from tierstore.errors import ClosedError, UnknownKeyError
from tierstore.model.outline import unused
from tierstore.model.tiers import UseOrder
from tierstore.progress import bar
from tierstore.store import TierStore, engine_of
from tierstore.system.allocator import FreedMemory
from tierstore.system.maps import AddressSpace, WriteWatch
from tierstore.torch_private import in_backward

Change = Callable[[torch.Tensor], torch.Tensor]


class StorageKind(Enum):
    """Storage of a group."""

    WEIGHTS = auto()
    """By content; its order of use is learned."""
    ROUTED = auto()
    """By content; data choose when it is used."""
    CHANGING = auto()
    """As a mutable group, because its values change constantly."""
    IN_PLACE = auto()
    """As a mutable group whose tensors are already in its memory."""


_numbers = itertools.count(1)


def _watch_of(bindings: list[ParameterBinding]) -> WriteWatch:
    return WriteWatch([(address_of(b.host_view), tensor_bytes(b.host_view)) for b in bindings])


class WeightGroups:
    """The groups of one model, until it is repartitioned.

    `groups` maps their keys to tensor names. `lock` guards the bindings of the tensors.
    `generation` increases each time tensors move to other groups. Once the groups are
    `invalidated`, nothing is bound any more. Hold `groups_lock` to add, replace or remove groups.
    """

    def __init__(
        self,
        store: TierStore,
        prefix: str,
        groups: dict[str, list[str]],
        groups_lock: threading.RLock,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.groups = groups
        self.lock = threading.RLock()
        self.generation = 0
        self.invalidated = False
        self.lease = store.acquire
        self.current = CurrentPass()
        self.backward_leases = BackwardLeases(lambda key: ViewLease(store.acquire(key)), 1)
        self.loops = engine_of(store).loops
        self._groups_lock = groups_lock
        self._bindings: dict[int, ParameterBinding] = {}
        self._wrapped: dict[int, WrappedTensor] = {}
        self._members: dict[str, list[ParameterBinding]] = {}
        self.running: set[object] = set()  # contexts that use slices
        self._slices: dict[int, tuple[str, list[str]]] = {}  # binding id: its key, slice keys
        self._routed: set[int] = set()  # ids of tensors in routed groups
        self._changing: set[str] = set()  # keys of groups stored as changing
        self._sticky: set[str] = set()  # names of tensors to evict last
        self._freed = FreedMemory()
        self._watched: list[ParameterBinding] = []
        self._watch: WriteWatch | None = None

    # Groups and bindings -----------------------------------------------------------------------

    def register(
        self, plans: Iterable[GroupPlan], sticky: set[str], wrapped: Iterable[WrappedTensor]
    ) -> None:
        """Put these groups into the store; groups of only `sticky` names are evicted last.

        `wrapped` are the model's wrapper tensors made of some of them.
        """
        self._sticky = sticky
        space = AddressSpace()
        kept = RetainedMemory(space)
        names: set[str] = set()
        for plan in bar(plans, self.prefix, "groups"):
            key = unused(f"{self.prefix}/{plan.name}", names)
            kept.note(plan.tensors)
            kind = StorageKind.ROUTED if plan.routed else StorageKind.WEIGHTS
            host_views = self._put(key, plan.tensors, space, kind=kind)
            members = [
                ParameterBinding(t, key, name, host_views[name]) for name, t in plan.tensors.items()
            ]
            self._members[key] = members
            self._bindings.update({binding.number: binding for binding in members})
            if plan.routed:
                self._routed.update(map(id, plan.tensors.values()))
            self._freed.add(sum(map(tensor_bytes, host_views.values())))
        self._freed.release()
        kept.log(self.prefix)
        for each in wrapped:
            if all(id(leaf) in self._bindings for leaf in each.leaves.values()):
                self._wrapped[id(each.tensor)] = each

    def _put(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        space: AddressSpace | None,
        casts: Mapping[str, torch.dtype] = NO_CASTS,
        kind: StorageKind = StorageKind.WEIGHTS,
    ) -> dict[str, torch.Tensor]:
        """Put a group into the store, and return the host views of its tensors."""
        self.groups[key] = list(tensors)  # first: if this is interrupted, `discard` removes it
        engine = engine_of(self.store)
        try:
            if kind in (StorageKind.CHANGING, StorageKind.IN_PLACE):
                cast = {name: t.to(casts.get(name, t.dtype)) for name, t in tensors.items()}
                host_views = engine.mutable_groups.put(
                    key, cast, in_place=kind is StorageKind.IN_PLACE
                )
            else:
                order = UseOrder.ROUTED if kind is StorageKind.ROUTED else UseOrder.LEARNED
                host_views = engine.groups.register(key, tensors, space, casts, order)
            if self._sticky.issuperset(tensors):
                self.store.make_sticky(key)
        except BaseException:
            if key not in self.store:
                del self.groups[key]
            raise
        return host_views

    def slices(self, binding: ParameterBinding) -> list[str]:
        """Return the keys of the groups of a tensor's slices along its first dimension, in order.

        The group of the whole tensor is kept only for its host view.
        """
        with self._groups_lock:
            found = self._slices.get(id(binding))
            if found is None or found[0] != binding.key:
                for key in () if found is None else found[1]:
                    if key in self.store:
                        self.store.discard(key)
                    self.groups.pop(key, None)
                found = binding.key, self._put_slices(binding)
                self._slices[id(binding)] = found
            return found[1]

    def _put_slices(self, binding: ParameterBinding) -> list[str]:
        """Put each slice into its own group. Can be repeated if interrupted."""
        space = AddressSpace()
        names = [f"{binding.name}[{i}]" for i in range(len(binding.host_view))]
        for name, part in zip(names, binding.host_view, strict=True):
            if f"{binding.key}/{name}" not in self.groups:
                self._put(f"{binding.key}/{name}", {name: part}, space, kind=StorageKind.ROUTED)
        return [f"{binding.key}/{name}" for name in names]

    def keys_of(self, unit: Unit) -> list[str]:
        """Return the keys of the groups that a unit uses at the same time, each once."""
        bindings = self.bindings(map(id, unit.tensors.values()))
        if unit.stacks:
            return [self._slices[id(b)][1][0] for b in bindings if id(b) in self._slices]
        return list({b.key: None for b in bindings})

    def tensor_ids(self) -> set[int]:
        """Return the ids of the tensors in the groups, and of the wrappers made of them."""
        alive = {number for number, binding in self._bindings.items() if binding.alive}
        return alive | self._wrapped.keys()

    @property
    def wrapped(self) -> Mapping[int, WrappedTensor]:
        """The model's wrapper tensors, by id."""
        return self._wrapped

    def wrapped_of(self, bindings: Iterable[ParameterBinding]) -> list[WrappedTensor]:
        """Return the wrapper tensors made of some of these tensors."""
        own = {binding.number for binding in bindings}
        return [w for w in self._wrapped.values() if any(id(t) in own for t in w.leaves.values())]

    def values_of(self, wrapped: WrappedTensor) -> dict[str, torch.Tensor]:
        """Return the values of a wrapper's leaves, in memory that is not reused."""
        found = {name: self._bindings[id(leaf)] for name, leaf in wrapped.leaves.items()}
        with self.lock:
            values = {name: each.value(each.tensor).detach() for name, each in found.items()}
        return values

    def bindings_for(self, tensor: torch.Tensor) -> Iterable[ParameterBinding]:
        """Return the bindings of a tensor of the model, or of a wrapper's leaves.

        Empty for a tensor used in slices, which may be larger than a budget.
        """
        found = self._bindings.get(id(tensor))
        if found is not None:
            return () if id(found) in self._slices else (found,)
        wrapped = self._wrapped.get(id(tensor))
        return () if wrapped is None else self.bindings(map(id, wrapped.leaves.values()))

    def bindings(self, tensors: Iterable[int]) -> list[ParameterBinding]:
        """Return the bindings of those tensors (by id) that are in the groups."""
        found = [self._bindings[each] for each in tensors if each in self._bindings]
        return [binding for binding in found if binding.alive]

    def bindings_of(self, module: nn.Module, *, recurse: bool = True) -> list[ParameterBinding]:
        """Return the bindings of a part of the model, each once."""
        held: dict[int, None] = {}
        for tensor in tensors_of(module, recurse=recurse):
            wrapped = self._wrapped.get(id(tensor))
            held |= dict.fromkeys(map(id, wrapped.leaves.values() if wrapped else (tensor,)))
        return self.bindings(held)

    @property
    def in_use(self) -> bool:
        """True while a tensor is bound to leased memory, or slices of one are in use."""
        shown = any(binding.user is not None for binding in self._bindings.values())
        return shown or bool(self.running)

    # Uses --------------------------------------------------------------------------------------

    def unit_weights(self, bindings: list[ParameterBinding]) -> UnitWeights:
        """Return the weights of a unit with these tensors."""
        wrapped = self.wrapped_of(bindings)
        on_cpu = self.store.device.type == "cpu"
        return UnitWeights(self, bindings, [] if on_cpu else wrapped, wrapped)

    def begin_pass(self) -> bool:
        """Release the leases left by a backward pass that raised. Return True, to record a pass."""
        if not in_backward():
            self.backward_leases.release_all()
        return True

    def lease_again(self, memory: LeasedMemory) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the memory's group, on the device, for a backward pass.

        Raises RuntimeError if the group has been rewritten since.
        """
        try:
            if self.invalidated or memory.key not in self.groups:
                raise UnknownKeyError(memory.key)
            return self.backward_leases.tensors(memory.key)
        except UnknownKeyError:
            raise RuntimeError(
                f"this backward needs {memory.binding.name} as it was in the forward, but the "
                "tierstore no longer has that value: the weights were changed since, or the model "
                "was repartitioned. Run the forward again"
            ) from None

    # Changed weights ---------------------------------------------------------------------------

    def rewrite_written(self) -> None:
        """Rewrite the groups that were written to since the last call."""
        if self._watch is None:  # a new watch reports all writes since the host views were made
            self._watched = [
                b for b in self._bindings.values() if b.policy is not BindingPolicy.WRITE_BACK
            ]
            self._watch = _watch_of(self._watched)
        written = [self._watched[i] for i in self._watch.written()]
        # WRITE_BACK tensors are not watched.
        written += [b for b in self._bindings.values() if b.policy is BindingPolicy.WRITE_BACK]
        if written:
            self.rewrite(written)

    def rewrite_edited(self, keys: set[str]) -> None:
        """Rewrite those of the groups that were edited and are not in use.

        Does not wait: if another thread is rewriting groups, the next run writes the edits.
        """
        members = [b for key in keys for b in self._members.get(key, ())]
        written = {members[i] for i in _watch_of(members).written()}
        edited = [
            b
            for b in members
            if b.edited
            or ((b in written or b.policy is BindingPolicy.WRITE_BACK) and b.user is None)
        ]
        if edited and self._groups_lock.acquire(blocking=False):
            try:
                self.rewrite(edited)
            finally:
                self._groups_lock.release()

    def wait_for_rewrite(self) -> None:
        """Wait while the model is being repartitioned, or made an ordinary one."""
        with self._groups_lock:
            pass

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def rewrite(self, edited: list[ParameterBinding]) -> None:
        """Rewrite the groups of changed tensors. Unchanged tensors in them are not written."""
        with self._groups_lock, without_interception():
            for keys in self._merge_tied(edited):
                members = [b for key in keys for b in self._members.get(key, [])]
                with self.lock:
                    if not members or any(b.user is not None for b in members):
                        continue  # in use: detected again before the next use
                    # Take aliases: another thread may bind the tensors to leased memory soon.
                    values = {b.name: b.tensor.detach() for b in members}
                if members[0].number not in self._routed:
                    note_changes([b for b in members if b in edited], members, values)
                self._replace_group(keys[0], members, values)
                for key in keys[1:]:
                    self._members.pop(key, None)
                    self._changing.discard(key)
                    self.store.discard(key)
                    del self.groups[key]
            self._freed.release()

    def _merge_tied(self, edited: list[ParameterBinding]) -> list[list[str]]:
        """Return the groups of edited tensors, as lists of keys to merge into one group each.

        Groups are merged if a tensor was pointed at the memory of another group's tensor
        (`a.data = b.data`): the two stay tied.
        """
        sets = {key: [key] for key in dict.fromkeys(binding.key for binding in edited)}
        given = [b for b in edited if b.was_reassigned and b.number not in self._routed]
        spans = [(address_of(b.tensor), address_of(b.tensor) + span(b.tensor), b) for b in given]
        for other in self._bindings.values() if spans else ():
            if other.user is not None or other.number in self._routed:
                continue
            start = address_of(other.tensor)
            end = start + span(other.tensor)
            for first, last, binding in spans:
                if start < last and first < end and other.key != binding.key:
                    joined = sets[binding.key]
                    joined += [k for k in sets.get(other.key, [other.key]) if k not in joined]
                    sets.update(dict.fromkeys(joined, joined))
        return list({id(keys): keys for keys in sets.values()}.values())

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def convert(self, change: Change) -> None:
        """Apply `change` to every plain tensor, with one changed group in memory at a time."""
        parts = {id(leaf) for each in self._wrapped.values() for leaf in each.leaves.values()}
        with self._groups_lock:
            self.rewrite([b for b in self._bindings.values() if b.edited])
            for key in bar(list(self._members), "Converting", "groups"):
                members = self._members[key]
                values = {
                    b.name: b.tensor if b.number in parts else change(b.tensor) for b in members
                }
                if any(values[b.name] is not b.tensor for b in members):
                    self._replace_group(key, members, values)
            self._freed.release()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def cast(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Cast tensors (by id) to other dtypes, group by group.

        A group cast from the same files before is neither read nor written.
        """
        with self._groups_lock:
            self.rewrite([b for b in self._bindings.values() if b.edited])
            space = AddressSpace()
            for key in bar(list(self._members), "Converting", "groups"):
                members = self._members[key]
                casts = {
                    b.name: dtypes[b.number]
                    for b in members
                    if dtypes.get(b.number, b.tensor.dtype) is not b.tensor.dtype
                }
                if casts:
                    values = {b.name: b.tensor.detach() for b in members}
                    self._replace_group(key, members, values, space, casts)
            self._freed.release()

    def _replace_group(
        self,
        old: str,
        members: list[ParameterBinding],
        values: dict[str, torch.Tensor],
        space: AddressSpace | None = None,
        casts: Mapping[str, torch.dtype] = NO_CASTS,
    ) -> None:
        """Replace a group by one with these values, which are popped from the dict.

        If only some of its tensors are changing, these move to a separate group.
        """
        changing = [b for b in members if b.policy is BindingPolicy.WRITE_BACK]
        steady = [b for b in members if b.policy is not BindingPolicy.WRITE_BACK]
        moved: dict[str, list[ParameterBinding]] = {}
        host_views: dict[str, torch.Tensor] = {}
        for part in filter(None, (changing, steady)):
            own = {b.name: values.pop(b.name) for b in part}
            kind = StorageKind.ROUTED if part[0].number in self._routed else StorageKind.WEIGHTS
            if part is changing:
                in_place = old in self._changing and not casts
                in_place = in_place and all(b.is_in_place(own[b.name]) for b in part)
                kind = StorageKind.IN_PLACE if in_place else StorageKind.CHANGING
            key = old if kind is StorageKind.IN_PLACE else _next_key(old, self.groups)
            host_views |= self._put(key, own, space, casts, kind)
            moved[key] = part
        self._changing.update(key for key, part in moved.items() if part is changing)
        try:
            self._move_members(old, moved, host_views)
        except BaseException:  # interrupted with tensors in both groups: finish the move
            self._move_members(old, moved, host_views)
            raise
        self._freed.add(sum(map(tensor_bytes, host_views.values())))
        if old not in moved:
            self._changing.discard(old)
            self.store.discard(old)
            del self.groups[old]

    def _move_members(
        self,
        old: str,
        moved: Mapping[str, list[ParameterBinding]],
        host_views: Mapping[str, torch.Tensor],
    ) -> None:
        """Move the tensors to other groups. Can be repeated if interrupted."""
        self._watch = None
        with self.lock:
            self.generation += 1
            self._members.pop(old, None)
            for key, members in moved.items():
                for binding in members:
                    binding.move_to(key, host_views[binding.name])
                self._members[key] = members

    # The end -----------------------------------------------------------------------------------

    def invalidate_if_idle(self) -> bool:
        """Invalidate the groups unless one is in use. Return whether they are invalidated."""
        with self.lock:
            self.invalidated = not self.in_use
            return self.invalidated

    def invalidate(self) -> None:
        """Invalidate the groups, even if some are in use."""
        with self.lock:
            self.invalidated = True

    def discard(self) -> None:
        """Discard the groups from the store. The tensors keep showing their host views."""
        for binding in self._bindings.values():
            if not binding.edited:  # an edited tensor keeps its new value
                assign(binding.tensor, binding.host_view)
        self._bindings.clear()
        self._wrapped.clear()
        self._members.clear()
        self._slices.clear()
        self.backward_leases.release_all()
        with suppress(ClosedError):  # also raised in a child process, where the store is unusable
            for key in self.groups:
                if key in self.store:
                    self.store.discard(key)
        self.groups.clear()


def _next_key(key: str, taken: Collection[str]) -> str:
    """Return an unused key for the replacement of a group."""
    names = (f"{key.partition('~')[0]}~{number}" for number in _numbers)
    return next(name for name in names if name not in taken)
