"""Attach a model to a store, for inference or training, and detach it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from tierstore.adapters.device_resident import DeviceResident, DeviceShare, is_resident
from tierstore.adapters.forward import MethodPatch
from tierstore.store import TierStore, engine_of


class Removable(Protocol):
    """A reversible change of a module: a method patch or a hook."""

    def remove(self) -> None:
        """Undo it."""


class Attachment:
    """The changes made to the modules of one model, until `detach`.

    `groups` maps keys of the store to tensor names. When `owner` is garbage-collected, the store
    discards these groups, and the device memory of `resident` is released. Parameter objects are
    never replaced; they are pointed at other memory (see `tierstore.adapters.codecs`). `patched`
    counts how often foreign patches of methods were found.
    """

    def __init__(self, owner: object, store: TierStore) -> None:
        self.groups: dict[str, list[str]] = {}
        self.resident = DeviceResident(store)
        self.patched = 0
        self._done: list[Removable] = []
        self._found: list[tuple[dict[str, Any], str, Any, nn.Module, type]] | None = None
        weakref.finalize(owner, _forget, weakref.ref(store), self.groups, self.resident.share)

    def add(self, done: Removable) -> None:
        """Register a change for `detach` to undo."""
        self._done.append(done)
        self._found = None

    def patch(
        self, module: nn.Module, name: str, run: Callable[[MethodPatch, Any, Any], Any]
    ) -> None:
        """Replace a module's method by `run`."""
        patch = MethodPatch(module, name, run)
        self.add(patch)
        patch.install()

    def reinstall_patches(self) -> bool:
        """Reinstall patches that were displaced: patched over, or removed with a foreign patch.

        Returns True if the class of any such module has changed. Runs before each run of the model
        and checks all patches; nearly always, nothing has changed.
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
            before.superseded = True  # first for all: none of them may call another
        for before in displaced:
            if before.run is not None:
                after = MethodPatch(before.module, before.name, before.run)
                self._done[self._done.index(before)] = after
                after.install()
                before.successor = after
                before.remove()
        return any(type(each.module) is not each.kind for each in displaced)

    def _attributes(self) -> Iterator[tuple[dict[str, Any], str, Any, nn.Module, type]]:
        """Yield the current attribute and class of each module with a patched method."""
        patches = [done for done in self._done if isinstance(done, MethodPatch)]
        for module, name in dict.fromkeys((each.module, each.name) for each in patches):
            yield module.__dict__, name, module.__dict__.get(name), module, type(module)

    def supersede(self, kind: type) -> list[MethodPatch]:
        """Mark the patches whose `run` is a `kind` as superseded, and return them.

        The caller removes them once new patches are installed.
        """
        superseded = [
            d for d in self._done if isinstance(d, MethodPatch) and isinstance(d.run, kind)
        ]
        self._done = [done for done in self._done if done not in superseded]
        for patch in superseded:
            patch.superseded = True
        return superseded

    def detach(self) -> None:
        """Undo all changes, the latest first. Device-resident tensors stay where they are."""
        self._found = None
        while self._done:
            self._done.pop().remove()


def _forget(
    store: weakref.ref[TierStore], groups: dict[str, list[str]], share: DeviceShare
) -> None:
    """Discard the groups of a garbage-collected model. Runs as a finalizer."""
    alive = store()
    resident = [key for key in groups if is_resident(key)]
    if alive is not None:
        engine_of(alive).groups.discard_from_finalizer(groups.keys() - resident)
    share.release_soon(alive)
    if alive is not None:
        engine_of(alive).groups.discard_at_next_transaction(resident)
