"""Store the changes of a model while its offloading is suspended.

Without this, code that changes every module of a model in turn would have the whole model in memory
before it is offloaded again.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tierstore.adapters.changing import WalkPatch
from tierstore.adapters.codecs import is_movable
from tierstore.adapters.codecs.memory import address_of, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.contents import modules_of, tensors_of
from tierstore.adapters.forward import MethodPatch
from tierstore.adapters.grouping import MemoryPieces, Unit
from tierstore.adapters.owners import owner_of
from tierstore.store import TierStore, engine_of
from tierstore.system.allocator import FreedMemory
from tierstore.system.maps import AddressSpace

_numbers = itertools.count()


class SuspendedChanges:
    """Moves changed tensors into files of the store from `begin` to `end`.

    A batch is moved once code that iterates over the model has moved on to other modules and
    `target` bytes have accumulated. Tensors that take no memory are skipped.
    """

    def __init__(self, root: nn.Module, store: TierStore, target: int) -> None:
        self._root = root
        self._store = store
        self._target = target
        self._pending: set[torch.Tensor] = set()
        self._space = AddressSpace()
        self._freed = FreedMemory()
        walk_patch = WalkPatch(_tensors, self._add)
        self._patches = [MethodPatch(root, name, walk_patch) for name in ("named_modules", "apply")]
        self._patches += [
            MethodPatch(each, "named_children", walk_patch) for each in modules_of(root)
        ]

    def begin(self) -> None:
        """Start to watch iterations over the model and its modules."""
        for patch in self._patches:
            patch.install()

    def end(self) -> None:
        """Stop watching, and remove all patches."""
        for patch in reversed(self._patches):
            patch.remove()
        self._freed.release()

    def _add(self, tensors: set[torch.Tensor]) -> None:
        if owner_of(self._root) is not None:
            return  # the model was offloaded meanwhile
        self._pending |= {tensor for tensor in tensors if self._takes_memory(tensor)}
        if sum(map(tensor_bytes, self._pending)) >= self._target:
            self._store_pending()

    def _takes_memory(self, tensor: torch.Tensor) -> bool:
        return self._space.extent_at(address_of(tensor), tensor_bytes(tensor)) is None

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _store_pending(self) -> None:
        """Store the pending tensors, and those that share memory with them, as one group.

        Tensors that share memory still do so afterwards.
        """
        modules = self._patches[0].original()  # bypasses the patch
        tensors = set().union(*(_tensors(module) for _, module in modules))
        unit = Unit("", self._root, {str(number): each for number, each in enumerate(tensors)})
        changed: dict[str, torch.Tensor] = {}
        for members in MemoryPieces([unit]).members.values():
            if not self._pending.isdisjoint(members.values()):
                changed |= members
        self._pending.clear()
        key = f"suspended-{next(_numbers)}"
        host_views = engine_of(self._store).groups.register(key, changed)
        self._store.discard(key)  # the file stays: the weights are mapped from it
        for name, host_view in host_views.items():
            assign(changed[name], host_view)
            self._freed.add(tensor_bytes(host_view))
        self._space = AddressSpace()


def _tensors(module: nn.Module) -> set[torch.Tensor]:
    """Return a module's own tensors on the CPU that can be stored in files."""
    held = tensors_of(module, recurse=False)
    return {t for t in held if is_movable(t) and t.device.type == "cpu" and not t.is_inference()}
