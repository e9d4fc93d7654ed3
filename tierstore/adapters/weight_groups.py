"""The tensors of an offloaded model that are in groups of a store, and their changes."""

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
from tierstore.adapters.kept_memory import KeptMemory
from tierstore.adapters.operations import not_looked_at
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


class Kind(Enum):
    """How a group is stored: by its content, in the order of use or not, or as what changes all
    the time, and maybe is in its place already."""

    WEIGHTS = auto()
    ROUTED = auto()
    CHANGING = auto()
    IN_PLACE = auto()


_renewals = itertools.count(1)


def _watch_of(bindings: list[ParameterBinding]) -> WriteWatch:
    return WriteWatch([(address_of(b.host_view), tensor_bytes(b.host_view)) for b in bindings])


class WeightGroups:
    """The groups of one model, from when it was cut into groups until it is so no more.

    `groups` maps their keys to the names of the tensors in each. `lock` guards what the tensors
    show; `renewals` tells how often any of them went to other groups. Once it is `invalidated`,
    nothing is bound any more. Who holds `renewing` may change which groups there are.
    """

    def __init__(
        self,
        store: TierStore,
        prefix: str,
        groups: dict[str, list[str]],
        renewing: threading.RLock,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.groups = groups
        self.lock = threading.RLock()
        self.renewals = 0
        self.invalidated = False
        self.lease = store.acquire
        self.current = CurrentPass()
        self.backward_leases = BackwardLeases(lambda key: ViewLease(store.acquire(key)), 1)
        self.loops = engine_of(store).loops
        self._renewing = renewing
        self._bindings: dict[int, ParameterBinding] = {}
        self._wrapped: dict[int, WrappedTensor] = {}
        self._members: dict[str, list[ParameterBinding]] = {}
        self.running: set[object] = set()  # uses of slices
        self._slices: dict[int, tuple[str, list[str]]] = {}  # of what, by the id of its binding
        self._routed: set[int] = set()  # the ids of tensors in groups that data choose
        self._changing: set[str] = set()  # keys of groups that are stored as changing
        self._in_ram: set[str] = set()  # names of tensors
        self._freed = FreedMemory()
        self._watched: list[ParameterBinding] = []
        self._watch: WriteWatch | None = None

    # Which there are ---------------------------------------------------------------------------

    def register(
        self, plans: Iterable[GroupPlan], in_ram: set[str], wrapped: Iterable[WrappedTensor]
    ) -> None:
        """Put tensors into the store in these groups; those named `in_ram` should stay in RAM.

        `wrapped` are the model's tensors that consist of some of them.
        """
        self._in_ram = in_ram
        space = AddressSpace()
        kept = KeptMemory(space)
        names: set[str] = set()
        for plan in bar(plans, self.prefix, "groups"):
            key = unused(f"{self.prefix}/{plan.name}", names)
            kept.note(plan.tensors)
            kind = Kind.ROUTED if plan.routed else Kind.WEIGHTS
            host_views = self._put(key, plan.tensors, space, kind=kind)
            members = [
                ParameterBinding(t, key, name, host_views[name]) for name, t in plan.tensors.items()
            ]
            self._members[key] = members
            self._bindings.update({binding.number: binding for binding in members})
            if plan.routed:
                self._routed.update(map(id, plan.tensors.values()))
            self._freed.add(sum(map(tensor_bytes, host_views.values())))
        self._freed.give_back()
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
        kind: Kind = Kind.WEIGHTS,
    ) -> dict[str, torch.Tensor]:
        """Put a group into the store. Returns what its tensors show while away."""
        self.groups[key] = list(tensors)  # first: what is interrupted is discarded in the end
        engine = engine_of(self.store)
        try:
            if kind in (Kind.CHANGING, Kind.IN_PLACE):
                cast = {name: t.to(casts.get(name, t.dtype)) for name, t in tensors.items()}
                host_views = engine.mutable_groups.put(key, cast, in_place=kind is Kind.IN_PLACE)
            else:
                order = UseOrder.ROUTED if kind is Kind.ROUTED else UseOrder.LEARNED
                host_views = engine.groups.register(key, tensors, space, casts, order)
            if self._in_ram.issuperset(tensors):
                self.store.keep(key)
        except BaseException:
            if key not in self.store:
                del self.groups[key]
            raise
        return host_views

    def slices(self, binding: ParameterBinding) -> list[str]:
        """The keys of groups that hold a tensor's slices along its first dimension, in order.

        The group that holds all of it is used no more, but for the tensor to show something.
        """
        with self._renewing:
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
        """Put slices into groups of their own. May be repeated if interrupted."""
        space = AddressSpace()
        names = [f"{binding.name}[{i}]" for i in range(len(binding.host_view))]
        for name, part in zip(names, binding.host_view, strict=True):
            if f"{binding.key}/{name}" not in self.groups:
                self._put(f"{binding.key}/{name}", {name: part}, space, kind=Kind.ROUTED)
        return [f"{binding.key}/{name}" for name in names]

    def keys_of(self, unit: Unit) -> list[str]:
        """The keys of the groups that a unit uses at once, each once."""
        bindings = self.bindings(map(id, unit.tensors.values()))
        if unit.stacks:
            return [self._slices[id(b)][1][0] for b in bindings if id(b) in self._slices]
        return list({b.key: None for b in bindings})

    def tensor_ids(self) -> set[int]:
        """The ids of the tensors in the groups, and of those that consist of them."""
        alive = {number for number, binding in self._bindings.items() if binding.alive}
        return alive | self._wrapped.keys()

    @property
    def wrapped(self) -> Mapping[int, WrappedTensor]:
        """The model's tensors that consist of others, by their ids."""
        return self._wrapped

    def wrapped_of(self, bindings: Iterable[ParameterBinding]) -> list[WrappedTensor]:
        """Those that consist of some of these tensors."""
        own = {binding.number for binding in bindings}
        return [w for w in self._wrapped.values() if any(id(t) in own for t in w.leaves.values())]

    def values_of(self, wrapped: WrappedTensor) -> dict[str, torch.Tensor]:
        """What its leaves are, in memory that nobody uses again."""
        found = {name: self._bindings[id(leaf)] for name, leaf in wrapped.leaves.items()}
        with self.lock:
            values = {name: each.value(each.tensor).detach() for name, each in found.items()}
        return values

    def bindings_for(self, tensor: torch.Tensor) -> Iterable[ParameterBinding]:
        """Those of a tensor of the model, or of what it consists of. One that is used in slices,
        which may be larger than a budget, has none."""
        found = self._bindings.get(id(tensor))
        if found is not None:
            return () if id(found) in self._slices else (found,)
        wrapped = self._wrapped.get(id(tensor))
        return () if wrapped is None else self.bindings(map(id, wrapped.leaves.values()))

    def bindings(self, tensors: Iterable[int]) -> list[ParameterBinding]:
        """Those of the tensors (by id) that are in the groups."""
        found = [self._bindings[each] for each in tensors if each in self._bindings]
        return [binding for binding in found if binding.alive]

    def bindings_of(self, module: nn.Module, *, recurse: bool = True) -> list[ParameterBinding]:
        """Those of a part of the model, each once."""
        held: dict[int, None] = {}
        for tensor in tensors_of(module, recurse=recurse):
            wrapped = self._wrapped.get(id(tensor))
            held |= dict.fromkeys(map(id, wrapped.leaves.values() if wrapped else (tensor,)))
        return self.bindings(held)

    @property
    def in_use(self) -> bool:
        """Whether anything of them is shown at this moment, or slices of them are used."""
        shown = any(binding.user is not None for binding in self._bindings.values())
        return shown or bool(self.running)

    # Uses --------------------------------------------------------------------------------------

    def unit_weights(self, bindings: list[ParameterBinding]) -> UnitWeights:
        """Return the weights of a unit with these tensors."""
        wrapped = self.wrapped_of(bindings)
        on_cpu = self.store.device.type == "cpu"
        return UnitWeights(self, bindings, [] if on_cpu else wrapped, wrapped)

    def begin_pass(self) -> bool:
        """Release what a backward pass that raised has left. There is a pass to note."""
        if not in_backward():
            self.backward_leases.release_all()
        return True

    def lease_again(self, memory: LeasedMemory) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the memory's group, on the device, for a backward pass.

        Raises RuntimeError if the group has been stored again since.
        """
        try:
            if self.invalidated or memory.key not in self.groups:
                raise UnknownKeyError(memory.key)
            return self.backward_leases.tensors(memory.key)
        except UnknownKeyError:
            raise RuntimeError(
                f"this backward needs {memory.binding.name}, which no tierstore has any more as it "
                "was in the forward: weights were changed since, or the model was cut into groups "
                "anew. Run the forward again"
            ) from None

    # Changed weights ---------------------------------------------------------------------------

    def renew_written(self) -> None:
        """Store the groups anew that were written to since the last time."""
        if self._watch is None:  # it looks at all that was written since there are these host_views
            self._watched = [
                b for b in self._bindings.values() if b.policy is not BindingPolicy.WRITE_BACK
            ]
            self._watch = _watch_of(self._watched)
        written = [self._watched[i] for i in self._watch.written()]
        # Nobody watches those.
        written += [b for b in self._bindings.values() if b.policy is BindingPolicy.WRITE_BACK]
        if written:
            self.renew(written)

    def renew_edited(self, keys: set[str]) -> None:
        """Of these groups, store those anew that were edited in any way, if they are not in use.

        If somebody else renews any at this moment, it is left to the next run: nobody waits.
        """
        members = [b for key in keys for b in self._members.get(key, ())]
        written = {members[i] for i in _watch_of(members).written()}
        edited = [
            b
            for b in members
            if b.edited
            or ((b in written or b.policy is BindingPolicy.WRITE_BACK) and b.user is None)
        ]
        if edited and self._renewing.acquire(blocking=False):
            try:
                self.renew(edited)
            finally:
                self._renewing.release()

    def wait_until_renewed(self) -> None:
        """Returns when the model is not being cut anew, or made an ordinary one."""
        with self._renewing:
            pass

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def renew(self, edited: list[ParameterBinding]) -> None:
        """Store the groups of changed tensors anew; what did not change in them is not written."""
        with self._renewing, not_looked_at():
            for keys in self._become_one(edited):
                members = [b for key in keys for b in self._members.get(key, [])]
                with self.lock:
                    if not members or any(b.user is not None for b in members):
                        continue  # they are in use: noticed again before the next one
                    # Aliases: on another thread, the tensors may show leased memory soon.
                    values = {b.name: b.tensor.detach() for b in members}
                if members[0].number not in self._routed:
                    note_changes([b for b in members if b in edited], members, values)
                self._store_anew(keys[0], members, values)
                for key in keys[1:]:
                    self._members.pop(key, None)
                    self._changing.discard(key)
                    self.store.discard(key)
                    del self.groups[key]
            self._freed.give_back()

    def _become_one(self, edited: list[ParameterBinding]) -> list[list[str]]:
        """The groups of edited tensors. Where one was given memory that a tensor of another group
        shows (`a.data = b.data`), both are one group from now on: they stay tied."""
        sets = {key: [key] for key in dict.fromkeys(binding.key for binding in edited)}
        given = [b for b in edited if b.was_given_memory and b.number not in self._routed]
        spans = [(address_of(b.tensor), address_of(b.tensor) + span(b.tensor), b) for b in given]
        for other in self._bindings.values() if spans else ():
            if other.user is not None or other.number in self._routed:
                continue
            start = address_of(other.tensor)
            stop = start + span(other.tensor)
            for first, last, binding in spans:
                if start < last and first < stop and other.key != binding.key:
                    joined = sets[binding.key]
                    joined += [k for k in sets.get(other.key, [other.key]) if k not in joined]
                    sets.update(dict.fromkeys(joined, joined))
        return list({id(keys): keys for keys in sets.values()}.values())

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def convert(self, change: Change) -> None:
        """Apply `change` to every plain tensor, group by group: of what changes, one is in
        memory."""
        parts = {id(leaf) for each in self._wrapped.values() for leaf in each.leaves.values()}
        with self._renewing:
            self.renew([b for b in self._bindings.values() if b.edited])
            for key in bar(list(self._members), "Converting", "groups"):
                members = self._members[key]
                values = {
                    b.name: b.tensor if b.number in parts else change(b.tensor) for b in members
                }
                if any(values[b.name] is not b.tensor for b in members):
                    self._store_anew(key, members, values)
            self._freed.give_back()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def cast(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Give tensors (by id) other dtypes, group by group. What was cast from the same files
        before is neither read nor written."""
        with self._renewing:
            self.renew([b for b in self._bindings.values() if b.edited])
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
                    self._store_anew(key, members, values, space, casts)
            self._freed.give_back()

    def _store_anew(
        self,
        old: str,
        members: list[ParameterBinding],
        values: dict[str, torch.Tensor],
        space: AddressSpace | None = None,
        casts: Mapping[str, torch.dtype] = NO_CASTS,
    ) -> None:
        """Replace a group by one of these values, which are taken out of the dict; by two if some
        of its tensors are changing, and others are not."""
        changing = [b for b in members if b.policy is BindingPolicy.WRITE_BACK]
        steady = [b for b in members if b.policy is not BindingPolicy.WRITE_BACK]
        moved: dict[str, list[ParameterBinding]] = {}
        host_views: dict[str, torch.Tensor] = {}
        for part in filter(None, (changing, steady)):
            own = {b.name: values.pop(b.name) for b in part}
            kind = Kind.ROUTED if part[0].number in self._routed else Kind.WEIGHTS
            if part is changing:
                in_place = old in self._changing and not casts
                in_place = in_place and all(b.is_in_place(own[b.name]) for b in part)
                kind = Kind.IN_PLACE if in_place else Kind.CHANGING
            key = old if kind is Kind.IN_PLACE else _renewed(old, self.groups)
            host_views |= self._put(key, own, space, casts, kind)
            moved[key] = part
        self._changing.update(key for key, part in moved.items() if part is changing)
        try:
            self._move_members(old, moved, host_views)
        except BaseException:  # when some show the one group, and some the other: do it again
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
        """Let the tensors be in other groups. May be repeated if interrupted."""
        self._watch = None
        with self.lock:
            self.renewals += 1
            self._members.pop(old, None)
            for key, members in moved.items():
                for binding in members:
                    binding.move_to(key, host_views[binding.name])
                self._members[key] = members

    # The end -----------------------------------------------------------------------------------

    def end_use(self) -> bool:
        """Have nothing shown from now on. False if something is at this moment."""
        with self.lock:
            self.invalidated = not self.in_use
            return self.invalidated

    def stop(self) -> None:
        """Have nothing shown from now on, whatever is."""
        with self.lock:
            self.invalidated = True

    def discard(self) -> None:
        """Let the tensors keep what they show while away. The store forgets the groups."""
        for binding in self._bindings.values():
            if not binding.edited:  # otherwise it shows what somebody gave it
                assign(binding.tensor, binding.host_view)
        self._bindings.clear()
        self._wrapped.clear()
        self._members.clear()
        self._slices.clear()
        self.backward_leases.release_all()
        with suppress(ClosedError):  # in a child process, too, where the store is of no use
            for key in self.groups:
                if key in self.store:
                    self.store.discard(key)
        self.groups.clear()


def _renewed(key: str, taken: Collection[str]) -> str:
    """A key for what takes the place of a group."""
    names = (f"{key.partition('~')[0]}~{number}" for number in _renewals)
    return next(name for name in names if name not in taken)
