"""A model whose offloading is suspended: what is changed in it is stored as it comes.

Otherwise whoever changes all of it, one module after the other, would have all of it in memory when
it is offloaded again.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tierstore.adapters.changing import Walking
from tierstore.adapters.codecs import is_movable
from tierstore.adapters.codecs.memory import address_of, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.contents import modules_of, tensors_of
from tierstore.adapters.forward import MethodPatch
from tierstore.adapters.grouping import ShownMemory, Unit
from tierstore.adapters.owners import owner_of
from tierstore.store import TierStore, engine_of
from tierstore.system.allocator import FreedMemory
from tierstore.system.maps import AddressSpace

_numbers = itertools.count()


class SuspendedModel:
    """From `begin` to `end`, what is changed is put into files of the store, and shown from there.

    It is put when whoever walks through the model has come to other modules, and there are `target`
    bytes of it. What takes no memory is left as it is.
    """

    def __init__(self, root: nn.Module, store: TierStore, target: int) -> None:
        self._root = root
        self._store = store
        self._target = target
        self._pending: set[torch.Tensor] = set()
        self._space = AddressSpace()
        self._freed = FreedMemory()
        walking = Walking(_tensors, self._add)
        self._patches = [MethodPatch(root, name, walking) for name in ("named_modules", "apply")]
        self._patches += [MethodPatch(each, "named_children", walking) for each in modules_of(root)]

    def begin(self) -> None:
        """Notice from now on who walks through the model, and through each part of it."""
        for patch in self._patches:
            patch.install()

    def end(self) -> None:
        """The model is an ordinary one, in all that is left of it."""
        for patch in reversed(self._patches):
            patch.remove()
        self._freed.give_back()

    def _add(self, tensors: set[torch.Tensor]) -> None:
        if owner_of(self._root) is not None:
            return  # somebody offloads it meanwhile
        self._pending |= {tensor for tensor in tensors if self._takes_memory(tensor)}
        if sum(map(tensor_bytes, self._pending)) >= self._target:
            self._put()

    def _takes_memory(self, tensor: torch.Tensor) -> bool:
        return self._space.extent_at(address_of(tensor), tensor_bytes(tensor)) is None

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _put(self) -> None:
        """Put what is pending, and what shares memory with it, as it goes on sharing it."""
        modules = self._patches[0].original()  # which nobody notices
        tensors = set().union(*(_tensors(module) for _, module in modules))
        unit = Unit("", self._root, {str(number): each for number, each in enumerate(tensors)})
        changed: dict[str, torch.Tensor] = {}
        for members in ShownMemory([unit]).members.values():
            if not self._pending.isdisjoint(members.values()):
                changed |= members
        self._pending.clear()
        key = f"suspended-{next(_numbers)}"
        homes = engine_of(self._store).groups.register(key, changed)
        self._store.discard(key)  # the file stays, as what the weights are
        for name, home in homes.items():
            assign(changed[name], home)
            self._freed.add(tensor_bytes(home))
        self._space = AddressSpace()


def _tensors(module: nn.Module) -> set[torch.Tensor]:
    """Its own tensors that can be put into files, if somebody has not moved them to a device."""
    held = tensors_of(module, recurse=False)
    return {t for t in held if is_movable(t) and t.device.type == "cpu" and not t.is_inference()}
