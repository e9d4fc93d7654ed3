"""How a module is bound to a store, by whoever offloads or trains it, and how that is undone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from tierstore.adapters.device_resident import DeviceResident, DeviceShare, is_resident
from tierstore.adapters.forward import MethodPatch
from tierstore.store import TierStore, engine_of


class Removable(Protocol):
    """Something that was done to a module: a patch for a method, or a hook."""

    def remove(self) -> None:
        """Undo it."""


class Attachment:
    """What was done to the modules of one model, until `detach`.

    `groups` maps keys of the store to the names of the tensors in each. The store forgets these
    groups, and what `resident` takes is given back, when `owner` is garbage-collected. No Parameter
    object is ever replaced: a parameter shows other memory (see `tierstore.adapters.codecs`).
    `patched` counts how often others were found to have patched methods.
    """

    def __init__(self, owner: object, store: TierStore) -> None:
        self.groups: dict[str, list[str]] = {}
        self.resident = DeviceResident(store)
        self.patched = 0
        self._done: list[Removable] = []
        self._found: list[tuple[dict[str, Any], str, Any, nn.Module, type]] | None = None
        weakref.finalize(owner, _forget, weakref.ref(store), self.groups, self.resident.share)

    def add(self, done: Removable) -> None:
        """Something was done that `detach` is to undo."""
        self._done.append(done)
        self._found = None

    def patch(
        self, module: nn.Module, name: str, run: Callable[[MethodPatch, Any, Any], Any]
    ) -> None:
        """Have calls of a module's method be calls of `run`."""
        patch = MethodPatch(module, name, run)
        self.add(patch)
        patch.install()

    def patch_again(self) -> bool:
        """Stand in front of methods that were patched since, or whose patch was taken back. Returns
        whether any module has another class since.

        This runs before each run of the model, and looks at all of it: nearly always, every module
        has what it had the last time.
        """
        if self._found is None:
            self._found = list(self._attributes())
        for attributes, name, found, module, kind in self._found:
            if attributes.get(name) is not found or type(module) is not kind:
                break
        else:
            return False
        self._found = None
        self.patched += 1
        displaced = [d for d in self._done if isinstance(d, MethodPatch) and d.displaced]
        for before in displaced:
            before.superseded = True  # none of them is in the others' way
        for before in displaced:
            if before.run is not None:
                after = MethodPatch(before.module, before.name, before.run)
                self._done[self._done.index(before)] = after
                after.install()
                before.successor = after
                before.remove()
        return any(type(each.module) is not each.kind for each in displaced)

    def _attributes(self) -> Iterator[tuple[dict[str, Any], str, Any, nn.Module, type]]:
        """What modules have in the places of the methods that something stands in for."""
        patches = [done for done in self._done if isinstance(done, MethodPatch)]
        for module, name in dict.fromkeys((each.module, each.name) for each in patches):
            yield module.__dict__, name, module.__dict__.get(name), module, type(module)

    def supersede(self, kind: type) -> list[MethodPatch]:
        """Leave it to the caller to remove the patches that run a `kind`: others take their
        places first."""
        superseded = [
            d for d in self._done if isinstance(d, MethodPatch) and isinstance(d.run, kind)
        ]
        self._done = [done for done in self._done if done not in superseded]
        for patch in superseded:
            patch.superseded = True
        return superseded

    def detach(self) -> None:
        """Undo all of it, the latest first; what stays on the device stays."""
        self._found = None
        while self._done:
            self._done.pop().remove()


def _forget(
    store: weakref.ref[TierStore], groups: dict[str, list[str]], share: DeviceShare
) -> None:
    """A model was garbage-collected: its groups are of no use to anybody."""
    alive = store()
    resident = [key for key in groups if is_resident(key)]
    if alive is not None:
        engine_of(alive).groups.discard_soon(groups.keys() - resident)
    share.give_back_soon(alive)
    if alive is not None:
        engine_of(alive).groups.discard_next(resident)
